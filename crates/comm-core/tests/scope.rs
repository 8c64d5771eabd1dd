//! Scopes: nothing borrowed is in flight when one ends, however it ends.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use comm_core::{CallOptions, Communicator, Error, ErrorKind, Result, Scope, op};
use common::mock::{Mock, Op};
use common::{Counted, Foreign, panic_text, within_deadline, world};

const SHORT: Duration = Duration::from_millis(20);

fn broken() -> Error {
    Error::new(ErrorKind::Corrupt { rank: Some(1), what: "test".into() })
}

/// Ends the operations of `mock`, from number `from` on, a while after they were started; to the last
/// moment it writes into them, which a scope that ends too early turns into a use after free.
fn end_later(mock: &Arc<Mock>, from: usize, n: usize, result: Result<()>) -> std::thread::JoinHandle<()> {
    let mock = Arc::clone(mock);
    std::thread::spawn(move || {
        while mock.started() < from + n {
            std::thread::yield_now();
        }
        std::thread::sleep(SHORT);
        for i in from..from + n {
            mock.op(i).write(5);
            mock.op(i).complete(result.clone());
        }
    })
}

fn ended(op: &Op) -> bool {
    op.dropped.load(SeqCst)
}

#[test]
fn a_scope_waits_at_its_end() {
    let mock = Mock::new();
    let comm = mock.comm();
    let t = end_later(&mock, 0, 2, Ok(()));
    let (mut a, mut b) = (vec![0u32; 4], vec![0u32; 4]);
    let value = comm
        .scope(|s| {
            // One handle is dropped, one forgotten.
            drop(s.all_reduce(&mut a, op::Sum)?);
            std::mem::forget(s.all_reduce(&mut b, op::Sum)?);
            Ok(17)
        })
        .unwrap();
    assert_eq!((value, a, b), (17, vec![0x0505_0505; 4], vec![0x0505_0505; 4]));
    assert!(ended(&mock.op(0)) && ended(&mock.op(1)));
    t.join().unwrap();
}

#[test]
fn a_scope_waits_when_its_closure_fails() {
    let mock = Mock::new();
    let comm = mock.comm();
    let t = end_later(&mock, 0, 1, Err(broken()));
    let mut a = vec![0u32; 4];
    let e = comm
        .scope(|s| {
            drop(s.all_reduce(&mut a, op::Sum)?);
            Err::<(), _>(Error::invalid("mine"))
        })
        .unwrap_err();
    // The closure's own error comes first.
    assert!(e.to_string().contains("mine"), "{e}");
    assert_eq!(a, [0x0505_0505; 4]);
    assert!(ended(&mock.op(0)));
    t.join().unwrap();
}

#[test]
fn a_scope_waits_when_its_closure_panics_and_keeps_the_payload() {
    let mock = Mock::new();
    let comm = mock.comm();
    let t = end_later(&mock, 0, 1, Ok(()));
    let mut a = vec![0u32; 4];
    let p = catch_unwind(AssertUnwindSafe(|| {
        comm.scope(|s| -> Result<()> {
            let _w = s.all_reduce(&mut a, op::Sum)?;
            panic!("payload {}", 42);
        })
    }))
    .unwrap_err();
    assert_eq!(panic_text(&*p), "payload 42");
    assert_eq!(a, [0x0505_0505; 4]);
    assert!(ended(&mock.op(0)));
    t.join().unwrap();
}

#[test]
fn owned_buffers_whose_handles_are_gone_live_until_their_operations_end() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[1; 4]);
    let seen = Arc::clone(&drops);
    let op0 = {
        let mock = Arc::clone(&mock);
        move || mock.op(0)
    };
    comm.scope(|s| {
        drop(s.all_reduce(buf, op::Sum)?);
        assert_eq!(seen.load(SeqCst), 0, "in flight");
        op0().write(3);
        op0().complete(Ok(()));
        Ok(())
    })
    .unwrap();
    assert_eq!(drops.load(SeqCst), 1);
}

