//! Scenes of the dynamic regime among threads, for every backend that has it: rank is index in all of them.
#![allow(dead_code, missing_docs, unreachable_pub, missing_debug_implementations)]

pub mod changes;
pub mod wrong;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, op};

/// Nothing that ends well takes as long, even on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// For attempts that are to fail.
pub const SHORT: Duration = Duration::from_millis(1500);

/// How a backend makes a communicator of these options.
pub type Make = fn(CommOptions) -> Result<Communicator>;

pub fn options() -> CommOptions {
    CommOptions::new().name("elastic").dynamic().timeout(LIMIT)
}

/// Communicators without members.
pub fn some(make: Make, n: usize) -> Vec<Communicator> {
    (0..n).map(|_| make(options()).unwrap()).collect()
}

pub fn uuid() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub fn handles(comms: &[&Communicator]) -> Vec<String> {
    comms.iter().map(|c| c.init_handle().unwrap()).collect()
}

/// All of `comms` make the same attempt at the same time.
pub fn attempt(uuid: u64, comms: &[&Communicator], list: &[String], timeout: Duration) -> Vec<Result<Communicator>> {
    thread::scope(|s| {
        let calls: Vec<_> = comms.iter().map(|c| s.spawn(|| c.reconfigure(uuid, list, timeout, &[]))).collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    })
}

/// A communicator of `comms`, in this order; it works.
pub fn form(comms: &[&Communicator]) -> Vec<Communicator> {
    let list = handles(comms);
    let generation = 1 + comms.iter().map(|c| c.generation()).max().unwrap();
    let made = attempt(uuid(), comms, &list, LIMIT);
    let made: Vec<Communicator> = made.into_iter().map(|r| r.unwrap()).collect();
    for (index, c) in made.iter().enumerate() {
        assert_eq!((c.rank(), c.size(), c.generation()), (index, comms.len(), generation));
        assert_eq!(c.name(), comms[index].name());
        assert!(c.ranks().iter().copied().eq(0..comms.len()));
    }
    work(&made);
    made
}

/// All ranks do the same.
pub fn on_all<T: Send>(comms: &[Communicator], f: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|s| {
        let ranks: Vec<_> = comms.iter().map(|c| s.spawn(|| f(c))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Everybody hears everybody, and by rank.
pub fn work(comms: &[Communicator]) {
    on_all(comms, |c| {
        let n = c.size();
        let mut x = [c.rank() as f32 + 1.0; 4];
        c.all_reduce(&mut x, op::Sum).unwrap();
        assert_eq!(x, [(n * (n + 1) / 2) as f32; 4]);
        let mut all = vec![0u32; n];
        c.all_gather(&[c.rank() as u32 * 10], &mut all).unwrap();
        assert!(all.iter().enumerate().all(|(r, v)| *v == r as u32 * 10), "{all:?}");
        let mut got = [0u32];
        if n > 1 {
            c.sendrecv(&[c.rank() as u32], &mut got, (c.rank() + 1) % n, (c.rank() + n - 1) % n).unwrap();
            assert_eq!(got[0] as usize, (c.rank() + n - 1) % n);
        }
    });
}

pub fn end(comms: &[Communicator]) {
    on_all(comms, |c| c.finalize(LIMIT).unwrap());
}

pub fn refs(comms: &[Communicator]) -> Vec<&Communicator> {
    comms.iter().collect()
}

/// The ranks that a failed attempt says are missing.
pub fn missing(e: &Error) -> Vec<usize> {
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => missing.clone(),
        _ => panic!("{e}"),
    }
}

pub fn stale(e: &Error) -> (u32, u32) {
    match e.kind() {
        ErrorKind::StaleGeneration { ours, theirs, .. } => (*ours, *theirs),
        _ => panic!("{e}"),
    }
}

pub fn invalid(e: &Error) -> String {
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    e.to_string()
}

pub fn took<T>(f: impl FnOnce() -> T) -> (T, Duration) {
    let t = Instant::now();
    let out = f();
    (out, t.elapsed())
}
