//! Random programs in random worlds with random faults: what returns is right, who is blamed is to blame, nobody hangs.

use std::time::Duration;

use backend_sim::{Ended, Fault, Faults, Outcome, Simulation, When};
use comm_core::{CommOptions, Communicator, ErrorKind, PeerCause, Result, op};

/// Chance for programs: the same on all ranks.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Thirty calls that chance has chosen, each of which checks what it gets.
fn program(comm: Communicator, seed: u64) -> Result<()> {
    let (me, n) = (comm.rank() as u64, comm.size() as u64);
    let mut dice = Dice(seed);
    for call in 0..30u64 {
        let len = [1, 13, 300, 5000][dice.below(4) as usize];
        let root = dice.below(n);
        let value = |rank: u64| rank * 1000 + call;
        let sum: u64 = (0..n).map(value).sum();
        match dice.below(8) {
            0 => comm.barrier()?,
            1 => {
                let mut x = vec![value(me); len];
                comm.all_reduce(&mut x, op::Sum)?;
                assert_eq!(x, vec![sum; len]);
            }
            2 => {
                let mut x = vec![value(me); len];
                comm.broadcast(&mut x, root as usize)?;
                assert_eq!(x, vec![value(root); len]);
            }
            3 => {
                let mut all = vec![0; len * n as usize];
                comm.all_gather(&vec![value(me); len], &mut all)?;
                assert!(all.iter().enumerate().all(|(i, x)| *x == value((i / len) as u64)));
            }
            4 => {
                let a = comm.all_reduce_async(vec![value(me); len], op::Max)?;
                let b = comm.all_reduce_async(vec![value(me); 3], op::Sum)?;
                assert_eq!(a.wait()?, vec![value(n - 1); len]);
                assert_eq!(b.wait()?, [sum; 3]);
            }
            5 => {
                let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
                let mut x = vec![0; len];
                comm.sendrecv(&vec![value(me); len], &mut x, next as usize, previous as usize)?;
                assert_eq!(x, vec![value(previous); len]);
            }
            6 => {
                let (mut a, mut b) = (vec![value(me); len], vec![value(me); 5]);
                comm.scope(|s| {
                    s.all_reduce(&mut a, op::Min)?;
                    s.all_reduce(&mut b, op::Sum)?;
                    Ok(())
                })?;
                assert_eq!((a, b), (vec![value(0); len], vec![sum; 5]));
            }
            _ => {
                let copy = comm.dup(format!("copy {call}"))?;
                let mut x = [value(me)];
                copy.all_reduce(&mut x, op::Sum)?;
                assert_eq!(x, [sum]);
                copy.finalize(Duration::from_secs(20))?;
            }
        }
    }
    comm.finalize(Duration::from_secs(20))
}

fn chaos(seed: u64, faults: Faults) -> Outcome<()> {
    let n = 2 + (seed % 7) as usize;
    let connect = if seed % 5 == 4 { "ring" } else { "auto" };
    let options = CommOptions::new().name("chaos").timeout(Duration::from_secs(20)).hint("connect", connect);
    let simulation = Simulation::new(n).seed(seed).options(options).faults(faults).trace(30);
    let run = simulation.run(move |comm| program(comm, seed)).unwrap();
    assert!(run.trouble.is_none(), "{}", run.failure("it does not end"));
    check(&run);
    run
}

/// Ranks that a fault has to do with.
fn guilty(fault: Fault) -> Vec<usize> {
    match fault {
        Fault::Drop { from, .. } | Fault::Duplicate { from, .. } | Fault::Corrupt { from, .. } => vec![from],
        Fault::Disconnect { a, b } => vec![a, b],
        Fault::Cut { from, to } => vec![from, to],
        Fault::Kill { rank } | Fault::Pause { rank, .. } => vec![rank],
        _ => Vec::new(),
    }
}

fn check(run: &Outcome<()>) {
    let guilty: Vec<usize> = run.faults.iter().flat_map(|h| guilty(h.fault)).collect();
    let bits = run.faults.iter().any(|h| matches!(h.fault, Fault::Corrupt { .. } | Fault::Drop { .. }));
    for (rank, end) in run.ranks.iter().enumerate() {
        let right = match end {
            Ended::Value(()) | Ended::Killed => true,
            Ended::Error(e) => match e.kind() {
                // Who waits for a lost frame in vain gives up and leaves, which others may learn first.
                ErrorKind::PeerFailed { rank, cause: PeerCause::Closed } if bits => {
                    guilty.contains(rank) || run.ranks[*rank].error().is_some()
                }
                ErrorKind::PeerFailed { rank, .. } => guilty.contains(rank),
                ErrorKind::Corrupt { rank, .. } => rank.is_some_and(|r| guilty.contains(&r)),
                // A frame that does not come, or a length that was never sent, shows by silence alone.
                ErrorKind::Timeout { .. } => bits,
                ErrorKind::Aborted { rank: origin, cause } => {
                    guilty.contains(origin) || cause.contains("timed out") && bits
                }
                _ => false,
            },
            _ => false,
        };
        assert!(right, "{}", run.failure(&format!("rank {rank} is wrong")));
    }
}

#[test]
fn without_faults_everybody_gets_through() {
    for seed in 0..100 {
        chaos(seed, Faults::new()).values().unwrap();
    }
}

#[test]
fn killed_ranks() {
    let mut felt = 0;
    for seed in 0..300 {
        let run = chaos(seed, Faults::new().kill((seed % 2) as usize, When::Within(400)));
        felt += usize::from(run.ranks.iter().any(|r| r.error().is_some()));
    }
    assert!(felt > 200, "{felt}");
}

#[test]
fn several_killed_ranks() {
    for seed in 0..200 {
        chaos(seed, Faults::new().kill_rate(0.003));
    }
}

#[test]
fn lost_links() {
    for seed in 0..200 {
        chaos(seed, Faults::new().disconnect_rate(0.005).at_most(1));
    }
}

#[test]
fn stopped_ranks_and_slow_frames_harm_nobody() {
    let most = Duration::from_millis(300);
    for seed in 0..100 {
        let run = chaos(seed, Faults::new().pause_rate(0.01, most).delay_rate(0.02, most).at_most(20));
        run.values().unwrap();
    }
}

#[test]
fn frames_lost_repeated_and_corrupted() {
    for seed in 0..300 {
        let rate = 0.004;
        chaos(seed, Faults::new().drop_rate(rate).duplicate_rate(rate).corrupt_rate(rate).at_most(1));
    }
}
