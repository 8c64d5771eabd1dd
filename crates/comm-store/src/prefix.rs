//! A part of another store.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{Result, Store};

/// A [`Store`] that puts `prefix/` in front of every key of another one, so that several users of
/// it do not meet each other's keys.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `inner` under `prefix`, without its slash.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into() + "/", inner }
    }

    /// The store underneath.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    fn key(&self, key: &str) -> String {
        [&self.prefix, key].concat()
    }

    fn with_keys<T>(&self, keys: &[&str], f: impl FnOnce(&[&str]) -> T) -> T {
        let long: Vec<String> = keys.iter().map(|k| self.key(k)).collect();
        f(&long.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.key(key), delta)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_keys(keys, |k| self.inner.check(k))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.with_keys(keys, |k| self.inner.wait(k, timeout))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner.delete_key(&self.key(key))
    }

    /// The number of keys in the whole store underneath, as in PyTorch.
    fn num_keys(&self) -> Result<i64> {
        self.inner.num_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |k| self.inner.multi_get(k, timeout))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(k, _)| *k).collect();
        self.with_keys(&keys, |k| {
            let pairs: Vec<(&str, &[u8])> = k.iter().zip(pairs).map(|(k, (_, v))| (*k, *v)).collect();
            self.inner.multi_set(&pairs)
        })
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.queue_push(&self.key(key), value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.queue_pop(&self.key(key), timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.inner.queue_len(&self.key(key))
    }

    /// The keys under the prefix, without it.
    fn list_keys(&self) -> Result<Vec<String>> {
        let keys = self.inner.list_keys()?;
        Ok(keys.into_iter().filter_map(|k| k.strip_prefix(&self.prefix).map(str::to_owned)).collect())
    }
}
