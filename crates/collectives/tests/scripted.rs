//! One rank alone against a scripted transport: what it posts and when, what it allocates, and that
//! errors come out.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::task::Poll;

use collectives::{Algorithm, AnySchedule, Blocks, Request, Schedule, Shape, Span, Token, Transport};
use comm_core::{Error, ErrorKind, PeerCause, Result};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system allocator unchanged; counting touches a constant-initialised
// thread-local without a destructor and so does not allocate itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are the system allocator's requirements.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` with this layout, as `alloc` passes everything on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Posted {
    peer: usize,
    step: u32,
    span: Span,
}

/// Sends are done at once; receives when the test says so.
struct Script {
    shape: Shape,
    sends: Vec<Posted>,
    recvs: Vec<Posted>,
    /// The first so many receives are done.
    arrived: usize,
    /// Fails the post after this many.
    fail_after: usize,
}

const SEND: u32 = 1 << 31;

impl Script {
    fn new(shape: Shape) -> Self {
        let (sends, recvs) = (Vec::with_capacity(256), Vec::with_capacity(256));
        Self { shape, sends, recvs, arrived: 0, fail_after: usize::MAX }
    }

    fn post(&mut self, is_send: bool, posted: Posted) -> Result<Token> {
        if self.sends.len() + self.recvs.len() == self.fail_after {
            return Err(Error::new(ErrorKind::PeerFailed { rank: posted.peer, cause: PeerCause::Killed }));
        }
        let list = if is_send { &mut self.sends } else { &mut self.recvs };
        list.push(posted);
        Ok(Token(list.len() as u32 - 1 + if is_send { SEND } else { 0 }))
    }
}

impl Transport for Script {
    fn rank(&self) -> usize {
        self.shape.rank
    }
    fn size(&self) -> usize {
        self.shape.size
    }
    fn send(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        self.post(true, Posted { peer, step, span })
    }
    fn recv(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        self.post(false, Posted { peer, step, span })
    }
    fn recv_fold(&mut self, peer: usize, step: u32, dst: Span, _own: Span) -> Result<Token> {
        self.post(false, Posted { peer, step, span: dst })
    }
    fn is_done(&self, t: Token) -> bool {
        t.0 & SEND != 0 || (t.0 as usize) < self.arrived
    }
    fn copy(&mut self, _: Span, _: Span) {}
    fn fold(&mut self, _: Span, _: Span) {}
    fn fold_rev(&mut self, _: Span, _: Span) {}
    fn finish(&mut self, _: Span, _: usize) {}
}

fn make(algorithm: Algorithm, shape: Shape) -> (AnySchedule, Script) {
    (AnySchedule::new(algorithm, &Request::even(shape, 0)).unwrap(), Script::new(shape))
}

#[test]
fn up_to_16_ranks_nothing_is_allocated() {
    for &algorithm in Algorithm::ALL {
        for rank in 0..16 {
            for in_place in [false, true] {
                let shape = Shape { rank, size: 16, bytes: 1024, unit: 8, in_place, segment: 0 };
                let mut t = Script::new(shape);
                t.arrived = usize::MAX;
                let before = ALLOCATIONS.get();
                let mut schedule = AnySchedule::new(algorithm, &Request::even(shape, 3)).unwrap();
                let result = schedule.poll(&mut t);
                assert_eq!(ALLOCATIONS.get(), before, "{algorithm} rank {rank}");
                assert!(matches!(result, Poll::Ready(Ok(()))), "{algorithm} rank {rank}");
                assert!(!t.sends.is_empty() || !t.recvs.is_empty());
            }
        }
    }
    // Lists of lengths are shared, not copied.
    let lens: Arc<[usize]> = (0..16).map(|r| r % 3 * 64).collect();
    let rank = 4;
    let own = lens[rank];
    for (algorithm, blocks) in [
        (Algorithm::AllGatherVDirect, Blocks::Uneven(Arc::clone(&lens))),
        (Algorithm::AllGatherVRing, Blocks::Uneven(Arc::clone(&lens))),
        (Algorithm::ReduceScatterVDirect, Blocks::Uneven(Arc::clone(&lens))),
        (Algorithm::ReduceScatterVRing, Blocks::Uneven(Arc::clone(&lens))),
        (Algorithm::AllToAllVDirect, Blocks::Pairs { send: [own; 16].into(), recv: Arc::clone(&lens) }),
        (Algorithm::AllToAllVPairwise, Blocks::Pairs { send: [own; 16].into(), recv: Arc::clone(&lens) }),
    ] {
        let shape = Shape { rank, size: 16, bytes: 0, unit: 8, in_place: false, segment: 0 };
        let mut t = Script::new(shape);
        t.arrived = usize::MAX;
        let request = Request { shape, root: 0, blocks };
        let before = ALLOCATIONS.get();
        let result = AnySchedule::new(algorithm, &request).unwrap().poll(&mut t);
        assert_eq!(ALLOCATIONS.get(), before, "{algorithm}");
        assert!(matches!(result, Poll::Ready(Ok(()))) && !t.sends.is_empty(), "{algorithm}");
    }
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert!(ALLOCATIONS.get() > before, "the counter counts");
}

