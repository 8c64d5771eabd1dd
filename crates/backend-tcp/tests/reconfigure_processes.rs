//! Memberships of processes that change: all of torchcomms' ReconfigureTest, members killed in mid attempt, and rank is
//! index in all of them.

mod crew;

use std::collections::BTreeSet;
use std::time::Duration;

use comm_core::{Communicator, ErrorKind, op};
use crew::{Crew, LIMIT, Member, say};

/// What happens to the members, who are numbers.
#[derive(Clone, Copy)]
enum Step {
    /// Those in a list form a communicator in that order; lists that stand side by side do so at the same time.
    Form(&'static [&'static [usize]]),
    /// Whoever was in the communicator before and is in none now finds that it is stale.
    LeftOut(&'static [usize]),
    /// This one calls it off; all of the last communicator learn it.
    Abort(usize),
    /// Three sums of 2048 values `rank + 1 + i`, and a 42 from rank 0.
    Work(&'static [usize]),
}

use Step::{Abort, Form, LeftOut, Work};

/// Names, the number of members, and what happens.
const SCRIPTS: &[(&str, usize, &[Step])] = &[
    ("basic", 3, &[Form(&[&[2, 0, 1]])]),
    (
        "without the last",
        4,
        &[Form(&[&[0, 1, 2, 3]]), Form(&[&[0, 1, 2]]), Work(&[0, 1, 2]), LeftOut(&[3]), Form(&[&[3, 0, 1, 2]])],
    ),
    (
        "without one in the middle",
        4,
        &[Form(&[&[0, 1, 2, 3]]), Form(&[&[0, 2, 3]]), Work(&[0, 2, 3]), LeftOut(&[1]), Form(&[&[0, 2, 1, 3]])],
    ),
    (
        "alone, together, alone",
        3,
        &[Form(&[&[0], &[1], &[2]]), Form(&[&[0, 1, 2]]), Form(&[&[2], &[0], &[1]]), Form(&[&[2, 1, 0]])],
    ),
    ("the same again", 3, &[Form(&[&[0, 1, 2]]), Form(&[&[0, 1, 2]]), Form(&[&[0, 1, 2]]), Work(&[0, 1, 2])]),
    ("a half first", 4, &[Form(&[&[2, 3]]), Form(&[&[0, 2, 1, 3]]), Work(&[0, 1, 2, 3])]),
    ("two halves", 5, &[Form(&[&[0, 1], &[2, 3, 4]]), Form(&[&[3, 0, 2, 1, 4]]), Work(&[0, 1, 2, 3, 4])]),
    (
        "down to one and grown again",
        5,
        &[
            Form(&[&[0, 1, 2]]),
            Form(&[&[1, 0]]),
            LeftOut(&[2]),
            Form(&[&[1]]),
            LeftOut(&[0]),
            Form(&[&[3, 1, 4]]),
            Work(&[3, 1, 4]),
        ],
    ),
    ("after an abort", 3, &[Form(&[&[0, 1, 2]]), Abort(2), Form(&[&[1, 2, 0]]), Work(&[0, 1, 2])]),
];

#[test]
fn child() {
    crew::child(|scene, me, fresh| match scene {
        "sorted" => sorted(me, &fresh),
        "attempts" => attempts(me, fresh),
        name => script(me, fresh, SCRIPTS.iter().find(|s| s.0 == name).unwrap().2),
    });
}

fn script(me: &Member, fresh: Communicator, steps: &[Step]) {
    let mut now = fresh;
    for (k, step) in steps.iter().enumerate() {
        let phase = k as u64 + 1;
        match *step {
            Form(groups) => {
                if let Some(group) = groups.iter().find(|g| g.contains(&me.number)) {
                    now = me.form(phase, &now, group);
                    me.together(phase, group);
                }
            }
            LeftOut(who) if who.contains(&me.number) => {
                let e = now.barrier().unwrap_err();
                let right = matches!(e.kind(), ErrorKind::StaleGeneration { ours, theirs, .. } if ours < theirs);
                assert!(right, "{e}");
                say("STALE");
            }
            Abort(who) => {
                if who == me.number {
                    now.abort("enough");
                }
                let e = now.barrier().unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 2, cause } if cause == "enough"), "{e}");
            }
            Work(who) if who.contains(&me.number) => {
                work(&now);
                me.together(phase, who);
            }
            LeftOut(_) | Work(_) => {}
        }
    }
    say("DONE");
    // Those who were left out have nobody to end with.
    if !now.is_failed() {
        now.finalize(LIMIT).unwrap();
    }
}

