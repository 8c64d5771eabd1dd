//! Ranks that do not come, leave, abort or finalize, over any world.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

use comm_core::PeerCause;

/// One rank comes too late to a call with a timeout.
pub fn a_rank_that_does_not_come(make: MakeWorld, n: usize, late: usize, call: Call, how: How, timeout: Duration) {
    let what = format!("{n} ranks, {late} late, {call:?}, {how:?}, {timeout:?}");
    let comms = make(n, &CommOptions::new().name("late").timeout(timeout));
    let done = AtomicUsize::new(0);
    let start = std::sync::Barrier::new(n);
    let errors = run(&what, &comms, move |comm| {
        // Threads of a large world come to life one after the other.
        start.wait();
        let until = Instant::now() + HANGS / 2;
        // It comes when the others have given up, however long they took to start.
        while comm.rank() == late && done.load(Ordering::SeqCst) < n - 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (mut r, t) = timed(|| call.issue(comm, how));
        done.fetch_add(1, Ordering::SeqCst);
        if comm.rank() == late && r.is_ok() {
            // The others had sent all it needs before they gave up.
            r = comm.barrier().map(|()| Vec::new());
        }
        (r.err(), t)
    });
    let mut timeouts = 0;
    for (r, (e, t)) in errors.iter().enumerate() {
        if r == late && errors.iter().enumerate().all(|(i, (e, _))| i == late || e.is_none()) {
            // Nobody needed it.
            assert!(!call.needs_all());
            continue;
        }
        if r == late {
            took("late rank", *t);
            let e = e.as_ref().unwrap_or_else(|| panic!("{what}: the late rank's call went well"));
            assert!(matches!(e.kind(), ErrorKind::Aborted { cause, .. } if cause.contains("timed out")), "{what}: {e}");
            continue;
        }
        let Some(e) = e else {
            assert!(!call.needs_all(), "{what}: rank {r} completed");
            continue;
        };
        // Ranks start a little apart, and the first timeout counts for all.
        let t = &(*t + Duration::from_millis(300));
        took("timeout", t.saturating_sub(timeout));
        assert!(*t >= timeout, "{what}: rank {r} gave up after {t:?}");
        match e.kind() {
            ErrorKind::Timeout { missing, elapsed, .. } => {
                timeouts += 1;
                // On a loaded machine, others may be late too, or the news of them.
                assert!(missing.contains(&late), "{what}: rank {r}: {e}");
                assert!(*elapsed >= timeout && *elapsed < timeout + PROMISED, "{e}");
            }
            ErrorKind::Aborted { cause, .. } => {
                assert!(cause.contains("timed out after") && cause.contains("not arrived: rank"), "{e}");
                assert!(cause.contains(&late.to_string()), "{e}");
            }
            _ => panic!("{what}: rank {r} got {e}"),
        }
        is_sticky(&comms[r], e);
    }
    let waited = errors.iter().enumerate().any(|(r, (e, _))| r != late && e.is_some());
    assert!(timeouts > 0 || !waited, "{what}: nobody says who was missing");
}

/// How a rank leaves without finalizing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Where {
    /// The others are inside this call.
    Inside(Call, How),
    /// The others are in `recv` from it.
    Recv,
    /// The others make no call.
    Between,
}

/// Rank `who` drops its communicator; everybody else must name it.
pub fn a_rank_that_leaves(make: MakeWorld, n: usize, who: usize, place: Where) {
    let what = format!("{n} ranks, {who} leaves, {place:?}");
    let comms = make(n, &CommOptions::new().name("left").timeout(HANGS));
    let (start, gone) = (Arc::new(Barrier::new(n)), Arc::new(Mutex::new(Instant::now())));
    let errors = run_owned(&what, comms, move |comm| {
        works(&comm, 1);
        start.wait();
        if comm.rank() == who {
            std::thread::sleep(Duration::from_millis(10));
            *gone.lock().unwrap() = Instant::now();
            drop(comm);
            // The others' errors are about the communicator, not about the end of this thread.
            return None;
        }
        let e = match place {
            Where::Inside(call, how) => call.issue(&comm, how).err(),
            Where::Recv => comm.recv(&mut [0u8; 9], who).err(),
            Where::Between => None,
        };
        if e.is_none() {
            // Complete without the leaver, or no call at all: the next one tells.
            std::thread::sleep(Duration::from_millis(30));
        }
        let e = e.unwrap_or_else(|| comm.barrier().unwrap_err());
        took("peer closed", gone.lock().unwrap().elapsed());
        is_sticky(&comm, &e);
        let last = comm.finalize(PROMISED).unwrap_err();
        assert_eq!(peer_failed(&last), peer_failed(&e), "{last}");
        Some(e)
    });
    for (r, e) in errors.iter().enumerate() {
        let Some(e) = e else { continue };
        assert_eq!(peer_failed(e), Some((who, PeerCause::Closed)), "{what}: rank {r}: {e}");
    }
}

