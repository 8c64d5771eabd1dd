//! Members that are processes and are killed: the rest goes on, takes in others, and needs no store and no rank 0.

mod crew;

use std::time::Duration;

use comm_core::{Communicator, ErrorKind, op};
use crew::{Crew, LIMIT, Member, lost, say};

#[test]
fn child() {
    crew::child(|scene, me, fresh| match scene {
        "replaced" => replaced(me, fresh),
        "attempt" => attempt(me, &fresh),
        other => panic!("no scene {other}"),
    });
}

/// Four; one is killed in mid all_reduce; three go on; number 4 comes.
fn replaced(me: &Member, fresh: Communicator) {
    let three = if me.number < 4 {
        let four = me.form(1, &fresh, &[0, 1, 2, 3]);
        say("READY");
        let mut x = vec![1f32; 1 << 20];
        let e = loop {
            if let Err(e) = four.all_reduce(&mut x, op::Max) {
                break e;
            }
        };
        let gone = lost(&e);
        say(&format!("LOST {gone}"));
        let rest: Vec<usize> = (0..4).filter(|n| *n != gone).collect();
        me.form(2, &four, &rest)
    } else {
        fresh
    };
    // Who is left can be seen from what they have left.
    let rest: Vec<usize> = (0..4).filter(|n| me.directory.join(format!("2.{n}")).exists()).collect();
    let mut all = vec![4];
    all.extend(rest);
    let last = me.form(3, &three, &all);
    last.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn one_of_four_is_killed_three_go_on_and_another_joins() {
    for victim in [2, 0] {
        let mut crew = Crew::start(4, "replaced");
        crew.hear("READY", &[0, 1, 2, 3]);
        std::thread::sleep(Duration::from_millis(30));
        let killed = crew.kill(victim);
        let rest: Vec<usize> = (0..4).filter(|n| *n != victim).collect();
        for (who, at) in crew.hear("LOST", &rest) {
            assert_eq!(who, victim.to_string());
            println!("known {:.1?} after the kill", at.saturating_duration_since(killed));
        }
        for (rank, (line, at)) in crew.hear("FORMED2", &rest).into_iter().enumerate() {
            assert_eq!(line, format!("{rank} 2"));
            println!("going on {:.1?} after the kill", at.saturating_duration_since(killed));
        }
        crew.another();
        let all: Vec<usize> = std::iter::once(4).chain(rest).collect();
        for (rank, (line, _)) in crew.hear("FORMED3", &all).into_iter().enumerate() {
            assert_eq!(line, format!("{rank} 3"));
        }
        crew.hear("DONE", &all);
        crew.ended(&all);
    }
}

/// Five have exchanged handles; 1 and 4 are killed while the others wait for them.
fn attempt(me: &Member, fresh: &Communicator) {
    let list = me.swap(1, fresh, &[0, 1, 2, 3, 4]);
    say("READY");
    if [1, 4].contains(&me.number) {
        std::thread::sleep(LIMIT);
    }
    let e = fresh.reconfigure(7, &list, LIMIT, &[]).unwrap_err();
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => say(&format!("FAILED {missing:?} {e}")),
        _ => panic!("{e}"),
    }
    // The dead are known: on this machine everybody can see it.
    let e = fresh.reconfigure(8, &list, LIMIT, &[]).unwrap_err();
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => say(&format!("AGAIN {missing:?}")),
        _ => panic!("{e}"),
    }
    let last = me.form(2, fresh, &[3, 0, 2]);
    last.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn two_are_killed_during_an_attempt_and_the_rest_goes_on() {
    let mut crew = Crew::start(5, "attempt");
    crew.hear("READY", &[0, 1, 2, 3, 4]);
    // Long enough for the others to wait, most of the time; if not, they find out otherwise.
    std::thread::sleep(Duration::from_millis(300));
    let killed = crew.kill(1);
    crew.kill(4);
    let rest = [0, 2, 3];
    for (line, at) in crew.hear("FAILED", &rest) {
        let took = at.saturating_duration_since(killed);
        println!("{took:.1?} after the kill: {line}");
        assert!(["[1]", "[4]", "[1, 4]"].iter().any(|m| line.starts_with(m)), "{line}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
    for (line, _) in crew.hear("AGAIN", &rest) {
        assert_eq!(line, "[1, 4]");
    }
    for (rank, (line, _)) in crew.hear("FORMED2", &[3, 0, 2]).into_iter().enumerate() {
        assert_eq!(line, format!("{rank} 1"));
    }
    crew.hear("DONE", &rest);
    crew.ended(&rest);
}
