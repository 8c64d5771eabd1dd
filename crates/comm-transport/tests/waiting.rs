//! What a call says that waits until its time is up.

mod wire;

use std::task::Poll;
use std::time::Duration;

use comm_core::{DType, ErrorKind, OpDesc, Operation, ReduceOp};
use comm_transport::{Port, Sink, Task};
use wire::*;

/// Receives in two steps from rank 1.
struct Two {
    into: [u8; 8],
    posted: bool,
}

impl Task for Two {
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<comm_core::Result<()>> {
        if !std::mem::replace(&mut self.posted, true) {
            for step in 0..2 {
                let to = self.into[4 * step..].as_mut_ptr();
                // SAFETY: the buffer belongs to the task, which outlives the operation that `run` drives.
                if let Err(e) = unsafe { port.recv(1, step as u32, Sink::Copy(to), 4) } {
                    return Poll::Ready(Err(e));
                }
            }
        }
        if port.all_done() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

/// A rank that has begun the call and stops on the way has arrived, and is named all the same.
#[test]
fn a_rank_that_stops_in_the_middle_is_named() {
    let mut s = Scene::new();
    let desc = OpDesc::new(Operation::AllReduce).elements(DType::U8, 8).redop(ReduceOp::Sum);
    assert!(s.send(Frame { seq: 0, step: 0, total: 4, desc, ..frame(COLLECTIVE) }, &[1; 4]));
    let mut task = Two { into: [0; 8], posted: false };
    let e = s.us.run(s.bad, Some(0), desc, Duration::from_millis(300), &mut task).unwrap_err();
    match e.kind() {
        ErrorKind::Timeout { missing, unmatched, .. } => {
            assert!(missing.is_empty(), "{e}");
            assert_eq!(unmatched, &["data from rank 1"]);
        }
        _ => panic!("{e}"),
    }
    assert!(e.to_string().contains("still waiting for: data from rank 1"), "{e}");
}
