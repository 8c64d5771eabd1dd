//! Libraries that later backends load if they are there, each tried in a process of its own, so that one that crashes,
//! hangs or ends its process is only reported.

use std::ffi::c_int;
use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use libloading::Library;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, setrlimit};

use super::{Findings, Verdict};

/// The name of the hidden subcommand that loads a library.
pub(crate) const PROBE: &str = "doctor-probe";
/// What stands before its answer; libraries print things, too.
const ANSWER: &str = "rustcomms-probe: ";
/// A driver that has to wake a device takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// More output of a library is not kept.
const KEPT: u64 = 64 << 10;

/// How a version is packed into a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    /// 22304 is 2.23.4; before 2.9 it was 2804 for 2.8.4.
    Nccl,
    /// 12040 is 12.4.
    Cuda,
    /// 60342131 is 6.3.42131.
    Hip,
}

/// A library that is tried.
#[derive(Debug)]
struct Wanted {
    what: &'static str,
    /// The first that is there counts.
    names: &'static [&'static str],
    /// A function `int f(int *version)` that may be called before everything else, and how to read what it gives.
    version: Option<(&'static str, Packing)>,
}

const WANTED: [Wanted; 7] = [
    Wanted { what: "NVIDIA's driver", names: &["libcuda.so.1"], version: Some(("cuDriverGetVersion", Packing::Cuda)) },
    Wanted {
        what: "CUDA's runtime",
        names: &["libcudart.so.13", "libcudart.so.12", "libcudart.so"],
        version: Some(("cudaRuntimeGetVersion", Packing::Cuda)),
    },
    Wanted { what: "NCCL", names: &["libnccl.so.2"], version: Some(("ncclGetVersion", Packing::Nccl)) },
    Wanted {
        what: "AMD's runtime",
        names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
        version: Some(("hipRuntimeGetVersion", Packing::Hip)),
    },
    Wanted { what: "RCCL", names: &["librccl.so.1", "librccl.so"], version: Some(("ncclGetVersion", Packing::Nccl)) },
    Wanted { what: "RDMA verbs", names: &["libibverbs.so.1"], version: None },
    Wanted { what: "libfabric", names: &["libfabric.so.1"], version: None },
];

/// Load a library, for rustcomms doctor.
#[derive(Debug, clap::Args)]
pub(crate) struct ProbeArgs {
    name: String,
    symbol: Option<String>,
}

/// The probe's process.
pub(crate) fn probe(args: &ProbeArgs) -> ExitCode {
    // A crash is expected here, and leaves nothing.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let answer = match load(&args.name, args.symbol.as_deref()) {
        Ok((path, Some(version))) => format!("version {version} {path}"),
        Ok((path, None)) => format!("path {path}"),
        Err(e) => format!("error {}", e.replace('\n', " ")),
    };
    // The library may have left an unfinished line.
    Findings::say(&format!("\n{ANSWER}{answer}"));
    ExitCode::SUCCESS
}

/// Loads `name`, and tells where it is, and what its function `version` says if there is one.
fn load(name: &str, version: Option<&str>) -> Result<(String, Option<c_int>), String> {
    let text = |e: libloading::Error| std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
    // SAFETY: loading runs the library's initialisers, and the version functions are foreign code. Both are vendors' own
    // libraries, found where the system's loader looks, which every program of these vendors loads the same way; the
    // functions have the type `int f(int *)`, take a pointer that may be written, and are documented as callable before any
    // initialisation. What may still go wrong in them hits only this process, which exists for that, has no other thread
    // and no state, and ends right after, without unloading.
    unsafe {
        let library = Library::new(name).map_err(text)?;
        let number = version.and_then(|symbol| {
            let get = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol).ok()?;
            let mut number = 0;
            (get(&raw mut number) == 0).then_some(number)
        });
        std::mem::forget(library);
        Ok((mapped(name), number))
    }
}

/// The file of a library that is loaded.
fn mapped(name: &str) -> String {
    let stem = name.find(".so").map_or(name, |at| &name[..at + 3]);
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..]));
    let ours = |p: &&str| Path::new(p).file_name().is_some_and(|f| f.to_string_lossy().starts_with(stem));
    paths.into_iter().find(ours).unwrap_or(name).to_owned()
}

/// Tries every library.
pub(super) fn look(found: &mut Findings) {
    for wanted in &WANTED {
        found.put(wanted.look());
    }
}

impl Wanted {
    fn look(&self) -> Verdict {
        let last = self.names.len() - 1;
        for (i, name) in self.names.iter().enumerate() {
            let verdict = self.judge(name, attempt(name, self.version.map(|(symbol, _)| symbol)));
            match verdict {
                // Another name may be there.
                None if i < last => {}
                None => break,
                Some(verdict) => return verdict,
            }
        }
        Verdict::Note(format!("{}: not found: {}; nothing that is built in needs it", self.what, self.names.join(", ")))
    }

