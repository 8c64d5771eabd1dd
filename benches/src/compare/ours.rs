//! Our side: a rank that runs the cases as `benches/peers/openmpi.c` and `gloo.cc` do.

use std::time::{Duration, Instant};

use rustcomms::{CommOptions, Communicator, Error, Result, op};

use super::options::{Op, Transport};
use super::place;

/// Why ours cannot run over this transport, if it cannot. Where a transport that is new is to be switched on: here, and in [`rank`].
#[must_use]
pub const fn missing(transport: Transport) -> Option<&'static str> {
    match transport {
        Transport::Tcp => None,
        Transport::Shm => Some("ours has no shared-memory transport yet: backend-tcp moves bytes over sockets only"),
    }
}

/// What a rank is told, behind the word `rank`.
const ARGS: &str = "rank TRANSPORT PINNED LIMIT_S CASES";

/// One rank, from its arguments; rank 0 prints rows.
///
/// # Errors
///
/// Whatever an operation says, and a result that is wrong.
pub fn rank(args: &[String]) -> Result<()> {
    let usage = || Error::invalid(format!("a rank of compare is started by compare, with {ARGS}"));
    let [transport, pinned, limit, cases] = args else { return Err(usage()) };
    let transport = Transport::ALL.into_iter().find(|t| t.name() == transport).ok_or_else(usage)?;
    let limit = Duration::from_secs(limit.parse().map_err(|_| usage())?);
    if let Some(why) = missing(transport) {
        return Err(Error::invalid(why));
    }
    // Ends with compare, and by itself if that fails to end it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("ruler: not done after {} s", limit.as_secs());
        std::process::exit(3);
    });
    if pinned == "1" {
        let nth = std::env::var(rustcomms::store::env::RANK).ok().and_then(|r| r.parse::<usize>().ok()).unwrap_or(0);
        let cores = place::cores();
        if !place::pin(cores[nth % cores.len()]) {
            return Err(Error::invalid(format!("rank {nth} cannot be pinned to a core")));
        }
    }
    let comm = rustcomms::connect(CommOptions::new().name("compare").timeout(limit).bootstrap_timeout(limit))?;
    for case in cases.split(',') {
        let mut words = case.split(':');
        let op = words.next().and_then(|n| Op::ALL.into_iter().find(|o| o.name() == n)).ok_or_else(usage)?;
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok()).ok_or_else(usage);
        let (bytes, iterations, warm_up) = (number()?, number()?, number()?);
        let us = Side::new(&comm, op, bytes).run(iterations, warm_up)?;
        if comm.rank() == 0 {
            println!("row {} {bytes} {iterations} {us:.4}", op.name());
        }
    }
    if comm.rank() == 0 {
        println!("done");
    }
    comm.finalize(limit)
}

/// Element `i` of what a rank contributes: 1 to 128, so that sums are exact and blocks in the wrong place show. As in `ruler.h`.
fn value(rank: usize, i: usize) -> f32 {
    let mixed = (i as u32).wrapping_add((rank as u32).wrapping_mul(40_503)).wrapping_mul(2_654_435_761);
    ((mixed >> 25) + 1) as f32
}

struct Side<'a> {
    comm: &'a Communicator,
    op: Op,
    /// The large buffer of what is divided, and the one for blocks or results.
    a: Vec<f32>,
    b: Vec<f32>,
    block: usize,
}

impl<'a> Side<'a> {
    fn new(comm: &'a Communicator, op: Op, bytes: usize) -> Self {
        let elements = bytes / 4;
        // Filled by the first check, so every page is there before anything is timed.
        Self { comm, op, a: vec![0.0; elements], b: vec![0.0; elements], block: elements / comm.size() }
    }

