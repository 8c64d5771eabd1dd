//! Children: communicators of some of the members.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::split_options::SplitOptions;
use crate::backend::{CallInfo, Form, OpRequest, SplitRequest};
use crate::blocks::RawBlocksMut;
use crate::buf::{RawBuf, RawBufMut};
use crate::comm::ticket::Numbers;
use crate::comm::{CommInner, Communicator, HandleState, check, job};
use crate::desc::{OpDesc, Operation};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::observe::{CallNumber, Event};
use crate::options::{CORE_HINTS, check_hints};
use crate::work::Work;

/// Who is in this rank's child.
enum Choice {
    Ranks(Vec<usize>),
    Color(Option<i64>, i64),
}

/// A split that has its numbers.
struct Splitting {
    comm: Arc<CommInner>,
    n: Numbers,
    /// The first number of the call: of the exchange of colours, or else of the backend's own two.
    first: u64,
    choice: Choice,
    options: SplitOptions,
}

impl Splitting {
    /// Numbers, checks and announces the call, on the thread that makes it: so the order of calls is that of the program.
    fn admit(comm: &Communicator, choice: Choice, options: SplitOptions, form: Form) -> Result<Self> {
        let c = comm.inner();
        let desc = OpDesc::new(Operation::Split);
        c.check_usable(&desc)?;
        let numbers = if matches!(choice, Choice::Color(..)) { 3 } else { 2 };
        let first = c.collective_seq.fetch_add(numbers, Ordering::Relaxed);
        let n = c.number(desc, CallNumber::Collective(first), options.split_timeout, true);
        let sound = match &choice {
            Choice::Ranks(ranks) => check::split_list(ranks, c.rank(), c.size()),
            Choice::Color(..) => Ok(()),
        };
        sound
            .and_then(|()| check_hints(options.hints.keys().map(String::as_str), &[CORE_HINTS, c.backend.info().hints]))
            .and_then(|()| c.no_open_work())
            .and_then(|()| c.announce(&n, form))
            .map_err(|e| c.refuse(e, &n, form))?;
        Ok(Self { comm: Arc::clone(c), n, first, choice, options })
    }

    fn run(self, state: HandleState) -> Result<Option<Communicator>> {
        let c = &self.comm;
        let until = c.clock().now().after(self.n.timeout);
        let (ranks, seq) = match self.choice {
            Choice::Ranks(ranks) => (ranks, self.first),
            Choice::Color(color, key) => (c.same_color(self.first, &self.n, color, key)?, self.first + 1),
        };
        let rank = ranks.iter().position(|r| *r == c.rank());
        let options = self.options.inherit(&c.options, rank, ranks.len());
        let left = until.since(c.clock().now());
        let request = SplitRequest::new(ranks, seq, options.clone(), left);
        let Some(backend) = c.backend.split(&request)? else { return Ok(None) };
        let roots = request.ranks.iter().map(|r| c.ranks[*r]).collect();
        if c.observers.any() {
            let (child, ranks) = (self.options.name.as_str(), request.ranks.as_slice());
            c.observers.event(&Event::Split { comm: &c.name, child, ranks }, c.clock().now());
        }
        let observers = self.options.observers_under(&c.observers);
        Communicator::assemble(backend, c.device, options, roots, observers, state).map(Some)
    }

    fn finish(self) -> Result<Option<Communicator>> {
        let (comm, n) = (Arc::clone(&self.comm), self.n);
        let made = self.run(HandleState::Live);
        comm.end(&n, Form::Sync, made)
    }

    fn launch(self) -> Result<Work<Option<Communicator>>> {
        let (comm, n) = (Arc::clone(&self.comm), self.n);
        job::start(&comm, n, move || self.run(HandleState::Fresh))
    }

    /// Of a split that this rank takes part in.
    fn launch_member(self) -> Result<Work<Communicator>> {
        let (comm, n) = (Arc::clone(&self.comm), self.n);
        job::start(&comm, n, move || member(self.run(HandleState::Fresh)?))
    }
}

fn member(child: Option<Communicator>) -> Result<Communicator> {
    child.ok_or_else(|| Error::invalid("the backend has made no child of a list with this rank"))
}

impl CommInner {
    /// A child is made between calls: the others could not know which side of it an open one is on.
    fn no_open_work(&self) -> Result<()> {
        let open: Vec<_> = self.inflight.lock().values().cloned().collect();
        let is_open = |c: &&Arc<crate::work::Core>| {
            c.try_finish();
            !c.is_done() && c.numbers.desc.operation != Operation::Split
        };
        match open.iter().filter(is_open).count() {
            0 => Ok(()),
            1 => Err(Error::invalid("1 operation is in flight; wait for it before the split")),
            n => Err(Error::invalid(format!("{n} operations are in flight; wait for them before the split"))),
        }
    }

