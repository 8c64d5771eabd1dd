//! Operations that deal in one block per rank.
//!
//! Each has a form with one buffer that holds all blocks in rank order, and a `_list` form with a buffer per block; the
//! two may meet in one call. The `_v` operations take blocks of uneven length, zero included.

use crate::desc::Operation;

forms! {
    /// Concatenates everybody's `input` (equal lengths) in rank order into `output` of world size times
    /// that length. Collective. Counterpart: `ncclAllGather`, `MPI_Allgather`, `torchcomms all_gather_single`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the lengths do not fit or buffers overlap; `Mismatch` when ranks differ in length or type.
    fn all_gather, all_gather_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: B)
        |w, (i, o)| w.prep_all_gather(i.buf(), o.buf_mut());

    /// [`all_gather`](Self::all_gather) in place: this rank's shard already lies at `rank * shard` of `buf`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length does not divide by the world size.
    fn all_gather_in_place, all_gather_in_place_async [B: IntoBufMut + StreamOrdered] (buf: B)
        |w, b| w.prep_all_gather_in_place(b.buf_mut(), size_of::<B::Elem>());

    /// [`all_gather`](Self::all_gather) into a buffer per rank, each as long as `input`: `outputs[r]` becomes rank `r`'s
    /// `input`. Counterpart: `torchcomms all_gather`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one output per rank, lengths differ or buffers overlap; else as
    /// [`all_gather`](Self::all_gather).
    fn all_gather_list, all_gather_list_async
        [I: IntoBuf + StreamOrdered, L: IntoBufListMut(I::Elem) + StreamOrderedList] (input: I, outputs: L)
        |w, (i, o)| w.prep_all_gather_list(Operation::AllGather, i.buf(), o.bufs_mut());

    /// Concatenates everybody's `input`, of lengths that may differ, in rank order into `output`. `counts[r]` is the
    /// number of elements of rank `r`; all ranks pass the same counts. Collective.
    /// Counterpart: `MPI_Allgatherv`; NCCL users issue a broadcast per rank.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one count per rank, `input` has not `counts[rank]` elements, `output` not
    /// their sum, or buffers overlap; `Mismatch` when ranks differ in counts or type.
    fn all_gather_v, all_gather_v_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: B; counts: &[usize])
        |w, (i, o)| w.prep_all_gather_v(i.buf(), o.buf_mut(), counts, size_of::<I::Elem>());

    /// [`all_gather_v`](Self::all_gather_v) in place: this rank's shard already lies where it belongs in `buf`.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    fn all_gather_v_in_place, all_gather_v_in_place_async [B: IntoBufMut + StreamOrdered] (buf: B; counts: &[usize])
        |w, b| w.prep_all_gather_v_in_place(b.buf_mut(), counts, size_of::<B::Elem>());

    /// [`all_gather_v`](Self::all_gather_v) into a buffer per rank; their lengths are the counts.
    /// Counterpart: `torchcomms all_gather_v`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one output per rank, `outputs[rank]` is not as long as `input` or buffers
    /// overlap; `Mismatch` when ranks differ in the lengths or type.
    fn all_gather_v_list, all_gather_v_list_async
        [I: IntoBuf + StreamOrdered, L: IntoBufListMut(I::Elem) + StreamOrderedList] (input: I, outputs: L)
        |w, (i, o)| w.prep_all_gather_list(Operation::AllGatherV, i.buf(), o.bufs_mut());

    /// Concatenates everybody's `input` (equal lengths) in rank order into the root's `output` of world size times that
    /// length. Other ranks may pass `None`; what they pass is not touched. A bare `None` needs its type
    /// (`None::<&mut [f32]>`), `then_some` does not. Collective.
    /// Counterpart: `ncclGather`, `MPI_Gather`, `torchcomms gather_single`.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// let mut all = vec![0u64; 2 * comm.size()];
    /// comm.gather(&[comm.rank() as u64, 7], (comm.rank() == 0).then_some(&mut all), 0)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, a root without output, lengths that do not fit or overlapping buffers;
    /// `Mismatch` when ranks differ in root, length or type.
    fn gather, gather_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: Option<B>; root: usize)
        |w, (i, o)| w.prep_gather(i.buf(), o.as_mut().map(|o| o.buf_mut()), root);

    /// [`gather`](Self::gather) in place: at the root `buf` holds a block per rank, its own already at `rank * shard`;
    /// elsewhere `buf` is the shard, and unchanged. Counterpart: `MPI_Gather` with `MPI_IN_PLACE`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, or when the root's length does not divide by the world size;
    /// `Mismatch` when ranks differ in root, length or type.
    fn gather_in_place, gather_in_place_async [B: IntoBufMut + StreamOrdered] (buf: B; root: usize)
        |w, b| w.prep_gather_in_place(b.buf_mut(), None, size_of::<B::Elem>(), root);

    /// [`gather`](Self::gather) into a buffer per rank, which only the root needs to pass.
    /// Counterpart: `torchcomms gather`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one output per rank, lengths differ or buffers overlap; else as
    /// [`gather`](Self::gather).
    fn gather_list, gather_list_async [I: IntoBuf + StreamOrdered, L: IntoBufListMut(I::Elem) + StreamOrderedList]
        (input: I, outputs: Option<L>; root: usize)
        |w, (i, o)| w.prep_gather_list(Operation::Gather, i.buf(), o.as_mut().map(|o| o.bufs_mut()), root);

    /// Concatenates everybody's `input`, of lengths that may differ, in rank order into the root's `output`. `counts[r]`
    /// is the number of elements of rank `r`; only the root's counts and output matter, and blocks lie without gaps (for
    /// others pass a list). Collective. Counterpart: `MPI_Gatherv`; NCCL and torchcomms have none.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// // Rank r has r values.
    /// let counts: Vec<usize> = (0..comm.size()).collect();
    /// let (mine, mut all) = (vec![1.0f32; comm.rank()], vec![0.0f32; counts.iter().sum()]);
    /// comm.gather_v(&mine, (comm.rank() == 0).then_some(&mut all), &counts, 0)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, and at the root when there is not one count per rank, its `input` has
    /// not `counts[root]` elements, `output` not their sum, or buffers overlap; `Mismatch` when ranks differ in root or
    /// type, or a rank's length is not its count.
    fn gather_v, gather_v_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: I, output: Option<B>; counts: &[usize], root: usize)
        |w, (i, o)| {
            w.prep_gather_v(i.buf(), o.as_mut().map(|o| o.buf_mut()), counts, size_of::<I::Elem>(), root)
        };

    /// [`gather_v`](Self::gather_v) in place: at the root `buf` holds all blocks, its own already where it belongs;
    /// elsewhere `buf` is the shard, and unchanged.
    ///
    /// # Errors
    ///
    /// As [`gather_v`](Self::gather_v).
    fn gather_v_in_place, gather_v_in_place_async [B: IntoBufMut + StreamOrdered]
        (buf: B; counts: &[usize], root: usize)
        |w, b| w.prep_gather_in_place(b.buf_mut(), Some(counts), size_of::<B::Elem>(), root);

    /// [`gather_v`](Self::gather_v) into a buffer per rank, which only the root needs to pass; their lengths are the
    /// counts. Counterpart: `MPI_Gatherv` with displacements.
    ///
    /// # Errors
    ///
    /// As [`gather_v`](Self::gather_v); `InvalidArgument` when there is not one output per rank.
    fn gather_v_list, gather_v_list_async [I: IntoBuf + StreamOrdered, L: IntoBufListMut(I::Elem) + StreamOrderedList]
        (input: I, outputs: Option<L>; root: usize)
        |w, (i, o)| w.prep_gather_list(Operation::GatherV, i.buf(), o.as_mut().map(|o| o.bufs_mut()), root);

    /// Cuts the root's `input` into a block per rank, each as long as everybody's `output`, and gives each rank its own.
    /// Other ranks may pass `None`, whose type a bare one needs (`None::<&[f32]>`). Collective.
    /// Counterpart: `ncclScatter`, `MPI_Scatter`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, a root without input, lengths that do not fit or overlapping buffers;
    /// `Mismatch` when ranks differ in root, length or type.
    fn scatter, scatter_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: Option<I>, output: B; root: usize)
        |w, (i, o)| w.prep_scatter(i.as_ref().map(|i| i.buf()), o.buf_mut(), root);

    /// [`scatter`](Self::scatter) in place: at the root `buf` holds a block per rank and stays unchanged, its own result
    /// being at `rank * shard`; elsewhere `buf` receives the shard. Counterpart: `MPI_Scatter` with `MPI_IN_PLACE`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, or when the root's length does not divide by the world size;
    /// `Mismatch` when ranks differ in root, length or type.
    fn scatter_in_place, scatter_in_place_async [B: IntoBufMut + StreamOrdered] (buf: B; root: usize)
        |w, b| w.prep_scatter_in_place(b.buf_mut(), None, size_of::<B::Elem>(), root);

    /// [`scatter`](Self::scatter) of a buffer per rank, which only the root needs to pass.
    /// Counterpart: `torchcomms scatter`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is not one input per rank, lengths differ or buffers overlap; else as
    /// [`scatter`](Self::scatter).
    fn scatter_list, scatter_list_async [L: IntoBufList + StreamOrderedList, B: IntoBufMut(L::Elem) + StreamOrdered]
        (inputs: Option<L>, output: B; root: usize)
        |w, (i, o)| w.prep_scatter_list(Operation::Scatter, i.as_ref().map(|i| i.bufs()), o.buf_mut(), root);

    /// Cuts the root's `input` into blocks of `counts[r]` elements and gives each rank its own. Only the root's counts
    /// and input matter, and blocks lie without gaps (for others pass a list). Collective. Counterpart: `MPI_Scatterv`;
    /// NCCL and torchcomms have none.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// let counts: Vec<usize> = (0..comm.size()).collect();
    /// let all = vec![1.0f32; counts.iter().sum()];
    /// let mut mine = vec![0.0f32; comm.rank()];
    /// comm.scatter_v((comm.rank() == 0).then_some(&all), &mut mine, &counts, 0)
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range, and at the root when there is not one count per rank, its `output` has
    /// not `counts[root]` elements, `input` not their sum, or buffers overlap; `Mismatch` when ranks differ in root or
    /// type, or a rank's length is not its count.
    fn scatter_v, scatter_v_async [I: IntoBuf + StreamOrdered, B: IntoBufMut(I::Elem) + StreamOrdered]
        (input: Option<I>, output: B; counts: &[usize], root: usize)
        |w, (i, o)| w.prep_scatter_v(i.as_ref().map(|i| i.buf()), counts, size_of::<I::Elem>(), o.buf_mut(), root);

    /// [`scatter_v`](Self::scatter_v) in place: at the root `buf` holds all blocks and stays unchanged; elsewhere it
    /// receives the shard.
    ///
    /// # Errors
    ///
    /// As [`scatter_v`](Self::scatter_v).
    fn scatter_v_in_place, scatter_v_in_place_async [B: IntoBufMut + StreamOrdered]
        (buf: B; counts: &[usize], root: usize)
        |w, b| w.prep_scatter_in_place(b.buf_mut(), Some(counts), size_of::<B::Elem>(), root);

    /// [`scatter_v`](Self::scatter_v) of a buffer per rank, which only the root needs to pass; their lengths are the
    /// counts. Counterpart: `MPI_Scatterv` with displacements.
    ///
    /// # Errors
    ///
    /// As [`scatter_v`](Self::scatter_v); `InvalidArgument` when there is not one input per rank.
    fn scatter_v_list, scatter_v_list_async [L: IntoBufList + StreamOrderedList, B: IntoBufMut(L::Elem) + StreamOrdered]
        (inputs: Option<L>, output: B; root: usize)
        |w, (i, o)| w.prep_scatter_list(Operation::ScatterV, i.as_ref().map(|i| i.bufs()), o.buf_mut(), root);
}
