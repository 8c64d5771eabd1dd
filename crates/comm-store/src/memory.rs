//! A store inside one process.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Error, Result, Store};
use parking_lot::{Condvar, Mutex};

use crate::protocol::parse_number;
use crate::{deadline_after, in_call, name_keys, timed_out};

/// A [`Store`] for ranks that are threads of one process. Clones share their contents.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    data: Mutex<Data>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Data {
    values: HashMap<String, Vec<u8>>,
    queues: HashMap<String, VecDeque<Vec<u8>>>,
}

impl Data {
    fn exists(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|q| !q.is_empty())
    }
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn change<T>(&self, f: impl FnOnce(&mut Data) -> T) -> T {
        let out = f(&mut self.0.data.lock());
        self.0.changed.notify_all();
        out
    }

    /// Waits until `f` finds something.
    fn until<T>(
        &self,
        op: impl FnOnce() -> String,
        timeout: Duration,
        mut f: impl FnMut(&mut Data) -> Option<T>,
    ) -> Result<T> {
        let (started, deadline) = (Instant::now(), deadline_after(timeout));
        let mut data = self.0.data.lock();
        loop {
            if let Some(found) = f(&mut data) {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                return Err(timed_out(&op(), started));
            }
            self.0.changed.wait_until(&mut data, deadline);
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|d| d.values.insert(key.to_owned(), value.to_vec()));
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        // A queue makes its key exist, yet has no value; the TCP store answers with nothing then.
        self.until(
            || format!("store get({})", name_keys(&[key])),
            timeout,
            |d| d.exists(key).then(|| d.values.get(key).cloned().unwrap_or_default()),
        )
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(|d| {
            let sum = match d.values.get(key) {
                None => Some(delta),
                Some(text) => parse_number(text).and_then(|n| n.checked_add(delta)),
            };
            let sum = sum.ok_or_else(|| {
                Error::invalid("the key holds no decimal number, or the sum does not fit into 64 bits")
                    .with_context(|| in_call(&format!("store add({}, {delta})", name_keys(&[key]))))
            })?;
            d.values.insert(key.to_owned(), sum.to_string().into_bytes());
            Ok(sum)
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let data = self.0.data.lock();
        Ok(keys.iter().all(|k| data.exists(k)))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.until(
            || format!("store wait({})", name_keys(keys)),
            timeout,
            |d| keys.iter().all(|k| d.exists(k)).then_some(()),
        )
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(self.change(|d| match d.values.get(key) {
            Some(current) if current != expected => current.clone(),
            None if !expected.is_empty() => expected.to_vec(),
            _ => {
                d.values.insert(key.to_owned(), desired.to_vec());
                desired.to_vec()
            }
        }))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.0.data.lock().values.remove(key).is_some())
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(self.0.data.lock().values.len() as i64)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|d| d.values.entry(key.to_owned()).or_default().extend_from_slice(value));
        Ok(())
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.until(
            || format!("store multi_get({})", name_keys(keys)),
            timeout,
            |d| {
                let all = keys.iter().all(|k| d.exists(k));
                all.then(|| keys.iter().map(|k| d.values.get(*k).cloned().unwrap_or_default()).collect())
            },
        )
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.change(|d| d.values.extend(pairs.iter().map(|(k, v)| ((*k).to_owned(), v.to_vec()))));
        Ok(())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|d| d.queues.entry(key.to_owned()).or_default().push_back(value.to_vec()));
        Ok(())
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.until(
            || format!("store queue_pop({})", name_keys(&[key])),
            timeout,
            |d| {
                let front = d.queues.get_mut(key)?.pop_front();
                if d.queues.get(key).is_some_and(VecDeque::is_empty) {
                    d.queues.remove(key);
                }
                front
            },
        )
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        Ok(self.0.data.lock().queues.get(key).map_or(0, |q| q.len() as i64))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.0.data.lock().values.keys().cloned().collect())
    }
}
