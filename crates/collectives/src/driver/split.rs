//! Children of a mesh: groups on the parent's endpoint, over the same links.
//!
//! A split has two numbers. At the first all ranks tell each other hashes of what they pass, from which each works out
//! the same verdict. If it is good, each makes its child, and the second number is where they wait for each other:
//! nobody may send to a group before everybody has made it. If it is bad, the second number is where they pass the
//! lists themselves, so that the error can say whose do not fit.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use comm_core::{DType, Device, Error, Fnv, OpDesc, Operation, RawBuf, RawBufMut, Result, SplitRequest};
use comm_transport::GroupSpec;

use super::buffers::{Buffers, Space};
use super::mesh::{MeshBackend, MeshOptions};
use super::task::Collective;
use crate::schedule::{AnySchedule, Request, Shape};
use crate::select::Algorithm;

/// Longest part of a child's name that is shown to others.
const NAME: usize = 64;
/// Bytes of lists that the ranks show each other at most when these do not fit together.
const SHOWN: usize = 4 << 20;
/// Ranks of a list that are printed.
const PRINTED: usize = 16;

/// What a rank passes, in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Vote {
    /// Hash of the sorted list.
    members: u64,
    /// Hash of the list in its order.
    order: u64,
    /// Hash of the child's name.
    name: u64,
    /// Length of the list.
    len: u64,
}

impl Vote {
    const BYTES: usize = 32;

    fn new(ranks: &[usize], name: &str) -> Self {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        Self { members: hash(&sorted), order: hash(ranks), name: Fnv::hash(name.as_bytes()), len: ranks.len() as u64 }
    }

    fn to_bytes(self) -> Vec<u8> {
        [self.members, self.order, self.name, self.len].iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn from_bytes(b: &[u8]) -> Self {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| b[8 * i + k]));
        Self { members: word(0), order: word(1), name: word(2), len: word(3) }
    }
}

/// What a rank passes in full: its list and the beginning of the name.
type Entry = (Vec<usize>, String);

impl MeshBackend {
    /// Creates this rank's child, after all members have seen that all lists fit together.
    pub(super) fn split_group(&self, request: &SplitRequest) -> Result<Option<Self>> {
        let until = self.endpoint.clock().now().after(request.timeout);
        let left = || until.since(self.endpoint.clock().now());
        let options = self.child_options(request).map_err(|e| self.refuse_split(request.seq, e))?;
        let mine = Vote::new(&request.ranks, request.options.effective_name());
        let votes = self.pass_around(request.seq, &mine.to_bytes(), left())?;
        let votes: Vec<Vote> = votes.chunks_exact(Vote::BYTES).map(Vote::from_bytes).collect();
        if let Err(misfit) = check(&votes) {
            let text = self.explain(request, &votes, misfit, left())?;
            return Err(Error::invalid(text));
        }
        let child = if request.ranks.is_empty() { None } else { Some(self.child(request, &mine, options)) };
        let child = child.transpose().map_err(|e| self.refuse_split(request.seq + 1, e))?;
        self.pass_around(request.seq + 1, &[1], left())?;
        Ok(child)
    }

    /// The others need not wait for this rank.
    fn refuse_split(&self, seq: u64, e: Error) -> Error {
        self.endpoint.refuse(self.group, seq, OpDesc::new(Operation::Split), &e.kind().to_string());
        e
    }

    /// The parent's settings, except for what the child's hints say.
    fn child_options(&self, request: &SplitRequest) -> Result<MeshOptions> {
        let own = MeshOptions::of(&request.options)?;
        let forced = if request.options.hints.contains_key("algo") { own.forced } else { self.options.forced.clone() };
        Ok(MeshOptions { forced, ..self.options.clone() })
    }

    fn child(&self, request: &SplitRequest, vote: &Vote, options: MeshOptions) -> Result<Self> {
        let ranks = &request.ranks;
        let mut id = Fnv::default();
        for part in [self.spec.id, request.seq, vote.order, vote.name] {
            id.write(&part.to_le_bytes());
        }
        let spec = GroupSpec {
            id: id.finish(),
            name: request.options.effective_name().into(),
            members: ranks.iter().map(|r| self.spec.members[*r]).collect(),
            ..self.spec.clone()
        };
        self.descend(ranks, spec, options)
    }

    /// A mesh of some of this one's members, in the order of `ranks`.
    pub(super) fn descend(&self, ranks: &[usize], spec: GroupSpec, options: MeshOptions) -> Result<Self> {
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
        let regroup = self.regroup.as_ref().map(|r| r.branch(&spec.name, spec.generation));
        let mut child = Self::new(Arc::clone(&self.endpoint), spec, info, options)?;
        child.regroup = regroup;
        Ok(child)
    }

