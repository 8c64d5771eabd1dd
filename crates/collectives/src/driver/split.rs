//! Children of a mesh: groups on the parent's endpoint, over the same links.

use std::collections::BTreeMap;
use std::sync::Arc;

use comm_core::{Control, DType, Device, Error, Fnv, OpDesc, Operation, RawBuf, RawBufMut, Result, SplitRequest};
use comm_transport::GroupSpec;

use super::buffers::{Buffers, Space};
use super::mesh::MeshBackend;
use super::task::Collective;
use crate::schedule::{AnySchedule, Request, Shape};
use crate::select::Algorithm;

/// Bytes that each rank contributes to the validation round: the hash of its list, and its length.
const VOTE: usize = 16;

impl MeshBackend {
    /// Creates this rank's child, after all members have seen that all lists fit together.
    pub(super) fn split_group(&self, request: &SplitRequest) -> Result<Option<Self>> {
        let name = request.options.effective_name();
        let mine = hash(&request.ranks, name);
        let votes = self.vote(request, mine)?;
        check(&votes)?;
        let child = if request.ranks.is_empty() { None } else { Some(self.child(request, mine)?) };
        // Nobody may send to a group before everybody has made it.
        Control::barrier(self.control.as_ref(), request.timeout)?;
        Ok(child)
    }

    fn child(&self, request: &SplitRequest, hash: u64) -> Result<Self> {
        let ranks = &request.ranks;
        let mut id = Fnv::default();
        for part in [self.spec.id, request.seq, hash] {
            id.write(&part.to_le_bytes());
        }
        let spec = GroupSpec {
            id: id.finish(),
            name: request.options.effective_name().into(),
            members: ranks.iter().map(|r| self.spec.members[*r]).collect(),
            ..self.spec.clone()
        };
        self.descend(ranks, spec)
    }

    /// A mesh of some of this one's members, in the order of `ranks`.
    pub(super) fn descend(&self, ranks: &[usize], spec: GroupSpec) -> Result<Self> {
        let rank = ranks
            .iter()
            .position(|r| *r == self.info.rank)
            .ok_or_else(|| Error::invalid(format!("the list {ranks:?} does not contain rank {}", self.info.rank)))?;
        let hosts: Vec<String> = ranks.iter().map(|r| self.info.hosts[*r].clone()).collect();
        let places: Vec<usize> = ranks.iter().map(|r| self.info.host_of[*r]).collect();
        let mut info = self.info.clone();
        info.generation = spec.generation;
        info.rank = rank;
        info.size = ranks.len();
        info.local_rank = places[..rank].iter().filter(|h| **h == places[rank]).count();
        info.local_size = places.iter().filter(|h| **h == places[rank]).count();
        info.hosts = hosts;
        info.host_of = places;
        Self::new(Arc::clone(&self.endpoint), spec, info, self.options.clone())
    }

    /// Everybody's hash and length, gathered as a collective of its own number, so that ranks that
    /// refuse, differ or do not come are noticed as in any other call.
    fn vote(&self, request: &SplitRequest, hash: u64) -> Result<Vec<(u64, u64)>> {
        let n = self.info.size;
        let mut input = [0u8; VOTE];
        input[..8].copy_from_slice(&hash.to_le_bytes());
        input[8..].copy_from_slice(&(request.ranks.len() as u64).to_le_bytes());
        let mut output = vec![0u8; n * VOTE];
        let from = RawBuf::new(input.as_ptr(), VOTE, DType::U8, Device::CPU);
        let to = RawBufMut::new(output.as_mut_ptr(), output.len(), DType::U8, Device::CPU);
        let shape = Shape { rank: self.info.rank, size: n, bytes: VOTE, unit: 1, in_place: false, segment: 0 };
        let algorithm = if n <= 8 { Algorithm::AllGatherDirect } else { Algorithm::AllGatherRing };
        let schedule = AnySchedule::new(algorithm, &Request::even(shape, 0))?;
        let buffers = Buffers::new(Space::read(&from), Space::write(&to), &self.pool);
        let mut task = Collective::new(schedule, buffers, None, self.info.rank, n);
        let mut desc = OpDesc::new(Operation::Split);
        desc.flags = algorithm.code();
        // `input` and `output` live until this returns, and nothing touches them after that.
        self.endpoint.run(self.group, Some(request.seq), desc, request.timeout, &mut task)?;
        let word = |c: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| c[i]));
        Ok(output.chunks_exact(VOTE).map(|c| (word(&c[..8]), word(&c[8..]))).collect())
    }
}

fn hash(ranks: &[usize], name: &str) -> u64 {
    let mut h = Fnv::default();
    for r in ranks {
        h.write(&(*r as u64).to_le_bytes());
    }
    h.write(name.as_bytes());
    h.finish()
}

/// Each list must be named by exactly as many ranks as it has. Same verdict on all ranks.
fn check(votes: &[(u64, u64)]) -> Result<()> {
    let mut lists: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (rank, (hash, len)) in votes.iter().enumerate() {
        if *len > 0 {
            lists.entry(*hash).or_default().push(rank);
        }
    }
    for ranks in lists.values() {
        let len = votes[ranks[0]].1;
        if len != ranks.len() as u64 {
            return Err(Error::invalid(format!(
                "split lists do not fit together: a list of {len} ranks was passed by {} ranks, {ranks:?}; all members \
                 of a child pass the same list and name",
                ranks.len()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_accepted_when_all_their_members_pass_them() {
        check(&[(1, 2), (2, 1), (1, 2), (9, 0)]).unwrap();
        let e = check(&[(1, 2), (2, 1), (3, 2), (9, 0)]).unwrap_err();
        assert!(e.to_string().contains("do not fit together"), "{e}");
    }
}