#[test]
fn a_failing_transport_fails_the_operation_at_every_point() {
    for &algorithm in Algorithm::ALL {
        for rank in [0, 1, 4] {
            let shape = Shape { rank, size: 5, bytes: 256, unit: 8, in_place: false, segment: 64 };
            let posts = {
                let (mut schedule, mut t) = make(algorithm, shape);
                t.arrived = usize::MAX;
                assert!(schedule.poll(&mut t).is_ready());
                t.sends.len() + t.recvs.len()
            };
            for fail_after in 0..posts {
                let (mut schedule, mut t) = make(algorithm, shape);
                (t.arrived, t.fail_after) = (usize::MAX, fail_after);
                let Poll::Ready(Err(e)) = schedule.poll(&mut t) else {
                    panic!("{algorithm} rank {rank} swallowed the error of post {fail_after}")
                };
                assert!(matches!(e.kind(), ErrorKind::PeerFailed { .. }), "{e}");
            }
        }
    }
}

#[test]
fn a_ring_passes_a_segment_on_as_soon_as_it_is_folded() {
    // Three ranks, chunks of four segments.
    let shape = Shape { rank: 1, size: 3, bytes: 3 * 256, unit: 8, in_place: false, segment: 64 };
    let (mut schedule, mut t) = make(Algorithm::AllReduceRing, shape);
    assert!(schedule.poll(&mut t).is_pending());
    assert_eq!(t.sends.len(), 4, "the first step needs nothing from others");
    assert_eq!(t.recvs.len(), 4, "four receives are posted ahead");
    for k in 1..=16 {
        t.arrived = k;
        let ready = schedule.poll(&mut t).is_ready();
        // The last step's segments stay here.
        assert_eq!(t.sends.len(), (4 + k).min(16));
        assert_eq!(t.recvs.len(), (4 + k).min(16));
        assert_eq!(ready, k == 16);
        if k <= 12 {
            let (came, went) = (t.recvs[k - 1], t.sends[3 + k]);
            assert_eq!((came.span, came.peer, went.peer), (went.span, 0, 2));
        }
    }
}

#[test]
fn chains_pass_a_segment_on_as_soon_as_it_has_come() {
    for (algorithm, from, to) in [(Algorithm::BroadcastChain, 0, 2), (Algorithm::ReduceChain, 2, 0)] {
        let shape = Shape { rank: 1, size: 3, bytes: 640, unit: 8, in_place: false, segment: 64 };
        let (mut schedule, mut t) = make(algorithm, shape);
        for k in 0..=10 {
            t.arrived = k;
            assert_eq!(schedule.poll(&mut t).is_ready(), k == 10);
            assert_eq!((t.sends.len(), t.recvs.len()), (k, (4 + k).min(10)), "{algorithm}");
        }
        assert!(t.sends.iter().all(|p| p.peer == to) && t.recvs.iter().all(|p| p.peer == from));
    }
}

#[test]
fn doubling_posts_every_receive_before_the_first_message_can_come() {
    let shape = Shape { rank: 5, size: 8, bytes: 64, unit: 8, in_place: false, segment: 0 };
    let (mut schedule, mut t) = make(Algorithm::AllReduceRecursiveDoubling, shape);
    assert!(schedule.poll(&mut t).is_pending());
    assert_eq!(t.recvs.iter().map(|p| p.peer).collect::<Vec<_>>(), [4, 7, 1]);
    assert_eq!(t.sends.iter().map(|p| p.peer).collect::<Vec<_>>(), [4]);
    // Once all are here, one poll goes through all rounds.
    t.arrived = 3;
    assert!(schedule.poll(&mut t).is_ready());
    assert_eq!(t.sends.iter().map(|p| p.peer).collect::<Vec<_>>(), [4, 7, 1]);
}
