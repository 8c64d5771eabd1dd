//! Making one call and looking at what it left.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use comm_core::{CallOptions, Communicator, Error, Fnv, Operation, Result, With, Work};

use crate::buffer::{Guarded, Lend, sentinel};
use crate::case::{CallCase, Form, Place};
use crate::expect::show;
use crate::kind::{Item, Kind, with_carrier, with_type};
use crate::layout::{Block, Layout, Source, layout};
use crate::oper::{Erased, reducer};
use crate::value::{PERIOD, Values};

/// What one rank saw of a case.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// What was wrong.
    pub(crate) complaints: Vec<String>,
    /// A hash of the outputs that all ranks have alike.
    pub(crate) hash: Option<u64>,
}

/// A case on a rank.
pub(crate) struct Ctx<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) case: &'a CallCase,
    pub(crate) timeout: Duration,
    pub(crate) values: Values,
}

/// Something that elements can be read from again.
pub(crate) trait Readable {
    fn len(&self) -> usize;
    fn bits(&self, i: usize) -> u128;
    /// The bits before the call.
    fn sentinel(&self, i: usize) -> u128;
    fn spilled(&self) -> Option<String>;
}

impl<T: Item> Readable for Guarded<T> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn bits(&self, i: usize) -> u128 {
        Self::bits(self, i)
    }

    fn sentinel(&self, i: usize) -> u128 {
        sentinel(self.kind(), self.guard() + i)
    }

    fn spilled(&self) -> Option<String> {
        Self::spilled(self)
    }
}

impl<'a> Ctx<'a> {
    pub(crate) fn new(comm: &'a Communicator, case: &'a CallCase, timeout: Duration) -> Self {
        Self { comm, case, timeout, values: case.values(comm.size()) }
    }

