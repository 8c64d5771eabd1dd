//! Running a side: its processes, with a deadline, and without survivors.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustcomms::store::{TcpStoreServer, env};
use rustix::process::{Pid, Signal, kill_process};

use super::options::{Case, Peer, Transport};
use super::output;

/// A launch that takes longer has failed.
pub const LIMIT: Duration = Duration::from_secs(240);
/// mpirun ends its ranks when it is told to end.
const GRACE: Duration = Duration::from_secs(3);
/// Folders that a killed compare left behind begin with this, and its process id.
const SCRATCH: &str = "rustcomms-compare-";

/// Who runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Side {
    Ours,
    Peer(Peer),
}

impl Side {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Peer(p) => p.name(),
        }
    }
}

/// What it runs.
#[derive(Clone, Copy, Debug)]
pub struct Spec<'a> {
    /// Number of ranks.
    pub world: usize,
    /// Between them.
    pub transport: Transport,
    /// One core each, or where the system puts them.
    pub pinned: bool,
    /// What they do.
    pub cases: &'a [Case],
    /// The folder with the peers' programs.
    pub peers: &'a Path,
}

impl Spec<'_> {
    fn cases(&self) -> String {
        self.cases.iter().map(Case::text).collect::<Vec<_>>().join(",")
    }

    fn pinned(&self) -> &'static str {
        if self.pinned { "1" } else { "0" }
    }
}

/// The command line of mpirun. TCP is Open MPI's own over the loopback interface, shared memory with its single copy.
#[must_use]
pub fn mpirun(spec: &Spec<'_>, scratch: &Path, root: bool) -> Vec<String> {
    let mut args: Vec<String> = if root { vec!["--allow-run-as-root".into()] } else { Vec::new() };
    args.extend(["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl"].map(String::from));
    let scratch = scratch.display().to_string();
    args.extend(match spec.transport {
        Transport::Tcp => ["tcp,self", "--mca", "btl_tcp_if_include", "lo"].map(String::from).to_vec(),
        Transport::Shm => {
            ["vader,self", "--mca", "btl_vader_single_copy_mechanism", "cma", "--mca", "btl_vader_backing_directory"]
                .map(String::from)
                .into_iter()
                .chain([scratch.clone()])
                .collect()
        }
    });
    args.extend(["--mca".into(), "orte_tmpdir_base".into(), scratch, "-n".into(), spec.world.to_string()]);
    args.push(spec.peers.join(Peer::OpenMpi.name()).display().to_string());
    args.extend([spec.pinned().into(), LIMIT.as_secs().to_string(), spec.cases()]);
    args
}

/// Runs it once and gives microseconds per case.
///
/// # Errors
///
/// When a process cannot be started, fails, finds a wrong result or is not done in time; with what it wrote to standard error.
pub fn run(side: Side, spec: &Spec<'_>) -> Result<Vec<f64>, String> {
    let scratch = Scratch::new()?;
    let limit = LIMIT.as_secs().to_string();
    let failed = |e: String| format!("{} with {} ranks over {}: {e}", side.name(), spec.world, spec.transport.name());
    let mut server = None;
    let commands: Vec<Command> = match side {
        Side::Ours => {
            let store = TcpStoreServer::bind("127.0.0.1:0").map_err(|e| failed(e.to_string()))?;
            let program = std::env::current_exe().map_err(|e| failed(format!("compare cannot find itself: {e}")))?;
            let address = server.insert(store).local_addr().to_string();
            let rank = |rank: usize| {
                let mut c = Command::new(&program);
                c.args(["rank", spec.transport.name(), spec.pinned(), &limit, &spec.cases()])
                    .env(env::RANK, rank.to_string())
                    .env(env::WORLD_SIZE, spec.world.to_string())
                    .env(env::STORE, &address)
                    .env(env::RUN_ID, "compare");
                c
            };
            (0..spec.world).map(rank).collect()
        }
        Side::Peer(Peer::OpenMpi) => {
            let mut c = Command::new("mpirun");
            c.args(mpirun(spec, &scratch.0, rustix::process::geteuid().is_root()));
            vec![c]
        }
        Side::Peer(Peer::Gloo) => {
            let rank = |rank: usize| {
                let mut c = Command::new(spec.peers.join(Peer::Gloo.name()));
                c.args([rank.to_string(), spec.world.to_string()]).arg(&scratch.0);
                c.args([spec.pinned(), &limit, &spec.cases()]);
                c
            };
            (0..spec.world).map(rank).collect()
        }
    };
    let text = Gang::start(commands).and_then(|g| g.finish(LIMIT + GRACE)).map_err(failed)?;
    output::parse(&text, spec.cases).map_err(failed)
}

