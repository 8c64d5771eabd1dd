//! What the server knows: values, queues, and who waits for what. No sockets here.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use crate::protocol::{NOT_READY, READY, Request, STOP_WAITING, WAIT_CANCELED, parse_number, put_bytes};

/// Names a connection.
pub(crate) type ConnId = u64;

/// What one map entry costs beside its bytes: two vectors, their heap headers, the map's slack.
const ENTRY: usize = 128;

/// Replies up to this size are given although the store is full, so that it still answers questions.
const FREE_REPLY: usize = 64 << 10;

/// Why a request was not carried out. Its connection is closed: the protocol has no error replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It would need this many bytes more than are left.
    Memory(usize),
    /// The value is no number, or the sum does not fit.
    NotANumber(Vec<u8>),
    /// The connection waits already.
    SecondWait,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(n) => write!(f, "its request needs {n} bytes, more than the store's memory limit leaves"),
            Self::NotANumber(key) => {
                write!(f, "it added to '{}', which holds no number or would overflow", String::from_utf8_lossy(key))
            }
            Self::SecondWait => f.write_str("it began to wait while it was waiting"),
        }
    }
}

/// A connection in WAIT or BARRIER.
#[derive(Debug)]
struct Waiting {
    /// Registrations not yet used up.
    remaining: usize,
    /// Where the registrations are, to take them back.
    place: Place,
}

#[derive(Debug)]
enum Place {
    Keys(Vec<Vec<u8>>),
    Barrier(Vec<u8>),
}

/// The store itself.
#[derive(Debug, Default)]
pub(crate) struct State {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// Who waits for a key, each once, in order of arrival.
    waiters: HashMap<Vec<u8>, Vec<ConnId>>,
    /// Who waits at a barrier, and for how many.
    barriers: HashMap<Vec<u8>, Vec<(ConnId, i64)>>,
    waiting: HashMap<ConnId, Waiting>,
    /// Approximate memory of all of the above.
    bytes: usize,
}

