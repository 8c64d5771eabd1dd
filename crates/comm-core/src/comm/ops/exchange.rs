//! Operations in which every rank has a block for every rank: reduce-scatters and all-to-alls.

use crate::desc::Operation;

forms! {
    /// Reduces everybody's `input` and leaves block `rank` of the result in `output`, whose length is the
    /// input's divided by the world size. Collective. `input` is unchanged.
    /// Counterpart: `ncclReduceScatter`, `MPI_Reduce_scatter_block`, `torchcomms reduce_scatter_single`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the lengths do not fit or buffers overlap; `Mismatch` when ranks differ in
    /// operator, length or type.
    fn reduce_scatter, reduce_scatter_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem] (input: I, output: B; op: O)
        |w, (i, o)| w.prep_reduce_scatter(i.buf(), o.buf_mut(), Ok(op.reducer()));

    /// [`reduce_scatter`](Self::reduce_scatter) in place: the result lies at `rank * block` of `buf`; the
    /// rest of `buf` is unspecified afterwards.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length does not divide by the world size.
    fn reduce_scatter_in_place, reduce_scatter_in_place_async [B: IntoBufMut + StreamOrdered; O: B::Elem]
        (buf: B; op: O)
        |w, b| w.prep_reduce_scatter_in_place(b.buf_mut(), None, Ok(op.reducer()));

    /// [`reduce_scatter`](Self::reduce_scatter) of a buffer per rank, each as long as `output`: rank `r` gets the
    /// reduction of everybody's `inputs[r]`. Counterpart: `torchcomms reduce_scatter`.
    ///
    /// ```no_run
    /// # use comm_core::op;
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// let inputs: Vec<Vec<f32>> = (0..comm.size()).map(|r| vec![r as f32; 4]).collect();
    /// let mut mine = [0.0; 4];
    /// comm.reduce_scatter_list(&inputs, &mut mine, op::Sum)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one input per rank, lengths differ or buffers overlap; else as
    /// [`reduce_scatter`](Self::reduce_scatter).
    fn reduce_scatter_list, reduce_scatter_list_async
        [L: IntoBufList + StreamOrderedList, B: IntoBufMut(L::Elem) + StreamOrdered; O: L::Elem]
        (inputs: L, output: B; op: O)
        |w, (i, o)| w.prep_reduce_scatter_list(Operation::ReduceScatter, i.bufs(), o.buf_mut(), Ok(op.reducer()));

    /// Reduces everybody's `input`, cuts the result into blocks of `counts[r]` elements and leaves each rank its own in
    /// `output`. All ranks pass the same counts. Collective. `input` is unchanged. Counterpart: `MPI_Reduce_scatter`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one count per rank, `output` has not `counts[rank]` elements, `input` not
    /// their sum, or buffers overlap; `Mismatch` when ranks differ in operator, counts or type.
    fn reduce_scatter_v, reduce_scatter_v_async
        [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered; O: I::Elem]
        (input: I, output: B; counts: &[usize], op: O)
        |w, (i, o)| w.prep_reduce_scatter_v(i.buf(), counts, o.buf_mut(), Ok(op.reducer()));

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) in place: the result lies at the own block of `buf`; the rest of
    /// `buf` is unspecified afterwards.
    ///
    /// # Errors
    ///
    /// As [`reduce_scatter_v`](Self::reduce_scatter_v).
    fn reduce_scatter_v_in_place, reduce_scatter_v_in_place_async [B: IntoBufMut + StreamOrdered; O: B::Elem]
        (buf: B; counts: &[usize], op: O)
        |w, b| w.prep_reduce_scatter_in_place(b.buf_mut(), Some(counts), Ok(op.reducer()));

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) of a buffer per rank; their lengths are the counts.
    /// Counterpart: `torchcomms reduce_scatter_v`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one input per rank, `inputs[rank]` is not as long as `output` or buffers
    /// overlap; `Mismatch` when ranks differ in operator, lengths or type.
    fn reduce_scatter_v_list, reduce_scatter_v_list_async
        [L: IntoBufList + StreamOrderedList, B: IntoBufMut(L::Elem) + StreamOrdered; O: L::Elem]
        (inputs: L, output: B; op: O)
        |w, (i, o)| w.prep_reduce_scatter_list(Operation::ReduceScatterV, i.bufs(), o.buf_mut(), Ok(op.reducer()));

    /// Sends block `r` of `input` to rank `r` and puts what comes from rank `r` into block `r` of `output`. Both buffers
    /// are equally long, of one equal block per rank. Collective.
    /// Counterpart: `ncclAlltoAll`, `MPI_Alltoall`, `torchcomms all_to_all_single`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length does not divide by the world size, lengths differ or buffers overlap; `Mismatch`
    /// when ranks differ in length or type.
    fn all_to_all, all_to_all_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: B)
        |w, (i, o)| w.prep_all_to_all(i.buf(), o.buf_mut(), size_of::<I::Elem>());

    /// [`all_to_all`](Self::all_to_all) in place: what comes from rank `r` replaces block `r`. Takes memory for a copy.
    /// Counterpart: `MPI_Alltoall` with `MPI_IN_PLACE`.
    ///
    /// # Errors
    ///
    /// As [`all_to_all`](Self::all_to_all).
    fn all_to_all_in_place, all_to_all_in_place_async [B: IntoBufMut + StreamOrdered] (buf: B)
        |w, b| w.prep_all_to_all_in_place(b.buf_mut(), size_of::<B::Elem>());

    /// [`all_to_all`](Self::all_to_all) between a buffer per rank on either side, all of equal length.
    /// Counterpart: `torchcomms all_to_all` with equal tensors; for others see
    /// [`all_to_all_v_list`](Self::all_to_all_v_list).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one buffer per rank, lengths differ or buffers overlap; else as
    /// [`all_to_all`](Self::all_to_all).
    fn all_to_all_list, all_to_all_list_async
        [I: IntoBufList + StreamOrderedList, L: IntoBufListMut(I::Elem) + StreamOrderedList] (inputs: I, outputs: L)
        |w, (i, o)| w.prep_all_to_all_list(Operation::AllToAll, i.bufs(), o.bufs_mut());

    /// [`all_to_all`](Self::all_to_all) with blocks of uneven length: `send_counts[r]` elements of `input` go to rank `r`,
    /// `recv_counts[r]` elements of `output` come from it; the blocks lie one after the other. What `i` sends to `j` must be
    /// as long as what `j` receives from `i`; zero is allowed. Counts are elements, not rows. Collective.
    /// Counterpart: `ncclSend` and `ncclRecv` in a group, `MPI_Alltoallv`, `torchcomms all_to_all_v_single`.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// // Rank i sends j values to rank j, so it receives its own number from each.
    /// let (n, me) = (comm.size(), comm.rank());
    /// let (send, recv): (Vec<usize>, Vec<usize>) = ((0..n).collect(), vec![me; n]);
    /// let (input, mut output) = (vec![me as f32; send.iter().sum()], vec![0.0; me * n]);
    /// comm.all_to_all_v(&input, &mut output, &send, &recv)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one count per rank, a buffer has not the sum of its counts, this rank's own two
    /// counts differ or buffers overlap; `Mismatch` when ranks differ in type, or the counts of a pair differ.
    fn all_to_all_v, all_to_all_v_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: B; send_counts: &[usize], recv_counts: &[usize])
        |w, (i, o)| w.prep_all_to_all_v(i.buf(), send_counts, o.buf_mut(), recv_counts, size_of::<I::Elem>());

    /// [`all_to_all_v`](Self::all_to_all_v) between a buffer per rank on either side; their lengths are the counts.
    /// Counterpart: `torchcomms all_to_all`, which takes uneven tensors on some backends.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one buffer per rank, the two for this rank itself differ in length or buffers
    /// overlap; else as [`all_to_all_v`](Self::all_to_all_v).
    fn all_to_all_v_list, all_to_all_v_list_async
        [I: IntoBufList + StreamOrderedList, L: IntoBufListMut(I::Elem) + StreamOrderedList] (inputs: I, outputs: L)
        |w, (i, o)| w.prep_all_to_all_list(Operation::AllToAllV, i.bufs(), o.bufs_mut());
}
