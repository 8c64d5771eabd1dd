//! Connections that lead through a proxy which is slow, loses bytes, changes them, falls silent or hangs up.

mod netproxy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, PeerCause, Result, op};
use netproxy::{LIMIT, Proxy, Rule, run, world};

const SECOND: Duration = Duration::from_secs(1);
/// What a loaded machine may add.
const MARGIN: Duration = Duration::from_secs(8);

fn options() -> CommOptions {
    CommOptions::new().timeout(LIMIT)
}

/// Some calls whose results depend on every byte; a wrong one is never taken for right.
fn work(comm: &Communicator, len: usize) -> Result<()> {
    work_with(comm, len, true)
}

fn work_with(comm: &Communicator, len: usize, right: bool) -> Result<()> {
    let (me, n) = (comm.rank() as u64, comm.size() as u64);
    let value = |rank: u64, i: u64| (rank + 1) * 0x0001_0001_0001_0001 + i * 3;
    let check = |what: &str, x: &[u64], want: &dyn Fn(u64) -> u64| {
        let wrong = x.iter().enumerate().find(|(i, v)| **v != want(*i as u64));
        assert!(wrong.is_none() || !right, "WRONG DATA in {what} at rank {me} of {n}: {wrong:?}");
    };
    let own = |rank: u64| -> Vec<u64> { (0..len as u64).map(|i| value(rank, i)).collect() };
    let mut x = own(me);
    comm.all_reduce(&mut x, op::Sum)?;
    check("all_reduce", &x, &|i| (0..n).map(|r| value(r, i)).sum());
    let mut x = own(me);
    comm.broadcast(&mut x, comm.size() - 1)?;
    check("broadcast", &x, &|i| value(n - 1, i));
    let send: Vec<u64> = (0..n).flat_map(|to| (0..9).map(move |i| value(me * n + to, i))).collect();
    let mut x = vec![0; send.len()];
    comm.all_to_all(&send, &mut x)?;
    check("all_to_all", &x, &|i| value(i / 9 * n + me, i % 9));
    comm.barrier()
}

/// Works until something goes wrong; what, and after which time.
fn until_error(comm: &Communicator, len: usize) -> (Error, Instant) {
    loop {
        if let Err(e) = work(comm, len) {
            return (e, Instant::now());
        }
    }
}

/// The ranks that an error names, in its kind.
fn named(e: &Error) -> Vec<usize> {
    match e.kind() {
        ErrorKind::PeerFailed { rank, .. } | ErrorKind::Aborted { rank, .. } => vec![*rank],
        ErrorKind::Corrupt { rank, .. } => rank.iter().copied().collect(),
        ErrorKind::Timeout { missing, .. } => missing.clone(),
        _ => Vec::new(),
    }
}

#[test]
fn delayed_split_and_joined_streams_change_nothing() {
    let rules = [(Rule::Delay(50), 30_000), (Rule::Split, 20_000), (Rule::Join(SECOND / 30), 60_000)];
    for (i, (rule, len)) in rules.into_iter().enumerate() {
        for checksum in [true, false] {
            let n = 2 + (i + usize::from(checksum)) % 3;
            // From the greetings on.
            let (proxy, comms) = world(n, &options().checksum(checksum).heartbeat_timeout(2 * SECOND), &rule);
            let _ = run(comms, move |_, c| {
                for len in [1, 100, len] {
                    work(&c, len).unwrap();
                }
                c.finalize(LIMIT).unwrap();
            });
            drop(proxy);
        }
    }
}

/// Loses or changes bytes on the way from rank `from` to rank `to` of three, and all fail.
fn damaged(rule: &Rule, checksum: bool, len: usize, from: usize, to: usize) -> Vec<Error> {
    let o = options().checksum(checksum).heartbeat_timeout(SECOND).timeout(8 * SECOND);
    let (proxy, comms) = world(3, &o, &Rule::Pass);
    let _ = run(comms.clone(), |_, c| work(&c, 10).unwrap());
    proxy.set(from, to, rule.clone());
    run(comms, move |_, c| {
        loop {
            // Without a checksum a call may be through with what it took for its last bytes.
            if let Err(e) = work_with(&c, len, checksum) {
                return e;
            }
        }
    })
}

