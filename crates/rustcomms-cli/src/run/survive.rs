//! What `--on-failure continue` adds: who ended how, and what the exit code is when some ranks failed and others did not.
//!
//! On several nodes each launcher leaves in the store how its ranks ended. One of whose ranks none ended well cannot know
//! whether another node's will, so it waits for node 0, which waits for all, to say so.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use comm_core::{ErrorKind, Result, Store};

use super::bind;
use super::ranks::{Outcome, Rank, signal};

/// At least one rank of the node has ended well.
const WELL: &[u8] = b"well";
/// All have ended, none of them well.
const FAILED: &[u8] = b"failed";
/// The launcher ended before it could tell.
pub(super) const UNKNOWN: &[u8] = b"unknown";
/// Where node 0 says how the run has ended: as the ranks of a node do.
const VERDICT: &str = "verdict";
/// The longest that one wait takes: connections that are silent for long are cut by firewalls.
const ONCE: Duration = Duration::from_secs(30);

/// Where it stands how the ranks of a node ended.
pub(super) fn key(node: usize) -> String {
    format!("outcome/{node}")
}

/// Exists once a node has joined node 0.
pub(super) fn joined_key(node: usize) -> String {
    format!("joined/{node}")
}

/// Who ended how, if not all did well.
pub(super) fn summary<'r>(ranks: impl IntoIterator<Item = &'r Rank>) -> Option<String> {
    summarize(ranks.into_iter().map(|r| (r.rank, r.ended)))
}

fn summarize(ranks: impl Iterator<Item = (usize, Option<Outcome>)>) -> Option<String> {
    let (mut well, mut others) = (BTreeSet::new(), BTreeMap::<String, (bool, BTreeSet<usize>)>::new());
    for (rank, ended) in ranks {
        let (killed, how) = match ended {
            Some(Outcome::Exited(0)) => {
                well.insert(rank);
                continue;
            }
            Some(Outcome::Exited(code)) => (false, format!("exited with code {code}")),
            Some(Outcome::Killed(s)) => (true, format!("killed by {}", signal(s))),
            None => (false, "could not be ended".to_owned()),
        };
        others.entry(how).or_insert_with(|| (killed, BTreeSet::new())).1.insert(rank);
    }
    if others.is_empty() {
        return None;
    }
    let name =
        |some: &BTreeSet<usize>| format!("{} {}", if some.len() == 1 { "rank" } else { "ranks" }, bind::show(some));
    let first = if well.is_empty() { "no rank ended well".to_owned() } else { format!("{} ended well", name(&well)) };
    let mut others: Vec<_> = others.into_iter().collect();
    others.sort_by_key(|(_, (_, some))| some.first().copied());
    let rest = others.iter().map(|(how, (killed, some))| {
        let verb = match (killed, some.len()) {
            (false, _) => "",
            (true, 1) => "was ",
            (true, _) => "were ",
        };
        format!("{} {verb}{how}", name(some))
    });
    Some(std::iter::once(first).chain(rest).collect::<Vec<_>>().join("; "))
}

/// Leaves word of how this node's ranks ended.
pub(super) fn leave_word(store: &dyn Store, node: usize, well: bool) -> Result<()> {
    store.set(&key(node), if well { WELL } else { FAILED })
}

/// Node 0's part: waits until the ranks of all nodes have ended that have come, and says whether any ended well. Nodes
/// that have not come are waited for as long as `patience`; the second value names those that did not.
pub(super) fn judge(store: &dyn Store, nnodes: usize, well: bool, patience: Duration) -> Result<(bool, Vec<usize>)> {
    let joined: Vec<String> = (1..nnodes).map(joined_key).collect();
    let there = store.wait(&joined.iter().map(String::as_str).collect::<Vec<_>>(), patience);
    let mut missing = Vec::new();
    if let Err(e) = there {
        if !matches!(e.kind(), ErrorKind::Timeout { .. }) {
            return Err(e);
        }
        for node in 1..nnodes {
            if !store.check(&[&joined_key(node)])? {
                missing.push(node);
            }
        }
    }
    let keys: Vec<String> = (1..nnodes).filter(|n| !missing.contains(n)).map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    patiently(|| store.wait(&keys, ONCE))?;
    let well = well || store.multi_get(&keys, ONCE)?.iter().any(|how| how == WELL);
    store.set(VERDICT, if well { WELL } else { FAILED })?;
    Ok((well, missing))
}

/// The other nodes' part, if none of their ranks has ended well.
pub(super) fn await_verdict(store: &dyn Store) -> Result<bool> {
    patiently(|| store.get(VERDICT, ONCE)).map(|v| v == WELL)
}

/// Asks again until there is an answer. The end of the store is one.
fn patiently<T>(mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match ask() {
            Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) => {}
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use comm_store::MemoryStore;

    use super::super::beat;
    use super::*;

    #[test]
    fn summaries_name_every_rank_once() {
        let sum = |ends: &[Option<Outcome>]| summarize(ends.iter().copied().enumerate());
        let (well, code, killed) = (Some(Outcome::Exited(0)), Some(Outcome::Exited(3)), Some(Outcome::Killed(9)));
        assert_eq!(sum(&[well, well]), None);
        let text = "ranks 0,2 ended well; rank 1 was killed by signal 9 (SIGKILL)";
        assert_eq!(sum(&[well, killed, well]).unwrap(), text);
        let text = "rank 4 ended well; ranks 0-1,5 exited with code 3; ranks 2-3 were killed by signal 9 (SIGKILL)";
        assert_eq!(sum(&[code, code, killed, killed, well, code]).unwrap(), text);
        assert_eq!(sum(&[None]).unwrap(), "no rank ended well; rank 0 could not be ended");
    }

    #[test]
    fn one_node_that_ended_well_is_enough() {
        for (ends, here, want) in [
            (&[false, true][..], false, true),
            (&[false, false], false, false),
            (&[false, false], true, true),
            (&[true, true], false, true),
        ] {
            let store = MemoryStore::new();
            for (i, well) in ends.iter().enumerate() {
                store.set(&joined_key(i + 1), b"").unwrap();
                leave_word(&store, i + 1, *well).unwrap();
                // What it has said stays.
                beat::part(&store, i + 1).unwrap();
            }
            assert_eq!(judge(&store, ends.len() + 1, here, Duration::ZERO).unwrap(), (want, vec![]));
            assert_eq!(await_verdict(&store).unwrap(), want);
        }
    }

    #[test]
    fn who_never_came_or_left_without_a_word_is_not_waited_for() {
        let store = MemoryStore::new();
        store.set(&joined_key(2), b"").unwrap();
        beat::part(&store, 2).unwrap();
        assert_eq!(judge(&store, 4, false, Duration::from_millis(1)).unwrap(), (false, vec![1, 3]));
    }
}