    fn once(&mut self, i: usize) -> Result<()> {
        let (comm, block) = (self.comm, self.block);
        match self.op {
            Op::AllReduce => comm.all_reduce(&mut self.a, op::Sum),
            Op::ReduceScatter => comm.reduce_scatter(&self.a, &mut self.b[..block], op::Sum),
            Op::AllGather => comm.all_gather(&self.b[..block], &mut self.a),
            Op::Broadcast => comm.broadcast(&mut self.a, i % comm.size()),
            Op::AllToAll => comm.all_to_all(&self.a, &mut self.b),
            Op::Barrier => comm.barrier(),
            Op::SendRecv => {
                let (me, peer) = (comm.rank(), comm.rank() ^ 1);
                if me < peer {
                    comm.send(&self.a, peer)?;
                }
                comm.recv(&mut self.a, peer)?;
                if me > peer { comm.send(&self.a, peer) } else { Ok(()) }
            }
        }
    }

    fn run(mut self, iterations: usize, warm_up: usize) -> Result<f64> {
        self.verify()?;
        // Sums of zeros stay what they are.
        self.a.fill(0.0);
        self.b.fill(0.0);
        for i in 0..warm_up {
            self.once(i)?;
        }
        self.comm.barrier()?;
        let start = Instant::now();
        for i in 0..iterations {
            self.once(i)?;
        }
        self.comm.barrier()?;
        let us = start.elapsed().as_secs_f64() * 1e6 / iterations as f64;
        self.verify()?;
        self.comm.barrier()?;
        Ok(if self.op == Op::SendRecv { us / 2.0 } else { us })
    }

    fn fill(&mut self) {
        let me = self.comm.rank();
        self.a.iter_mut().enumerate().for_each(|(i, x)| *x = value(me, i));
    }

    fn verify(&mut self) -> Result<()> {
        let (me, world, block) = (self.comm.rank(), self.comm.size(), self.block);
        let sum = |i| (0..world).map(|r| value(r, i)).sum::<f32>();
        self.fill();
        match self.op {
            Op::AllReduce => {
                self.once(0)?;
                self.check(&self.a, sum)
            }
            Op::ReduceScatter => {
                self.once(0)?;
                self.check(&self.b[..block], |i| sum(me * block + i))
            }
            Op::AllGather => {
                self.b.copy_from_slice(&self.a);
                self.once(0)?;
                self.check(&self.a, |i| value(i / block, i % block))
            }
            Op::Broadcast => {
                for root in 0..world {
                    self.fill();
                    self.once(root)?;
                    self.check(&self.a, |i| value(root, i))?;
                }
                Ok(())
            }
            Op::AllToAll => {
                self.once(0)?;
                self.check(&self.b, |i| value(i / block, me * block + i % block))
            }
            Op::Barrier => self.once(0),
            Op::SendRecv => {
                // As `once`, with values of one's own on the way back.
                let peer = me ^ 1;
                if me < peer {
                    self.comm.send(&self.a, peer)?;
                }
                self.comm.recv(&mut self.a, peer)?;
                self.check(&self.a, |i| value(peer, i))?;
                self.fill();
                if me > peer { self.comm.send(&self.a, peer) } else { Ok(()) }
            }
        }
    }

    fn check(&self, got: &[f32], want: impl Fn(usize) -> f32) -> Result<()> {
        match got.iter().enumerate().find(|(i, x)| x.to_bits() != want(*i).to_bits()) {
            None => Ok(()),
            Some((i, x)) => Err(Error::invalid(format!(
                "a wrong result: rank {} has {x} instead of {} at element {i} of {} of {} bytes",
                self.comm.rank(),
                want(i),
                self.op.name(),
                self.a.len() * 4
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_peers() {
        // From ruler_value in ruler.h.
        let some: Vec<f32> = (0..4).map(|i| value(0, i)).chain((0..4).map(|i| value(3, i))).collect();
        assert_eq!(some, RULER_VALUES);
    }

    #[test]
    fn a_rank_that_was_not_started_by_compare_says_so() {
        let args = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(rank(&args("tcp 1")).unwrap_err().to_string().contains(ARGS));
        let e = rank(&args("shm 0 60 barrier:0:1:1")).unwrap_err().to_string();
        assert!(e.contains("no shared-memory transport yet"), "{e}");
    }

    const RULER_VALUES: [f32; 8] = [1.0, 80.0, 31.0, 110.0, 89.0, 40.0, 119.0, 70.0];
}
