//! The dynamic regime in virtual time: kills at any step, attempts that wait in vain for an hour, and the same run twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_sim::{Faults, Simulation, When};
use comm_core::{CommOptions, Communicator, ErrorKind, Result, op};

const HOUR: Duration = Duration::from_secs(3600);

/// Where ranks leave their handles, by phase and old rank.
#[derive(Clone, Default)]
struct Board(Arc<Mutex<BTreeMap<(u64, usize), String>>>);

impl Board {
    /// Leaves the own handle and waits, on the simulation's clock, for those of `who`.
    fn swap(&self, phase: u64, comm: &Communicator, me: usize, who: &[usize]) -> Result<Vec<String>> {
        self.0.lock().unwrap().insert((phase, me), comm.init_handle()?);
        loop {
            let all = self.0.lock().unwrap();
            let found: Vec<String> = who.iter().filter_map(|r| all.get(&(phase, *r)).cloned()).collect();
            drop(all);
            if found.len() == who.len() {
                return Ok(found);
            }
            comm.options().clock.sleep(Duration::from_micros(100));
        }
    }
}

fn sum(comm: &Communicator) -> Result<u64> {
    let mut x = [comm.rank() as u64 + 1];
    comm.all_reduce(&mut x, op::Sum)?;
    Ok(x[0])
}

/// Calls until the communicator fails, and tells who is gone.
fn until_failure(comm: &Communicator) -> Result<usize> {
    let mut x = vec![1f32; 3000];
    loop {
        if let Err(e) = comm.all_reduce(&mut x, op::Max) {
            match e.kind() {
                ErrorKind::PeerFailed { rank, .. } => return Ok(*rank),
                // That of the one that was killed.
                _ => return Err(e),
            }
        }
    }
}

#[test]
fn whoever_is_killed_at_whatever_step_the_rest_goes_on() {
    for seed in 0..24 {
        let victim = seed as usize % 4;
        let run = || {
            let board = Board::default();
            let faults = Faults::new().kill(victim, When::Event(20 + 7 * seed));
            let world = Simulation::new(4).seed(seed).faults(faults).options(CommOptions::new().timeout(HOUR));
            world.run(move |comm| {
                let gone = until_failure(&comm)?;
                let rest: Vec<usize> = (0..4).filter(|r| *r != gone).collect();
                let list = board.swap(1, &comm, comm.rank(), &rest)?;
                let new = comm.reconfigure(1, &list, HOUR, &[])?;
                assert_eq!(rest[new.rank()], comm.rank());
                assert_eq!((new.size(), new.generation()), (3, 1));
                let total = sum(&new)?;
                new.finalize(HOUR)?;
                Ok((gone, total))
            })
        };
        let first = run().unwrap();
        assert!(first.trouble.is_none(), "seed {seed}: {:?}", first.trouble);
        for (r, end) in first.ranks.iter().enumerate().filter(|(r, _)| *r != victim) {
            assert_eq!(end.value(), Some(&(victim, 6)), "seed {seed}, rank {r}: {end:?}");
        }
        assert_eq!(run().unwrap().digest, first.digest, "seed {seed}");
    }
}

/// A member is killed before it comes: the others hear of it long before their hour is over.
#[test]
fn who_is_killed_on_the_way_to_an_attempt_is_not_waited_for() {
    let board = Board::default();
    let faults = Faults::new().kill(2, When::At(Duration::from_secs(5)));
    let run = Simulation::new(4).seed(3).faults(faults).run(move |comm| {
        let list = board.swap(1, &comm, comm.rank(), &[0, 1, 2, 3])?;
        let clock = Arc::clone(&comm.options().clock);
        if comm.rank() == 2 {
            clock.sleep(Duration::from_secs(10));
        }
        let began = clock.now();
        let e = comm.reconfigure(1, &list, HOUR, &[]).unwrap_err();
        let waited = clock.now().since(began);
        if let ErrorKind::Bootstrap { missing, .. } = e.kind() {
            assert_eq!(missing, &[2], "{e}");
            assert!(waited < Duration::from_secs(6), "{waited:?}");
        }
        let rest = [list[3].clone(), list[1].clone(), list[0].clone()];
        let new = comm.reconfigure(2, rest, HOUR, &[])?;
        let total = sum(&new)?;
        new.finalize(HOUR)?;
        Ok((new.rank(), total))
    });
    let run = run.unwrap();
    assert!(run.trouble.is_none(), "{:?}", run.trouble);
    for (old, new) in [(3, 0), (1, 1), (0, 2)] {
        assert_eq!(run.ranks[old].value(), Some(&(new, 6)), "{:?}", run.ranks[old]);
    }
}

