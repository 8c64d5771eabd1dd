//! A store in a directory that all ranks share.

pub(crate) mod layout;
pub(crate) mod lock;

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Store};
use parking_lot::Mutex;

use crate::protocol::parse_number;
use crate::{deadline_after, in_call, name_keys, timed_out};

/// How long a call waits for its turn to write.
const TURN: Duration = Duration::from_secs(300);
/// Sleeps between two looks at what is waited for.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// A [`Store`] in a directory that all ranks share, for worlds whose ranks share a file system but know no address.
///
/// Each run has a directory of its own below the shared one, named after the run, so that what an earlier run left is
/// never read. A directory that is removed, or replaced by that of another run, is noticed and ends calls with an
/// error. Values replace each other atomically; whoever writes holds a lock that the system takes back from a process
/// that dies. Those who wait look again, every 50 ms in the end, so this store is slower than a
/// [`TcpStore`](crate::TcpStore). A queue is rewritten by each push: keep queues short.
///
/// Nothing is flushed to disk: a store is for the life of its run. The shared directory must be writable for the ranks
/// and should not be for others. The file system must have `flock(2)`, and hosts see each other's writes as late
/// as its caches allow: seconds over NFS that is mounted without `lookupcache=positive` or `noac`.
///
/// Keys have at most 8 KiB, values nearly 256 MiB. Each file tells its length and a hash: one that is cut off, altered or
/// no file of this store makes calls on its key fail with [`ErrorKind::Corrupt`].
///
/// Clones share the store. The directory of the run stays until [`remove`](Self::remove).
#[derive(Clone, Debug)]
pub struct FileStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    run: String,
    /// Tells this run from others of its name.
    nonce: String,
    /// Names what this process has not finished writing.
    token: u64,
    turn: Duration,
    threads: Arc<Mutex<()>>,
}

impl FileStore {
    /// Enters the store of `run` below `dir`; whoever comes first makes it.
    ///
    /// `run` must be new for each run, as the place in a run that [`discover`](crate::discover) finds under Slurm is.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty `run`; `Io` when `dir` does not exist, cannot be written, or has something else in
    /// place of the run's directory.
    pub fn open(dir: impl AsRef<Path>, run: &str) -> Result<Self> {
        Self::enter(dir.as_ref(), run).map(|(store, _)| store)
    }

    /// Makes the store of `run` below `dir`, which must not be there. For the one rank, or launcher, that comes before
    /// all others.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when a run of this name is there, as an earlier one may have left it; else as [`open`](Self::open).
    pub fn create_new(dir: impl AsRef<Path>, run: &str) -> Result<Self> {
        let (store, new) = Self::enter(dir.as_ref(), run)?;
        if !new {
            return Err(Error::invalid(format!(
                "a run '{}' has left its store in {}, or is still there: choose another name, or remove that directory",
                crate::shorten(run),
                store.0.dir.display()
            )));
        }
        Ok(store)
    }

