//! Meeting on one host: rank 0 leaves the store's address in a file that only its user can read or write.
//!
//! Rank 0 holds a lock (`flock(2)`) on the file as long as it lives, so a file without one is left over from a job that is
//! over, however it ended and whatever it was called. Each reader appends a byte; the last one removes the file.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Fnv, Result};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::file::lock;

/// Sleeps between two looks for the file.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// What such a file begins with.
const HEAD: &str = "rustcomms 1 ";
/// No such file is longer, but for a byte per reader.
const LONGEST: u64 = 128;
/// How long others may hold the directory while they write there, which takes them no time.
const TURN: Duration = Duration::from_secs(30);

/// Where a job's ranks meet.
#[derive(Debug)]
pub(super) struct Spot {
    dir: PathBuf,
    name: String,
}

impl Spot {
    /// The place of `job` in the directory of this user, which is made if it is not there.
    pub(super) fn of(job: &str) -> Result<Self> {
        Self::below(&base(&|name| std::env::var_os(name).map(PathBuf::from)), job)
    }

    /// The place of `job` in this user's directory below `base`.
    pub(super) fn below(base: &Path, job: &str) -> Result<Self> {
        let user = rustix::process::geteuid().as_raw();
        let dir = base.join(format!("rustcomms-{user}"));
        let fail = |e: &io::Error| Error::io(format!("preparing {} for the ranks to meet", dir.display()), e);
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(&e)),
            _ => {}
        }
        // In /tmp anybody may have made it, as a link or with rights for others.
        let meta = fs::symlink_metadata(&dir).map_err(|e| fail(&e))?;
        if !meta.is_dir() || meta.uid() != user || meta.permissions().mode() & 0o077 != 0 {
            return Err(bootstrap(format!(
                "the ranks cannot meet in {}: it is not a directory of this user alone. Remove it, or set TMPDIR to \
                 another directory, or MASTER_ADDR and MASTER_PORT, on all ranks",
                dir.display()
            )));
        }
        Ok(Self { dir, name: file_name(job) })
    }

    fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Leaves `addr` for the others. It counts as long as the returned file is open.
    pub(super) fn publish(&self, addr: SocketAddr, deadline: Instant) -> Result<File> {
        let fail = |e: &io::Error| Error::io(format!("publishing the store's address in {}", self.dir.display()), e);
        // One at a time: what is removed or replaced below must be what was looked at.
        let turn = File::open(&self.dir).map_err(|e| fail(&e))?;
        let until = deadline.min(crate::deadline_after(TURN));
        if !lock::among_processes(&turn, until).map_err(|e| fail(&e))? {
            return Err(bootstrap(format!("the ranks cannot meet in {}: somebody has locked it", self.dir.display())));
        }
        self.sweep().map_err(|e| fail(&e))?;
        if self.path().symlink_metadata().is_ok() {
            return Err(bootstrap(format!(
                "another run meets at {} and is still there: set RUSTCOMMS_RUN_ID to a name of its own, or MASTER_ADDR and \
                 MASTER_PORT, on all ranks of each",
                self.path().display()
            )));
        }
        // Under another name until it is locked and complete.
        let early = self.dir.join(format!(".{}", std::process::id()));
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&early)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            file.write_all(format!("{HEAD}{addr}\n").as_bytes())?;
            fs::rename(&early, self.path())?;
            Ok(file)
        };
        write().map_err(|e: io::Error| {
            let _ = fs::remove_file(&early);
            fail(&e)
        })
    }

    /// Removes what jobs that are over have left.
    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if let Ok(Some(file)) = open(&path)
                && !lives(&file)?
            {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Waits for the address that rank 0 leaves. The last of `readers` removes it.
    pub(super) fn find(&self, readers: usize, deadline: Instant) -> Result<SocketAddr> {
        let path = self.path();
        let fail = |e: &io::Error| Error::io(format!("reading the store's address from {}", path.display()), e);
        let mut nap = NAPS.0;
        loop {
            if let Some(mut file) = open(&path).map_err(|e| fail(&e))?
                && lives(&file).map_err(|e| fail(&e))?
            {
                let mut text = String::new();
                (&mut file).take(LONGEST).read_to_string(&mut text).map_err(|e| fail(&e))?;
                let head =
                    text.split_once('\n').and_then(|(line, _)| Some((line, line.strip_prefix(HEAD)?.parse().ok()?)));
                let Some((line, addr)) = head else {
                    return Err(bootstrap(format!(
                        "{} is no file of rank 0's: '{}'",
                        path.display(),
                        text.escape_debug()
                    )));
                };
                file.write_all(b".").map_err(|e| fail(&e))?;
                let all = (line.len() + 1 + readers) as u64;
                let meta = file.metadata().map_err(|e| fail(&e))?;
                // Not one that came in its place.
                if meta.len() >= all && path.symlink_metadata().is_ok_and(|m| m.ino() == meta.ino()) {
                    let _ = fs::remove_file(&path);
                }
                return Ok(addr);
            }
            if Instant::now() >= deadline {
                return Err(bootstrap(format!(
                    "rank 0 did not leave the store's address in {} in time: it has not started, has failed, or has other \
                     values of XDG_RUNTIME_DIR and TMPDIR",
                    path.display()
                )));
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAPS.1);
        }
    }
}

