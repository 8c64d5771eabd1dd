//! What children inherit, how they are made without waiting, and how parents and children fail apart from each other.

use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use backend_sim::run_ranks;
use comm_core::{
    Call, CallOptions, Communicator, ErrorKind, Event, Observer, Result, SplitOptions, Time, Work, op, wait_all,
};

const LONG: Duration = Duration::from_secs(20);

fn sum(comm: &Communicator) -> Result<()> {
    let mut x = [1u64];
    comm.all_reduce(&mut x, op::Sum)?;
    assert_eq!(x, [comm.size() as u64]);
    Ok(())
}

/// The calls that it has seen, by communicator.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Observer for Log {
    fn pre(&self, call: &Call<'_>) -> Result<(), String> {
        self.0.lock().unwrap().push(format!("{}: {}", call.comm, call.desc.operation));
        Ok(())
    }

    fn event(&self, event: &Event<'_>, _: Time) {
        if let Event::Split { comm, child, ranks, .. } = event {
            self.0.lock().unwrap().push(format!("{comm}: made {child} of {ranks:?}"));
        }
    }
}

impl Log {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

#[test]
fn options_and_observers_are_inherited_unless_overridden() {
    run_ranks(2, |comm| {
        let (parents, own) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let _guard = comm.observe(Arc::clone(&parents) as _);
        let child = comm.split(&[1, 0], "plain")?.expect("all are in it");
        assert_eq!((child.options().timeout, child.name()), (comm.options().timeout, "plain"));
        assert_eq!((child.options().rank, child.options().size), (Some(1 - comm.rank()), Some(2)));
        sum(&child)?;
        assert_eq!(parents.take(), ["run_ranks: split", "run_ranks: made plain of [1, 0]", "plain: all_reduce"]);

        let short = Duration::from_secs(7);
        let options = SplitOptions::new("own")
            .timeout(short)
            .heartbeat_timeout(LONG)
            .hint("algo", "ring")
            .observer(Arc::clone(&own) as _)
            .split_timeout(LONG);
        let child = comm.dup(options.clone())?;
        let o = child.options();
        assert_eq!((o.timeout, o.heartbeat_timeout, o.hints["algo"].as_str()), (short, LONG, "ring"));
        assert!(!comm.options().hints.contains_key("algo"));
        let desc = comm_core::OpDesc::new(comm_core::Operation::AllReduce).elements(comm_core::DType::F32, 1);
        assert_eq!(child.explain(&desc), "ring");
        assert_ne!(comm.explain(&desc), "ring");
        parents.take();
        sum(&child)?;
        assert_eq!((parents.take().len(), own.take()), (1, vec!["own: all_reduce".to_owned()]));
        // An observer of the child does not see the parent; one that comes to the parent later sees the child.
        let (late, below) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let (_late, _below) = (comm.observe(Arc::clone(&late) as _), child.observe(Arc::clone(&below) as _));
        sum(&comm)?;
        sum(&child)?;
        assert_eq!(late.take(), ["run_ranks: all_reduce", "own: all_reduce"]);
        assert_eq!(below.take(), ["own: all_reduce"]);
        // Grandchildren inherit along the line.
        let grand = child.dup("grand")?;
        assert_eq!((grand.options().timeout, grand.options().hints["algo"].as_str()), (short, "ring"));
        own.take();
        sum(&grand)?;
        assert_eq!(own.take(), ["grand: all_reduce"]);

        let alone = comm.dup(options.inherit_observers(false))?;
        parents.take();
        own.take();
        sum(&alone)?;
        assert_eq!((parents.take().len(), own.take().len()), (0, 1));
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn ranks_are_those_of_the_root_through_all_generations() {
    run_ranks(6, |comm| {
        // Lists of different lengths in different children at once; one rank is in none.
        let lists: [&[usize]; 6] = [&[4, 2, 0], &[1, 3], &[4, 2, 0], &[1, 3], &[4, 2, 0], &[]];
        let Some(child) = comm.split(lists[comm.rank()], "child")? else {
            assert_eq!(comm.rank(), 5);
            return comm.finalize(LONG);
        };
        assert_eq!(child.ranks(), lists[comm.rank()]);
        sum(&child)?;
        if child.size() == 3 {
            let list: &[usize] = if child.rank() == 1 { &[] } else { &[2, 0] };
            if let Some(grand) = child.split(list, "grand")? {
                assert_eq!((grand.ranks(), grand.size()), (&[0, 4][..], 2));
                assert_eq!(grand.ranks()[grand.rank()], comm.rank());
                let copy = grand.dup("copy")?;
                assert_eq!(copy.ranks(), grand.ranks());
                sum(&copy)?;
            }
        }
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn asynchronous_splits_are_ordered_by_their_calls() {
    run_ranks(4, |comm| {
        let me = comm.rank();
        let half = if me < 2 { vec![0, 1] } else { vec![3, 2] };
        // All under way at a time; the calls have different numbers of steps.
        let a = comm.split_async(&half, "a")?;
        let b = comm.split_by_async(Some((me % 2) as i64), -(me as i64), "b")?;
        let c = comm.dup_async("c")?;
        let d = comm.split_by_host_async("d")?;
        let none = comm.split_async(&[], "none")?;
        let e = comm.split_by_async(None, 0, "none")?;
        // Waited for in another order on each rank.
        let (a, b, c, d) = if me % 2 == 0 {
            let (d, c, b, a) = (d.wait()?, c.wait()?, b.wait()?, a.wait()?);
            (a, b, c, d)
        } else {
            (a.wait()?, b.wait()?, c.wait()?, d.wait()?)
        };
        assert!(none.wait()?.is_none() && e.wait()?.is_none());
        let (a, b) = (a.expect("in a half"), b.expect("has a colour"));
        assert_eq!((a.ranks(), b.ranks()), (&half[..], if me % 2 == 0 { &[2, 0][..] } else { &[3, 1] }));
        for comm in [&a, &b, &c, &d, &comm] {
            sum(comm)?;
        }
        // Many of one kind.
        let many = (0..8).map(|i| comm.dup_async(format!("many {i}"))).collect::<Result<Vec<_>>>()?;
        for (i, c) in wait_all(many)?.into_iter().enumerate() {
            assert_eq!(c.name(), format!("many {i}"));
            sum(&c)?;
            c.finalize(LONG)?;
        }
        comm.finalize(LONG)
    })
    .unwrap();
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(work: Work<T>) -> Result<T> {
    let mut work = std::pin::pin!(work);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(r) => return r,
            Poll::Pending => std::thread::park_timeout(LONG),
        }
    }
}

#[test]
fn a_split_is_a_work_like_any_other() {
    run_ranks(2, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(60));
        }
        let work = comm.dup_async("future")?;
        let work = match (comm.rank(), work.try_wait()) {
            // The other one sleeps still.
            (0, Err(w)) => w.wait_timeout(Duration::from_millis(5)).expect_err("nobody has come"),
            (0, Ok(_)) => panic!("made without the other rank"),
            (_, Ok(r)) => return r.and_then(|c| sum(&c)).and_then(|()| comm.finalize(LONG)),
            (_, Err(w)) => w,
        };
        sum(&block_on(work)?)?;
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn a_dropped_split_closes_its_child_and_finalize_waits_for_open_ones() {
    run_ranks(2, |comm| {
        let work = comm.dup_async("dropped")?;
        if comm.rank() == 0 {
            drop(work);
        } else {
            // The child is made; whoever needs the other rank of it learns that it is gone.
            let child = work.wait()?;
            let e = child.recv(&mut [0u8], 0).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 0, .. }), "{e}");
        }
        sum(&comm)?;
        let open = comm.dup_async("open")?;
        comm.finalize(LONG)?;
        sum(&open.try_wait().expect("finalize has waited for it")?)
    })
    .unwrap();
}

/// How a child is made to fail; its error on rank 0.
type Failing = (&'static str, fn(&Communicator) -> Result<()>, &'static [&'static str]);

const FAILURES: &[Failing] = &[
    (
        "abort",
        |c| {
            if c.rank() == 1 {
                c.abort("a child's");
            }
            c.barrier()
        },
        &["Aborted"],
    ),
    ("mismatch", |c| if c.rank() == 1 { c.barrier() } else { sum(c) }, &["Mismatch"]),
    (
        "timeout",
        |c| {
            let t = Duration::from_millis(30);
            if c.rank() != 0 { c.barrier() } else { c.with(CallOptions::new().timeout(t)).recv(&mut [0u8], 1) }
        },
        &["Timeout"],
    ),
];

#[test]
fn a_childs_failure_leaves_parent_and_siblings_whole() {
    for (name, fail, kinds) in FAILURES {
        let all = Arc::new(Barrier::new(3));
        run_ranks(3, move |comm| {
            let (child, sibling) = (comm.dup("child")?, comm.dup("sibling")?);
            let grand = child.dup("grand")?;
            // One that is ahead must not fail the split that another is still in.
            all.wait();
            let e = fail(&child).and_then(|()| child.barrier()).unwrap_err();
            if comm.rank() == 0 {
                assert!(kinds.contains(&e.kind().name()), "{name}: {e}");
            }
            assert!(child.is_failed());
            for c in [&comm, &sibling, &grand] {
                assert!(!c.is_failed());
                sum(c)?;
            }
            let again = comm.dup("child")?;
            sum(&again)?;
            comm.finalize(LONG)?;
            // Children outlive their parent.
            sum(&sibling)?;
            sibling.finalize(LONG)
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn a_member_that_drops_its_child_fails_the_child_alone() {
    let all = Arc::new(Barrier::new(3));
    run_ranks(3, move |comm| {
        let (child, sibling) = (comm.dup("child")?, comm.dup("sibling")?);
        all.wait();
        if comm.rank() == 2 {
            drop(child);
        } else {
            let e = child.barrier().and_then(|()| child.barrier()).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 2, .. }), "{e}");
        }
        sum(&sibling)?;
        sum(&comm)?;
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn a_parents_failure_leaves_its_children_whole() {
    let all = Arc::new(Barrier::new(3));
    run_ranks(3, move |comm| {
        let child = comm.dup("child")?;
        let grand = child.split_by(Some(i64::from(comm.rank() == 1)), 0, "grand")?.expect("all have a colour");
        all.wait();
        if comm.rank() == 1 {
            comm.abort("the parent's");
        }
        let e = comm.barrier().and_then(|()| comm.barrier()).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 1, .. }), "{e}");
        let e = comm.dup("late").map(drop).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 1, .. }), "{e}");
        sum(&child)?;
        sum(&grand)?;
        drop(comm);
        sum(&child)?;
        sum(&child.dup("of a child")?)?;
        child.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn a_split_that_not_all_ranks_join_times_out_by_its_own_clock() {
    run_ranks(3, |comm| {
        if comm.rank() == 2 {
            // Comes when the others have given up.
            std::thread::sleep(Duration::from_millis(200));
            let e = comm.dup("x").map(drop).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Aborted { .. }), "{e}");
            return Ok(());
        }
        let e = comm.dup(SplitOptions::new("x").split_timeout(Duration::from_millis(60))).map(drop).unwrap_err();
        match e.kind() {
            ErrorKind::Timeout { missing, .. } => assert!(missing.contains(&2), "{e}"),
            ErrorKind::Aborted { cause, .. } => assert!(cause.contains("split"), "{e}"),
            _ => panic!("{e}"),
        }
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    })
    .unwrap();
}
