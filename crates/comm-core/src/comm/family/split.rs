//! Children: communicators of some of the members.

use std::sync::Arc;

use crate::backend::SplitRequest;
use crate::comm::{Communicator, HandleState, check};
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
        Self::assemble(backend, i.device, options, roots, Arc::clone(&i.observers), HandleState::Live).map(Some)
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
}