    /// Everybody's bytes, as many from each rank, gathered as a collective of its own number, so that ranks that
    /// refuse, differ or do not come are noticed as in any other call.
    fn pass_around(&self, seq: u64, input: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let (n, bytes) = (self.info.size, input.len());
        let mut output = vec![0u8; n * bytes];
        let from = RawBuf::new(input.as_ptr(), bytes, DType::U8, Device::CPU);
        let to = RawBufMut::new(output.as_mut_ptr(), output.len(), DType::U8, Device::CPU);
        let shape = Shape { rank: self.info.rank, size: n, bytes, unit: 1, in_place: false, segment: 0 };
        let algorithm = if n <= 8 { Algorithm::AllGatherDirect } else { Algorithm::AllGatherRing };
        let schedule = AnySchedule::new(algorithm, &Request::even(shape, 0))?;
        let buffers = Buffers::new(Space::read(&from), Space::write(&to), &self.pool);
        let mut task = Collective::new(schedule, buffers, None, self.info.rank, n);
        let mut desc = OpDesc::new(Operation::Split);
        desc.flags = algorithm.code();
        // `input` and `output` live until this returns, and nothing touches them after that.
        self.endpoint.run(self.group, Some(seq), desc, timeout, &mut task)?;
        Ok(output)
    }

    /// What does not fit, and whose. The same text on all ranks.
    fn explain(&self, request: &SplitRequest, votes: &[Vote], misfit: Misfit, timeout: Duration) -> Result<String> {
        let longest = votes.iter().map(|v| v.len).max().unwrap_or(0) as usize;
        let bytes = NAME + 4 * longest;
        if votes.len().saturating_mul(bytes) > SHOWN {
            return Ok(misfit.to_string());
        }
        let mut mine = vec![0u8; bytes];
        let name = request.options.effective_name();
        let mut end = name.len().min(NAME);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        mine[..end].copy_from_slice(&name.as_bytes()[..end]);
        for (place, rank) in mine[NAME..].chunks_exact_mut(4).zip(&request.ranks) {
            place.copy_from_slice(&(*rank as u32).to_le_bytes());
        }
        let all = self.pass_around(request.seq + 1, &mine, timeout)?;
        let entries: Vec<Entry> = all.chunks_exact(bytes).zip(votes).map(|(b, v)| entry(b, v)).collect();
        Ok(difference(&entries).unwrap_or_else(|| misfit.to_string()))
    }
}

fn entry(bytes: &[u8], vote: &Vote) -> Entry {
    let (name, list) = bytes.split_at(NAME);
    let name = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
    let ranks = list.as_chunks().0.iter().take(vote.len as usize).map(|r| u32::from_le_bytes(*r) as usize).collect();
    (ranks, name)
}

fn hash(ranks: &[usize]) -> u64 {
    let mut h = Fnv::default();
    for r in ranks {
        h.write(&(*r as u64).to_le_bytes());
    }
    h.finish()
}

/// Which lists do not fit together, as far as hashes tell.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Misfit {
    /// Not all ranks of a list, and only they, pass it.
    Members { len: u64, ranks: Vec<usize> },
    /// They pass it in different orders.
    Order { ranks: Vec<usize> },
    /// They give the child different names.
    Name { ranks: Vec<usize> },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("split lists do not fit together: ")?;
        match self {
            Self::Members { len, ranks } => {
                write!(f, "a list of {len} ranks was passed by {} ranks, {}", ranks.len(), Listed(ranks))
            }
            Self::Order { ranks } => write!(f, "ranks {} pass the same ranks in different orders", Listed(ranks)),
            Self::Name { ranks } => write!(f, "ranks {} give the child different names", Listed(ranks)),
        }
    }
}

/// Each list must be passed by exactly its ranks, in the same order and with the same name. Same verdict on all ranks.
fn check(votes: &[Vote]) -> Result<(), Misfit> {
    let mut children: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (rank, vote) in votes.iter().enumerate().filter(|(_, v)| v.len > 0) {
        children.entry(vote.members).or_default().push(rank);
    }
    for ranks in children.values() {
        let len = votes[ranks[0]].len;
        if len != ranks.len() as u64 {
            return Err(Misfit::Members { len, ranks: ranks.clone() });
        }
    }
    for ranks in children.into_values() {
        let first = votes[ranks[0]];
        if ranks.iter().any(|r| votes[*r].order != first.order) {
            return Err(Misfit::Order { ranks });
        }
        if ranks.iter().any(|r| votes[*r].name != first.name) {
            return Err(Misfit::Name { ranks });
        }
    }
    Ok(())
}