impl State {
    /// The memory that this takes, approximately and rather too high.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Carries out `request` of `conn`: appends the reply to `out` and lists in `woken` the
    /// connections whose wait ended, which get a [`STOP_WAITING`] each. `budget` is the memory that
    /// the reply and what is stored may take.
    pub(crate) fn apply(
        &mut self,
        conn: ConnId,
        request: Request,
        budget: usize,
        out: &mut Vec<u8>,
        woken: &mut Vec<ConnId>,
    ) -> Result<(), Refused> {
        match request {
            Request::Validate => {}
            Request::Ping { nonce } => out.extend_from_slice(&nonce.to_le_bytes()),
            Request::Set { key, value } => {
                self.afford(budget, key.len() + value.len() + ENTRY)?;
                self.put(&key, value);
                self.wake_all(&key, woken);
            }
            Request::MultiSet { pairs } => {
                self.afford(budget, pairs.iter().map(|(k, v)| k.len() + v.len() + ENTRY).sum())?;
                for (key, value) in pairs {
                    self.put(&key, value);
                    self.wake_all(&key, woken);
                }
            }
            Request::CompareSet { key, expected, desired } => {
                self.afford(budget, key.len() + 2 * desired.len() + ENTRY)?;
                match self.values.get(&key) {
                    Some(current) if *current != expected => {
                        self.afford_reply(budget, current.len())?;
                        put_bytes(out, current);
                    }
                    // PyTorch answers with the expectation here, although nothing was stored.
                    None if !expected.is_empty() => put_bytes(out, &expected),
                    _ => {
                        put_bytes(out, &desired);
                        self.put(&key, desired);
                        self.wake_all(&key, woken);
                    }
                }
            }
            Request::Get { key } => {
                let value = self.values.get(&key).map_or(&[][..], |v| v);
                self.afford_reply(budget, value.len())?;
                put_bytes(out, value);
            }
            Request::MultiGet { keys } => {
                let values = || keys.iter().map(|k| self.values.get(k).map_or(&[][..], |v| v));
                self.afford_reply(budget, values().map(|v| v.len() + 8).sum())?;
                values().for_each(|v| put_bytes(out, v));
            }
            Request::Add { key, delta } => {
                let sum = self.add(&key, delta, budget, woken)?;
                out.extend_from_slice(&sum.to_le_bytes());
            }
            Request::Append { key, value } => {
                let growth = match self.values.get(&key) {
                    Some(v) if v.capacity() - v.len() >= value.len() => 0,
                    Some(v) => v.len().max(value.len()),
                    None => key.len() + value.len() + ENTRY,
                };
                self.afford(budget, growth)?;
                if let Some(v) = self.values.get_mut(&key) {
                    let before = v.capacity();
                    v.extend_from_slice(&value);
                    self.bytes += v.capacity() - before;
                } else {
                    self.put(&key, value);
                }
                self.wake_all(&key, woken);
            }
            Request::DeleteKey { key } => {
                let deleted = self.values.remove_entry(&key).map(|(k, v)| self.bytes -= cost(&k, &v)).is_some();
                out.extend_from_slice(&i64::from(deleted).to_le_bytes());
            }
            Request::Check { keys } => {
                let all = keys.iter().all(|k| self.exists(k));
                out.push(if all { READY } else { NOT_READY });
            }
            Request::GetNumKeys => out.extend_from_slice(&(self.values.len() as i64).to_le_bytes()),
            Request::ListKeys => {
                self.afford_reply(budget, self.values.keys().map(|k| k.len() + 8).sum())?;
                out.extend_from_slice(&(self.values.len() as i64).to_le_bytes());
                self.values.keys().for_each(|k| put_bytes(out, k));
            }
            Request::Wait { keys } => self.wait(conn, keys, budget, out)?,
            Request::CancelWait => {
                self.forget(conn);
                out.push(WAIT_CANCELED);
            }
            Request::Barrier { key, world_size } => {
                if self.waiting.contains_key(&conn) {
                    return Err(Refused::SecondWait);
                }
                self.afford(budget, 2 * (key.len() + ENTRY))?;
                let arrived = self.add(&key, 1, budget, woken)?;
                self.bytes += 2 * (key.len() + ENTRY);
                self.barriers.entry(key.clone()).or_default().push((conn, world_size));
                self.waiting.insert(conn, Waiting { remaining: 1, place: Place::Barrier(key.clone()) });
                self.open_barrier(key, arrived, woken);
            }
            Request::QueuePush { key, value } => {
                self.afford(budget, key.len() + value.len() + 2 * ENTRY)?;
                self.bytes += value.capacity() + ENTRY;
                if !self.queues.contains_key(&key) {
                    self.bytes += key.len() + ENTRY;
                }
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.wake_one(&key, woken);
            }
            Request::QueuePop { key } => {
                let len = self.queues.get(&key).map_or(0, VecDeque::len);
                if let Some(front) = self.queues.get(&key).and_then(VecDeque::front) {
                    self.afford_reply(budget, front.len())?;
                }
                out.extend_from_slice(&(len as i64).to_le_bytes());
                if let Some(front) = self.queues.get_mut(&key).and_then(VecDeque::pop_front) {
                    self.bytes -= front.capacity() + ENTRY;
                    put_bytes(out, &front);
                }
                if len == 1 {
                    self.queues.remove(&key);
                    self.bytes -= key.len() + ENTRY;
                }
            }
            Request::QueueLen { key } => {
                let len = self.queues.get(&key).map_or(0, VecDeque::len);
                out.extend_from_slice(&(len as i64).to_le_bytes());
            }
        }
        Ok(())
    }

    /// Takes back all registrations of `conn`: it is gone, or has cancelled.
    pub(crate) fn forget(&mut self, conn: ConnId) {
        let Some(Waiting { place, .. }) = self.waiting.remove(&conn) else { return };
        match place {
            Place::Keys(keys) => {
                for key in keys {
                    self.bytes -= 2 * (key.len() + ENTRY);
                    if let Some(list) = self.waiters.get_mut(&key) {
                        list.retain(|c| *c != conn);
                        if list.is_empty() {
                            self.waiters.remove(&key);
                        }
                    }
                }
            }
            Place::Barrier(key) => {
                self.bytes -= 2 * (key.len() + ENTRY);
                if let Some(list) = self.barriers.get_mut(&key) {
                    list.retain(|(c, _)| *c != conn);
                    if list.is_empty() {
                        self.barriers.remove(&key);
                    }
                }
            }
        }
    }

