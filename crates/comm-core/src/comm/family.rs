//! Communicators made from communicators: children, copies, and new memberships.

use std::sync::Arc;
use std::time::Duration;

use super::{Communicator, check};
use crate::backend::{ReconfigureRequest, SplitRequest};
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, Result};
use crate::observe::Event;

impl Communicator {
    /// Creates child communicators: each rank names the parent ranks of its own child, in the child's
    /// order. An empty list takes part and joins none. Collective over this communicator. The child
    /// inherits options and observers.
    ///
    /// Counterpart: `torchcomms split`, `MPI_Comm_create_group`, `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends that cannot; `InvalidArgument` for duplicates, ranks out of range, a
    /// non-empty list without this rank, and, on all ranks, for lists that do not fit together;
    /// `PeerRefused` when another rank's list is bad in itself.
    pub fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Self>> {
        let i = self.inner();
        let ticket = self.begin(OpDesc::new(Operation::Split))?;
        if let Err(e) = check::split_list(ranks, i.rank(), i.size()) {
            return Err(ticket.refuse(e));
        }
        let mut options = i.options.clone();
        options.name = Some(name.to_owned());
        options.rank = ranks.iter().position(|r| *r == i.rank());
        options.size = (!ranks.is_empty()).then_some(ranks.len());
        let seq = ticket.collective_seq().unwrap_or(0);
        let request = SplitRequest::new(ranks.to_vec(), seq, options.clone(), i.options.timeout);
        let child = ticket.complete(i.backend.split(&request))?;
        let Some(backend) = child else { return Ok(None) };
        let roots = ranks.iter().map(|r| i.ranks[*r]).collect();
        if i.observers.any() {
            i.observers.event(&Event::Split { comm: &i.name, child: name, ranks }, i.clock().now());
        }
        Self::assemble(backend, i.device, options, roots, Some(Arc::clone(&i.observers))).map(Some)
    }

    /// Creates one child per colour, its ranks ordered by `key`, then by rank here. `None` joins none. Collective.
    ///
    /// Counterpart: `MPI_Comm_split`, `ncclCommSplit`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn split_by(&self, color: Option<i64>, key: i64, name: &str) -> Result<Option<Self>> {
        let mine = [i64::from(color.is_some()), color.unwrap_or(0), key];
        let mut all = vec![0i64; 3 * self.size()];
        self.all_gather(&mine, &mut all)?;
        let mut members: Vec<(i64, usize)> = Vec::new();
        if color.is_some() {
            let same = |(_, c): &(usize, &[i64])| c[..2] == mine[..2];
            members.extend(all.chunks_exact(3).enumerate().filter(same).map(|(r, c)| (c[2], r)));
            members.sort_unstable();
        }
        let ranks: Vec<usize> = members.into_iter().map(|(_, r)| r).collect();
        self.split(&ranks, name)
    }

    /// Creates one child per host, in rank order. Collective. Counterpart: `MPI_Comm_split_type(SHARED)`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn split_by_host(&self, name: &str) -> Result<Self> {
        let hosts = &self.info().host_of;
        let here = hosts.get(self.rank());
        let ranks: Vec<usize> = (0..self.size()).filter(|r| hosts.get(*r) == here).collect();
        self.split(&ranks, name)?.ok_or_else(|| Error::invalid("this rank is on no host"))
    }

    /// Creates a communicator with the same members and numbers of its own. Collective. Counterpart: `MPI_Comm_dup`.
    ///
    /// # Errors
    ///
    /// As [`split`](Self::split).
    pub fn dup(&self, name: &str) -> Result<Self> {
        let ranks: Vec<usize> = (0..self.size()).collect();
        self.split(&ranks, name)?.ok_or_else(|| Error::invalid("this rank is not a member"))
    }

    /// The opaque handle by which `reconfigure` can name this member.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends with a fixed membership.
    pub fn init_handle(&self) -> Result<String> {
        self.inner().backend.init_handle()
    }

    /// A communicator with a new membership: rank = index in `handles`. `uuid` names the attempt.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends with a fixed membership; `Timeout` when not all members came.
    pub fn reconfigure(&self, uuid: u64, handles: &[String], timeout: Duration) -> Result<Self> {
        let i = self.inner();
        let ticket = self.begin(OpDesc::new(Operation::Reconfigure))?;
        let request = ReconfigureRequest::new(uuid, handles.to_vec(), timeout, i.options.clone());
        let backend = ticket.complete(i.backend.reconfigure(&request))?;
        let generation = backend.info().generation;
        if i.observers.any() {
            i.observers.event(&Event::Reconfigured { comm: &i.name, generation }, i.clock().now());
        }
        let ranks = (0..backend.info().size).collect();
        Self::assemble(backend, i.device, i.options.clone(), ranks, Some(Arc::clone(&i.observers)))
    }

    /// The members of a failed communicator that are still there, as all of them see it.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends that cannot agree after a failure; `Timeout`.
    pub fn agree_survivors(&self, timeout: Duration) -> Result<Vec<usize>> {
        self.inner().backend.agree_survivors(timeout)
    }

    /// A communicator of the survivors, in their old order.
    ///
    /// # Errors
    ///
    /// As [`agree_survivors`](Self::agree_survivors).
    pub fn shrink(&self, timeout: Duration) -> Result<Self> {
        let i = self.inner();
        let survivors = i.backend.agree_survivors(timeout)?;
        let backend = i.backend.shrink(&survivors, timeout)?;
        let ranks = survivors.iter().map(|r| i.ranks[*r]).collect();
        Self::assemble(backend, i.device, i.options.clone(), ranks, Some(Arc::clone(&i.observers)))
    }
}
