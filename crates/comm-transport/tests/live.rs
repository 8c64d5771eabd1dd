//! Peers that are silent, closed, or only busy: who counts as dead, when, and why.

mod wire;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use comm_core::{Clock, Error, ErrorKind, OpDesc, Operation, Parker, PeerCause, RealClock, Result, Time};
use comm_transport::{Endpoint, EndpointOptions, GroupId, HEADER, Link, Port, Prober, SocketLink, Task};
use wire::*;

const MS: Duration = Duration::from_millis(1);
/// Nothing takes as long.
const LIMIT: Duration = Duration::from_secs(20);

fn us(link: impl Link + 'static, options: EndpointOptions) -> (Arc<Endpoint>, GroupId) {
    let us = Endpoint::new(0, vec![None, Some(Box::new(link))], options).unwrap();
    let g = us.create_group(spec(BAD, &[0, 1])).unwrap();
    (us, g)
}

/// An endpoint of rank 0 and the socket of rank 1.
fn scene(heartbeat: Duration, prober: Option<Arc<dyn Prober>>) -> (Arc<Endpoint>, GroupId, UnixStream) {
    let (a, peer) = UnixStream::pair().unwrap();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    let (us, g) = us(SocketLink::new(a).unwrap(), EndpointOptions { heartbeat, prober, ..options(false) });
    (us, g, peer)
}

fn failure(us: &Endpoint, g: GroupId) -> Error {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(e) = us.failure(g) {
            return e;
        }
        assert!(Instant::now() < until, "the endpoint noticed nothing");
        std::thread::sleep(MS);
    }
}

fn is(e: &Error, cause: PeerCause) -> bool {
    matches!(e.kind(), ErrorKind::PeerFailed { rank: 1, cause: c } if *c == cause)
}

/// Counts questions, and answers them if it has somebody to tell.
#[derive(Debug, Default)]
struct Asked {
    count: AtomicUsize,
    tell: later::Slot,
}

/// A place for an endpoint that is made later.
mod later {
    use std::sync::{Mutex, Weak};

    use comm_transport::Endpoint;

    #[derive(Debug, Default)]
    pub(crate) struct Slot(Mutex<Option<Weak<Endpoint>>>);

    impl Slot {
        pub(crate) fn set(&self, e: Weak<Endpoint>) {
            *self.0.lock().unwrap() = Some(e);
        }
        pub(crate) fn get(&self) -> Option<Weak<Endpoint>> {
            self.0.lock().unwrap().clone()
        }
    }
}

impl Prober for Asked {
    fn probe(&self, peer: usize) {
        assert_eq!(peer, 1);
        self.count.fetch_add(1, Ordering::SeqCst);
        if let Some(e) = self.tell.get() {
            std::thread::spawn(move || e.upgrade().map(|e| e.vouch(1)));
        }
    }
}

/// The next frame of the endpoint: its kind and `offset`.
fn hear(peer: &mut UnixStream) -> (u8, u64) {
    let mut b = [0u8; HEADER];
    peer.read_exact(&mut b).unwrap();
    let len = u32::from_le_bytes(b[4..8].try_into().unwrap());
    peer.read_exact(&mut vec![0; len as usize]).unwrap();
    (b[3], u64::from_le_bytes(b[32..40].try_into().unwrap()))
}