/// An hour in vain costs nothing here; everybody names the one that never comes.
#[test]
fn an_attempt_ends_when_its_time_is_up() {
    let board = Board::default();
    let run = Simulation::new(3).seed(9).run(move |comm| {
        let list = board.swap(1, &comm, comm.rank(), &[0, 1, 2])?;
        let clock = Arc::clone(&comm.options().clock);
        let began = clock.now();
        let half = HOUR / 2;
        if comm.rank() == 1 {
            clock.sleep(half);
        } else {
            let e = comm.reconfigure(1, &list, half / 2, &[]).unwrap_err();
            match e.kind() {
                ErrorKind::Bootstrap { missing, .. } => assert_eq!(missing, &[1], "{e}"),
                _ => panic!("{e}"),
            }
            // By the clock of who came first.
            assert!(clock.now().since(began) + Duration::from_secs(1) >= half / 2);
        }
        let new = comm.reconfigure(2, &list, half, &[])?;
        let total = sum(&new)?;
        new.finalize(half)?;
        Ok(total)
    });
    let run = run.unwrap();
    assert!(run.trouble.is_none() && run.ranks.iter().all(|r| r.value() == Some(&6)), "{:?}", run.ranks);
}

/// One that was killed is named by who comes when others have given up because of it, and are gone as well.
#[test]
fn who_was_killed_is_missing_though_others_are_too() {
    let board = Board::default();
    let faults = Faults::new().kill(1, When::At(Duration::from_secs(5)));
    let run = Simulation::new(3).seed(4).faults(faults).run(move |comm| {
        let list = board.swap(1, &comm, comm.rank(), &[0, 1, 2])?;
        let clock = Arc::clone(&comm.options().clock);
        clock.sleep([7, 20, 1].map(Duration::from_secs)[comm.rank()]);
        match comm.reconfigure(1, &list, HOUR, &[]).unwrap_err().kind() {
            ErrorKind::Bootstrap { missing, .. } => Ok(missing.clone()),
            other => panic!("{other:?}"),
        }
    });
    let run = run.unwrap();
    assert!(run.trouble.is_none(), "{:?}", run.trouble);
    assert_eq!([0, 2].map(|r| run.ranks[r].value().cloned()), [Some(vec![1, 2]), Some(vec![1])]);
}

/// Of several attempts of one uuid that differ, the same one is found each time.
#[test]
fn which_of_several_rivals_is_named_can_be_repeated() {
    let run = || {
        let board = Board::default();
        let run = Simulation::new(6).seed(5).run(move |comm| {
            let list = board.swap(1, &comm, comm.rank(), &[0, 1, 2, 3, 4, 5])?;
            let clock = Arc::clone(&comm.options().clock);
            let of = |ranks: &[usize]| ranks.iter().map(|r| list[*r].clone()).collect::<Vec<_>>();
            let wants = match comm.rank() {
                0 => {
                    clock.sleep(Duration::from_secs(1));
                    of(&[0, 1, 2, 3, 4])
                }
                5 => {
                    clock.sleep(HOUR / 4);
                    return Ok(String::new());
                }
                // They wait for one that does not come, and not for each other.
                me => of(&[me, 5]),
            };
            Ok(comm.reconfigure(1, wants, HOUR / 8, &[]).unwrap_err().to_string())
        });
        let run = run.unwrap();
        (run.digest, run.values().unwrap())
    };
    let first = run();
    assert!(first.1[0].contains("different handles"), "{}", first.1[0]);
    for _ in 0..8 {
        assert_eq!(run(), first);
    }
}