    pub(crate) fn with(&self) -> With<'a> {
        let options = CallOptions::new().timeout(self.timeout).tag((self.case.seed >> 40) as u32 % 3);
        self.comm.with(match &self.case.algo {
            Some(name) => options.hint("algo", name.as_str()),
            None => options,
        })
    }

    /// Guards of many lengths: so buffers start at every alignment that the type allows.
    pub(crate) fn guard(&self) -> usize {
        17 + (self.case.seed >> 11) as usize % 16
    }

    /// The bits of the blocks' elements before the call, asked for in their order.
    pub(crate) fn initial<'b>(
        &self,
        blocks: &'b [Block],
        mut kept: impl FnMut(usize) -> u128 + 'b,
    ) -> impl FnMut(usize) -> u128 + 'b {
        let v = self.values;
        let (mut block, mut start, mut table) = (None::<usize>, 0, Vec::new());
        move |i| {
            // Empty blocks are passed over.
            while block.is_none_or(|b| i >= start + blocks[b].len) {
                start += block.map_or(0, |b| blocks[b].len);
                let next = block.map_or(0, |b| b + 1);
                block = Some(next);
                table = match &blocks[next].before {
                    Source::From(rank, at) => (0..blocks[next].len.min(PERIOD)).map(|k| v.get(*rank, at + k)).collect(),
                    _ => Vec::new(),
                };
            }
            if table.is_empty() { kept(i) } else { table[(i - start) % PERIOD] }
        }
    }

    #[inline(never)]
    pub(crate) fn one<T: Item>(&self, blocks: Option<&[Block]>) -> Guarded<T> {
        let (blocks, guard, kind) = (blocks.unwrap_or_default(), self.guard(), self.case.kind);
        let len = blocks.iter().map(|b| b.len).sum();
        Guarded::new(kind, guard, len, self.initial(blocks, move |i| sentinel(kind, guard + i)))
    }

    #[inline(never)]
    pub(crate) fn many<T: Item>(&self, blocks: Option<&[Block]>) -> Vec<Guarded<T>> {
        blocks.unwrap_or_default().iter().map(|b| self.one(Some(std::slice::from_ref(b)))).collect()
    }

    #[inline(never)]
    fn maybe_one<T: Item>(&self, blocks: Option<&[Block]>) -> Option<Guarded<T>> {
        blocks.map(|b| self.one(Some(b)))
    }

    #[inline(never)]
    fn maybe_many<T: Item>(&self, blocks: Option<&[Block]>) -> Option<Vec<Guarded<T>>> {
        blocks.map(|b| self.many(Some(b)))
    }

    pub(crate) fn oper(&self) -> Result<Erased> {
        let c = self.case;
        let made = c.oper.and_then(|o| reducer(c.kind, o, self.comm.rank()));
        made.map(Erased).ok_or_else(|| Error::invalid("the suite made a case with an operator that is not legal"))
    }

    /// If the handle is going to be dropped: the way on which the buffers come back.
    #[inline(never)]
    pub(crate) fn tether<B: Lend>(&self, buffers: &mut B) -> Option<B::Home> {
        (self.case.form == Form::Dropped).then(|| buffers.tether())
    }

    /// Brings an asynchronous call to its end in the way that the form asks for.
    #[inline(never)]
    pub(crate) fn settle<B: Lend>(&self, work: Work<B>, home: Option<B::Home>) -> Result<B> {
        match home {
            Some(home) => {
                drop(work);
                // Comes after it on every rank, and shows that the communicator goes on.
                self.comm.with(CallOptions::new().timeout(self.timeout)).barrier()?;
                let buffers = self.fetch(home)?;
                // The barrier may be over while the operation is not, and nobody looks at how that ends.
                match self.comm.cause() {
                    Some(e) => Err(e),
                    None => Ok(buffers),
                }
            }
            None if self.case.form == Form::Future => block_on(work, self.timeout),
            None => work.wait(),
        }
    }

    /// Waits until an operation whose handle was dropped has let go of its buffers.
    pub(crate) fn fetch<B: Lend>(&self, home: B::Home) -> Result<B> {
        B::fetch(home, self.timeout).ok_or_else(|| {
            Error::invalid("the buffers of an operation whose handle was dropped were not released after it was done")
        })
    }

    /// Looks at a side's buffers: one that has all blocks, or one per block.
    #[inline(never)]
    pub(crate) fn check<R: Readable>(&self, what: &str, buffers: &[R], blocks: Option<&[Block]>, seen: &mut Seen) {
        let blocks = blocks.unwrap_or_default();
        let mut hash = Fnv::default();
        let (mut buffer, mut at) = (0, 0);
        for (b, block) in blocks.iter().enumerate() {
            let Some(mem) = buffers.get(buffer) else {
                return seen.complaints.push(format!("{what}: a buffer is gone"));
            };
            if let Some(problem) = self.compare(mem, at, block, &mut hash) {
                seen.complaints.push(format!("{what}, block {b}: {problem}"));
            }
            if buffers.len() == 1 {
                at += block.len;
            } else {
                buffer += 1;
            }
        }
        if buffers.len() == 1 && buffers[0].len() != at {
            seen.complaints.push(format!("{what} came back with {} elements instead of {at}", buffers[0].len()));
        }
        for mem in buffers {
            if let Some(where_) = mem.spilled() {
                seen.complaints.push(format!("{what}: memory outside was written, {where_}"));
            }
        }
        if what == "output" && is_alike(self.case.op) {
            seen.hash = Some(hash.finish());
        }
    }

    fn compare<R: Readable>(&self, mem: &R, at: usize, block: &Block, hash: &mut Fnv) -> Option<String> {
        if block.after == Source::Any {
            return None;
        }
        let (kind, wants) = (self.case.kind, block.wants(&self.values));
        let (mut wrong, mut first) = (0usize, None);
        for k in 0..block.len {
            let got = mem.bits(at + k);
            hash.write(&got.to_le_bytes()[..kind.size()]);
            let (ok, want) = match &wants {
                Some(w) => (w[k % PERIOD].is_met(kind, got), Some(w[k % PERIOD])),
                None => (got == mem.sentinel(at + k), None),
            };
            if !ok {
                wrong += 1;
                first = first.or(Some((k, got, want)));
            }
        }
        let (k, got, want) = first?;
        let want = want.map_or_else(|| "what was there before".to_owned(), |w| w.show(kind));
        Some(format!("{wrong} of {} elements wrong; element {k} is {} instead of {want}", block.len, show(kind, got)))
    }
}