#[test]
fn a_silent_peer_is_asked_once_and_given_up() {
    for asked in [None, Some(Arc::new(Asked::default()))] {
        let start = Instant::now();
        let (us, g, mut peer) = scene(300 * MS, asked.clone().map(|a| a as Arc<dyn Prober>));
        let e = failure(&us, g);
        // The timeout and, in its place, a quarter of a second for the answer.
        assert!(is(&e, PeerCause::NoHeartbeat) && start.elapsed() >= 550 * MS, "{e} after {:?}", start.elapsed());
        assert_eq!(asked.map_or(1, |a| a.count.load(Ordering::SeqCst)), 1);
        // It has heard from this rank all the time, and why it is alone now.
        let mut beats = 0;
        loop {
            match hear(&mut peer) {
                (HEARTBEAT, 300_000) => beats += 1,
                (ABORT, _) => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(beats >= 3, "{beats} heartbeats");
        assert_eq!(peer.read(&mut [0; 8]).unwrap(), 0, "the link is still there");
    }
}

#[test]
fn a_silent_peer_that_answers_on_another_way_lives() {
    let asked = Arc::new(Asked::default());
    let (us, g, _peer) = scene(100 * MS, Some(Arc::clone(&asked) as Arc<dyn Prober>));
    asked.tell.set(Arc::downgrade(&us));
    std::thread::sleep(1500 * MS);
    assert!(us.failure(g).is_none(), "{:?}", us.failure(g));
    assert!(asked.count.load(Ordering::SeqCst) >= 3);
}

/// Tells when it has asked in vain, after a while or never.
#[derive(Debug, Default)]
struct Telling(later::Slot);

impl Prober for Telling {
    fn probe(&self, _: usize) {
        let Some(e) = self.0.get() else { return };
        std::thread::spawn(move || {
            std::thread::sleep(600 * MS);
            e.upgrade().map(|e| e.unanswered(1))
        });
    }
    fn tells(&self) -> bool {
        true
    }
}

#[test]
fn a_prober_that_tells_is_waited_for_but_not_for_ever() {
    for speaks in [true, false] {
        let prober = Arc::new(Telling::default());
        let start = Instant::now();
        let (us, g, _peer) = scene(300 * MS, Some(Arc::clone(&prober) as Arc<dyn Prober>));
        if speaks {
            prober.0.set(Arc::downgrade(&us));
        }
        // It is no doubt that nobody had.
        us.unanswered(1);
        let e = failure(&us, g);
        let (took, least) = (start.elapsed(), if speaks { 900 * MS } else { 1300 * MS });
        assert!(is(&e, PeerCause::NoHeartbeat) && took >= least, "{e} after {took:?}");
    }
}

/// Parts of one long frame are signs of life.
#[test]
fn a_slow_peer_lives() {
    use std::io::Write;
    let (us, g, mut peer) = scene(300 * MS, None);
    let b = Frame { step: 3, total: 1000, ..frame(CONTROL) }.bytes(0, &[7; 1000]);
    for part in b.chunks(b.len() / 18) {
        std::thread::sleep(100 * MS);
        peer.write_all(part).unwrap();
    }
    assert_eq!(us.recv_control(g, 1, 3, LIMIT).unwrap(), [7; 1000]);
    assert!(us.failure(g).is_none());
}

/// Each end says what it expects, and gets that of the other, though its own timeout is longer, or infinite.
#[test]
fn the_shorter_timeout_counts_for_both() {
    use std::io::Write;
    for own in [Duration::MAX, Duration::from_secs(60)] {
        let (us, g, mut peer) = scene(own, None);
        peer.write_all(&Frame { offset: 200_000, ..frame(HEARTBEAT) }.bytes(0, &[])).unwrap();
        let mut last = Instant::now();
        for _ in 0..10 {
            let micros = if own == Duration::MAX { 0 } else { 60_000_000 };
            assert_eq!(hear(&mut peer), (HEARTBEAT, micros));
            assert!(last.elapsed() < SOON, "{:?} between heartbeats", last.elapsed());
            last = Instant::now();
        }
        assert!(us.failure(g).is_none());
    }
    let both = |a: Duration, b: Duration| {
        let (x, y) = UnixStream::pair().unwrap();
        let end = |rank: usize, s: UnixStream, heartbeat| {
            let link: Box<dyn Link> = Box::new(SocketLink::new(s).unwrap());
            let mut links = vec![Some(link)];
            links.insert(rank, None);
            let e = Endpoint::new(rank, links, EndpointOptions { heartbeat, ..options(false) }).unwrap();
            let g = e.create_group(spec(BAD, &[0, 1])).unwrap();
            (e, g)
        };
        (end(0, x, a), end(1, y, b))
    };
    let pairs: Vec<_> =
        [(400, 400), (400, 60_000), (60_000, 400)].map(|(a, b)| both(a * MS, b * MS)).into_iter().collect();
    let lopsided = both(400 * MS, Duration::MAX);
    std::thread::sleep(2500 * MS);
    for ((a, ga), (b, gb)) in pairs.iter().chain([&lopsided]) {
        assert!(a.failure(*ga).is_none() && b.failure(*gb).is_none(), "{:?} {:?}", a.failure(*ga), b.failure(*gb));
    }
}

/// No timeout is shorter than a millisecond: below a microsecond it would read as none at the other end. Nor is one too long.
#[test]
fn timeouts_of_any_length_make_sense() {
    for own in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(999), MS] {
        let (us, g, mut peer) = scene(own, None);
        assert_eq!(hear(&mut peer), (HEARTBEAT, 1000), "{own:?}");
        let start = Instant::now();
        assert!(is(&failure(&us, g), PeerCause::NoHeartbeat), "{own:?}");
        assert!(start.elapsed() < 2 * SOON, "{own:?}: {:?}", start.elapsed());
        // A peer that answers lives.
        let asked = Arc::new(Asked::default());
        let (us, g, _peer) = scene(own, Some(Arc::clone(&asked) as Arc<dyn Prober>));
        asked.tell.set(Arc::downgrade(&us));
        std::thread::sleep(600 * MS);
        assert!(us.failure(g).is_none(), "{own:?}: {:?}", us.failure(g));
    }
    for own in [Duration::MAX - Duration::from_nanos(1), Duration::from_secs(u64::MAX), Duration::from_secs(1 << 40)] {
        use std::io::Write;
        let (us, g, mut peer) = scene(own, None);
        peer.write_all(&Frame { offset: u64::MAX, ..frame(HEARTBEAT) }.bytes(0, &[])).unwrap();
        peer.write_all(&Frame { step: 3, total: 5, ..frame(CONTROL) }.bytes(1, b"hello")).unwrap();
        assert_eq!(us.recv_control(g, 1, 3, LIMIT).unwrap(), b"hello", "{own:?}");
        std::thread::sleep(300 * MS);
        assert!(us.failure(g).is_none(), "{own:?}: {:?}", us.failure(g));
    }
}

/// Who has finalized owes nothing until this rank finalizes too; then it has to be there.
#[test]
fn silence_after_a_goodbye_counts_in_finalize_only() {
    use std::io::Write;
    let (us, g, mut peer) = scene(150 * MS, None);
    peer.write_all(&Frame { offset: 1, ..frame(GOODBYE) }.bytes(0, &[])).unwrap();
    std::thread::sleep(1200 * MS);
    assert!(us.failure(g).is_none(), "{:?}", us.failure(g));
    let e = us.finalize(g, LIMIT).unwrap_err();
    assert!(is(&e, PeerCause::NoHeartbeat), "{e}");
    // And who is needed by nobody is not watched.
    let (us, g, mut peer) = scene(150 * MS, None);
    peer.write_all(&Frame { offset: 0, ..frame(GOODBYE) }.bytes(0, &[])).unwrap();
    std::thread::sleep(800 * MS);
    assert!(us.failure(g).is_none(), "{:?}", us.failure(g));
}

/// A clock that can jump: to a process that was stopped its own time looks like that.
#[derive(Debug)]
struct Jumping(AtomicU64);

impl Clock for Jumping {
    fn now(&self) -> Time {
        Time(RealClock.now().0 + self.0.load(Ordering::SeqCst))
    }
    fn sleep(&self, d: Duration) {
        RealClock.sleep(d);
    }
    fn park(&self, parker: &Parker, until: Option<Time>) {
        RealClock.park(parker, until.map(|t| Time(t.0.saturating_sub(self.0.load(Ordering::SeqCst)))));
    }
    fn unpark(&self, parker: &Parker) {
        RealClock.unpark(parker);
    }
}

#[test]
fn who_has_slept_blames_nobody() {
    use std::io::Write;
    let clock = Arc::new(Jumping(AtomicU64::new(0)));
    let (a, mut peer) = UnixStream::pair().unwrap();
    let options = EndpointOptions { heartbeat: 400 * MS, ..EndpointOptions::new(Arc::clone(&clock) as Arc<dyn Clock>) };
    let (us, g) = us(SocketLink::new(a).unwrap(), options);
    for i in 0..25 {
        peer.write_all(&frame(HEARTBEAT).bytes(i, &[])).unwrap();
        std::thread::sleep(80 * MS);
        if i % 8 == 7 {
            // Longer than silence and grace.
            clock.0.fetch_add(5_000_000_000, Ordering::SeqCst);
        }
    }
    assert!(us.failure(g).is_none(), "{:?}", us.failure(g));
    // A peer that says nothing afterwards is found all the same.
    assert!(is(&failure(&us, g), PeerCause::NoHeartbeat));
}

/// A process has ended, and a child of its holds the connection: its last words count, then it is dead.
#[test]
fn a_dead_process_is_read_to_its_end() {
    use std::io::Write;
    let (us, g, mut peer) = scene(Duration::MAX, None);
    let words = vec![5u8; 200_000];
    peer.write_all(&Frame { step: 3, total: 200_000, ..frame(CONTROL) }.bytes(0, &words)).unwrap();
    let start = Instant::now();
    us.lost_process(1);
    assert_eq!(us.recv_control(g, 1, 3, LIMIT).unwrap(), words);
    let e = failure(&us, g);
    assert!(is(&e, PeerCause::Killed) && start.elapsed() < SOON, "{e} after {:?}", start.elapsed());
    us.lost_process(1);
    us.lost_process(77);
    us.vouch(77);
    us.unreachable(77, "");
}

/// Holds the endpoint, as a reduce function does.
struct Hold(Duration);

impl Task for Hold {
    fn poll(&mut self, _: &mut Port<'_>) -> Poll<Result<()>> {
        std::thread::sleep(self.0);
        Poll::Ready(Ok(()))
    }
}

#[test]
fn nobody_waits_for_an_endpoint_that_is_held() {
    let (us, g, _peer) = scene(Duration::MAX, None);
    let (a, _b) = UnixStream::pair().unwrap();
    std::thread::scope(|s| {
        let run = s.spawn(|| {
            let desc = OpDesc::new(Operation::Barrier);
            us.run(g, Some(0), desc, LIMIT, &mut Hold(700 * MS))
        });
        std::thread::sleep(200 * MS);
        let start = Instant::now();
        us.vouch(1);
        us.attach(1, Box::new(SocketLink::new(a).unwrap())).unwrap();
        us.unreachable(1, "");
        us.lost_process(1);
        assert!(start.elapsed() < 300 * MS && !run.is_finished(), "waited for {:?}", start.elapsed());
        run.join().unwrap().unwrap();
    });
    // And nothing of it was lost.
    assert!(is(&failure(&us, g), PeerCause::Killed));
}

/// A link that fails when it is read, or when it is written to: then it reads as closed, as an error that a write has
/// reported is gone.
#[derive(Debug)]
struct Broken {
    how: std::io::ErrorKind,
    writing: bool,
    written: bool,
}

impl Link for Broken {
    fn write(&mut self, head: &[u8], body: &[u8]) -> std::io::Result<usize> {
        self.written = true;
        if self.writing { Err(self.how.into()) } else { Ok(head.len() + body.len()) }
    }
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        match (self.writing, self.written) {
            (_, false) => Err(std::io::ErrorKind::WouldBlock.into()),
            (true, true) => Ok(0),
            (false, true) => Err(self.how.into()),
        }
    }
}

#[test]
fn a_link_says_whether_the_peer_hung_up_or_cannot_be_reached() {
    use std::io::ErrorKind as Io;
    for (kind, cause) in [
        (Io::ConnectionReset, PeerCause::Killed),
        (Io::BrokenPipe, PeerCause::Killed),
        (Io::TimedOut, PeerCause::NoHeartbeat),
        (Io::HostUnreachable, PeerCause::NoHeartbeat),
        (Io::NetworkUnreachable, PeerCause::NoHeartbeat),
    ] {
        for writing in [false, true] {
            let (us, g) = us(Broken { how: kind, writing, written: false }, options(false));
            let e = us.send_control(g, 1, 3, b"x").and_then(|()| us.recv_control(g, 1, 3, LIMIT)).unwrap_err();
            assert!(is(&e, cause), "{kind:?}: {e}");
        }
    }
}
