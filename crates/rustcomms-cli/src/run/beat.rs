//! How the launchers of several nodes know that the others are there.
//!
//! Each adds to a number of its own in the store once a second. Node 0 watches the numbers of those who have joined and
//! not left, and reports the failure of one that stands still, as its node would have reported it. The others hear of
//! node 0's end by the end of its store, and here that the store is there but silent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Result, Store};

use super::nodes::{Failure, announce};
use super::{Event, survive};

/// The nodes that have joined: their numbers, each with a comma behind.
const JOINED: &str = "roster";
/// Those that need nobody any more, alike.
const LEFT: &str = "left";
/// What launchers were told that were not let in, a line for each.
const REFUSED: &str = "refused";

/// From one beat to the next.
const EVERY: Duration = Duration::from_secs(1);
/// What a launcher may take to come from one beat to the next, on however loaded a machine.
const SILENCE: Duration = Duration::from_secs(10);
/// What counts of the time between two looks: if it was longer, then node 0 was the slow one.
const LOOK: Duration = Duration::from_secs(2);
/// How long a store that can be reached may leave all calls without an answer.
const UNANSWERED: Duration = Duration::from_secs(30);
/// Beats that are asked for in one call.
const AT_ONCE: usize = 1000;

/// The pairs that node 0 sets before another node can come.
pub(super) const EMPTY: [(&str, &[u8]); 3] = [(JOINED, b""), (LEFT, b""), (REFUSED, b"")];

fn key(node: usize) -> String {
    format!("beat/{node}")
}

/// Enters `node`, whose beats must follow.
pub(super) fn enter(store: &dyn Store, node: usize) -> Result<()> {
    store.add(&key(node), 1)?;
    store.append(JOINED, format!("{node},").as_bytes())
}

/// `node` need not be watched any more, nor waited for.
pub(super) fn part(store: &dyn Store, node: usize) -> Result<()> {
    store.append(LEFT, format!("{node},").as_bytes())?;
    // Who ends before it knows how its ranks have ended is not to be asked any more.
    store.compare_set(&survive::key(node), b"", survive::UNKNOWN)?;
    store.set(&done_key(node), b"")
}

/// Exists when a node needs the store no more.
pub(super) fn done_key(node: usize) -> String {
    format!("done/{node}")
}

/// Lets node 0 know that somebody was not let in.
pub(super) fn refused(store: &dyn Store, text: &str) -> Result<()> {
    store.append(REFUSED, format!("{}\n", text.replace('\n', " ")).as_bytes())
}

/// Beats for `node` as long as the process lives; on node 0, watches the others' beats. The loss of one ends the run, or
/// with `goes_on`, is only told.
pub(super) fn beat(store: &dyn Store, node: usize, addr: &str, goes_on: bool, events: &Sender<Event>) {
    let (mut watch, mut answered, mut looked) = (Watch::default(), Instant::now(), Instant::now());
    loop {
        std::thread::sleep(EVERY);
        let passed = looked.elapsed().min(LOOK);
        looked = Instant::now();
        let result =
            if node == 0 { watch.look(store, passed, goes_on, events) } else { store.add(&key(node), 1).map(drop) };
        match result {
            Ok(()) => answered = Instant::now(),
            Err(e) if node > 0 && matches!(e.kind(), ErrorKind::Timeout { .. }) && answered.elapsed() > UNANSWERED => {
                let text = format!("node 0's store at {addr} has not answered for {UNANSWERED:.0?}");
                // The main thread is gone only if the process ends.
                let _ = events.send(Event::StoreLost(text));
                return;
            }
            // If the store is gone, the thread that waits for failures tells.
            Err(_) => {}
        }
    }
}

/// What node 0 knows of the others.
#[derive(Debug, Default)]
struct Watch {
    pulses: BTreeMap<usize, Pulse>,
    /// Bytes of [`REFUSED`] that have been told.
    told: usize,
}

#[derive(Debug, Default)]
struct Pulse {
    beat: Vec<u8>,
    still: Duration,
}