/// Operations that leave the same on all ranks.
const fn is_alike(op: Operation) -> bool {
    matches!(op, Operation::AllReduce | Operation::Broadcast | Operation::AllGather | Operation::AllGatherV)
}

/// All buffers of one side.
trait Parts<T: Item> {
    fn parts(self) -> Vec<Guarded<T>>;
}

impl<T: Item> Parts<T> for Guarded<T> {
    fn parts(self) -> Vec<Self> {
        vec![self]
    }
}

impl<T: Item> Parts<T> for Vec<Guarded<T>> {
    fn parts(self) -> Self {
        self
    }
}

impl<T: Item, B: Parts<T>> Parts<T> for Option<B> {
    fn parts(self) -> Vec<Guarded<T>> {
        self.map(B::parts).unwrap_or_default()
    }
}

macro_rules! lent {
    (ref $b:ident) => {
        $b.lend()
    };
    (mut $b:ident) => {
        $b.lend_mut()
    };
}
pub(crate) use lent;

/// Makes a call in the case's form and evaluates to its buffers.
macro_rules! call {
    ($x:ident, $m:ident, $am:ident, [$($mode:ident $b:ident),+] $(, $a:expr)*) => {{
        #[allow(unused_mut, unused_parens)]
        match $x.case.form {
            Form::Async | Form::Future | Form::Dropped => {
                let mut buffers = ($($b),+);
                let home = $x.tether(&mut buffers);
                let ($($b),+) = buffers;
                let work = $x.with().$am($($b),+ $(, $a)*)?;
                let ($($b),+) = $x.settle(work, home)?;
                ($($b,)+)
            }
            Form::Scoped => {
                $(let mut $b = $b;)+
                {
                    let lent = ($(lent!($mode $b),)+);
                    $x.with().scope(|s| {
                        let ($($b,)+) = lent;
                        let work = s.$m($($b),+ $(, $a)*)?;
                        if $x.case.seed & 64 == 0 {
                            work.wait()?;
                        }
                        Ok(())
                    })?;
                }
                ($($b,)+)
            }
            Form::Sync | Form::Dynamic => {
                $(let mut $b = $b;)+
                $x.with().$m($(lent!($mode $b)),+ $(, $a)*)?;
                ($($b,)+)
            }
        }
    }};
}
pub(crate) use call;

/// Makes the buffers, makes the call, and takes them apart again.
macro_rules! go {
    ($x:ident, $l:ident: $m:ident, $am:ident, in $bi:ident, out $bo:ident $(, $a:expr)*) => {{
        let (i, o) = ($x.$bi::<T>($l.input.as_deref()), $x.$bo::<T>($l.output.as_deref()));
        let (i, o) = call!($x, $m, $am, [ref i, mut o] $(, $a)*);
        (Parts::<T>::parts(i), Parts::<T>::parts(o))
    }};
    ($x:ident, $l:ident: $m:ident, $am:ident, out $bo:ident $(, $a:expr)*) => {{
        let o = $x.$bo::<T>($l.output.as_deref());
        let (o,) = call!($x, $m, $am, [mut o] $(, $a)*);
        (Vec::new(), Parts::<T>::parts(o))
    }};
}

/// Runs a case on this rank.
pub(crate) fn run(x: &Ctx<'_>) -> Result<Seen> {
    if x.case.op == Operation::Barrier {
        return crate::messages::barrier(x);
    }
    if x.case.form == Form::Dynamic {
        return crate::dynamic::run(x);
    }
    match x.case.op {
        Operation::Batch => with_type!(x.case.kind, T => crate::messages::batch::<T>(x)),
        Operation::Send | Operation::Recv => {
            with_carrier!(x.case.kind, T => crate::messages::run::<T>(x))
        }
        op if crate::case::reduces(op) => with_carrier!(x.case.kind, T => reductions::<T>(x)),
        _ => with_carrier!(x.case.kind, T => movements::<T>(x)),
    }
}

