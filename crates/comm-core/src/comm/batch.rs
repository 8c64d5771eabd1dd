//! Batches of point-to-point messages: all are posted together, so that their order cannot deadlock.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::{OpRequest, P2pOp};
use crate::buf::{IntoBuf, IntoBufMut, RawBuf, RawBufMut};
use crate::comm::ops::With;
use crate::comm::prepare::Prepared;
use crate::desc::{OpDesc, Operation};
use crate::dtype::{DType, Pod};
use crate::error::{Error, Result};
use crate::work::{Hold, Work};

/// One entry of a batch, for inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchedOp {
    /// `Send` or `Recv`.
    pub operation: Operation,
    /// The other rank.
    pub peer: usize,
    /// Tag.
    pub tag: u32,
    /// Element type.
    pub dtype: DType,
    /// Elements.
    pub count: usize,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Send(RawBuf, usize, u32),
    Recv(RawBufMut, usize, u32),
}

impl Entry {
    fn describe(&self) -> BatchedOp {
        match self {
            Self::Send(b, peer, tag) => {
                BatchedOp { operation: Operation::Send, peer: *peer, tag: *tag, dtype: b.dtype(), count: b.count() }
            }
            Self::Recv(b, peer, tag) => {
                BatchedOp { operation: Operation::Recv, peer: *peer, tag: *tag, dtype: b.dtype(), count: b.count() }
            }
        }
    }
}

/// The entries of a batch; shared by its three forms.
#[derive(Debug)]
pub(super) struct Entries<'c> {
    with: With<'c>,
    list: Vec<Entry>,
}

impl<'c> Entries<'c> {
    pub(super) fn new(with: With<'c>) -> Self {
        Self { with, list: Vec::new() }
    }

    pub(super) fn send(&mut self, buf: Result<RawBuf>, dst: usize) -> Result<()> {
        let buf = buf?;
        super::check::rank_in_range("destination", dst, self.with.size())?;
        super::check::reachable(&buf, self.with.comm.device())?;
        let clash = self.list.iter().position(|e| matches!(e, Entry::Recv(b, ..) if b.overlaps(&buf)));
        if let Some(i) = clash {
            return Err(Error::invalid(format!(
                "the send buffer overlaps the receive buffer of entry {i} of this batch"
            )));
        }
        self.list.push(Entry::Send(buf, dst, self.with.options.tag));
        Ok(())
    }

    pub(super) fn recv(&mut self, buf: Result<RawBufMut>, src: usize) -> Result<()> {
        let buf = buf?;
        super::check::rank_in_range("source", src, self.with.size())?;
        super::check::reachable(&buf.as_const(), self.with.comm.device())?;
        let clash = self.list.iter().position(|e| match e {
            Entry::Send(b, ..) => buf.overlaps(b),
            Entry::Recv(b, ..) => buf.overlaps(&b.as_const()),
        });
        if let Some(i) = clash {
            return Err(Error::invalid(format!("the receive buffer overlaps the buffer of entry {i} of this batch")));
        }
        self.list.push(Entry::Recv(buf, src, self.with.options.tag));
        Ok(())
    }

    pub(super) fn tag(&mut self, tag: u32) {
        self.with.options.tag = tag;
    }

    pub(super) fn ops(&self) -> Vec<BatchedOp> {
        self.list.iter().map(Entry::describe).collect()
    }

    pub(super) const fn with(&self) -> &With<'c> {
        &self.with
    }

    /// Numbers the messages. Each issue takes new numbers, so that a batch can be issued again.
    pub(super) fn prepare(&self) -> Prepared {
        let mut desc = OpDesc::new(Operation::Batch);
        desc.count = self.list.len() as u64;
        let number = |e: &Entry| match e {
            Entry::Send(buf, peer, tag) => {
                P2pOp::Send { buf: *buf, peer: *peer, tag: *tag, seq: self.with.next_send(*peer, *tag) }
            }
            Entry::Recv(buf, peer, tag) => {
                P2pOp::Recv { buf: *buf, peer: *peer, tag: *tag, seq: self.with.next_recv(*peer, *tag) }
            }
        };
        let request = if self.list.is_empty() {
            Err(Error::invalid("the batch is empty; add at least one send or receive before issuing it"))
        } else {
            // What refuses the call locally comes before it takes numbers that peers would wait for.
            let usable = self.with.check_options().and_then(|()| self.with.comm.inner().check_usable(&desc));
            usable.map(|()| OpRequest::Batch(self.list.iter().map(number).collect()))
        };
        Prepared { desc, request }
    }
}

