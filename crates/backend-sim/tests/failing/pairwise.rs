//! Lengths that only two ranks know: gather_v, scatter_v and all_to_all_v whose two ends do not fit; and messages that
//! find no counterpart.

use super::*;

/// `from` sends one element more or less to `to` than `to` expects.
#[derive(Clone, Debug)]
pub struct Case {
    pub n: usize,
    pub op: Operation,
    pub from: usize,
    pub to: usize,
    /// What is sent, and what is expected.
    pub counts: (usize, usize),
    pub how: How,
}

/// All pairs in worlds of 2 to 5; lengths that are zero on either side, short, and long.
pub fn table() -> Vec<Case> {
    let mut list = Vec::new();
    for n in 2..=5usize {
        for from in 0..n {
            for to in (0..n).filter(|to| *to != from) {
                for counts in [(4, 5), (5, 4), (0, 3), (3, 0), (40_000, 40_001), (40_000, 0), (0, 40_000)] {
                    for op in [Operation::GatherV, Operation::ScatterV, Operation::AllToAllV] {
                        let how = FORMS[list.len() % 3];
                        list.push(Case { n, op, from, to, counts, how });
                    }
                }
            }
        }
    }
    list
}

fn issue(comm: &Communicator, c: &Case) -> Result<()> {
    const COMMON: usize = 6;
    let (me, n) = (comm.rank(), comm.size());
    // What `who` thinks that `a` sends to `b`.
    let length = |who: usize, a: usize, b: usize| match (a == c.from && b == c.to, who == c.from) {
        (false, _) => COMMON,
        (true, true) => c.counts.0,
        (true, false) => c.counts.1,
    };
    let to_all: Vec<usize> = (0..n).map(|r| length(me, me, r)).collect();
    let from_all: Vec<usize> = (0..n).map(|r| length(me, r, me)).collect();
    let buf = |counts: &[usize]| vec![me as f32; counts.iter().sum()];
    match c.op {
        Operation::GatherV => {
            let root = c.to;
            let input = buf(&to_all[root..=root]);
            let mut out = (me == root).then(|| buf(&from_all));
            match c.how {
                How::Sync => comm.gather_v(&input, out.as_mut(), &from_all, root),
                How::Async => comm.gather_v_async(input, out, &from_all, root)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.gather_v(&input, out.as_mut(), &from_all, root)?.wait().map(drop)),
            }
        }
        Operation::ScatterV => {
            let root = c.from;
            let input = (me == root).then(|| buf(&to_all));
            let mut out = buf(&from_all[root..=root]);
            match c.how {
                How::Sync => comm.scatter_v(input.as_ref(), &mut out, &to_all, root),
                How::Async => comm.scatter_v_async(input, out, &to_all, root)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.scatter_v(input.as_ref(), &mut out, &to_all, root)?.wait().map(drop)),
            }
        }
        _ => {
            let (input, mut out) = (buf(&to_all), buf(&from_all));
            match c.how {
                How::Sync => comm.all_to_all_v(&input, &mut out, &to_all, &from_all),
                How::Async => comm.all_to_all_v_async(input, out, &to_all, &from_all)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.all_to_all_v(&input, &mut out, &to_all, &from_all)?.wait().map(drop)),
            }
        }
    }
}

/// The receiver's call fails, and everybody's next one; the two ends get `Mismatch`, which names the other.
pub fn check(make: MakeWorld, c: &Case) {
    let comms = make(c.n, &CommOptions::new().name("pairwise").timeout(HANGS));
    let (case, warm) = (c.clone(), Barrier::new(c.n));
    let seen = run(&format!("{c:?}"), &comms, move |comm| {
        works(comm, 1);
        warm.wait();
        let ((call, e), t) = timed(|| {
            let call = issue(comm, &case);
            let e = call.clone().and_then(|()| comm.barrier());
            (call, e.expect_err("a barrier after a mismatch must not pass"))
        });
        took("lengths of a pair", t);
        is_sticky(comm, &e);
        (call, e)
    });
    for (r, (call, e)) in seen.iter().enumerate() {
        assert!(call.is_err() || r != c.to, "the receiver took a block that does not fit: {c:?}");
        match e.kind() {
            ErrorKind::Mismatch { ranks, .. } if r == c.to => assert_eq!(ranks, &[c.from], "{e} in {c:?}"),
            ErrorKind::Mismatch { ranks, .. } if r == c.from => assert_eq!(ranks, &[c.to], "{e} in {c:?}"),
            ErrorKind::Mismatch { .. } | ErrorKind::Aborted { .. } if r != c.from && r != c.to => {}
            _ => panic!("rank {r} got {e} in {c:?}"),
        }
    }
}