    fn afford(&self, budget: usize, need: usize) -> Result<(), Refused> {
        if need > budget { Err(Refused::Memory(need)) } else { Ok(()) }
    }

    fn afford_reply(&self, budget: usize, need: usize) -> Result<(), Refused> {
        self.afford(budget.saturating_add(FREE_REPLY), need)
    }

    /// Whether a value or a non-empty queue has this name.
    fn exists(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    fn put(&mut self, key: &[u8], value: Vec<u8>) {
        if let Some(old) = self.values.get_mut(key) {
            self.bytes -= old.capacity();
            self.bytes += value.capacity();
            *old = value;
        } else {
            let key = key.to_vec();
            self.bytes += cost(&key, &value);
            self.values.insert(key, value);
        }
    }

    fn add(&mut self, key: &[u8], delta: i64, budget: usize, woken: &mut Vec<ConnId>) -> Result<i64, Refused> {
        self.afford(budget, key.len() + 20 + ENTRY)?;
        let sum = match self.values.get(key) {
            Some(text) => parse_number(text).and_then(|n| n.checked_add(delta)),
            None => Some(delta),
        };
        let sum = sum.ok_or_else(|| Refused::NotANumber(key.to_vec()))?;
        self.put(key, sum.to_string().into_bytes());
        self.wake_all(key, woken);
        Ok(sum)
    }

    fn wait(&mut self, conn: ConnId, mut keys: Vec<Vec<u8>>, budget: usize, out: &mut Vec<u8>) -> Result<(), Refused> {
        if self.waiting.contains_key(&conn) {
            return Err(Refused::SecondWait);
        }
        keys.retain(|k| !self.exists(k));
        // One registration per key: what ends one of a key's registrations ends them all, and taking back thousands of
        // one connection among thousands of another would take as long as their product.
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() {
            out.push(STOP_WAITING);
            return Ok(());
        }
        let need = keys.iter().map(|k| 2 * (k.len() + ENTRY)).sum();
        self.afford(budget, need)?;
        self.bytes += need;
        for key in &keys {
            match self.waiters.get_mut(key) {
                Some(list) => list.push(conn),
                None => {
                    self.waiters.insert(key.clone(), vec![conn]);
                }
            }
        }
        self.waiting.insert(conn, Waiting { remaining: keys.len(), place: Place::Keys(keys) });
        Ok(())
    }

    /// `key` was stored: uses up every registration for it.
    fn wake_all(&mut self, key: &[u8], woken: &mut Vec<ConnId>) {
        for conn in self.waiters.remove(key).unwrap_or_default() {
            let Some(w) = self.waiting.get_mut(&conn) else { continue };
            w.remaining -= 1;
            if w.remaining == 0 {
                self.forget(conn);
                woken.push(conn);
            }
        }
    }

    /// `arrived` have come to the barrier at `key`: lets those through who wait for no more than that.
    fn open_barrier(&mut self, key: Vec<u8>, arrived: i64, woken: &mut Vec<ConnId>) {
        let Some(mut list) = self.barriers.remove(&key) else { return };
        list.retain(|(conn, size)| {
            let stays = *size > arrived;
            if !stays {
                self.waiting.remove(conn);
                self.bytes -= 2 * (key.len() + ENTRY);
                woken.push(*conn);
            }
            stays
        });
        if !list.is_empty() {
            self.barriers.insert(key, list);
        }
    }

    /// An element was queued at `key`: wakes one of those who wait for nothing else. Those who wait
    /// for more have seen this key, too.
    fn wake_one(&mut self, key: &[u8], woken: &mut Vec<ConnId>) {
        let mut one = None;
        let mut still = Vec::new();
        for conn in self.waiters.remove(key).unwrap_or_default() {
            let Some(w) = self.waiting.get_mut(&conn) else { continue };
            if w.remaining > 1 {
                w.remaining -= 1;
            } else if one.is_none() {
                one = Some(conn);
            } else {
                still.push(conn);
            }
        }
        if !still.is_empty() {
            self.waiters.insert(key.to_vec(), still);
        }
        if let Some(conn) = one {
            self.forget(conn);
            woken.push(conn);
        }
    }

    /// Counts everything again, for tests.
    ///
    /// # Panics
    ///
    /// When the books do not balance, or somebody is on a list and does not wait, or waits and is on none.
    pub(crate) fn check(&self) {
        let values: usize = self.values.iter().map(|(k, v)| cost(k, v)).sum();
        let elements = |q: &VecDeque<Vec<u8>>| q.iter().map(|v| v.capacity() + ENTRY).sum::<usize>();
        let queues: usize = self.queues.iter().map(|(k, q)| k.len() + ENTRY + elements(q)).sum();
        let (mut waits, mut listed) = (0, 0);
        for (conn, w) in &self.waiting {
            let there = match &w.place {
                Place::Keys(keys) => {
                    waits += keys.iter().map(|k| 2 * (k.len() + ENTRY)).sum::<usize>();
                    keys.iter().filter(|k| self.waiters.get(*k).is_some_and(|l| l.contains(conn))).count()
                }
                Place::Barrier(key) => {
                    waits += 2 * (key.len() + ENTRY);
                    usize::from(self.barriers.get(key).is_some_and(|l| l.iter().any(|(c, _)| c == conn)))
                }
            };
            assert_eq!(there, w.remaining, "connection {conn} waits for {} and is on {there} lists", w.remaining);
            listed += there;
        }
        let lists = self.waiters.values().map(Vec::len).chain(self.barriers.values().map(Vec::len));
        assert_eq!(lists.sum::<usize>(), listed);
        assert!(self.queues.values().all(|q| !q.is_empty()));
        assert_eq!(self.bytes, values + queues + waits);
    }
}

fn cost(key: &[u8], value: &Vec<u8>) -> usize {
    key.len() + value.capacity() + ENTRY
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(s: &mut State, conn: ConnId, r: Request) -> (Vec<u8>, Vec<ConnId>) {
        let (mut out, mut woken) = (Vec::new(), Vec::new());
        s.apply(conn, r, usize::MAX, &mut out, &mut woken).unwrap();
        (out, woken)
    }

    fn set(k: &str, v: &[u8]) -> Request {
        Request::Set { key: k.into(), value: v.to_vec() }
    }

    fn wait(keys: &[&str]) -> Request {
        Request::Wait { keys: keys.iter().map(|k| k.as_bytes().to_vec()).collect() }
    }

    fn push(k: &str) -> Request {
        Request::QueuePush { key: k.into(), value: b"e".to_vec() }
    }

    #[test]
    fn a_wait_ends_with_its_last_key_whatever_is_listed_twice() {
        let mut s = State::default();
        assert_eq!(run(&mut s, 1, wait(&["a", "b", "a"])), (vec![], vec![]));
        assert_eq!(run(&mut s, 2, set("a", b"1")).1, Vec::<u64>::new());
        assert_eq!(run(&mut s, 2, set("a", b"2")).1, Vec::<u64>::new());
        assert_eq!(run(&mut s, 2, set("b", b"1")).1, vec![1]);
        assert_eq!(run(&mut s, 1, wait(&["a", "b"])).0, vec![STOP_WAITING]);
        assert_eq!(run(&mut s, 1, wait(&[])).0, vec![STOP_WAITING]);
    }

    /// Two connections that list one key a hundred thousand times: whether they leave or are woken, the work is in
    /// proportion to what they sent. Squared, this would take minutes.
    #[test]
    fn keys_that_are_listed_often_cost_no_more_than_once() {
        let mut s = State::default();
        let many = || Request::Wait { keys: vec![b"a".to_vec(); 131_072] };
        for conn in 1..=3 {
            run(&mut s, conn, many());
        }
        assert!(s.bytes() < 10 * ENTRY, "{}", s.bytes());
        s.forget(1);
        run(&mut s, 2, Request::CancelWait);
        assert_eq!(run(&mut s, 9, push("a")).1, vec![3]);
        run(&mut s, 9, Request::QueuePop { key: b"a".to_vec() });
        assert_eq!(s.bytes(), 0);
    }

    #[test]
    fn cancelled_and_lost_waiters_are_not_woken() {
        let mut s = State::default();
        run(&mut s, 1, wait(&["a"]));
        run(&mut s, 2, wait(&["a"]));
        run(&mut s, 3, wait(&["a"]));
        assert_eq!(run(&mut s, 1, Request::CancelWait).0, vec![WAIT_CANCELED]);
        s.forget(2);
        assert_eq!(run(&mut s, 9, set("a", b"")).1, vec![3]);
        assert!(s.waiters.is_empty() && s.waiting.is_empty());
    }

    #[test]
    fn a_push_wakes_one_waiter_in_order() {
        let mut s = State::default();
        run(&mut s, 1, wait(&["q", "other"]));
        run(&mut s, 2, wait(&["q"]));
        run(&mut s, 3, wait(&["q"]));
        assert_eq!(run(&mut s, 9, push("q")).1, vec![2]);
        assert_eq!(run(&mut s, 9, push("q")).1, vec![3]);
        assert_eq!(run(&mut s, 9, set("other", b"")).1, vec![1]);
        assert!(s.waiters.is_empty());
    }

    #[test]
    fn a_barrier_opens_for_all_when_the_last_arrives() {
        let mut s = State::default();
        let b = || Request::Barrier { key: b"b".to_vec(), world_size: 3 };
        assert_eq!(run(&mut s, 1, b()).1, Vec::<u64>::new());
        assert_eq!(run(&mut s, 2, b()).1, Vec::<u64>::new());
        let mut woken = run(&mut s, 3, b()).1;
        woken.sort_unstable();
        assert_eq!(woken, vec![1, 2, 3]);
        assert_eq!(run(&mut s, 1, Request::Get { key: b"b".to_vec() }).0[8..], *b"3");
        assert!(s.barriers.is_empty() && s.waiting.is_empty());
    }

    #[test]
    fn the_books_balance() {
        let mut s = State::default();
        for i in 0..50u8 {
            run(&mut s, 1, set(&format!("k{i}"), &vec![i; usize::from(i) * 100]));
            run(&mut s, 1, set(&format!("k{i}"), &vec![i; usize::from(50 - i)]));
            run(&mut s, 1, Request::Append { key: b"app".to_vec(), value: vec![1; 33] });
            run(&mut s, 1, push("q"));
            run(&mut s, 1, Request::Add { key: b"n".to_vec(), delta: 1000 });
        }
        run(&mut s, 1, wait(&["x", "y", "x"]));
        run(&mut s, 2, Request::Barrier { key: b"b".to_vec(), world_size: 2 });
        run(&mut s, 3, set("x", b""));
        assert!(s.bytes() > 50 * ENTRY);
        s.forget(1);
        s.forget(2);
        for i in 0..50u8 {
            run(&mut s, 1, Request::DeleteKey { key: format!("k{i}").into() });
            run(&mut s, 1, Request::QueuePop { key: b"q".to_vec() });
        }
        for k in ["app", "n", "x", "b"] {
            run(&mut s, 1, Request::DeleteKey { key: k.into() });
        }
        assert_eq!(s.bytes(), 0);
        assert!(s.values.is_empty() && s.queues.is_empty() && s.waiters.is_empty() && s.barriers.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let mut s = State::default();
        run(&mut s, 1, set("big", &[0; FREE_REPLY + 1000]));
        let before = s.bytes();
        let (mut out, mut woken) = (Vec::new(), Vec::new());
        let mut refused = |r: Request| s.apply(1, r, 900, &mut out, &mut woken).unwrap_err();
        for r in [
            set("more", &[0; 900]),
            Request::MultiSet { pairs: vec![(b"x".to_vec(), vec![0; 400]); 2] },
            Request::Append { key: b"big".to_vec(), value: vec![1] },
            Request::Get { key: b"big".to_vec() },
            Request::MultiGet { keys: vec![b"x".to_vec(); 10_000] },
            wait(&["a", "b", "c", "d"]),
        ] {
            assert!(matches!(refused(r), Refused::Memory(_)));
        }
        assert_eq!(refused(Request::Add { key: b"big".to_vec(), delta: 1 }), Refused::NotANumber(b"big".to_vec()));
        assert!(out.is_empty());
        assert_eq!(s.bytes(), before);
    }
}