/// A batch of borrowed messages. Made by [`Communicator::batch`](crate::Communicator::batch).
///
/// Counterpart: `torchcomms BatchSendRecv`, `ncclGroupStart`/`ncclGroupEnd` around sends and receives.
#[derive(Debug)]
pub struct Batch<'c, 'a> {
    entries: Entries<'c>,
    borrowed: PhantomData<&'a mut ()>,
}

impl<'c, 'a> Batch<'c, 'a> {
    pub(super) fn new(with: With<'c>) -> Self {
        Self { entries: Entries::new(with), borrowed: PhantomData }
    }

    /// Adds a send.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range.
    pub fn send<T: Pod>(mut self, buf: &'a [T], dst: usize) -> Result<Self> {
        self.entries.send(IntoBuf::buf(&buf), dst)?;
        Ok(self)
    }

    /// Adds a receive.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range or a buffer that overlaps another of the batch.
    pub fn recv<T: Pod>(mut self, buf: &'a mut [T], src: usize) -> Result<Self> {
        let mut buf = buf;
        self.entries.recv(IntoBufMut::buf_mut(&mut buf), src)?;
        Ok(self)
    }

    /// Sets the tag of the messages that are added after this.
    #[must_use]
    pub fn tag(mut self, tag: u32) -> Self {
        self.entries.tag(tag);
        self
    }

    /// What has been added so far.
    #[must_use]
    pub fn ops(&self) -> Vec<BatchedOp> {
        self.entries.ops()
    }

    /// Runs all messages and returns when all are done. May be called again with the same memory, which the batch
    /// borrows as long as it lives; to change it in between, use [`AsyncBatch`] and
    /// [`Communicator::batch_again`](crate::Communicator::batch_again).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty batch; else the first error of a message.
    pub fn issue(&mut self) -> Result<()> {
        self.entries.with().run(self.entries.prepare())
    }
}

/// Finds a buffer of an [`AsyncBatch`] in its [`BatchBuffers`].
#[derive(Debug, PartialEq, Eq)]
pub struct BatchSlot<X> {
    index: usize,
    kind: PhantomData<fn() -> X>,
}

// Not derived: that would ask for `X: Copy`, which no buffer is.
impl<X> Clone for BatchSlot<X> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<X> Copy for BatchSlot<X> {}

/// One message of an [`AsyncBatch`] as it was added.
struct Plan {
    /// Lies in a `Hold` of its own and not in a `Box`: the operation writes through pointers into it while the list
    /// moves, and moving a `Box` claims exclusive access to what it points to. `None` when it was taken.
    hold: Option<Arc<dyn Any + Send + Sync>>,
    /// Enters the buffer, whose place may be another than at the last issue, into a batch.
    enter: fn(&mut Entries<'_>, &Arc<dyn Any + Send + Sync>, usize) -> Result<()>,
    peer: usize,
    tag: u32,
}

fn enter_with<X: Send + 'static>(
    hold: &Arc<dyn Any + Send + Sync>,
    f: impl FnOnce(&mut X) -> Result<()>,
) -> Result<()> {
    let hold = Arc::clone(hold).downcast::<Hold<X>>().map_err(|_| Error::invalid("a buffer of another type"))?;
    // SAFETY: buffers are entered before the batch is issued, and those of an issued batch come back, with the work,
    // when its messages are complete; `BatchBuffers` gives out no other reference while it is moved into a batch.
    unsafe { hold.with(f) }.unwrap_or_else(|| Err(Error::invalid("a buffer of the batch is gone")))
}

/// The buffers of an [`AsyncBatch`], given back by its work. To send the same messages once more, fill them through
/// [`get_mut`](Self::get_mut) and make a batch of them with [`Communicator::batch_again`](crate::Communicator::batch_again).
pub struct BatchBuffers(Vec<Plan>);

impl std::fmt::Debug for BatchBuffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchBuffers").field("len", &self.0.len()).finish()
    }
}