    /// This store with another limit than 5 minutes on the time for which a call waits while others write. Shares
    /// everything else.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let Inner { dir, run, nonce, token: _, turn: _, threads } = &*self.0;
        Self(Arc::new(Inner {
            dir: dir.clone(),
            run: run.clone(),
            nonce: nonce.clone(),
            token: random(),
            turn: timeout,
            threads: Arc::clone(threads),
        }))
    }

    /// The directory of this run.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.dir
    }

    /// A text that tells this run from all others, those of its name included.
    #[must_use]
    pub fn nonce(&self) -> &str {
        &self.0.nonce
    }

    /// Removes the directory of this run. Ranks that still use it get errors.
    ///
    /// # Errors
    ///
    /// `Io` when it is gone already, was replaced by another run, or cannot be removed; `Timeout` when others write all
    /// the time.
    pub fn remove(&self) -> Result<()> {
        let dir = &self.0.dir;
        // Renamed first, so that nobody sees half of it.
        let gone = dir.with_file_name(format!("{}gone-{}", layout::HIDDEN, self.0.nonce));
        let fail = |e: &io::Error| Error::io(format!("removing {}", dir.display()), e);
        self.locked(&|| "remove".into(), || fs::rename(dir, &gone).map_err(|e| fail(&e)))?;
        fs::remove_dir_all(&gone).map_err(|e| fail(&e))
    }

    /// The store, and whether this call made it.
    fn enter(shared: &Path, run: &str) -> Result<(Self, bool)> {
        if run.is_empty() {
            return Err(Error::invalid("a file store needs the name of its run"));
        }
        if run.len() > layout::MOST_KEY {
            let (len, most) = (run.len(), layout::MOST_KEY);
            return Err(Error::invalid(format!("the name of the run has {len} bytes; the most is {most}")));
        }
        let at = shared.display();
        let hint = |what: &str| Error::new(ErrorKind::Io { what: format!("the store's directory {at} {what}") });
        match fs::metadata(shared) {
            Ok(m) if m.is_dir() => {}
            Ok(_) => return Err(hint("is not a directory")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(hint("does not exist: make it, on a file system that all ranks share"));
            }
            Err(e) => return Err(hint(&format!("cannot be looked at: {e}"))),
        }
        // Threads that name one directory differently must still meet at one mutex.
        let shared = fs::canonicalize(shared).map_err(|e| hint(&format!("cannot be looked at: {e}")))?;
        let dir = shared.join(layout::encode(run));
        let mut made = None;
        // A second round finds what another rank made in between; more are needed only while runs remove it.
        for _ in 0..100 {
            if let Some(text) = read_marker_file(&dir)? {
                let (nonce, name) = layout::read_marker(&text).ok_or_else(|| foreign(&dir))?;
                if name != run {
                    return Err(foreign(&dir));
                }
                let inner = Inner {
                    threads: lock::among_threads(&dir),
                    run: run.into(),
                    nonce: nonce.into(),
                    token: random(),
                    turn: TURN,
                    dir,
                };
                let new = made.as_deref() == Some(nonce);
                return Ok((Self(Arc::new(inner)), new));
            }
            let nonce = format!("{:016x}{:016x}", random(), random());
            match make(&shared, &dir, run, &nonce) {
                Ok(()) => made = Some(nonce),
                Err(e) if matches!(e.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => {
                    if !dir.join(layout::MARKER).exists() && dir.exists() {
                        return Err(foreign(&dir));
                    }
                }
                Err(e) => {
                    return Err(hint(&format!(
                        "cannot be written ({e}): all ranks must be able to make directories there"
                    )));
                }
            }
        }
        Err(foreign(&dir))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.dir.join(name)
    }

    /// Fails unless the directory is still that of this run.
    fn alive(&self) -> Result<()> {
        let marker = read_marker_file(&self.0.dir)?;
        let how = match marker.as_deref().map(layout::read_marker) {
            Some(Some((nonce, _))) if nonce == self.0.nonce => return Ok(()),
            Some(Some(_)) => "was replaced by another run of this name",
            Some(None) => return Err(damaged(&self.file(layout::MARKER), "is not the marker of a run")),
            None => "was removed",
        };
        let what = format!("the directory {} of run '{}' {how}", self.0.dir.display(), crate::shorten(&self.0.run));
        Err(Error::new(ErrorKind::Io { what }))
    }

    /// Runs `f` while nobody else writes.
    fn locked<T>(&self, op: &dyn Fn() -> String, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let deadline = deadline_after(self.0.turn);
        let run = || {
            let late = || timed_out(&format!("store {}, waiting for those who write", op()), started);
            let _threads = self.0.threads.try_lock_until(deadline).ok_or_else(late)?;
            let path = self.file(layout::LOCK);
            let file = match File::options().write(true).open(&path) {
                Ok(file) => file,
                Err(e) => {
                    self.alive()?;
                    return Err(Error::io(format!("opening {}", path.display()), &e));
                }
            };
            let ours = lock::among_processes(&file, deadline)
                .map_err(|e| Error::io(format!("locking {} (the file system must have flock)", path.display()), &e))?;
            if !ours {
                return Err(late());
            }
            // Whoever held the lock before may have removed the run.
            self.alive()?;
            f()
        };
        run().map_err(
            |e| if e.context().op.is_some() { e } else { e.with_context(|| in_call(&format!("store {}", op()))) },
        )
    }

    /// Looks for something until `f` finds it.
    fn until<T>(
        &self,
        op: &dyn Fn() -> String,
        timeout: Duration,
        mut f: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let (started, deadline) = (Instant::now(), deadline_after(timeout));
        let mut nap = NAPS.0;
        let context = |e: Error| e.with_context(|| in_call(&format!("store {}", op())));
        loop {
            if let Some(found) = f().map_err(context)? {
                return Ok(found);
            }
            self.alive().map_err(context)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(timed_out(&format!("store {}", op()), started));
            }
            std::thread::sleep(nap.min(left));
            nap = (nap * 2).min(NAPS.1);
        }
    }

    /// The body of the file `name`, which belongs to `key`.
    fn read(&self, name: &str, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.file(name);
        let Some(mut bytes) = read_file(&path, layout::MOST)? else { return Ok(None) };
        let at = layout::body_of(&bytes, key).map_err(|how| damaged(&path, how))?;
        bytes.drain(..at);
        Ok(Some(bytes))
    }

    /// Replaces the file `name`. Only under the lock.
    fn write(&self, name: &str, key: &str, body: &[u8]) -> Result<()> {
        if key.len() > layout::MOST_KEY {
            let (len, most) = (key.len(), layout::MOST_KEY);
            return Err(Error::invalid(format!("the key has {len} bytes; the most is {most}")));
        }
        if body.len() > layout::MOST - layout::START {
            let (len, most) = (body.len(), layout::MOST - layout::START);
            return Err(Error::invalid(format!("the key's file would hold {len} bytes; the most is {most}")));
        }
        let (path, new) = (self.file(name), self.file(&format!("{}new-{:016x}", layout::HIDDEN, self.0.token)));
        let written = fs::write(&new, layout::record(key, body)).and_then(|()| fs::rename(&new, &path));
        written.map_err(|e| {
            let _ = fs::remove_file(&new);
            Error::io(format!("writing {}", path.display()), &e)
        })
    }

    /// Whether the file `name` was there.
    fn unlink(&self, name: &str) -> Result<bool> {
        match fs::remove_file(self.file(name)) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(Error::io(format!("removing {}", self.file(name).display()), &e)),
        }
    }

    fn there(&self, name: &str) -> Result<bool> {
        let path = self.file(name);
        path.try_exists().map_err(|e| Error::io(format!("looking at {}", path.display()), &e))
    }

    /// Whether a value or a queue has this name.
    fn exists(&self, key: &str) -> Result<bool> {
        Ok(self.there(&layout::value_file(key))? || self.there(&layout::queue_file(key))?)
    }

    fn value(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.read(&layout::value_file(key), key)
    }

    /// What `get` gives: a queue makes its key exist, yet has no value.
    fn value_or_queue(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.value(key)? {
            None => Ok(self.there(&layout::queue_file(key))?.then(Vec::new)),
            found => Ok(found),
        }
    }

    /// Changes the value of `key` under the lock.
    fn change<T>(
        &self,
        op: &dyn Fn() -> String,
        key: &str,
        f: impl FnOnce(Option<Vec<u8>>) -> Result<(Option<Vec<u8>>, T)>,
    ) -> Result<T> {
        self.locked(op, || {
            let (value, out) = f(self.value(key)?)?;
            if let Some(value) = value {
                self.write(&layout::value_file(key), key, &value)?;
            }
            Ok(out)
        })
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let op = || format!("set({})", name_keys(&[key]));
        self.locked(&op, || self.write(&layout::value_file(key), key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.until(&|| format!("get({})", name_keys(&[key])), timeout, || self.value_or_queue(key))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(&|| format!("add({}, {delta})", name_keys(&[key])), key, |old| {
            let sum = match &old {
                None => Some(delta),
                Some(text) => parse_number(text).and_then(|n| n.checked_add(delta)),
            };
            let sum = sum.ok_or_else(|| {
                Error::invalid("the key holds no decimal number, or the sum does not fit into 64 bits")
            })?;
            Ok((Some(sum.to_string().into_bytes()), sum))
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        for key in keys {
            if !self.exists(key)? {
                // No key is there where no store is.
                return self.alive().map(|()| false);
            }
        }
        Ok(true)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        // As at a server: a key that was seen counts, also if it is deleted while others are waited for.
        let mut missing = keys;
        self.until(&|| format!("wait({})", name_keys(keys)), timeout, || {
            while let Some((first, rest)) = missing.split_first() {
                if !self.exists(first)? {
                    return Ok(None);
                }
                missing = rest;
            }
            Ok(Some(()))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.change(&|| format!("compare_set({})", name_keys(&[key])), key, |old| {
            Ok(match old {
                Some(current) if current != expected => (None, current),
                None if !expected.is_empty() => (None, expected.to_vec()),
                _ => (Some(desired.to_vec()), desired.to_vec()),
            })
        })
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let op = || format!("delete_key({})", name_keys(&[key]));
        self.locked(&op, || self.unlink(&layout::value_file(key)))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(self.list_keys()?.len() as i64)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(&|| format!("append({})", name_keys(&[key])), key, |old| {
            let mut all = old.unwrap_or_default();
            all.extend_from_slice(value);
            Ok((Some(all), ()))
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut got: Vec<Vec<u8>> = Vec::new();
        self.until(&|| format!("multi_get({})", name_keys(keys)), timeout, || {
            while let Some(key) = keys.get(got.len()) {
                match self.value_or_queue(key)? {
                    Some(value) => got.push(value),
                    None => return Ok(None),
                }
            }
            Ok(Some(std::mem::take(&mut got)))
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let op = || format!("multi_set({})", name_keys(&pairs.iter().map(|(k, _)| *k).collect::<Vec<_>>()));
        self.locked(&op, || pairs.iter().try_for_each(|(k, v)| self.write(&layout::value_file(k), k, v)))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let name = layout::queue_file(key);
        self.locked(&|| format!("queue_push({})", name_keys(&[key])), || {
            let mut body = self.read(&name, key)?.unwrap_or_default();
            layout::push(&mut body, value);
            self.write(&name, key, &body)
        })
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let name = layout::queue_file(key);
        let op = || format!("queue_pop({})", name_keys(&[key]));
        self.until(&op, timeout, || {
            if !self.there(&name)? {
                return Ok(None);
            }
            self.locked(&op, || {
                let Some(body) = self.read(&name, key)? else { return Ok(None) };
                let cut = || damaged(&self.file(&name), "ends in the middle of an element");
                let Some((first, rest)) = layout::front(&body).map_err(|layout::CutOff| cut())? else {
                    return Ok(None);
                };
                if rest.is_empty() {
                    self.unlink(&name)?;
                } else {
                    self.write(&name, key, rest)?;
                }
                Ok(Some(first.to_vec()))
            })
        })
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        let name = layout::queue_file(key);
        let body = self.read(&name, key)?.unwrap_or_default();
        let (mut n, mut rest) = (0, &body[..]);
        while let Some((_, behind)) = layout::front(rest)
            .map_err(|layout::CutOff| damaged(&self.file(&name), "ends in the middle of an element"))?
        {
            (n, rest) = (n + 1, behind);
        }
        if n == 0 {
            self.alive()?;
        }
        Ok(n)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let fail = |e: &io::Error| Error::io(format!("listing {}", self.0.dir.display()), e);
        self.locked(&|| "list_keys".into(), || {
            let mut keys = Vec::new();
            for entry in fs::read_dir(&self.0.dir).map_err(|e| fail(&e))? {
                let name = entry.map_err(|e| fail(&e))?.file_name();
                let Some(name) = name.to_str().and_then(|n| n.strip_prefix("k.")) else { continue };
                let key = match layout::decode(name) {
                    Some(key) => key,
                    None => long_key(&self.file(&format!("k.{name}")))?,
                };
                keys.push(key);
            }
            Ok(keys)
        })
    }
}

/// The key that a file with a shortened name belongs to.
fn long_key(path: &Path) -> Result<String> {
    let fail = |e: &io::Error| Error::io(format!("reading {}", path.display()), e);
    // Values may be long, and are not needed.
    let mut head = Vec::new();
    let file = open_file(path)?.ok_or_else(|| fail(&io::ErrorKind::NotFound.into()))?;
    file.take(layout::START as u64).read_to_end(&mut head).map_err(|e| fail(&e))?;
    let key = layout::key_of(&head).ok_or_else(|| damaged(path, "was not written by this store"))?;
    Ok(key.into())
}

/// Opens a file of this store; `None` if it is not there.
fn open_file(path: &Path) -> Result<Option<File>> {
    let fail = |e: &io::Error| Error::io(format!("reading {}", path.display()), e);
    // Not blocking: a pipe in the file's place would wait for a writer.
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) if file.metadata().map_err(|e| fail(&e))?.is_file() => Ok(Some(file)),
        Ok(_) => Err(damaged(path, "is no file")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(fail(&e)),
    }
}

/// What is in a file of this store, at most `most` bytes; `None` if it is not there.
fn read_file(path: &Path, most: usize) -> Result<Option<Vec<u8>>> {
    let Some(file) = open_file(path)? else { return Ok(None) };
    let fail = |e: &io::Error| Error::io(format!("reading {}", path.display()), e);
    let len = file.metadata().map_err(|e| fail(&e))?.len();
    let too_long = || damaged(path, &format!("has more than {most} bytes"));
    let len = usize::try_from(len).ok().filter(|n| *n <= most).ok_or_else(too_long)?;
    let mut bytes = Vec::with_capacity(len);
    // What is not one of this store's files may grow meanwhile.
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(|e| fail(&e))?;
    if bytes.len() > most { Err(too_long()) } else { Ok(Some(bytes)) }
}

/// The text of a run's marker; `None` if there is none.
fn read_marker_file(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(layout::MARKER);
    let Some(bytes) = read_file(&path, layout::MOST_MARKER)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|_| damaged(&path, "is not the marker of a run"))
}

/// Makes the directory of a run, complete or not at all.
fn make(shared: &Path, dir: &Path, run: &str, nonce: &str) -> io::Result<()> {
    let new = shared.join(format!("{}new-{nonce}", layout::HIDDEN));
    // What ranks tell each other decides whom they trust.
    DirBuilder::new().mode(0o700).create(&new)?;
    let fill = || {
        File::create_new(new.join(layout::LOCK))?;
        File::create_new(new.join(layout::MARKER))?.write_all(layout::marker(run, nonce).as_bytes())?;
        fs::rename(&new, dir)
    };
    let made = fill();
    if made.is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    made
}

fn foreign(dir: &Path) -> Error {
    let what =
        format!("{} is there, but not as the store of this run: remove it, or choose another name", dir.display());
    Error::new(ErrorKind::Io { what })
}

fn damaged(path: &Path, how: &str) -> Error {
    ErrorKind::Corrupt { rank: None, what: format!("{} {how}", path.display()) }.into()
}

/// A random number, from the operating system through the standard library's hasher keys.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut h = std::collections::hash_map::RandomState::new().build_hasher();
    h.write_u32(std::process::id());
    if let Ok(now) = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
        h.write_u128(now.as_nanos());
    }
    h.finish()
}