/// A batch whose messages have no counterpart says which, when its time is up.
pub fn unmatched_batch(make: MakeWorld) {
    let comms = make(2, &CommOptions::new().name("unmatched").timeout(HANGS));
    let errors = run("unmatched batch", &comms, |comm| {
        let limit = Duration::from_millis(200);
        let with = comm.with(CallOptions::new().timeout(limit));
        if comm.rank() == 1 {
            // One of the two messages that rank 0 waits for.
            comm.send(&[1i16; 3], 0).unwrap();
            std::thread::sleep(limit * 2);
            return comm.barrier().unwrap_err();
        }
        let (mut a, mut b, long) = (vec![0i16; 3], vec![0i16; 3], vec![1u64; 100_000]);
        let batch = with.batch().recv(&mut a, 1).unwrap().tag(7).recv(&mut b, 1).unwrap();
        let (e, t) = timed(|| batch.send(&long, 1).unwrap().issue().unwrap_err());
        took("unmatched", t.saturating_sub(limit));
        e
    });
    let ErrorKind::Timeout { missing, unmatched, .. } = errors[0].kind() else { panic!("{}", errors[0]) };
    assert_eq!(missing, &[1]);
    let text = errors[0].to_string();
    for part in ["recv(i16, count 3) from rank 1 (tag 7", "send(u64, count 100000) to rank 1 (tag 7", "batch"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(unmatched.len(), 2, "what had come is no part of it: {unmatched:?}");
    assert!(matches!(errors[1].kind(), ErrorKind::Aborted { .. }), "{}", errors[1]);
}

/// A message that nobody received: its sender could not know, finalize does.
pub fn left_over_message(make: MakeWorld, n: usize, from: usize, to: usize) {
    let comms = make(n, &CommOptions::new().name("left over").timeout(HANGS));
    let errors = run("left over", &comms, move |comm| {
        works(comm, 1);
        if comm.rank() == from {
            comm.send(&[1.5f64; 7], to).unwrap();
        }
        works(comm, 2);
        let (e, t) = timed(|| comm.finalize(HANGS).expect_err("a message is lost and finalize says nothing"));
        took("left-over message", t);
        e
    });
    for (r, e) in errors.iter().enumerate() {
        match e.kind() {
            ErrorKind::Mismatch { ranks, theirs, ours, .. } if r == to => {
                assert_eq!(ranks, &[from], "{e}");
                assert!(theirs.operation == Operation::Send && theirs.count == 7, "{e}");
                assert_eq!(ours.operation, Operation::Finalize, "{e}");
            }
            ErrorKind::Mismatch { .. } | ErrorKind::Aborted { .. } if r != to => {}
            _ => panic!("rank {r}: {e}"),
        }
    }
}

/// A long message, or a receive, that the other end never comes to: both finalize, and are told what is left.
pub fn left_over_work(make: MakeWorld, n: usize, from: usize, to: usize, receives: bool) {
    let comms = make(n, &CommOptions::new().name("left over").timeout(HANGS));
    let errors = run("left over work", &comms, move |comm| {
        works(comm, 1);
        if comm.rank() == from {
            if receives {
                drop(comm.recv_async(vec![0u16; 9], to).unwrap());
            } else {
                drop(comm.send_async(vec![0u32; 70_000], to).unwrap());
            }
        }
        let (e, t) = timed(|| comm.finalize(HANGS).expect_err("a message has no other end and finalize says nothing"));
        took("left-over work", t);
        e
    });
    let what = if receives { Operation::Recv } else { Operation::Send };
    for (r, e) in errors.iter().enumerate() {
        match e.kind() {
            ErrorKind::Mismatch { ranks, theirs, ours, .. } if r == from => {
                assert_eq!(ranks, &[to], "{e}");
                assert!(ours.operation == what && theirs.operation == Operation::Finalize, "{e}");
                assert!(e.to_string().contains("match every send with a receive"), "{e}");
            }
            ErrorKind::Mismatch { .. } | ErrorKind::Aborted { .. } if r != from => {}
            _ => panic!("rank {r}: {e}"),
        }
    }
}

/// Calls without elements exchange nothing, so that nobody can know before the end that they differ.
pub fn silent(make: MakeWorld, n: usize, odd: usize, base: Call, other: Call) {
    let comms = make(n, &CommOptions::new().name("silent").timeout(HANGS));
    let errors = run(&format!("silent {n} {odd} {base:?} {other:?}"), &comms, move |comm| {
        works(comm, 1);
        let call = if comm.rank() == odd { other } else { base };
        let first = call.issue(comm, How::Sync).map(drop);
        // Later calls may go well.
        let later = first.and_then(|()| comm.barrier());
        let e = later.and_then(|()| comm.finalize(HANGS)).expect_err("different calls went unnoticed");
        assert!(matches!(e.kind(), ErrorKind::Mismatch { .. }), "{e}");
        e
    });
    for (r, e) in errors.iter().enumerate() {
        let ErrorKind::Mismatch { seq, ranks, .. } = e.kind() else { panic!("{e}") };
        assert_eq!(*seq, 1, "{e}");
        assert_eq!(ranks.contains(&odd), r != odd, "rank {r}: {e}");
    }
}

/// Every pair of silent calls, and differences within one.
pub fn silent_table() -> Vec<(usize, usize, Call, Call)> {
    let quiet: Vec<Operation> =
        COLLECTIVES.into_iter().filter(|op| !is_pairwise(*op) && *op != Operation::Barrier).collect();
    let mut pairs = Vec::new();
    for a in &quiet {
        pairs.extend(quiet.iter().filter(|b| *b != a).map(|b| (Call::new(*a, 0), Call::new(*b, 0))));
        let call = Call::new(*a, 0);
        pairs.push((call, Call { dtype: DType::I32, ..call }));
        if is_rooted(*a) {
            pairs.push((call, Call { root: 1, ..call }));
        }
        if is_reduction(*a) {
            pairs.push((call, Call { redop: ReduceOp::Max, ..call }));
        }
    }
    let place = |i: usize| (2 + i % 3, i % (2 + i % 3));
    pairs.into_iter().enumerate().map(|(i, (a, b))| (place(i).0, place(i).1, a, b)).collect()
}