/// A peer's program that is not there, before anything runs.
///
/// # Errors
///
/// Names it, and the command that makes it.
pub fn check_peers(against: &[Peer], peers: &Path) -> Result<(), String> {
    match against.iter().map(|p| peers.join(p.name())).find(|p| !p.is_file()) {
        None => Ok(()),
        Some(p) => Err(format!("there is no {}: `cargo xtask bench compare` makes it from benches/peers", p.display())),
    }
}

/// Processes that belong together. Dropped, they end.
struct Gang {
    members: Vec<Child>,
    out: JoinHandle<String>,
    errors: Vec<JoinHandle<String>>,
}

impl Gang {
    fn start(commands: Vec<Command>) -> Result<Self, String> {
        let mut gang = Self { members: Vec::new(), out: std::thread::spawn(String::new), errors: Vec::new() };
        for (i, mut command) in commands.into_iter().enumerate() {
            command.stdin(Stdio::null()).stderr(Stdio::piped());
            command.stdout(if i == 0 { Stdio::piped() } else { Stdio::null() });
            let program = command.get_program().to_string_lossy().into_owned();
            let mut child = command.spawn().map_err(|e| format!("cannot start {program}: {e}"))?;
            if let Some(out) = child.stdout.take() {
                gang.out = read(out);
            }
            gang.errors.extend(child.stderr.take().map(read));
            gang.members.push(child);
        }
        Ok(gang)
    }

    /// What the first one printed, when all have ended well.
    fn finish(mut self, limit: Duration) -> Result<String, String> {
        let start = Instant::now();
        let mut ended = vec![false; self.members.len()];
        let mut problem = None;
        while problem.is_none() && ended.contains(&false) {
            for (member, ended) in self.members.iter_mut().zip(&mut ended) {
                match member.try_wait() {
                    Ok(Some(status)) if !status.success() => problem = Some(format!("a process failed ({status})")),
                    Ok(status) => *ended = status.is_some(),
                    Err(e) => problem = Some(format!("a process cannot be waited for: {e}")),
                }
            }
            if start.elapsed() > limit {
                problem = Some(format!("not done after {} s, and killed", limit.as_secs()));
            }
            // Rare enough to leave the cores to those that are measured.
            std::thread::sleep(Duration::from_millis(20));
        }
        self.end();
        let errors: Vec<String> = std::mem::take(&mut self.errors).into_iter().filter_map(|e| e.join().ok()).collect();
        let out = std::mem::replace(&mut self.out, std::thread::spawn(String::new)).join().unwrap_or_default();
        let Some(problem) = problem else { return Ok(out) };
        let said: Vec<&str> =
            errors.iter().flat_map(|e| e.lines()).map(str::trim).filter(|l| !l.is_empty()).take(8).collect();
        Err(if said.is_empty() { problem } else { format!("{problem}; it said: {}", said.join(" | ")) })
    }

    /// Ends those that are still there: politely at first, as mpirun passes that on to its ranks.
    fn end(&mut self) {
        for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, GRACE)] {
            let start = Instant::now();
            let alive = |m: &mut Child| matches!(m.try_wait(), Ok(None));
            for member in self.members.iter_mut().filter_map(|m| alive(m).then_some(m.id())) {
                if let Some(pid) = Pid::from_raw(member as i32) {
                    // It may have ended in between, which is as good.
                    let _ = kill_process(pid, signal);
                }
            }
            while self.members.iter_mut().any(alive) && start.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl Drop for Gang {
    fn drop(&mut self) {
        self.end();
    }
}

/// All that comes, up to a bound: a side that floods must not fill the memory.
fn read(from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let mut from = from;
        let _ = from.by_ref().take(1 << 20).read_to_end(&mut kept);
        let _ = std::io::copy(&mut from, &mut std::io::sink());
        String::from_utf8_lossy(&kept).into_owned()
    })
}

