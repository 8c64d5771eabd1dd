//! Shared by the integration tests: a reference backend that really moves bytes, a controllable one, buffers that count their drops, and a world of rank threads with a watchdog.

// Every test binary compiles its own copy and uses a part of it.
#![allow(dead_code)]

pub(crate) mod mock;
pub(crate) mod toy;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use comm_core::{Communicator, Device, ErrorKind, IntoBuf, IntoBufMut, RawBuf, RawBufMut, Result, op};

/// Longest time that a world may take before the watchdog fails the test.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Runs `f` as `n` ranks, one thread each, and returns their results in rank order.
///
/// A rank's panic fails the test with its rank and message; a rank that does not return fails it
/// after [`DEADLINE`] with the list of those that are missing.
pub(crate) fn world<T, F>(n: usize, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Communicator) -> T + Send + Sync + 'static,
{
    world_on(&toy::World::new(n), f)
}

/// [`world`] over a given toy world, for tests that look at it afterwards.
pub(crate) fn world_on<T, F>(shared: &Arc<toy::World>, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Communicator) -> T + Send + Sync + 'static,
{
    let n = shared.size();
    let (f, start) = (Arc::new(f), Instant::now());
    let (tx, rx) = mpsc::channel();
    for rank in 0..n {
        let (tx, f, shared) = (tx.clone(), Arc::clone(&f), Arc::clone(shared));
        let body = move || {
            let out = catch_unwind(AssertUnwindSafe(|| f(shared.comm(rank))));
            let _ = tx.send((rank, out.map_err(|p| panic_text(&*p))));
        };
        std::thread::Builder::new().name(format!("rank {rank}")).spawn(body).unwrap();
    }
    let mut results: Vec<Option<T>> = (0..n).map(|_| None).collect();
    let mut failures = Vec::new();
    for _ in 0..n {
        let Ok((rank, out)) = rx.recv_timeout(DEADLINE.saturating_sub(start.elapsed())) else {
            let missing: Vec<usize> = (0..n).filter(|r| results[*r].is_none()).collect();
            panic!(
                "ranks {missing:?} of {n} did not return in {DEADLINE:?}; panicked so far: {failures:?}; {shared:?}"
            );
        };
        match out {
            Ok(v) => results[rank] = Some(v),
            Err(text) => {
                failures.push(format!("rank {rank}: {text}"));
                // The others may wait for this rank: let them fail too instead of running into the deadline.
                shared.fail_all(rank, "a rank panicked");
            }
        }
    }
    // The first one is the cause; later ones are mostly its consequences.
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    results.into_iter().map(Option::unwrap).collect()
}

/// Rank 0 makes the bad call, the others a good one of the same kind; then all use the communicator.
pub(crate) fn refused(
    name: &'static str,
    parts: &'static [&'static str],
    bad: impl Fn(&Communicator) -> Result<()> + Send + Sync + Copy + 'static,
    good: impl Fn(&Communicator) -> Result<()> + Send + Sync + Copy + 'static,
) {
    for n in 2..=3 {
        let shared = toy::World::new(n);
        world_on(&shared, move |c| {
            if c.rank() == 0 {
                let e = bad(&c).unwrap_err();
                let text = e.to_string();
                for part in [&format!("{name} #0")[..], "'toys'", &format!("rank 0 of {n}"), "still usable"] {
                    assert!(text.contains(part), "{part} in {text}");
                }
                for part in parts {
                    assert!(text.contains(part), "{part} in {text}");
                }
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e:?}");
                assert!(e.is_recoverable());
            } else {
                let e = good(&c).unwrap_err();
                let ErrorKind::PeerRefused { rank: 0, reason } = e.kind() else { panic!("{e:?}") };
                assert!(reason.contains("invalid argument"), "{reason}");
                assert!(e.to_string().contains(&format!("{name} #0")), "{e}");
            }
            assert!(!c.is_failed());
            let mut x = [1u32];
            c.all_reduce(&mut x, op::Sum).unwrap();
            assert_eq!(x, [c.size() as u32]);
        });
        assert!(shared.is_quiet());
    }
}

/// Runs `f` on a thread and fails if it takes longer than [`DEADLINE`].
pub(crate) fn within_deadline<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || tx.send(catch_unwind(AssertUnwindSafe(f)).map_err(|p| panic_text(&*p))));
    match rx.recv_timeout(DEADLINE) {
        Ok(Ok(v)) => v,
        Ok(Err(text)) => panic!("{text}"),
        Err(e) => panic!("not done in {DEADLINE:?}: {e}"),
    }
}

pub(crate) fn panic_text(p: &(dyn std::any::Any + Send)) -> String {
    let text = p.downcast_ref::<String>().cloned();
    text.or_else(|| p.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_else(|| "a panic without text".into())
}

/// Marker of [`Counted`]: shows that other crates can bring their own.
#[derive(Debug)]
pub(crate) struct Foreign;

/// An owned buffer that counts how often one was dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) data: Box<[u32]>,
    pub(crate) drops: Arc<AtomicUsize>,
}

impl Counted {
    pub(crate) fn new(data: &[u32]) -> (Self, Arc<AtomicUsize>) {
        let drops = Arc::new(AtomicUsize::new(0));
        (Self { data: data.into(), drops: Arc::clone(&drops) }, drops)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Whoever still reads it would see this.
        self.data.fill(0xdead_beef);
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: a boxed slice of `u32`s that nothing touches while `self` is held.
unsafe impl IntoBuf<Foreign> for Counted {
    type Elem = u32;
    fn buf(&self) -> Result<RawBuf> {
        self.data.buf()
    }
}

// SAFETY: as above; `&mut self` is exclusive.
unsafe impl IntoBufMut<Foreign> for Counted {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        self.data.buf_mut()
    }
}

/// A buffer whose description the test chooses: to reach checks that the borrow checker makes unreachable for slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw(pub(crate) RawBufMut);

impl Raw {
    /// `len` elements from index `at` of `all`, which the caller keeps alive and does not touch meanwhile.
    pub(crate) fn of(all: &mut [u32], at: usize, len: usize) -> Self {
        let mut all = all;
        Self((&mut all).buf_mut().unwrap().slice(at * 4, len * 4))
    }

    /// The same, but said to lie on another device.
    pub(crate) fn on(self, device: Device) -> Self {
        Self(RawBufMut::new(self.0.ptr(), self.0.bytes(), self.0.dtype(), device))
    }
}

// SAFETY: not for overlapping ranges: tests use them only in calls that must be refused before memory is touched.
unsafe impl IntoBuf<Foreign> for Raw {
    type Elem = u32;
    fn buf(&self) -> Result<RawBuf> {
        Ok(self.0.as_const())
    }
}

// SAFETY: as above.
unsafe impl IntoBufMut<Foreign> for Raw {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        Ok(self.0)
    }
}

// SAFETY: as above.
unsafe impl comm_core::StreamOrdered<Foreign> for Raw {}
