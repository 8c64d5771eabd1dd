//! A backend that implements nothing: every operation says that it is lacking, and touches nothing.

mod common;

use std::sync::Arc;
use std::time::Duration;

use comm_core::{
    BackendInfo, CallNumber, Clock, CommOptions, Communicator, Device, Error, ErrorKind, HostBackend, OpDesc, OpQuery,
    Operation, RealClock, Result, Support, host_backend, op,
};

#[derive(Debug)]
struct Bare {
    info: BackendInfo,
    clock: Arc<dyn Clock>,
}

impl HostBackend for Bare {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        Support::Unsupported { reason: format!("bare of {}", query.operation) }
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn refuse(&self, _: &CallNumber, _: &OpDesc, _: &str) {}

    fn failure(&self) -> Option<Error> {
        None
    }

    fn abort(&self, _: &Error) {}

    fn finalize(&self, _: Duration) -> Result<()> {
        Ok(())
    }

    fn close(&self) {}
}

#[test]
fn what_is_not_implemented_says_so_and_touches_nothing() {
    let bare = Bare { info: BackendInfo::new("bare", 0, 2), clock: Arc::new(RealClock) };
    let c =
        &Communicator::from_backend(host_backend(bare), Device::CPU, CommOptions::new().name("empty hands")).unwrap();
    let (x, two, counts) = ([1u16; 2], [vec![1u16], vec![1]], [1, 1]);
    let (mut y, mut one, mut l) = ([7u16; 2], [7u16], [vec![7u16], vec![7]]);
    macro_rules! lacking {
        ($($operation:ident: $call:expr;)*) => {$(
            let e = $call.unwrap_err();
            let name = Operation::$operation.name();
            let ErrorKind::Unsupported { what, reason } = e.kind() else { panic!("{name}: {e:?}") };
            assert_eq!(what, name);
            assert!(reason.contains("backend bare does not implement it"), "{reason}");
            assert!(e.to_string().contains("'empty hands'") && e.to_string().contains("rank 0 of 2"), "{e}");
            assert_eq!((y, one, &l[0][..], &l[1][..]), ([7; 2], [7], &[7][..], &[7][..]), "{name}");
            assert!(!c.supports(&OpQuery::new(Operation::$operation)).is_supported(), "{name}");
        )*};
    }
    lacking! {
        Broadcast: c.broadcast(&mut y, 0);
        Reduce: c.reduce(&mut y, op::Sum, 1);
        AllGatherV: c.all_gather_v(&x[..1], &mut y, &counts);
        AllGatherV: c.all_gather_v_list(&x[..1], &mut l);
        AllGather: c.all_gather_list(&x[..1], &mut l);
        Gather: c.gather(&x[..1], Some(&mut y), 0);
        Gather: c.gather(&x[..1], None::<&mut [u16]>, 1);
        GatherV: c.gather_v_list(&x[..1], Some(&mut l), 0);
        GatherV: c.gather_v_in_place(&mut y, &counts, 0);
        Scatter: c.scatter(Some(&x), &mut one, 0);
        Scatter: c.scatter_list(Some(&two), &mut one, 0);
        ScatterV: c.scatter_v(Some(&x), &mut one, &counts, 0);
        ScatterV: c.scatter_v(None::<&[u16]>, &mut one, &[], 1);
        ReduceScatter: c.reduce_scatter_list(&two, &mut one, op::Sum);
        ReduceScatterV: c.reduce_scatter_v(&x, &mut one, &counts, op::Sum);
        ReduceScatterV: c.reduce_scatter_v_in_place(&mut y, &counts, op::Sum);
        AllToAll: c.all_to_all(&x, &mut y);
        AllToAll: c.all_to_all_in_place(&mut y);
        AllToAll: c.all_to_all_list(&two, &mut l);
        AllToAllV: c.all_to_all_v(&x, &mut y, &counts, &counts);
        AllToAllV: c.all_to_all_v_list(&two, &mut l);
        Scan: c.scan(&mut y, op::Sum);
        Exscan: c.exscan(&mut y, op::Sum);
        Exscan: c.exscan_into(&x, &mut y, op::Sum);
        Barrier: c.barrier();
    }
    // A pair is two messages.
    let e = c.sendrecv(&x, &mut y, 1, 1).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e:?}");
    assert!(!c.supports(&OpQuery::new(Operation::SendRecv)).is_supported());
    // Asynchronously the buffers come back.
    let (bufs, r) = c.all_to_all_v_list_async(two, l).unwrap().into_parts();
    assert!(matches!(r.unwrap_err().kind(), ErrorKind::Unsupported { .. }));
    assert_eq!(bufs.unwrap().1, [[7], [7]]);
}