impl BatchBuffers {
    /// Takes a buffer out; `None` when it was taken before.
    pub fn take<X: Send + 'static>(&mut self, slot: BatchSlot<X>) -> Option<X> {
        // A slot of another batch takes nothing.
        let hold = self.0.get_mut(slot.index)?.hold.take_if(|h| h.is::<Hold<X>>())?.downcast::<Hold<X>>().ok()?;
        // SAFETY: users get this list from the batch's work, when the messages are complete; `&mut self` and
        // the entry that was just taken out make this the only access.
        unsafe { hold.take() }
    }

    /// A buffer; `None` when it was taken.
    pub fn get_mut<X: Send + 'static>(&mut self, slot: BatchSlot<X>) -> Option<&mut X> {
        let hold = self.0.get(slot.index)?.hold.as_ref()?;
        let hold: &Hold<X> = hold.downcast_ref()?;
        // SAFETY: users get this list from the batch's work, when the messages are complete, and the reference borrows
        // it mutably: this is the only access.
        unsafe { hold.get_mut() }
    }
}

/// A batch of owned buffers; unlike [`Batch`] it is not chained, because each message added gives a slot. Made by [`Communicator::batch_async`](crate::Communicator::batch_async).
///
/// ```no_run
/// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
/// let mut batch = comm.batch_async();
/// batch.send(vec![1.0f32; 4], 1)?;
/// let slot = batch.recv(vec![0.0f32; 4], 1)?;
/// let mut buffers = batch.issue()?.wait()?;
/// let received: Vec<f32> = buffers.take(slot).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct AsyncBatch<'c> {
    entries: Entries<'c>,
    buffers: BatchBuffers,
}

impl<'c> AsyncBatch<'c> {
    pub(super) fn new(with: With<'c>) -> Self {
        Self { entries: Entries::new(with), buffers: BatchBuffers(Vec::new()) }
    }

    /// The messages of `buffers` once more.
    pub(super) fn again(with: With<'c>, buffers: BatchBuffers) -> Result<Self> {
        let mut batch = Self::new(with);
        let tag = batch.entries.with.options.tag;
        for (i, p) in buffers.0.iter().enumerate() {
            let Some(hold) = &p.hold else {
                return Err(Error::invalid(format!("the buffer of entry {i} of the batch was taken out")));
            };
            batch.entries.tag(p.tag);
            (p.enter)(&mut batch.entries, hold, p.peer)?;
        }
        batch.entries.tag(tag);
        batch.buffers = buffers;
        Ok(batch)
    }

    /// Adds a send.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range.
    pub fn send<M, B: IntoBuf<M> + Send + 'static>(&mut self, buf: B, dst: usize) -> Result<BatchSlot<B>> {
        self.add(buf, dst, |entries, hold, peer| enter_with::<B>(hold, |b| entries.send(IntoBuf::<M>::buf(b), peer)))
    }

    /// Adds a receive.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range.
    pub fn recv<M, B: IntoBufMut<M> + Send + 'static>(&mut self, buf: B, src: usize) -> Result<BatchSlot<B>> {
        self.add(buf, src, |entries, hold, peer| {
            enter_with::<B>(hold, |b| entries.recv(IntoBufMut::<M>::buf_mut(b), peer))
        })
    }

    fn add<B: Send + 'static>(
        &mut self,
        buf: B,
        peer: usize,
        enter: fn(&mut Entries<'_>, &Arc<dyn Any + Send + Sync>, usize) -> Result<()>,
    ) -> Result<BatchSlot<B>> {
        let hold: Arc<dyn Any + Send + Sync> = Hold::new(buf);
        enter(&mut self.entries, &hold, peer)?;
        let index = self.buffers.0.len();
        self.buffers.0.push(Plan { hold: Some(hold), enter, peer, tag: self.entries.with.options.tag });
        Ok(BatchSlot { index, kind: PhantomData })
    }

    /// Sets the tag of the messages that are added after this.
    pub fn tag(&mut self, tag: u32) {
        self.entries.tag(tag);
    }

    /// What has been added so far.
    #[must_use]
    pub fn ops(&self) -> Vec<BatchedOp> {
        self.entries.ops()
    }

    /// Starts all messages.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty batch.
    pub fn issue(self) -> Result<Work<BatchBuffers>> {
        let Self { entries, buffers } = self;
        entries.with().launch(buffers, |_| entries.prepare())
    }
}