#[test]
fn lost_bytes_end_in_an_error_that_names_who_sent_them() {
    let mut round = 0;
    for after in [0, 3, 79, 80, 1000, 100_000] {
        for bytes in [1, 8, 80, 500] {
            for checksum in [true, false] {
                round += 1;
                let (from, to) = [(0, 1), (1, 0), (2, 0), (1, 2)][round / 2 % 4];
                let rule = Rule::Lose { after, bytes };
                let errors = damaged(&rule, checksum, 30_000, from, to);
                let what = format!("{rule:?} from {from} to {to}, checksum {checksum}: {errors:?}");
                assert!(matches!(errors[to].kind(), ErrorKind::Corrupt { rank: Some(r), .. } if *r == from), "{what}");
                for e in &errors {
                    assert!(named(e).iter().any(|r| [from, to].contains(r)), "{what}");
                }
            }
        }
    }
}

/// Each frame's header has its number and place: what is missing in one shows in the next, before the message is whole.
#[test]
fn without_checksums_bytes_lost_in_a_long_message_are_found_before_it_is_received() {
    for after in [0, 500, 200_000, 1_000_000, 1_500_000] {
        // Not what announces the message and much more, or there would be nothing to find but silence.
        for bytes in [1, 80, 500.max(after / 30)] {
            let (proxy, comms) = world(2, &options().heartbeat_timeout(SECOND).timeout(8 * SECOND), &Rule::Pass);
            let _ = run(comms.clone(), |_, c| work(&c, 10).unwrap());
            proxy.set(0, 1, Rule::Lose { after, bytes });
            let errors = run(comms, |rank, c| {
                let mut x: Vec<u8> = (0..2_000_000u32).map(|i| (i % 251) as u8).collect();
                let done = if rank == 0 { c.send(&x[..], 1) } else { c.recv(&mut x[..], 0).map(drop) };
                if rank == 0 { done.and_then(|()| c.barrier()).unwrap_err() } else { done.unwrap_err() }
            });
            let what = format!("{bytes} bytes lost after {after}: {errors:?}");
            // The sender is told the same.
            for e in &errors {
                assert!(matches!(e.kind(), ErrorKind::Corrupt { rank: Some(0), .. }), "{what}");
            }
        }
    }
}

#[test]
fn with_checksums_a_changed_bit_is_found_wherever_it_is() {
    for (i, after) in (0..80).step_by(6).chain([80, 81, 500, 50_000, 300_000]).enumerate() {
        let (from, to) = [(0, 1), (1, 0), (2, 0), (1, 2)][i % 4];
        let errors = damaged(&Rule::Flip { after }, true, 100_000, from, to);
        let what = format!("bit {after} from {from} to {to}: {errors:?}");
        assert!(matches!(errors[to].kind(), ErrorKind::Corrupt { rank: Some(r), .. } if *r == from), "{what}");
        for e in &errors {
            assert!(named(e).iter().any(|r| [from, to].contains(r)), "{what}");
        }
    }
}

/// Sets `rule` between two of three ranks that go on with their work; the errors and when they came after that.
fn broken(o: &CommOptions, rules: &[(usize, usize, Rule)], len: usize) -> Vec<(Error, Duration)> {
    let (proxy, comms) = world(3, o, &Rule::Pass);
    let proxy = Arc::new(proxy);
    let rules = rules.to_vec();
    let ranks: Vec<Option<Communicator>> = comms.into_iter().map(Some).chain([None]).collect();
    let (begin, act) = (Instant::now(), Arc::clone(&proxy));
    let mut results = run(ranks, move |_, c| match c {
        Some(c) => Some(until_error(&c, len)),
        None => {
            std::thread::sleep(SECOND / 5);
            for (from, to, rule) in &rules {
                act.set(*from, *to, rule.clone());
            }
            None
        }
    });
    results.pop();
    results.into_iter().flatten().map(|(e, at)| (e, at.saturating_duration_since(begin + SECOND / 5))).collect()
}

