//! The dynamic regime over hosts, which are network namespaces at a switch: handles lead from one to the other, a newcomer
//! on another host joins, and a host that is cut off meanwhile is named.
#![cfg(target_os = "linux")]

mod crew;
mod netns;

use std::time::{Duration, Instant};

use comm_core::{Communicator, ErrorKind};
use crew::{Crew, Member, await_file, say};
use netns::Lan;

/// Of the attempt that is cut.
const ATTEMPT: Duration = Duration::from_secs(8);

#[test]
fn child() {
    crew::child(|scene, me, fresh| match scene.split_once(' ') {
        Some(("join", n)) => join(me, fresh, n.parse().unwrap()),
        _ => panic!("no scene {scene}"),
    });
}

/// All but the last are together, it joins, then its host is cut off while all are on their way to the same again.
fn join(me: &Member, fresh: Communicator, n: usize) {
    let (old, all): (Vec<usize>, Vec<usize>) = ((0..n - 1).collect(), (0..n).collect());
    let last = me.number == n - 1;
    let mut now = fresh;
    if !last {
        now = me.form(1, &now, &old);
    }
    now = me.form(2, &now, &all);
    me.together(2, &all);
    let list = me.swap(3, &now, &all);
    me.together(3, &all);
    say("READY");
    await_file(&me.directory.join("cut"));
    let e = now.reconfigure(3, &list, ATTEMPT, &[]).unwrap_err();
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => say(&format!("MISSING {missing:?}")),
        _ => panic!("{e}"),
    }
    // The others go on without it, it goes on by itself.
    let rest = if last { me.form(4, &now, &[me.number]) } else { me.form(4, &now, &old) };
    me.together(4, &all);
    rest.finalize(crew::LIMIT).unwrap();
    say("DONE");
}

fn over(test: &str, hosts: usize, places: &[usize], scene: &'static str) {
    let Some(lan) = Lan::new(test, hosts) else { return };
    let n = places.len();
    let exe = std::env::current_exe().unwrap();
    let mut crew = Crew::empty(scene);
    for place in places {
        crew.another_at(lan.hosts[*place].command(exe.to_str().unwrap()));
    }
    let all: Vec<usize> = (0..n).collect();
    for (rank, (line, _)) in crew.hear("FORMED2", &all).into_iter().enumerate() {
        assert_eq!(line, format!("{rank} 2"), "{places:?}");
    }
    crew.hear("READY", &all);
    lan.unplug(places[n - 1]);
    let cut = Instant::now();
    crew.mark("cut");
    let (near, far): (Vec<usize>, Vec<usize>) = all.iter().partition(|r| places[**r] != places[n - 1]);
    for (r, (line, at)) in crew.hear("MISSING", &all).into_iter().enumerate() {
        let gone = if near.contains(&r) { &far } else { &near };
        assert_eq!(line, format!("{gone:?}"), "{places:?}: rank {r}");
        let took = at.saturating_duration_since(cut);
        assert!(took < ATTEMPT * 2, "{places:?}: rank {r} knew after {took:?}");
    }
    crew.hear("DONE", &all);
    crew.ended(&all);
}

#[test]
fn a_newcomer_on_a_second_host_joins_and_is_named_when_it_is_cut_off() {
    over("a_newcomer_on_a_second_host_joins_and_is_named_when_it_is_cut_off", 2, &[0, 0, 1], "join 3");
}

#[test]
fn a_newcomer_on_a_third_host_joins_and_is_named_when_it_is_cut_off() {
    let test = "a_newcomer_on_a_third_host_joins_and_is_named_when_it_is_cut_off";
    over(test, 3, &[0, 1, 2], "join 3");
    over(test, 3, &[0, 1, 0, 1, 2], "join 5");
}