/// Another thread of rank `who` aborts while everybody waits.
pub fn abort_from_another_thread(make: MakeWorld, n: usize, who: usize, how: How) {
    let what = format!("{n} ranks, {who} aborts, {how:?}");
    let comms = make(n, &CommOptions::new().name("aborted").timeout(HANGS));
    let at = Arc::new(Mutex::new(Instant::now()));
    let warm = Barrier::new(n);
    let errors = run(&what, &comms, move |comm| {
        works(comm, 2);
        warm.wait();
        if comm.rank() == who {
            let (c, at) = (comm.clone(), Arc::clone(&at));
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(25));
                *at.lock().unwrap() = Instant::now();
                c.abort("the user pressed stop");
            });
        }
        // The last rank never comes; if it is the aborting one, it receives instead.
        let e = if comm.rank() == comm.size() - 1 {
            comm.recv(&mut [0u32; 4], 0).unwrap_err()
        } else {
            Call::new(Operation::AllReduce, 20_000).issue(comm, how).unwrap_err()
        };
        took("abort", at.lock().unwrap().elapsed());
        is_sticky(comm, &e);
        assert_eq!(comm.finalize(PROMISED).unwrap_err().kind(), e.kind());
        e
    });
    for e in errors {
        match e.kind() {
            ErrorKind::Aborted { rank, cause } => {
                assert_eq!(*rank, who, "{e}");
                assert!(cause.contains("the user pressed stop"), "{e}");
            }
            _ => panic!("{what}: {e}"),
        }
    }
}

/// Rank `who` finalizes while the others make a call.
pub fn finalize_against_a_call(make: MakeWorld, n: usize, who: usize, call: Call, how: How) {
    let what = format!("{n} ranks, {who} finalizes, the others {call:?} {how:?}");
    let comms = make(n, &CommOptions::new().name("finalized").timeout(HANGS));
    let warm = Barrier::new(n);
    let out = run(&what, &comms, move |comm| {
        works(comm, 3);
        warm.wait();
        let (r, t) = timed(|| {
            if comm.rank() == who {
                return comm.finalize(HANGS);
            }
            call.issue(comm, how).map(drop).and_then(|()| comm.finalize(HANGS))
        });
        took("finalize against a call", t);
        r.expect_err("somebody's finalize went well")
    });
    for (r, e) in out.iter().enumerate() {
        let ok = match e.kind() {
            ErrorKind::Mismatch { ours, theirs, ranks, .. } => {
                let (a, b) = if r == who { (theirs, ours) } else { (ours, theirs) };
                assert!(same_call(a, &call.desc(n)) && b.operation == Operation::Finalize, "{what}: rank {r}: {e}");
                ranks.contains(&who) == (r != who)
            }
            ErrorKind::PeerFailed { rank, cause: PeerCause::Closed } => r != who && *rank == who,
            ErrorKind::Aborted { .. } => r == who,
            _ => false,
        };
        assert!(ok, "{what}: rank {r} got {e}");
    }
}

/// Finalize with work in flight waits for it; the work's result is right.
pub fn finalize_with_work_in_flight(make: MakeWorld, n: usize) {
    let comms = make(n, &CommOptions::new().name("drain").timeout(HANGS));
    run("drain", &comms, |comm| {
        let n = comm.size() as i32;
        let works: Vec<_> = (0..8).map(|_| comm.all_reduce_async(vec![1i32; 30_000], Sum).unwrap()).collect();
        comm.finalize(HANGS).unwrap();
        for w in works {
            assert!(w.is_completed());
            assert!(w.wait().unwrap().iter().all(|x| *x == n));
        }
        let e = comm.finalize(HANGS).unwrap_err();
        assert_eq!(e.kind().name(), "Finalized", "{e}");
        for how in FORMS {
            let e = Call::new(Operation::AllReduce, 1).issue(comm, how).unwrap_err();
            assert_eq!(e.kind().name(), "Finalized", "{e}");
        }
        assert_eq!(comm.send(&[1u8], 0).unwrap_err().kind().name(), "Finalized");
        assert_eq!(comm.split(&[], "x").map(drop).unwrap_err().kind().name(), "Finalized");
    });
}

/// A rank that does not finalize is named; when it does come it gets an error and does not wait.
pub fn finalize_that_times_out(make: MakeWorld, n: usize, late: usize) {
    let comms = make(n, &CommOptions::new().name("slow").timeout(HANGS));
    let out = run("finalize times out", &comms, move |comm| {
        let limit = Duration::from_millis(300);
        if comm.rank() == late {
            std::thread::sleep(limit * 2);
        }
        let (r, t) = timed(|| comm.finalize(limit));
        (r.unwrap_err(), t)
    });
    let mut named = 0;
    for (r, (e, t)) in out.iter().enumerate() {
        took("finalize", t.saturating_sub(Duration::from_millis(300)));
        match e.kind() {
            ErrorKind::Timeout { missing, .. } if r != late => {
                named += 1;
                assert_eq!(missing, &[late], "{e}");
            }
            ErrorKind::Aborted { cause, .. } => assert!(cause.contains(&format!("rank {late}")), "{e}"),
            _ => panic!("rank {r}: {e}"),
        }
    }
    assert!(named > 0);
}

/// Work and messages, then finalize and leave at once, in any order: nobody sees an error.
pub fn leave_right_after_finalize(make: MakeWorld, n: usize, rounds: usize) {
    for round in 0..rounds {
        let comms = make(n, &CommOptions::new().name("leave").timeout(HANGS));
        run_owned("leave", comms, move |comm| {
            for i in 0..round % 3 {
                works(&comm, i);
            }
            if round % 2 == 0 {
                let (next, prev) = ((comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size());
                let (a, mut b) = (vec![comm.rank() as u32; 100], vec![0u32; 100]);
                comm.batch().send(&a, next).unwrap().recv(&mut b, prev).unwrap().issue().unwrap();
            }
            // Different ranks are the last in different rounds.
            if (comm.rank() + round) % comm.size() == 0 {
                std::thread::sleep(Duration::from_micros((round % 5 * 300) as u64));
            }
            comm.finalize(HANGS).unwrap_or_else(|e| panic!("round {round}, rank {}: {e}", comm.rank()));
            drop(comm);
        });
    }
}