#[test]
fn a_direction_that_falls_silent_is_found_after_the_heartbeat_timeout() {
    let heartbeat = 2 * SECOND;
    let cases =
        [(0, 1, Rule::Hole, 10), (2, 0, Rule::Stop, 10), (1, 0, Rule::Stop, 300_000), (1, 2, Rule::Hole, 300_000)];
    for (from, to, rule, len) in cases {
        let errors = broken(&options().heartbeat_timeout(heartbeat), &[(from, to, rule.clone())], len);
        let what = format!("{rule:?} from {from} to {to}: {errors:?}");
        let silent = |e: &Error| matches!(e.kind(), ErrorKind::PeerFailed { rank, cause: PeerCause::NoHeartbeat } if *rank == from);
        assert!(silent(&errors[to].0), "{what}");
        for (rank, (e, took)) in errors.iter().enumerate() {
            // The last sign of life may be a quarter older than the silence.
            assert!(*took >= heartbeat * 3 / 4 && *took < heartbeat * 5 / 4 + MARGIN, "rank {rank}: {what}");
            // Who is not heard hears that.
            assert!(silent(e) || named(e).iter().any(|r| [from, to].contains(r) && *r != rank), "rank {rank}: {what}");
        }
    }
}

/// As when one connection of many is broken: its peer lives, so it is the call's timeout that ends it.
#[test]
fn a_silent_connection_to_a_living_peer_ends_in_a_timeout() {
    let timeout = 3 * SECOND;
    for (from, to, rule) in [(0, 1, Rule::HoleButProbes), (2, 0, Rule::StopButProbes)] {
        let errors = broken(&options().heartbeat_timeout(SECOND / 2).timeout(timeout), &[(from, to, rule.clone())], 10);
        let what = format!("{rule:?} from {from} to {to}: {errors:?}");
        for (rank, (e, took)) in errors.iter().enumerate() {
            let timeout_told = e.to_string().to_lowercase().contains("timeout") || e.to_string().contains("timed out");
            assert!(matches!(e.kind(), ErrorKind::Timeout { .. } | ErrorKind::Aborted { .. }), "rank {rank}: {what}");
            assert!(timeout_told, "rank {rank}: {what}");
            assert!(*took >= timeout * 3 / 4 && *took < timeout + MARGIN, "rank {rank}: {what}");
        }
    }
}

#[test]
fn a_closed_connection_is_noticed_at_once_by_all() {
    // In mid-frame, between frames, and while nothing more fits.
    for (from, to, after, len) in [(0, 1, 0, 10), (1, 0, 50, 10), (1, 2, 100_000, 300_000), (2, 0, 1_000_000, 300_000)]
    {
        let errors = broken(&options(), &[(from, to, Rule::Close { after })], len);
        let what = format!("closed after {after} from {from} to {to}: {errors:?}");
        for (rank, (e, took)) in errors.iter().enumerate() {
            let blames = named(e).iter().all(|r| [from, to].contains(r) && *r != rank) && !named(e).is_empty();
            // Far less than the heartbeat timeout of 30 s.
            assert!(blames && *took < MARGIN, "rank {rank}: {what}");
        }
        let is_killed = |e: &Error| matches!(e.kind(), ErrorKind::PeerFailed { cause: PeerCause::Killed, .. });
        assert!(errors.iter().any(|(e, _)| is_killed(e)), "{what}");
    }
}

