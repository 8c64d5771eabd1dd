//! Synchronous calls whose element type and operator are chosen at run time.

use crate::buf::{DynBuf, DynBufMut};
use crate::comm::{Communicator, With};
use crate::error::Result;
use crate::op::ReduceOp;
use crate::reduce::Reducer;

/// The same method on [`With`] and, with default options, on [`Communicator`].
macro_rules! dynamic {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) |$w:ident| $prep:expr;)*) => {
        impl With<'_> {$(
            $(#[$doc])*
            // Some are only read.
            #[allow(unused_mut)]
            pub fn $name(&self, $(mut $arg: $ty),*) -> Result<()> {
                let $w = self;
                self.run($prep)
            }
        )*}

        impl Communicator {$(
            $(#[$doc])*
            pub fn $name(&self, $($arg: $ty),*) -> Result<()> {
                self.with(crate::CallOptions::new()).$name($($arg),*)
            }
        )*}
    };
}

dynamic! {
    /// [`send`](Self::send) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    fn send_dyn(buf: DynBuf<'_>, dst: usize) |w| w.prep_send(Ok(buf.raw()), dst);

    /// [`recv`](Self::recv) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    fn recv_dyn(buf: DynBufMut<'_>, src: usize) |w| w.prep_recv(Ok(buf.raw()), src);

    /// [`sendrecv`](Self::sendrecv) with the types chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`sendrecv`](Self::sendrecv).
    fn sendrecv_dyn(send: DynBuf<'_>, recv: DynBufMut<'_>, dst: usize, src: usize)
        |w| w.prep_sendrecv(Ok(send.raw()), dst, Ok(recv.raw()), src);

    /// [`broadcast`](Self::broadcast) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`broadcast`](Self::broadcast).
    fn broadcast_dyn(buf: DynBufMut<'_>, root: usize) |w| w.prep_broadcast(Ok(buf.raw()), root);

    /// [`all_reduce`](Self::all_reduce) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`all_reduce`](Self::all_reduce).
    fn all_reduce_dyn(buf: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_all_reduce(Ok(buf.raw()), Reducer::builtin(op, buf.raw().dtype()));

    /// [`all_reduce_into`](Self::all_reduce_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; `InvalidArgument` when the types differ;
    /// else as [`all_reduce_into`](Self::all_reduce_into).
    fn all_reduce_into_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_all_reduce_into(Ok(input.raw()), Ok(output.raw()), Reducer::builtin(op, input.raw().dtype()));

    /// [`reduce`](Self::reduce) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce`](Self::reduce).
    fn reduce_dyn(buf: DynBufMut<'_>, op: ReduceOp, root: usize)
        |w| w.prep_reduce(Ok(buf.raw()), Reducer::builtin(op, buf.raw().dtype()), root);

    /// [`reduce_into`](Self::reduce_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce_into`](Self::reduce_into).
    fn reduce_into_dyn(input: DynBuf<'_>, output: Option<DynBufMut<'_>>, op: ReduceOp, root: usize)
        |w| w.prep_reduce_into(
            Ok(input.raw()),
            output.as_mut().map(|o| Ok(o.raw())),
            Reducer::builtin(op, input.raw().dtype()),
            root,
        );

    /// [`scan`](Self::scan) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`scan`](Self::scan).
    fn scan_dyn(buf: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_scan(false, Ok(buf.raw()), Reducer::builtin(op, buf.raw().dtype()));

    /// [`scan_into`](Self::scan_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`scan_into`](Self::scan_into).
    fn scan_into_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_scan_into(false, Ok(input.raw()), Ok(output.raw()), Reducer::builtin(op, input.raw().dtype()));

    /// [`exscan`](Self::exscan) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`exscan`](Self::exscan).
    fn exscan_dyn(buf: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_scan(true, Ok(buf.raw()), Reducer::builtin(op, buf.raw().dtype()));

    /// [`exscan_into`](Self::exscan_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`exscan_into`](Self::exscan_into).
    fn exscan_into_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_scan_into(true, Ok(input.raw()), Ok(output.raw()), Reducer::builtin(op, input.raw().dtype()));

    /// [`all_gather`](Self::all_gather) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    fn all_gather_dyn(input: DynBuf<'_>, output: DynBufMut<'_>)
        |w| w.prep_all_gather(Ok(input.raw()), Ok(output.raw()));

    /// [`all_gather_in_place`](Self::all_gather_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather_in_place`](Self::all_gather_in_place).
    fn all_gather_in_place_dyn(buf: DynBufMut<'_>)
        |w| w.prep_all_gather_in_place(Ok(buf.raw()), buf.raw().dtype().size());

    /// [`all_gather_v`](Self::all_gather_v) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    fn all_gather_v_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, counts: &[usize])
        |w| w.prep_all_gather_v(Ok(input.raw()), Ok(output.raw()), counts, input.raw().dtype().size());

    /// [`all_gather_v_in_place`](Self::all_gather_v_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v_in_place`](Self::all_gather_v_in_place).
    fn all_gather_v_in_place_dyn(buf: DynBufMut<'_>, counts: &[usize])
        |w| w.prep_all_gather_v_in_place(Ok(buf.raw()), counts, buf.raw().dtype().size());

    /// [`gather`](Self::gather) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn gather_dyn(input: DynBuf<'_>, output: Option<DynBufMut<'_>>, root: usize)
        |w| w.prep_gather(Ok(input.raw()), output.as_mut().map(|o| Ok(o.raw())), root);

    /// [`gather_in_place`](Self::gather_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`gather_in_place`](Self::gather_in_place).
    fn gather_in_place_dyn(buf: DynBufMut<'_>, root: usize)
        |w| w.prep_gather_in_place(Ok(buf.raw()), None, buf.raw().dtype().size(), root);

    /// [`gather_v`](Self::gather_v) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`gather_v`](Self::gather_v).
    fn gather_v_dyn(input: DynBuf<'_>, output: Option<DynBufMut<'_>>, counts: &[usize], root: usize)
        |w| w.prep_gather_v(
            Ok(input.raw()),
            output.as_mut().map(|o| Ok(o.raw())),
            counts,
            input.raw().dtype().size(),
            root,
        );

    /// [`gather_v_in_place`](Self::gather_v_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`gather_v_in_place`](Self::gather_v_in_place).
    fn gather_v_in_place_dyn(buf: DynBufMut<'_>, counts: &[usize], root: usize)
        |w| w.prep_gather_in_place(Ok(buf.raw()), Some(counts), buf.raw().dtype().size(), root);

    /// [`scatter`](Self::scatter) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`scatter`](Self::scatter).
    fn scatter_dyn(input: Option<DynBuf<'_>>, output: DynBufMut<'_>, root: usize)
        |w| w.prep_scatter(input.as_ref().map(|i| Ok(i.raw())), Ok(output.raw()), root);

    /// [`scatter_in_place`](Self::scatter_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`scatter_in_place`](Self::scatter_in_place).
    fn scatter_in_place_dyn(buf: DynBufMut<'_>, root: usize)
        |w| w.prep_scatter_in_place(Ok(buf.raw()), None, buf.raw().dtype().size(), root);

    /// [`scatter_v`](Self::scatter_v) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`scatter_v`](Self::scatter_v).
    fn scatter_v_dyn(input: Option<DynBuf<'_>>, output: DynBufMut<'_>, counts: &[usize], root: usize)
        |w| w.prep_scatter_v(
            input.as_ref().map(|i| Ok(i.raw())),
            counts,
            output.raw().dtype().size(),
            Ok(output.raw()),
            root,
        );

    /// [`scatter_v_in_place`](Self::scatter_v_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`scatter_v_in_place`](Self::scatter_v_in_place).
    fn scatter_v_in_place_dyn(buf: DynBufMut<'_>, counts: &[usize], root: usize)
        |w| w.prep_scatter_in_place(Ok(buf.raw()), Some(counts), buf.raw().dtype().size(), root);

    /// [`reduce_scatter`](Self::reduce_scatter) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce_scatter`](Self::reduce_scatter).
    fn reduce_scatter_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_reduce_scatter(Ok(input.raw()), Ok(output.raw()), Reducer::builtin(op, input.raw().dtype()));

    /// [`reduce_scatter_in_place`](Self::reduce_scatter_in_place) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as
    /// [`reduce_scatter_in_place`](Self::reduce_scatter_in_place).
    fn reduce_scatter_in_place_dyn(buf: DynBufMut<'_>, op: ReduceOp)
        |w| w.prep_reduce_scatter_in_place(Ok(buf.raw()), None, Reducer::builtin(op, buf.raw().dtype()));

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce_scatter_v`](Self::reduce_scatter_v).
    fn reduce_scatter_v_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, counts: &[usize], op: ReduceOp)
        |w| w.prep_reduce_scatter_v(
            Ok(input.raw()),
            counts,
            Ok(output.raw()),
            Reducer::builtin(op, input.raw().dtype()),
        );

    /// [`reduce_scatter_v_in_place`](Self::reduce_scatter_v_in_place) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as
    /// [`reduce_scatter_v_in_place`](Self::reduce_scatter_v_in_place).
    fn reduce_scatter_v_in_place_dyn(buf: DynBufMut<'_>, counts: &[usize], op: ReduceOp)
        |w| w.prep_reduce_scatter_in_place(
            Ok(buf.raw()),
            Some(counts),
            Reducer::builtin(op, buf.raw().dtype()),
        );

    /// [`all_to_all`](Self::all_to_all) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_to_all`](Self::all_to_all).
    fn all_to_all_dyn(input: DynBuf<'_>, output: DynBufMut<'_>)
        |w| w.prep_all_to_all(Ok(input.raw()), Ok(output.raw()), input.raw().dtype().size());

    /// [`all_to_all_in_place`](Self::all_to_all_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_to_all_in_place`](Self::all_to_all_in_place).
    fn all_to_all_in_place_dyn(buf: DynBufMut<'_>)
        |w| w.prep_all_to_all_in_place(Ok(buf.raw()), buf.raw().dtype().size());

    /// [`all_to_all_v`](Self::all_to_all_v) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_to_all_v`](Self::all_to_all_v).
    fn all_to_all_v_dyn(input: DynBuf<'_>, output: DynBufMut<'_>, send_counts: &[usize], recv_counts: &[usize])
        |w| w.prep_all_to_all_v(
            Ok(input.raw()),
            send_counts,
            Ok(output.raw()),
            recv_counts,
            input.raw().dtype().size(),
        );
}