/// Opens a file of this user's for reading and appending; `None` if there is none.
fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    match OpenOptions::new().read(true).append(true).custom_flags(flags).open(path) {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether whoever wrote the file still holds it.
fn lives(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        // Given back at once: others ask the same.
        Ok(()) => flock(file, FlockOperation::Unlock).map(|()| false).map_err(Into::into),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// The directory for such files: the user's own if the system has made one, else one for everybody's.
fn base(var: &dyn Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let usable = |p: &PathBuf| p.is_absolute() && p.is_dir();
    let own = var("XDG_RUNTIME_DIR").filter(usable).filter(|p| p.metadata().is_ok_and(|m| m.uid() == user));
    own.or_else(|| var("TMPDIR").filter(usable)).unwrap_or_else(|| "/tmp".into())
}

/// The job's name without what a file's name cannot have, and a number that keeps different ones apart: of the whole name
/// and of the network, because what listens on loopback in another namespace cannot be reached.
fn file_name(job: &str) -> String {
    let network = fs::read_link("/proc/self/ns/net").map(PathBuf::into_os_string).unwrap_or_default();
    let hash = Fnv::hash(format!("{job}\0{}", network.to_string_lossy()).as_bytes());
    let readable: String =
        job.chars().map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' }).take(60).collect();
    format!("{readable}-{hash:016x}")
}

fn bootstrap(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// A directory of its own, which goes away with this.
    struct Base(PathBuf);

    impl Base {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("rustcomms-local-{}-{name}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            Self(dir)
        }

        fn spot(&self, job: &str) -> Spot {
            Spot::below(&self.0, job).unwrap()
        }

        fn files(&self) -> usize {
            fs::read_dir(self.spot("x").dir).unwrap().count()
        }
    }

    impl Drop for Base {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn readers_wait_for_rank_0_and_the_last_one_cleans_up() {
        let base = Base::new("meet");
        std::thread::scope(|scope| {
            let readers: Vec<_> =
                (0..3).map(|_| scope.spawn(|| base.spot("job").find(3, Instant::now() + LONG).unwrap())).collect();
            std::thread::sleep(Duration::from_millis(50));
            let held = base.spot("job").publish(at(4000), Instant::now() + LONG).unwrap();
            readers.into_iter().for_each(|r| assert_eq!(r.join().unwrap(), at(4000)));
            drop(held);
        });
        assert_eq!(base.files(), 0);
    }

    #[test]
    fn what_a_dead_job_left_is_not_read_and_is_swept() {
        let base = Base::new("stale");
        drop(base.spot("job").publish(at(1), Instant::now() + LONG).unwrap());
        drop(base.spot("other").publish(at(2), Instant::now() + LONG).unwrap());
        let e = base.spot("job").find(1, Instant::now() + Duration::from_millis(50)).unwrap_err().to_string();
        assert!(e.contains("rank 0 did not leave"), "{e}");
        let held = base.spot("job").publish(at(3), Instant::now() + LONG).unwrap();
        assert_eq!(base.files(), 1, "the other job's is gone");
        assert_eq!(base.spot("job").find(2, Instant::now() + LONG).unwrap(), at(3));
        drop(held);
    }

    #[test]
    fn a_living_job_is_not_replaced_and_others_are_left_alone() {
        let base = Base::new("living");
        let held = base.spot("job").publish(at(1), Instant::now() + LONG).unwrap();
        let e = base.spot("job").publish(at(2), Instant::now() + LONG).unwrap_err().to_string();
        assert!(e.contains("another run") && e.contains("RUSTCOMMS_RUN_ID"), "{e}");
        let other = base.spot("job/2").publish(at(2), Instant::now() + LONG).unwrap();
        assert_eq!(base.spot("job").find(1, Instant::now() + LONG).unwrap(), at(1));
        assert_eq!(base.spot("job/2").find(1, Instant::now() + LONG).unwrap(), at(2));
        drop((held, other));
    }

    #[test]
    fn directories_that_others_can_use_are_refused() {
        let base = Base::new("open");
        let dir = base.spot("job").dir;
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        let e = Spot::below(&base.0, "job").unwrap_err().to_string();
        assert!(e.contains("of this user alone") && e.contains("TMPDIR"), "{e}");
        fs::remove_dir(&dir).unwrap();
        let elsewhere = base.0.join("elsewhere");
        DirBuilder::new().mode(0o700).create(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &dir).unwrap();
        assert!(Spot::below(&base.0, "job").is_err(), "a link");
        fs::remove_file(&dir).unwrap();
        fs::write(&dir, "").unwrap();
        assert!(Spot::below(&base.0, "job").is_err(), "a file");
    }

    #[test]
    fn garbage_in_place_of_the_file_is_an_error() {
        let base = Base::new("garbage");
        let long = "x".repeat(1 << 20);
        for text in ["", "rustcomms 1 \n", "rustcomms 2 127.0.0.1:4000\n", "rustcomms 1 127.0.0.1:4000", &long] {
            let path = base.spot("job").path();
            fs::write(&path, text).unwrap();
            let file = File::open(&path).unwrap();
            flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
            let e = base.spot("job").find(1, Instant::now() + LONG).unwrap_err().to_string();
            assert!(e.contains("no file of rank 0's") && e.len() < 1000, "{e}");
        }
    }

    #[test]
    fn the_directory_is_the_users_own_where_there_is_one() {
        let dir = Base::new("base");
        let (own, tmp) = (dir.0.join("own"), dir.0.join("tmp"));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&tmp).unwrap();
        let with = |xdg: Option<&Path>, tmp: Option<&Path>| {
            base(&|name| if name == "TMPDIR" { tmp } else { xdg }.map(Path::to_owned))
        };
        assert_eq!(with(Some(&own), Some(&tmp)), own);
        assert_eq!(with(None, Some(&tmp)), tmp);
        assert_eq!(with(Some(Path::new("own")), Some(&tmp)), tmp);
        assert_eq!(with(Some(&dir.0.join("gone")), None), Path::new("/tmp"));
    }

    #[test]
    fn names_of_jobs_become_names_of_files() {
        let long = "j".repeat(1000);
        let names: Vec<String> = ["a/b", "a_b", "..", "", "a b", &long].into_iter().map(file_name).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(name.len() < 100 && !name.starts_with('.') && !name.contains('/'), "{name}");
            assert!(!names[..i].contains(name), "{name}");
        }
    }
}