/// As programs do it: again when somebody has died meanwhile.
fn shrink(comm: &Communicator) -> Result<Vec<usize>> {
    for _ in 0..8 {
        match comm.shrink(LIMIT / 4) {
            Ok(new) => {
                work(&new, 1000)?;
                new.finalize(LIMIT)?;
                return Ok(new.ranks().to_vec());
            }
            Err(e) if matches!(e.kind(), ErrorKind::PeerFailed { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    panic!("rank {}: shrink fails again and again", comm.rank());
}

/// Two that lost their connection cannot both be in: the higher one is out, and told so.
#[test]
fn after_a_closed_connection_shrink_leaves_out_the_higher_end() {
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        let (proxy, comms) = world(3, &options().heartbeat_timeout(2 * SECOND), &Rule::Pass);
        let _ = run(comms.clone(), |_, c| work(&c, 10).unwrap());
        proxy.close(a, b);
        let results = run(comms, |_, c| {
            let _ = until_error(&c, 10);
            shrink(&c)
        });
        let left: Vec<usize> = (0..3).filter(|r| *r != b).collect();
        for (rank, r) in results.iter().enumerate() {
            assert_eq!(r.as_ref().ok(), (rank != b).then_some(&left), "rank {rank}, {a} and {b} cut: {results:?}");
        }
        assert!(matches!(results[b].as_ref().unwrap_err().kind(), ErrorKind::StaleGeneration { .. }), "{results:?}");
    }
}

/// In the middle of long messages, when connections are full.
#[test]
fn a_rank_that_is_cut_off_among_long_messages_goes_on_alone_and_the_others_together() {
    for victim in [0, 3] {
        let (proxy, comms) = world(4, &options().heartbeat_timeout(SECOND), &Rule::Pass);
        let proxy = Arc::new(proxy);
        let ranks: Vec<Option<Communicator>> = comms.into_iter().map(Some).chain([None]).collect();
        let results = run(ranks, move |_, c| {
            let Some(c) = c else {
                std::thread::sleep(SECOND / 2);
                for r in (0..4).filter(|r| *r != victim) {
                    proxy.set(r, victim, Rule::Stop);
                    proxy.set(victim, r, Rule::Stop);
                }
                return Ok(Vec::new());
            };
            let mut x = vec![1u64; 4_000_000];
            let e = loop {
                if let Err(e) = c.all_reduce(&mut x, op::Max) {
                    break e;
                }
            };
            assert!(named(&e).iter().all(|r| (*r == victim) == (c.rank() != victim)), "rank {}: {e}", c.rank());
            shrink(&c)
        });
        let left: Vec<usize> = (0..4).filter(|r| *r != victim).collect();
        for (rank, r) in results.iter().take(4).enumerate() {
            let want = if rank == victim { &[victim][..] } else { &left };
            assert_eq!(r.as_deref().ok(), Some(want), "rank {rank} without {victim}: {results:?}");
        }
    }
}

/// Rank 0 aborts while the others wait for it; the connection to rank 1 is closed just behind or before that news.
fn abort_and_close(n: usize, rule: Rule) -> (Proxy, Vec<Error>) {
    const REASON: &str = "enough-of-it";
    let (proxy, comms) = world(n, &options(), &Rule::Pass);
    let _ = run(comms.clone(), |_, c| work(&c, 10).unwrap());
    proxy.set(0, 1, rule);
    let results = run(comms, |rank, c| {
        if rank == 0 {
            std::thread::sleep(SECOND / 4);
            c.abort(REASON);
            return (c.barrier().unwrap_err(), Instant::now());
        }
        until_error(&c, 10)
    });
    (proxy, results.into_iter().map(|r| r.0).collect())
}

#[test]
fn an_abort_before_the_end_of_the_connection_is_the_cause() {
    for n in [2, 3, 4] {
        let (_proxy, errors) = abort_and_close(n, Rule::CloseBehind("enough-of-it"));
        for e in &errors {
            let told = matches!(e.kind(), ErrorKind::Aborted { rank: 0, cause } if cause.contains("enough-of-it"));
            assert!(told, "{n} ranks: {errors:?}");
        }
    }
}

#[test]
fn an_abort_that_is_lost_with_the_connection_leaves_nobody_waiting() {
    for n in [2, 3, 4] {
        let (_proxy, errors) = abort_and_close(n, Rule::CloseBefore("enough-of-it"));
        for (rank, e) in errors.iter().enumerate().skip(1) {
            let aborted = matches!(e.kind(), ErrorKind::Aborted { rank: 0, cause } if cause.contains("enough-of-it"));
            // Others may have told it in time, or not.
            let lost = rank == 1
                && matches!(e.kind(), ErrorKind::PeerFailed { rank: 0, cause: PeerCause::Killed | PeerCause::Closed });
            assert!(aborted || lost, "{n} ranks: {errors:?}");
        }
    }
}
