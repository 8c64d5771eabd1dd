//! Reductions whose result is as long as a contribution.

forms! {
    /// Reduces everybody's `buf` element by element and gives all the result, in place. Collective.
    /// Identical bits on all ranks. Counterpart: `ncclAllReduce`, `MPI_Allreduce`, `torchcomms all_reduce`.
    ///
    /// # Errors
    ///
    /// `Mismatch` when ranks differ in operator, length or type.
    fn all_reduce, all_reduce_async [B: IntoBufMut + StreamOrdered; O: B::Elem] (buf: B; op: O)
        |w, b| w.prep_all_reduce(b.buf_mut(), Ok(op.reducer()));

    /// [`all_reduce`](Self::all_reduce) from `input` into `output` of the same length; `input` is unchanged.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when lengths differ or the buffers overlap; else as [`all_reduce`](Self::all_reduce).
    fn all_reduce_into, all_reduce_into_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem] (input: I, output: B; op: O)
        |w, (i, o)| w.prep_all_reduce_into(i.buf(), o.buf_mut(), Ok(op.reducer()));

    /// Reduces everybody's `buf`; the root gets the result in place, the others' buffers are unchanged.
    /// Collective. Counterpart: `ncclReduce`, `MPI_Reduce`, `torchcomms reduce`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range; `Mismatch` when ranks differ in root, operator, length or type.
    fn reduce, reduce_async [B: IntoBufMut + StreamOrdered; O: B::Elem] (buf: B; op: O, root: usize)
        |w, b| w.prep_reduce(b.buf_mut(), Ok(op.reducer()), root);

    /// [`reduce`](Self::reduce) from `input` into `output`, which only the root needs to pass.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the root passes no output, lengths differ or buffers overlap; else as
    /// [`reduce`](Self::reduce).
    fn reduce_into, reduce_into_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem]
        (input: I, output: Option<B>; op: O, root: usize)
        |w, (i, o)| w.prep_reduce_into(i.buf(), o.as_mut().map(|o| o.buf_mut()), Ok(op.reducer()), root);

    /// Prefix reduction, in place: rank `r` gets the reduction of the buffers of ranks `0` to `r`, folded in rank
    /// order. All pass the same length. `Avg` divides by `r + 1`. Collective. Counterpart: `MPI_Scan`; NCCL and
    /// torchcomms have none.
    ///
    /// ```no_run
    /// # use comm_core::op;
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// // Where this rank's values begin among those of all.
    /// let mut begin = [0u64];
    /// comm.exscan_into(&[17u64], &mut begin, op::Sum)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `Mismatch` when ranks differ in operator, length or type.
    fn scan, scan_async [B: IntoBufMut + StreamOrdered; O: B::Elem] (buf: B; op: O)
        |w, b| w.prep_scan(false, b.buf_mut(), Ok(op.reducer()));

    /// [`scan`](Self::scan) from `input` into `output` of the same length; `input` is unchanged.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when lengths differ or the buffers overlap; else as [`scan`](Self::scan).
    fn scan_into, scan_into_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem] (input: I, output: B; op: O)
        |w, (i, o)| w.prep_scan_into(false, i.buf(), o.buf_mut(), Ok(op.reducer()));

    /// Exclusive prefix reduction, in place: rank `r` gets the reduction of the buffers of ranks `0` to `r - 1`, folded
    /// in rank order. Rank 0 has nothing before it: its buffer is unchanged. `Avg` divides by `r`. Collective.
    /// Counterpart: `MPI_Exscan`; NCCL and torchcomms have none.
    ///
    /// # Errors
    ///
    /// `Mismatch` when ranks differ in operator, length or type.
    fn exscan, exscan_async [B: IntoBufMut + StreamOrdered; O: B::Elem] (buf: B; op: O)
        |w, b| w.prep_scan(true, b.buf_mut(), Ok(op.reducer()));

    /// [`exscan`](Self::exscan) from `input` into `output` of the same length; `input` is unchanged, and so is rank 0's
    /// `output`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when lengths differ or the buffers overlap; else as [`exscan`](Self::exscan).
    fn exscan_into, exscan_into_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem] (input: I, output: B; op: O)
        |w, (i, o)| w.prep_scan_into(true, i.buf(), o.buf_mut(), Ok(op.reducer()));
}