#[inline(never)]
fn looked_at<T: Item>(x: &Ctx<'_>, l: &Layout, (i, o): (Vec<Guarded<T>>, Vec<Guarded<T>>)) -> Seen {
    let mut seen = Seen::default();
    x.check("input", &i, l.input.as_deref(), &mut seen);
    x.check("output", &o, l.output.as_deref(), &mut seen);
    seen
}

fn reductions<T: Item>(x: &Ctx<'_>) -> Result<Seen> {
    use Operation as O;
    use Place as P;
    let (c, n, me) = (x.case, x.comm.size(), x.comm.rank());
    let (l, op, root) = (layout(c, n, me), x.oper()?, c.root);
    let counts = if crate::case::is_uneven(c.op) { c.counts(n) } else { Vec::new() };
    let sides = match (c.op, c.place) {
        (O::AllReduce, P::In) => go!(x, l: all_reduce, all_reduce_async, out one, op),
        (O::AllReduce, _) => go!(x, l: all_reduce_into, all_reduce_into_async, in one, out one, op),
        (O::Reduce, P::In) => go!(x, l: reduce, reduce_async, out one, op, root),
        (O::Reduce, _) => go!(x, l: reduce_into, reduce_into_async, in one, out maybe_one, op, root),
        (O::Scan, P::In) => go!(x, l: scan, scan_async, out one, op),
        (O::Scan, _) => go!(x, l: scan_into, scan_into_async, in one, out one, op),
        (O::Exscan, P::In) => go!(x, l: exscan, exscan_async, out one, op),
        (O::Exscan, _) => go!(x, l: exscan_into, exscan_into_async, in one, out one, op),
        (O::ReduceScatter, P::Out) => go!(x, l: reduce_scatter, reduce_scatter_async, in one, out one, op),
        (O::ReduceScatter, P::In) => go!(x, l: reduce_scatter_in_place, reduce_scatter_in_place_async, out one, op),
        (O::ReduceScatter, P::List) => {
            go!(x, l: reduce_scatter_list, reduce_scatter_list_async, in many, out one, op)
        }
        (_, P::Out) => go!(x, l: reduce_scatter_v, reduce_scatter_v_async, in one, out one, &counts, op),
        (_, P::In) => {
            go!(x, l: reduce_scatter_v_in_place, reduce_scatter_v_in_place_async, out one, &counts, op)
        }
        (_, P::List) => go!(x, l: reduce_scatter_v_list, reduce_scatter_v_list_async, in many, out one, op),
    };
    Ok(looked_at(x, &l, sides))
}