#[test]
fn waiting_gives_the_borrow_back_inside_the_scope() {
    world(2, |c| {
        let (mut a, mut b) = (vec![1.0f32; 3], vec![2.0f64; 2]);
        c.scope(|s| {
            let first = s.all_reduce(&mut a, op::Sum)?;
            let second = s.all_reduce(&mut b, op::Max)?;
            let a = first.wait()?;
            a[0] += 1.0;
            // The same buffer again, reborrowed from what came back.
            let a = s.all_reduce(a, op::Sum)?.wait()?;
            assert_eq!(**a, [6.0, 4.0, 4.0]);
            let owned = s.all_gather(vec![c.rank() as u8], vec![0u8; 2])?;
            assert_eq!(owned.wait()?.1, [0, 1]);
            while !second.is_completed() {
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!((a, b), (vec![6.0, 4.0, 4.0], vec![2.0; 2]));
    });
}

#[test]
fn the_first_error_that_nobody_saw_is_returned() {
    let mock = Mock::new();
    let comm = mock.comm();
    let mut bufs = vec![[0u32; 2]; 3];
    let e = comm
        .scope(|s| {
            for b in &mut bufs {
                drop(s.all_reduce(b, op::Sum)?);
            }
            mock.op(0).complete(Ok(()));
            mock.op(2).complete(Err(Error::invalid("third")));
            mock.op(1).complete(Err(broken()));
            Ok(())
        })
        .unwrap_err();
    assert!(e.to_string().contains("all_reduce #1") && e.to_string().contains("corrupt"), "{e}");
}

#[test]
fn an_error_that_was_seen_is_not_reported_again() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (mut a, mut b) = ([0u32; 2], [0u32; 2]);
    let (first, second) = (Arc::clone(&mock), Arc::clone(&mock));
    comm.scope(|s| {
        let w = s.all_reduce(&mut a, op::Sum)?;
        first.op(0).complete(Err(broken()));
        assert!(w.wait().is_err());
        Ok(())
    })
    .unwrap();
    // But looking only whether it is done is not seeing the error.
    let r = comm.scope(|s| {
        let w = s.all_reduce(&mut b, op::Sum)?;
        second.op(1).complete(Err(broken()));
        assert!(w.is_completed());
        Ok(())
    });
    assert!(r.is_err());
}

#[test]
fn an_operation_that_is_refused_leaves_nothing_behind() {
    let mock = Mock::new();
    let comm = mock.comm();
    *mock.start_error.lock() = Some(broken());
    let (buf, drops) = Counted::new(&[1; 4]);
    comm.scope(|s| {
        assert!(s.all_reduce(buf, op::Sum).is_err());
        let mut x = [0u8; 3];
        let _ = &mut x;
        Ok(())
    })
    .unwrap();
    assert_eq!(drops.load(SeqCst), 1);
}

#[test]
fn many_operations_in_one_scope() {
    // Records of operations that went well are thrown away on the way; errors are not.
    let mock = Mock::new();
    let comm = mock.comm();
    let mut bufs = vec![[0u32; 1]; 1000];
    let e = comm
        .scope(|s| {
            for (i, b) in bufs.iter_mut().enumerate() {
                drop(s.all_reduce(b, op::Sum)?);
                // The later half stays in flight until the end.
                if i < 500 {
                    mock.op(i).complete(if i == 300 { Err(broken()) } else { Ok(()) });
                }
            }
            for i in 500..1000 {
                mock.op(i).write(1);
                mock.op(i).complete(Ok(()));
            }
            Ok(())
        })
        .unwrap_err();
    assert!(e.to_string().contains("all_reduce #300"), "{e}");
    assert!(bufs[500..].iter().all(|b| *b == [0x0101_0101]));
    world(2, |c| {
        let mut bufs: Vec<_> = (0..200u64).map(|i| [i + c.rank() as u64]).collect();
        c.scope(|s| bufs.iter_mut().try_for_each(|b| s.all_reduce(b, op::Sum).map(drop))).unwrap();
        assert!(bufs.iter().enumerate().all(|(i, b)| b[0] == 2 * i as u64 + 1));
    });
}

#[test]
fn a_scope_may_be_shared_between_threads() {
    world(2, |c| {
        let (mut a, mut b) = (vec![1u8; 3], vec![0u8; 3]);
        c.scope(|s| {
            std::thread::scope(|t| {
                // Different pairs of messages: the order between the threads does not matter.
                let h = t.spawn(|| s.send(&mut a, 1 - c.rank()).map(drop));
                s.recv(&mut b, 1 - c.rank())?;
                h.join().unwrap()
            })
        })
        .unwrap();
        assert_eq!(b, [1; 3]);
    });
}

#[test]
fn options_apply_to_all_calls_of_a_scope() {
    world(2, |c| {
        let peer = 1 - c.rank();
        let (mut a, mut b) = ([0u8], [0u8]);
        let tagged = c.with(CallOptions::new().tag(4));
        c.send(&[1u8], peer).unwrap();
        tagged.scope(|s| s.send(&[2u8], peer).map(drop)).unwrap();
        tagged.scope(|s| s.recv(&mut a, peer).map(drop)).unwrap();
        c.recv(&mut b, peer).unwrap();
        assert_eq!((a, b), ([2], [1]));
        let e = c.with(CallOptions::new().hint("algos", "ring")).scope(|s| s.barrier().map(drop)).unwrap_err();
        assert!(e.to_string().contains("did you mean 'algo'"), "{e}");
    });
}

/// A buffer whose destructor looks around and panics.
struct Bomb<F: FnMut()>(Counted, F);

impl<F: FnMut()> Drop for Bomb<F> {
    fn drop(&mut self) {
        (self.1)();
        panic!("a destructor that panics");
    }
}

// SAFETY: as `Counted`.
unsafe impl<F: FnMut()> comm_core::IntoBuf<Foreign> for Bomb<F> {
    type Elem = u32;
    fn buf(&self) -> Result<comm_core::RawBuf> {
        self.0.buf()
    }
}

// SAFETY: as `Counted`.
unsafe impl<F: FnMut()> comm_core::IntoBufMut<Foreign> for Bomb<F> {
    fn buf_mut(&mut self) -> Result<comm_core::RawBufMut> {
        self.0.buf_mut()
    }
}

#[test]
fn a_panicking_destructor_does_not_end_the_scope_early() {
    let mock = Mock::new();
    let comm = mock.comm();
    let mut borrowed = vec![0u32; 4];
    let (buf, drops) = Counted::new(&[1; 4]);
    let ends_last = end_later(&mock, 1, 1, Ok(()));
    let (first, second) = (Arc::clone(&mock), Arc::clone(&mock));
    let others_ended = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&others_ended);
    // Looked at before the panic: printing one can take longer than the other operation.
    let look = move || seen.store(ended(&second.op(1)), SeqCst);
    let p = catch_unwind(AssertUnwindSafe(|| {
        comm.scope(|s| {
            drop(s.all_reduce(Bomb(buf, look), op::Sum)?);
            drop(s.all_reduce(&mut borrowed, op::Sum)?);
            first.op(0).complete(Ok(()));
            Ok(())
        })
    }))
    .unwrap_err();
    assert_eq!(panic_text(&*p), "a destructor that panics");
    assert!(others_ended.load(SeqCst), "the borrowed buffer was given back in flight");
    assert_eq!(borrowed, [0x0505_0505; 4]);
    assert_eq!(drops.load(SeqCst), 1);
    ends_last.join().unwrap();
}

/// A buffer whose destructor starts another operation in the same scope.
struct Chain<'s, 'e>(Counted, &'s Scope<'s, 'e>);

impl Drop for Chain<'_, '_> {
    fn drop(&mut self) {
        self.1.barrier().unwrap();
    }
}

// SAFETY: as `Counted`.
unsafe impl comm_core::IntoBuf<Foreign> for Chain<'_, '_> {
    type Elem = u32;
    fn buf(&self) -> Result<comm_core::RawBuf> {
        self.0.buf()
    }
}

// SAFETY: as `Counted`.
unsafe impl comm_core::IntoBufMut<Foreign> for Chain<'_, '_> {
    fn buf_mut(&mut self) -> Result<comm_core::RawBufMut> {
        self.0.buf_mut()
    }
}

#[test]
fn destructors_may_use_the_scope() {
    within_deadline(|| {
        let mock = Mock::new();
        let comm = mock.comm();
        *mock.trick.lock() = common::mock::Trick::InStart;
        let run = |comm: &Communicator, n: usize| {
            comm.scope(|s| (0..n).try_for_each(|_| s.all_reduce(Chain(Counted::new(&[1]).0, s), op::Sum).map(drop)))
        };
        // Few: dropped at the end; many: thrown away on the way.
        run(&comm, 3).unwrap();
        assert_eq!(mock.started(), 6);
        run(&comm, 300).unwrap();
        assert_eq!(mock.started(), 606);
    });
}

/// Runs in a process of its own, which has to end.
#[test]
fn a_backend_that_panics_in_flight_ends_the_process_before_borrowed_memory_is_given_back() {
    const CHILD: &str = "COMM_CORE_SCOPE_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let mock = Mock::new();
        let comm = mock.comm();
        *mock.trick.lock() = common::mock::Trick::PanicInWait;
        let mut x = [0u32; 4];
        let r = catch_unwind(AssertUnwindSafe(|| comm.scope(|s| s.all_reduce(&mut x, op::Sum).map(drop))));
        println!("the scope ended in flight: {}", r.is_err());
        return;
    }
    let name = "a_backend_that_panics_in_flight_ends_the_process_before_borrowed_memory_is_given_back";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let start = std::time::Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > common::DEADLINE {
            child.kill().unwrap();
            panic!("the child did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut out = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut out).unwrap();
    assert!(!status.success() && !out.contains("the scope ended"), "{status} {out}");
}