/// The first thing that does not fit, with the lists.
fn difference(entries: &[Entry]) -> Option<String> {
    let sorted = |list: &[usize]| {
        let mut list = list.to_vec();
        list.sort_unstable();
        list
    };
    let with_members = || entries.iter().enumerate().filter(|(_, (list, _))| !list.is_empty());
    for (rank, (list, _)) in with_members() {
        let same = sorted(list);
        let other = |m: &&usize| entries.get(**m).is_some_and(|(theirs, _)| sorted(theirs) != same);
        let others: Vec<usize> = list.iter().filter(other).copied().collect();
        let Some(first) = others.first() else { continue };
        let theirs = &entries[*first].0;
        let absent: Vec<usize> = others.iter().filter(|m| entries[**m].0.is_empty()).copied().collect();
        return Some(if absent.is_empty() {
            format!(
                "split lists overlap: rank {rank} passed {}, but rank {first}, which is in it, passed {}; all ranks of a \
                 child pass the same list",
                Listed(list),
                Listed(theirs)
            )
        } else {
            format!(
                "split lists do not fit together: rank {rank} passed {}, but {} {} in it and passed an empty list",
                Listed(list),
                if absent.len() == 1 { format!("rank {}", absent[0]) } else { format!("ranks {}", Listed(&absent)) },
                if absent.len() == 1 { "is" } else { "are" }
            )
        });
    }
    for (rank, (list, name)) in with_members() {
        for m in list {
            let (theirs, their_name) = entries.get(*m)?;
            if theirs != list {
                return Some(format!(
                    "split lists are in different orders: rank {rank} passed {}, rank {m} passed {}",
                    Listed(list),
                    Listed(theirs)
                ));
            }
            if their_name != name {
                return Some(format!(
                    "the names of the child differ: rank {rank} calls it '{name}', rank {m} '{their_name}'"
                ));
            }
        }
    }
    None
}

/// A list of ranks, not too long.
struct Listed<'a>(&'a [usize]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() <= PRINTED {
            return write!(f, "{:?}", self.0);
        }
        f.write_str("[")?;
        for r in &self.0[..PRINTED] {
            write!(f, "{r}, ")?;
        }
        write!(f, "and {} more]", self.0.len() - PRINTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(lists: &[(&[usize], &str)]) -> (Result<(), Misfit>, Option<String>) {
        let votes: Vec<Vote> = lists.iter().map(|(l, n)| Vote::new(l, n)).collect();
        for v in &votes {
            assert_eq!(Vote::from_bytes(&v.to_bytes()), *v);
        }
        let entries: Vec<Entry> = lists.iter().map(|(l, n)| (l.to_vec(), (*n).to_owned())).collect();
        (check(&votes), difference(&entries))
    }

    #[test]
    fn lists_are_accepted_when_all_their_members_pass_them() {
        assert_eq!(verdict(&[(&[2, 0], "a"), (&[1], "b"), (&[2, 0], "a"), (&[], "c")]), (Ok(()), None));
    }

    #[test]
    fn what_does_not_fit_is_told_apart() {
        let (v, text) = verdict(&[(&[0, 1], "a"), (&[1, 2], "a"), (&[1, 2], "a")]);
        assert_eq!(v, Err(Misfit::Members { len: 2, ranks: vec![0] }));
        assert!(text.unwrap().starts_with("split lists overlap: rank 0 passed [0, 1], but rank 1"));
        let (v, text) = verdict(&[(&[0, 1, 2], "a"), (&[], "a"), (&[], "a")]);
        assert!(matches!(v, Err(Misfit::Members { .. })));
        assert!(text.unwrap().contains("but ranks [1, 2] are in it and passed an empty list"));
        let (v, text) = verdict(&[(&[0, 1], "a"), (&[1, 0], "a"), (&[2], "a")]);
        assert_eq!(v, Err(Misfit::Order { ranks: vec![0, 1] }));
        assert!(text.unwrap().contains("rank 0 passed [0, 1], rank 1 passed [1, 0]"));
        let (v, text) = verdict(&[(&[0, 1], "a"), (&[0, 1], "b"), (&[2], "a")]);
        assert_eq!(v, Err(Misfit::Name { ranks: vec![0, 1] }));
        assert!(text.unwrap().contains("rank 0 calls it 'a', rank 1 'b'"));
    }

    #[test]
    fn long_lists_are_cut_short() {
        let all: Vec<usize> = (0..40).collect();
        assert!(Listed(&all).to_string().ends_with("15, and 24 more]"));
    }
}