fn movements<T: Item>(x: &Ctx<'_>) -> Result<Seen> {
    use Operation as O;
    use Place as P;
    let (c, n, me) = (x.case, x.comm.size(), x.comm.rank());
    let (l, root) = (layout(c, n, me), c.root);
    let counts = x.known_counts();
    let sides = match (c.op, c.place) {
        (O::SendRecv, _) => {
            let (dst, src) = ((me + root) % n, (me + n - root % n) % n);
            go!(x, l: sendrecv, sendrecv_async, in one, out one, dst, src)
        }
        (O::Broadcast, _) => go!(x, l: broadcast, broadcast_async, out one, root),
        (O::AllGather, P::Out) => go!(x, l: all_gather, all_gather_async, in one, out one),
        (O::AllGather, P::In) => go!(x, l: all_gather_in_place, all_gather_in_place_async, out one),
        (O::AllGather, P::List) => go!(x, l: all_gather_list, all_gather_list_async, in one, out many),
        (O::AllGatherV, P::Out) => go!(x, l: all_gather_v, all_gather_v_async, in one, out one, &counts),
        (O::AllGatherV, P::In) => go!(x, l: all_gather_v_in_place, all_gather_v_in_place_async, out one, &counts),
        (O::AllGatherV, P::List) => go!(x, l: all_gather_v_list, all_gather_v_list_async, in one, out many),
        (O::Gather, P::Out) => go!(x, l: gather, gather_async, in one, out maybe_one, root),
        (O::Gather, P::In) => go!(x, l: gather_in_place, gather_in_place_async, out one, root),
        (O::Gather, P::List) => go!(x, l: gather_list, gather_list_async, in one, out maybe_many, root),
        (O::GatherV, P::Out) => go!(x, l: gather_v, gather_v_async, in one, out maybe_one, &counts, root),
        (O::GatherV, P::In) => go!(x, l: gather_v_in_place, gather_v_in_place_async, out one, &counts, root),
        (O::GatherV, P::List) => go!(x, l: gather_v_list, gather_v_list_async, in one, out maybe_many, root),
        (O::Scatter, P::Out) => go!(x, l: scatter, scatter_async, in maybe_one, out one, root),
        (O::Scatter, P::In) => go!(x, l: scatter_in_place, scatter_in_place_async, out one, root),
        (O::Scatter, P::List) => go!(x, l: scatter_list, scatter_list_async, in maybe_many, out one, root),
        (O::ScatterV, P::Out) => go!(x, l: scatter_v, scatter_v_async, in maybe_one, out one, &counts, root),
        (O::ScatterV, P::In) => go!(x, l: scatter_v_in_place, scatter_v_in_place_async, out one, &counts, root),
        (O::ScatterV, P::List) => go!(x, l: scatter_v_list, scatter_v_list_async, in maybe_many, out one, root),
        (O::AllToAll, P::Out) => go!(x, l: all_to_all, all_to_all_async, in one, out one),
        (O::AllToAll, P::In) => go!(x, l: all_to_all_in_place, all_to_all_in_place_async, out one),
        (O::AllToAll, P::List) => go!(x, l: all_to_all_list, all_to_all_list_async, in many, out many),
        (_, P::List) => go!(x, l: all_to_all_v_list, all_to_all_v_list_async, in many, out many),
        _ => {
            let (sends, receives) = x.exchanged();
            go!(x, l: all_to_all_v, all_to_all_v_async, in one, out one, &sends, &receives)
        }
    };
    Ok(looked_at(x, &l, sides))
}

impl Ctx<'_> {
    /// The counts that this rank passes: where only the root's matter, others may know none.
    pub(crate) fn known_counts(&self) -> Vec<usize> {
        let rooted = matches!(self.case.op, Operation::GatherV | Operation::ScatterV);
        if rooted && self.comm.rank() != self.case.root && self.case.seed & 256 == 0 {
            return Vec::new();
        }
        self.case.counts(self.comm.size())
    }

    /// What goes to and what comes from each rank.
    pub(crate) fn exchanged(&self) -> (Vec<usize>, Vec<usize>) {
        let m = self.case.matrix(self.comm.size());
        let me = self.comm.rank();
        (m[me].clone(), m.iter().map(|row| row[me]).collect())
    }
}

struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// The smallest executor: polls only when woken, so that a lost wake-up is an error.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T>>, timeout: Duration) -> Result<T> {
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(true) });
    let waker = Waker::from(Arc::clone(&unpark));
    let mut future = pin!(future);
    // The operation's own timeout comes first, and wakes.
    let until = Instant::now() + timeout + Duration::from_secs(5);
    loop {
        if unpark.woken.swap(false, Ordering::AcqRel)
            && let Poll::Ready(r) = future.as_mut().poll(&mut Context::from_waker(&waker))
        {
            return r;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::invalid("the future was never woken, not even by its timeout"));
        }
        std::thread::park_timeout(left);
    }
}

/// The bytes of an element, lowest first.
pub(crate) fn to_bytes(kind: Kind, bits: u128) -> impl Iterator<Item = u8> {
    bits.to_le_bytes().into_iter().take(kind.size())
}