fn work(comm: &Communicator) {
    let n = comm.size();
    for i in 0..3 {
        let mut x = vec![(comm.rank() + 1 + i) as f32; 2048];
        comm.all_reduce(&mut x, op::Sum).unwrap();
        assert!(x.iter().all(|v| *v == (n * (n + 1) / 2 + n * i) as f32));
    }
    let mut x = [if comm.rank() == 0 { 42f32 } else { 0.0 }; 7];
    comm.broadcast(&mut x, 0).unwrap();
    assert_eq!(x, [42.0; 7]);
}

#[test]
fn processes_form_what_the_lists_say() {
    for (name, n, steps) in SCRIPTS {
        let mut crew = Crew::start(*n, name);
        let all: Vec<usize> = (0..*n).collect();
        let mut generations = vec![0; *n];
        for (k, step) in steps.iter().enumerate() {
            let Form(groups) = step else { continue };
            for group in *groups {
                let generation = 1 + group.iter().map(|m| generations[*m]).max().unwrap();
                for (rank, (line, _)) in crew.hear(&format!("FORMED{}", k + 1), group).into_iter().enumerate() {
                    assert_eq!(line, format!("{rank} {generation}"), "{name}, step {k}");
                }
                group.iter().for_each(|m| generations[*m] = generation);
            }
        }
        crew.hear("DONE", &all);
        crew.ended(&all);
    }
}

/// Members as a set: sorted by handle, on all alike.
fn sorted(me: &Member, fresh: &Communicator) {
    let set: BTreeSet<String> = me.swap(1, fresh, &[0, 1, 2, 3]).into_iter().collect();
    let own = fresh.init_handle().unwrap();
    let new = fresh.reconfigure(1, set.clone(), LIMIT, &[]).unwrap();
    assert_eq!(set.iter().position(|h| *h == own), Some(new.rank()));
    work(&new);
    new.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn processes_of_a_set_are_sorted_by_handle() {
    let mut crew = Crew::start(4, "sorted");
    crew.hear("DONE", &[0, 1, 2, 3]);
    crew.ended(&[0, 1, 2, 3]);
}

/// Five reconfigure again and again, until two of them are gone; the other three find together.
fn attempts(me: &Member, fresh: Communicator) {
    let all = [0, 1, 2, 3, 4];
    let mut now = me.form(1, &fresh, &all);
    say("READY");
    for phase in 2.. {
        // Handles that never come are those of the dead, who are missing then.
        let Some(list) = me.swap_until_gone(phase, &now, &all) else { break };
        match now.reconfigure(phase, &list, LIMIT, &[]) {
            Ok(new) => now = new,
            Err(e) => {
                let named = match e.kind() {
                    ErrorKind::Bootstrap { missing, .. } => missing.clone(),
                    ErrorKind::PeerFailed { rank, .. } => vec![*rank],
                    _ => panic!("{e}"),
                };
                // Who has given up for the same reason may be what one sees of it.
                assert!(!named.contains(&me.number), "{e}");
                say(&format!("FAILED {named:?}"));
                break;
            }
        }
    }
    let rest = me.form(1_000_000, &now, &[4, 0, 2]);
    work(&rest);
    rest.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn two_that_are_killed_at_any_moment_of_attempts_hold_up_nobody() {
    for round in 0..6u64 {
        let mut crew = Crew::start(5, "attempts");
        crew.hear("READY", &[0, 1, 2, 3, 4]);
        std::thread::sleep(Duration::from_millis(7 + 13 * round));
        crew.mark("gone");
        let killed = crew.kill(1);
        std::thread::sleep(Duration::from_millis(round % 3));
        crew.kill(3);
        for (rank, (line, at)) in crew.hear("FORMED1000000", &[4, 0, 2]).into_iter().enumerate() {
            let took = at.saturating_duration_since(killed);
            assert!(line.starts_with(&format!("{rank} ")), "{line}");
            assert!(took < Duration::from_secs(20), "round {round}: together {took:?} after the kill");
        }
        crew.hear("DONE", &[0, 2, 4]);
        crew.ended(&[0, 2, 4]);
    }
}