    /// The ranks that pass the same colour, in the order of their keys.
    fn same_color(&self, seq: u64, n: &Numbers, color: Option<i64>, key: i64) -> Result<Vec<usize>> {
        let mine = [i64::from(color.is_some()), color.unwrap_or(0), key];
        let mut all = vec![0i64; mine.len() * self.size()];
        let input = RawBuf::new(mine.as_ptr().cast(), size_of_val(&mine), DType::I64, Device::CPU);
        let bytes = size_of_val(all.as_slice());
        let output = RawBufMut::new(all.as_mut_ptr().cast(), bytes, DType::I64, Device::CPU);
        let request = OpRequest::AllGather { input, output: RawBlocksMut::even(output, self.size()) };
        let desc = OpDesc::new(Operation::AllGather).elements(DType::I64, mine.len());
        // SAFETY: `mine` and `all` live until `run` returns and are not used meanwhile; they do not overlap.
        unsafe { self.backend.run(&request, &CallInfo::new(desc, seq, n.op_id, n.timeout))? };
        if color.is_none() {
            return Ok(Vec::new());
        }
        let same = |(_, c): &(usize, &[i64])| c[..2] == mine[..2];
        let mut members: Vec<(i64, usize)> =
            all.chunks_exact(3).enumerate().filter(same).map(|(r, c)| (c[2], r)).collect();
        members.sort_unstable();
        Ok(members.into_iter().map(|(_, r)| r).collect())
    }
}

impl Communicator {
    /// Creates child communicators: each rank names the parent ranks of its own child, in the child's
    /// order. An empty list takes part and joins none. Collective over this communicator. The child
    /// inherits options and observers, unless [`SplitOptions`] say otherwise; a name will do for these.
    ///
    /// The ranks first compare what they pass; if it does not fit together, nobody gets a child and all get an error that
    /// says who passed what. A child that fails leaves its parent and its siblings as they are, and the other way round.
    ///
    /// Counterpart: `torchcomms split`, `MPI_Comm_create_group`, `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends that cannot; `InvalidArgument` for duplicates, ranks out of range, a
    /// non-empty list without this rank, or operations of this communicator in flight; and, on all ranks, for lists or
    /// names that do not fit together; `PeerRefused` when another rank's arguments are bad in themselves, or it has
    /// operations in flight. The communicator stays usable after these.
    pub fn split(&self, ranks: &[usize], options: impl Into<SplitOptions>) -> Result<Option<Self>> {
        Splitting::admit(self, Choice::Ranks(ranks.to_vec()), options.into(), Form::Sync)?.finish()
    }

    /// Asynchronous [`split`](Self::split). Several may be under way at a time; they are ordered by their calls. When the
    /// work is dropped, the split runs to its end and the child is closed. It needs this communicator: when the last clone
    /// is dropped before, the work ends with `Finalized`, here, and with this rank's `PeerFailed` on the others.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` as there; the other errors, and `Finalized`, come from the work.
    pub fn split_async(&self, ranks: &[usize], options: impl Into<SplitOptions>) -> Result<Work<Option<Self>>> {
        Splitting::admit(self, Choice::Ranks(ranks.to_vec()), options.into(), Form::Async)?.launch()
    }

    /// Creates one child per colour, its ranks ordered by `key`, then by rank here. `None` joins none. Collective.
    ///
    /// Counterpart: `MPI_Comm_split`, `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn split_by(&self, color: Option<i64>, key: i64, options: impl Into<SplitOptions>) -> Result<Option<Self>> {
        Splitting::admit(self, Choice::Color(color, key), options.into(), Form::Sync)?.finish()
    }

    /// Asynchronous [`split_by`](Self::split_by); see [`split_async`](Self::split_async).
    ///
    /// # Errors
    ///
    /// As [`split_async`](Self::split_async).
    pub fn split_by_async(
        &self,
        color: Option<i64>,
        key: i64,
        options: impl Into<SplitOptions>,
    ) -> Result<Work<Option<Self>>> {
        Splitting::admit(self, Choice::Color(color, key), options.into(), Form::Async)?.launch()
    }

    /// The ranks on this rank's host.
    fn neighbours(&self) -> Choice {
        let hosts = &self.info().host_of;
        let here = hosts.get(self.rank());
        Choice::Ranks((0..self.size()).filter(|r| hosts.get(*r) == here).collect())
    }

    fn everybody(&self) -> Choice {
        Choice::Ranks((0..self.size()).collect())
    }

    /// Creates one child per host, in rank order. Collective. Counterpart: `MPI_Comm_split_type(SHARED)`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn split_by_host(&self, options: impl Into<SplitOptions>) -> Result<Self> {
        member(Splitting::admit(self, self.neighbours(), options.into(), Form::Sync)?.finish()?)
    }

    /// Asynchronous [`split_by_host`](Self::split_by_host); see [`split_async`](Self::split_async).
    ///
    /// # Errors
    ///
    /// As [`split_async`](Self::split_async).
    pub fn split_by_host_async(&self, options: impl Into<SplitOptions>) -> Result<Work<Self>> {
        Splitting::admit(self, self.neighbours(), options.into(), Form::Async)?.launch_member()
    }

    /// Creates a communicator with the same members and numbers of its own. Collective. Counterpart: `MPI_Comm_dup`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn dup(&self, options: impl Into<SplitOptions>) -> Result<Self> {
        member(Splitting::admit(self, self.everybody(), options.into(), Form::Sync)?.finish()?)
    }

    /// Asynchronous [`dup`](Self::dup); see [`split_async`](Self::split_async). Counterpart: `MPI_Comm_idup`.
    ///
    /// # Errors
    ///
    /// As [`split_async`](Self::split_async).
    pub fn dup_async(&self, options: impl Into<SplitOptions>) -> Result<Work<Self>> {
        Splitting::admit(self, self.everybody(), options.into(), Form::Async)?.launch_member()
    }
}
