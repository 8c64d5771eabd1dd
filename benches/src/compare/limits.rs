//! What the machine can do at best: the same bytes, exchanged without any library.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::options::{Case, Op, Transport};
use super::place;

/// A floor that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Floor {
    /// Over what.
    pub transport: Transport,
    /// Both cores at once, each way; or one way, the other waiting.
    pub both: bool,
    /// Bytes each way.
    pub bytes: usize,
}

/// What a row cannot go below: this floor; and its part that grows with the bytes as many times as pairs of ranks take turns on the cores.
#[must_use]
pub fn floor_of(case: &Case, transport: Transport, world: usize) -> Floor {
    let others = world - 1;
    let (both, bytes) = match case.op {
        Op::AllReduce => (true, 2 * case.bytes * others / world),
        Op::ReduceScatter | Op::AllGather | Op::AllToAll => (true, case.bytes * others / world),
        Op::Broadcast | Op::SendRecv => (false, case.bytes),
        Op::Barrier => (true, 4),
    };
    Floor { transport, both, bytes: bytes.max(4) }
}

/// The floor of a row in microseconds, from the time of its [`Floor`] and of the same with 4 bytes.
#[must_use]
pub fn limit_us(case: &Case, world: usize, cores: usize, floor: f64, hop: f64) -> f64 {
    let lanes = (world.min(cores) as f64 / 2.0).max(0.5);
    let turns = match case.op {
        // From one rank to all others; in a world of two there is only one way.
        Op::Broadcast => (world - 1) as f64 / lanes.max(1.0) / if world > 2 { 2.0 } else { 1.0 },
        _ => world as f64 / 2.0 / lanes,
    };
    hop + (floor - hop).max(0.0) * turns.max(1.0)
}

/// Shortest times in microseconds that were seen for each floor.
#[derive(Clone, Debug, Default)]
pub struct Floors(BTreeMap<Floor, f64>);

impl Floors {
    /// Takes a time in.
    pub fn add(&mut self, floor: Floor, us: f64) {
        let best = self.0.entry(floor).or_insert(us);
        *best = best.min(us);
    }

    /// The time of a floor.
    #[must_use]
    pub fn get(&self, floor: &Floor) -> Option<f64> {
        self.0.get(floor).copied()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&Floor, f64)> {
        self.0.iter().map(|(f, us)| (f, *us))
    }
}

/// The time of a floor in microseconds: the shortest of those that fit into `time`, and of at least two.
///
/// # Errors
///
/// Of the sockets.
pub fn measure(floor: &Floor, cores: &[usize], time: Duration) -> io::Result<f64> {
    let (first, second) = (cores[0], cores[1 % cores.len()]);
    match floor.transport {
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let a = TcpStream::connect(listener.local_addr()?)?;
            let (b, _) = listener.accept()?;
            let runs = runs(floor, time);
            std::thread::scope(|s| {
                let other = s.spawn(move || ends(b, second, floor, runs, false));
                let best = ends(a, first, floor, runs, true).and_then(|us| {
                    us.into_iter().reduce(f64::min).ok_or_else(|| io::Error::other("nothing was measured"))
                });
                other.join().map_err(|_| io::Error::other("the other end of the bare socket panicked"))??;
                best
            })
        }
        Transport::Shm => Ok(copy(floor, first, second, time)),
    }
}

/// Both ends do as many.
fn runs(floor: &Floor, time: Duration) -> usize {
    // A guess that is wrong makes it longer or shorter, not worse.
    let guess = 2e-5 + floor.bytes as f64 / 2e9;
    ((time.as_secs_f64() / guess) as usize).clamp(2, 2000)
}

/// One end of a bare socket; times in microseconds.
fn ends(mut s: TcpStream, core: usize, floor: &Floor, runs: usize, first: bool) -> io::Result<Vec<f64>> {
    s.set_nodelay(true)?;
    s.set_nonblocking(true)?;
    // In a thread of its own, which ends with it.
    std::thread::scope(|scope| {
        let all = scope.spawn(move || {
            place::pin(core);
            let (tx, mut rx) = (vec![1u8; floor.bytes], vec![1u8; floor.bytes]);
            let mut times = Vec::with_capacity(runs);
            for _ in 0..runs {
                let start = Instant::now();
                if floor.both {
                    exchange(&mut s, &tx, &mut rx)?;
                } else if first {
                    exchange(&mut s, &tx, &mut [])?;
                    exchange(&mut s, &[], &mut rx)?;
                } else {
                    exchange(&mut s, &[], &mut rx)?;
                    exchange(&mut s, &tx, &mut [])?;
                }
                times.push(start.elapsed().as_secs_f64() * 1e6 / if floor.both { 1.0 } else { 2.0 });
            }
            Ok(times)
        });
        all.join().map_err(|_| io::Error::other("an end of the bare socket panicked"))?
    })
}