impl Watch {
    fn look(&mut self, store: &dyn Store, passed: Duration, goes_on: bool, events: &Sender<Event>) -> Result<()> {
        let lists = store.multi_get(&[JOINED, LEFT, REFUSED], EVERY)?;
        let [joined, left, refused] = lists.as_slice() else { return Ok(()) };
        if let Some(new) = refused.get(self.told..) {
            for line in String::from_utf8_lossy(new).lines() {
                // The main thread is gone only if the process ends.
                let _ = events.send(Event::Refused(line.to_owned()));
            }
            self.told = refused.len();
        }
        let there: Vec<usize> = numbers(joined).difference(&numbers(left)).copied().collect();
        let mut beats = Vec::with_capacity(there.len());
        for some in there.chunks(AT_ONCE) {
            let keys: Vec<String> = some.iter().map(|n| key(*n)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            beats.extend(store.multi_get(&keys, EVERY)?);
        }
        for node in self.silent(there.into_iter().zip(beats).collect(), passed) {
            let text = format!("the launcher has not been heard of for {SILENCE:.0?}; it or its host is gone");
            if goes_on {
                // The main thread is gone only if the process ends.
                let _ = events.send(Event::NodeLost(format!("node {node}: {text}")));
            } else {
                announce(store, 0, usize::MAX, &Failure { node, code: 1, last: true, text })?;
            }
            part(store, node)?;
        }
        Ok(())
    }

    /// Takes the beats of all who should live in, `passed` after the ones before; returns who has been still too long.
    fn silent(&mut self, beats: Vec<(usize, Vec<u8>)>, passed: Duration) -> Vec<usize> {
        let mut before = std::mem::take(&mut self.pulses);
        for (node, beat) in beats {
            let still = before.remove(&node).filter(|p| p.beat == beat).map_or(Duration::ZERO, |p| p.still + passed);
            self.pulses.insert(node, Pulse { beat, still });
        }
        self.pulses.iter().filter(|(_, p)| p.still >= SILENCE).map(|(node, _)| *node).collect()
    }
}

fn numbers(list: &[u8]) -> BTreeSet<usize> {
    String::from_utf8_lossy(list).split(',').filter_map(|n| n.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use comm_store::MemoryStore;

    use super::*;

    fn beats(of: &[(usize, &str)]) -> Vec<(usize, Vec<u8>)> {
        of.iter().map(|(n, b)| (*n, b.as_bytes().to_vec())).collect()
    }

    #[test]
    fn who_stands_still_long_enough_is_silent() {
        let mut watch = Watch::default();
        assert!(watch.silent(beats(&[(1, "1"), (2, "1")]), LOOK).is_empty());
        for i in 0..4 {
            assert!(watch.silent(beats(&[(1, "1"), (2, &i.to_string())]), LOOK).is_empty());
        }
        // Slow, but in time; who joins late begins anew; who leaves is forgotten.
        assert!(watch.silent(beats(&[(1, "2"), (2, "9"), (3, "1")]), LOOK).is_empty());
        for _ in 0..4 {
            assert!(watch.silent(beats(&[(1, "2"), (2, "9"), (3, "1")]), LOOK).is_empty());
        }
        assert_eq!(watch.silent(beats(&[(1, "2"), (3, "2")]), LOOK), [1]);
    }

    #[test]
    fn a_silent_node_fails_in_the_first_generation_that_has_not() {
        let store = MemoryStore::new();
        store.multi_set(&EMPTY).unwrap();
        enter(&store, 1).unwrap();
        enter(&store, 2).unwrap();
        let first = Failure { node: 2, code: 3, last: false, text: "a rank".into() };
        announce(&store, 0, 5, &first).unwrap();
        refused(&store, "not\nyou").unwrap();
        let (tx, rx) = mpsc::channel();
        let mut watch = Watch::default();
        for i in 0..9 {
            store.add(&key(1), i).unwrap();
            watch.look(&store, LOOK, false, &tx).unwrap();
        }
        let told: Vec<Event> = rx.try_iter().collect();
        assert!(matches!(&told[..], [Event::Refused(text)] if text == "not you"), "{told:?}");
        let get = |k: &str| store.get(k, Duration::ZERO).map(|v| Failure::decode(&v));
        assert_eq!(get("failure/0").unwrap(), first);
        let lost = get("failure/1").unwrap();
        assert!(lost.node == 2 && lost.last && lost.text.contains("not been heard of for 10s"), "{lost:?}");
        // Once, and nobody waits for it.
        assert!(get("failure/2").is_err());
        assert!(store.check(&["done/2"]).unwrap() && !store.check(&["done/1"]).unwrap());
    }
}
