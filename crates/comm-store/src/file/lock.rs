//! One writer at a time, among processes and threads.
//!
//! `flock(2)` goes away with the process that holds it, so nobody has to guess whether a lock is stale. Where it is
//! made of a lock per *process*, as over NFS, it does not keep threads apart; a mutex per directory does.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Sleeps between two attempts at another process's lock.
const NAPS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(10));

/// This process's mutex for `dir`.
pub(super) fn among_threads(dir: &Path) -> Arc<Mutex<()>> {
    static ALL: OnceLock<Mutex<HashMap<PathBuf, Weak<Mutex<()>>>>> = OnceLock::new();
    let mut all = ALL.get_or_init(Mutex::default).lock();
    all.retain(|_, one| one.strong_count() > 0);
    if let Some(one) = all.get(dir).and_then(Weak::upgrade) {
        return one;
    }
    let one = Arc::default();
    all.insert(dir.to_owned(), Arc::downgrade(&one));
    one
}

/// Locks an open file until it is closed; false if others hold it until `deadline`.
pub(crate) fn among_processes(file: &File, deadline: Instant) -> io::Result<bool> {
    let mut nap = NAPS.0;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() >= deadline => return Ok(false),
            Err(Errno::WOULDBLOCK) => {
                std::thread::sleep(nap);
                nap = (nap * 2).min(NAPS.1);
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