/// Sends and receives at once, without sleeping.
fn exchange(s: &mut TcpStream, tx: &[u8], rx: &mut [u8]) -> io::Result<()> {
    const PIECE: usize = 512 << 10;
    let limit = Instant::now() + Duration::from_secs(60);
    let (mut sent, mut got, mut idle) = (0, 0, 0u32);
    while sent < tx.len() || got < rx.len() {
        let before = (sent, got);
        if sent < tx.len() {
            match s.write(&tx[sent..(sent + PIECE).min(tx.len())]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        if got < rx.len() {
            match s.read(&mut rx[got..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        if before == (sent, got) {
            idle += 1;
            // On one core the other end needs it.
            if idle.is_multiple_of(1000) {
                std::thread::yield_now();
                if Instant::now() > limit {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
        }
    }
    Ok(())
}

/// Copying in memory: by one core, or by both at once, when the slower one counts. By the library's routine or by a plain loop, as
/// some processors are many times slower with the former where the addresses lie badly.
fn copy(floor: &Floor, first: usize, second: usize, time: Duration) -> f64 {
    let one = |core: usize| {
        place::pin(core);
        let words = floor.bytes.div_ceil(8);
        let (from, mut to) = (vec![1u64; words], vec![2u64; words]);
        // So many that a clock's tick does not count.
        let inner = (65_536 / floor.bytes).max(1);
        let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
        while runs < 4 || start.elapsed() < time {
            let zero = std::hint::black_box(0);
            let t = Instant::now();
            for _ in 0..inner {
                let from = std::hint::black_box(from.as_slice());
                if runs % 2 == 0 {
                    to.copy_from_slice(from);
                } else {
                    to.iter_mut().zip(from).for_each(|(t, f)| *t = f ^ zero);
                }
                std::hint::black_box(&mut to);
            }
            best = best.min(t.elapsed().as_secs_f64() * 1e6 / inner as f64);
            runs += 1;
        }
        best
    };
    std::thread::scope(|s| {
        let a = s.spawn(|| one(first));
        let b = (floor.both && first != second).then(|| s.spawn(|| one(second)));
        let a = a.join().unwrap_or(f64::INFINITY);
        b.map_or(a, |b| a.max(b.join().unwrap_or(f64::INFINITY)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_of_operations() {
        let floor = |op, world| {
            let f = floor_of(&Case::new(op, 1 << 20, world, 1.0), Transport::Tcp, world);
            (f.both, f.bytes)
        };
        assert_eq!(floor(Op::AllReduce, 2), (true, 1 << 20));
        assert_eq!(floor(Op::AllReduce, 4), (true, 3 << 19));
        assert_eq!(floor(Op::AllToAll, 2), (true, 1 << 19));
        assert_eq!(floor(Op::Broadcast, 4), (false, 1 << 20));
        assert_eq!(floor(Op::Barrier, 4), (true, 4));
    }

    #[test]
    fn ranks_that_share_cores_take_turns() {
        let case = |op| Case::new(op, 1 << 20, 4, 1.0);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(limit_us(&case(Op::AllReduce), 2, 2, 100.0, 4.0), 100.0);
        near(limit_us(&case(Op::AllReduce), 4, 2, 100.0, 4.0), 196.0);
        near(limit_us(&case(Op::AllReduce), 4, 8, 100.0, 4.0), 100.0);
        near(limit_us(&case(Op::Broadcast), 2, 2, 100.0, 4.0), 100.0);
        near(limit_us(&case(Op::Broadcast), 4, 2, 100.0, 4.0), 148.0);
        // A floor below the hop is noise.
        near(limit_us(&case(Op::Barrier), 4, 2, 3.0, 4.0), 4.0);
    }

    #[test]
    fn the_shortest_time_counts() {
        let f = Floor { transport: Transport::Tcp, both: true, bytes: 8 };
        let mut floors = Floors::default();
        assert_eq!(floors.get(&f), None);
        for us in [5.0, 4.0, 6.0] {
            floors.add(f, us);
        }
        assert_eq!((floors.get(&f), floors.iter().count()), (Some(4.0), 1));
    }

    #[test]
    fn bare_exchanges_end() {
        let cores = place::cores();
        for transport in Transport::ALL {
            for both in [true, false] {
                for bytes in [4, 1 << 20] {
                    let us = measure(&Floor { transport, both, bytes }, &cores, Duration::from_millis(2)).unwrap();
                    assert!(us > 0.0 && us.is_finite());
                }
            }
        }
    }
}