/// A folder for what the sides need to meet, gone when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Open MPI's segments are to be memory.
        let shm = Path::new("/dev/shm");
        let base = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let path = base.join(format!("{SCRATCH}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&path).map_err(|e| format!("cannot make the folder {}: {e}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of compares that were killed.
pub fn remove_stale() {
    for base in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
        for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let owner = name.strip_prefix(SCRATCH).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
            if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::Op;
    use super::*;

    fn sh(script: &str) -> Command {
        let mut c = Command::new("sh");
        c.args(["-c", script]);
        c
    }

    #[test]
    fn a_gang_ends_together() {
        let long = Duration::from_secs(60);
        assert_eq!(Gang::start(vec![sh("echo a"), sh("echo b")]).unwrap().finish(long), Ok("a\n".to_owned()));
        let start = Instant::now();
        let e =
            Gang::start(vec![sh("exec sleep 600"), sh("echo because >&2; exit 3")]).unwrap().finish(long).unwrap_err();
        assert!(e.contains("exit status: 3") && e.contains("because"), "{e}");
        let e = Gang::start(vec![sh("exec sleep 600")]).unwrap().finish(Duration::from_millis(50)).unwrap_err();
        assert!(e.contains("not done"), "{e}");
        assert!(start.elapsed() < Duration::from_secs(30));
        let e = Gang::start(vec![Command::new("no-such-program")]).err().unwrap();
        assert!(e.contains("no-such-program"), "{e}");
    }

    #[test]
    fn one_that_does_not_listen_is_killed() {
        let start = Instant::now();
        let gang = Gang::start(vec![sh("trap '' TERM; echo ready; while :; do sleep 0.05; done")]).unwrap();
        let id = gang.members[0].id();
        let e = gang.finish(Duration::from_millis(200)).unwrap_err();
        assert!(e.contains("not done") && start.elapsed() < Duration::from_secs(30), "{e}");
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn scratch_goes() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.0.clone();
        std::fs::write(path.join("left"), "x").unwrap();
        assert!(path.is_dir());
        drop(scratch);
        assert!(!path.exists());
        // No process has this number.
        let stale = std::env::temp_dir().join(format!("{SCRATCH}4294967295-0"));
        std::fs::create_dir_all(&stale).unwrap();
        let own = Scratch::new().unwrap();
        remove_stale();
        assert!(!stale.exists() && own.0.exists());
    }

    #[test]
    fn open_mpi_is_told_which_transport() {
        let cases = [Case::new(Op::Barrier, 0, 2, 1.0)];
        let mut spec = Spec { world: 2, transport: Transport::Tcp, pinned: true, cases: &cases, peers: Path::new("p") };
        let line = |spec: &Spec<'_>, root| mpirun(spec, Path::new("s"), root).join(" ");
        let tcp = line(&spec, true);
        assert!(
            tcp.starts_with("--allow-run-as-root ") && tcp.contains("btl tcp,self") && tcp.contains("if_include lo"),
            "{tcp}"
        );
        assert!(tcp.ends_with("-n 2 p/openmpi 1 240 barrier:0:300:32"), "{tcp}");
        spec.transport = Transport::Shm;
        let shm = line(&spec, false);
        assert!(
            shm.starts_with("--oversubscribe")
                && shm.contains("btl vader,self")
                && shm.contains("single_copy_mechanism cma"),
            "{shm}"
        );
    }

    #[test]
    fn a_missing_program_is_named() {
        let e = check_peers(&[Peer::Gloo], Path::new("nowhere")).unwrap_err();
        assert!(e.contains("nowhere/gloo") && e.contains("cargo xtask bench compare"), "{e}");
        assert_eq!(check_peers(&[], Path::new("nowhere")), Ok(()));
    }
}