    /// `None` if there is no such library.
    fn judge(&self, name: &str, outcome: Outcome) -> Option<Verdict> {
        let what = self.what;
        Some(match outcome {
            Outcome::Answer(answer) => match answer.split_once(' ') {
                Some(("path", path)) => Verdict::Ok(format!("{what}: {path}")),
                Some(("version", rest)) => {
                    let (number, path) = rest.split_once(' ').unwrap_or((rest, name));
                    let version = number.parse().ok().zip(self.version).map(|(n, (_, packing))| unpack(n, packing));
                    Verdict::Ok(format!("{what}: version {}, {path}", version.as_deref().unwrap_or(number)))
                }
                // The loader says the same of a library that the one wanted needs, with that one's name.
                Some((_, e)) if e.contains(name) && e.contains("No such file") => return None,
                Some((_, e)) => Verdict::Note(format!("{what}: {name} is there, but cannot be loaded: {e}")),
                None => Verdict::Problem(format!("{what}: loading {name} gave '{answer}'")),
            },
            Outcome::Ended(status) => {
                let how = match status.signal() {
                    Some(s) => format!("kills the process by {}", crate::run::signal(s)),
                    None => format!("ends the process with code {}", status.code().unwrap_or_default()),
                };
                Verdict::Problem(format!(
                    "{what}: loading {name} {how}; reinstall it, or take it out of the loader's path"
                ))
            }
            Outcome::Hung => Verdict::Problem(format!(
                "{what}: loading {name} does not end within {PATIENCE:?}; is its device or driver stuck?"
            )),
            Outcome::Failed(e) => Verdict::Problem(format!("{what}: no process to try {name} in: {e}")),
        })
    }
}

/// What became of a probe.
#[derive(Debug)]
enum Outcome {
    Answer(String),
    /// Without an answer.
    Ended(ExitStatus),
    Hung,
    Failed(std::io::Error),
}

fn attempt(name: &str, symbol: Option<&str>) -> Outcome {
    let me = crate::run::this_program();
    let spawned = me.and_then(|me| {
        let mut c = Command::new(me);
        c.arg(PROBE).arg(name).args(symbol).process_group(0);
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    });
    let mut child = match spawned {
        Ok(child) => child,
        Err(e) => return Outcome::Failed(e),
    };
    let (tx, rx) = channel();
    let out = child.stdout.take();
    let read = move || {
        let mut text = Vec::new();
        if let Some(out) = out {
            let mut out = out;
            // What could not be read is not there; the rest only keeps the pipe from filling up.
            let _ = out.by_ref().take(KEPT).read_to_end(&mut text);
            let _ = std::io::copy(&mut out, &mut std::io::sink());
        }
        // Too late, nobody listens.
        let _ = tx.send(String::from_utf8_lossy(&text).into_owned());
    };
    let text = match std::thread::Builder::new().name("probe".into()).spawn(read) {
        Ok(_) => rx.recv_timeout(PATIENCE),
        Err(_) => Ok(String::new()),
    };
    if text.is_err() {
        // With whatever it has started.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    // Its output has ended, or it is killed: it ends.
    let status = child.wait();
    match (text, status) {
        (Err(_), _) => Outcome::Hung,
        (_, Err(e)) => Outcome::Failed(e),
        (Ok(text), Ok(status)) => match text.lines().rev().find_map(|l| l.strip_prefix(ANSWER)) {
            Some(answer) => Outcome::Answer(answer.to_owned()),
            None => Outcome::Ended(status),
        },
    }
}

fn unpack(n: c_int, packing: Packing) -> String {
    match packing {
        Packing::Nccl if n < 10_000 => format!("{}.{}.{}", n / 1000, n / 100 % 10, n % 100),
        Packing::Nccl => format!("{}.{}.{}", n / 10_000, n / 100 % 100, n % 100),
        Packing::Cuda => format!("{}.{}", n / 1000, n / 10 % 100),
        Packing::Hip => format!("{}.{}.{}", n / 10_000_000, n / 100_000 % 100, n % 100_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let of = |n, p| unpack(n, p);
        assert_eq!([of(22_304, Packing::Nccl), of(2804, Packing::Nccl)], ["2.23.4", "2.8.4"]);
        assert_eq!([of(12_040, Packing::Cuda), of(13_000, Packing::Cuda)], ["12.4", "13.0"]);
        assert_eq!(of(60_342_131, Packing::Hip), "6.3.42131");
    }

    #[test]
    fn answers_are_judged() {
        let nccl = &WANTED[2];
        let of = |a: &str| nccl.judge("libnccl.so.2", Outcome::Answer(a.into()));
        assert!(
            matches!(of("version 22304 /a b/libnccl.so.2"), Some(Verdict::Ok(t)) if t == "NCCL: version 2.23.4, /a b/libnccl.so.2")
        );
        assert!(matches!(of("path /l/libnccl.so.2"), Some(Verdict::Ok(t)) if t == "NCCL: /l/libnccl.so.2"));
        assert!(of("error libnccl.so.2: cannot open shared object file: No such file or directory").is_none());
        let needs = of("error libcudart.so.12: cannot open shared object file: No such file or directory");
        assert!(matches!(needs, Some(Verdict::Note(t)) if t.contains("cannot be loaded: libcudart.so.12")));
        assert!(matches!(of("junk"), Some(Verdict::Problem(_))));
        let ended = |raw| nccl.judge("libnccl.so.2", Outcome::Ended(ExitStatus::from_raw(raw)));
        assert!(matches!(ended(11), Some(Verdict::Problem(t)) if t.contains("signal 11 (SIGSEGV)")));
        assert!(matches!(ended(3 << 8), Some(Verdict::Problem(t)) if t.contains("with code 3")));
        assert!(matches!(nccl.judge("libnccl.so.2", Outcome::Hung), Some(Verdict::Problem(_))));
    }
}
