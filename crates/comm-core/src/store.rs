//! The rendezvous store: a small key-value service through which ranks find each other.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};

/// A key-value store shared by all ranks of a run.
///
/// The semantics are those of PyTorch's `Store`, so that `comm-store`'s `TcpStore` can speak its
/// protocol. Keys are opaque text, values opaque bytes. Implementations are thread-safe. Every call
/// that can block takes the longest time it may take, and then fails with
/// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout).
pub trait Store: Send + Sync + fmt::Debug {
    /// Sets `key`, replacing what was there, and wakes those who wait for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists and returns its value.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the decimal number stored at `key` (missing counts as 0) and returns the sum.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Whether all of `keys` exist.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Waits until all of `keys` exist.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// If `key` holds `expected` (or is missing and `expected` is empty), stores `desired`. Returns
    /// the value afterwards; for a missing key with a non-empty expectation, `expected` itself.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Deletes `key`; true if it existed.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// The number of keys in the store (its own bookkeeping keys included).
    fn num_keys(&self) -> Result<i64>;

    /// Appends to the value at `key`, creating it when missing, and wakes those who wait for it.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits for all of `keys` and returns their values in order.
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        keys.iter().map(|k| self.get(k, timeout)).collect()
    }

    /// Sets several keys.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(k, v)| self.set(k, v))
    }

    /// Appends an element to the queue at `key`.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = value;
        Err(Error::unsupported(format!("queue_push('{key}')"), "this store has no queues"))
    }

    /// Waits for and removes the first element of the queue at `key`.
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let _ = timeout;
        Err(Error::unsupported(format!("queue_pop('{key}')"), "this store has no queues"))
    }

    /// The length of the queue at `key`.
    fn queue_len(&self, key: &str) -> Result<i64> {
        Err(Error::unsupported(format!("queue_len('{key}')"), "this store has no queues"))
    }

    /// All keys, in no particular order.
    fn list_keys(&self) -> Result<Vec<String>> {
        Err(Error::unsupported("list_keys", "this store cannot list its keys"))
    }
}
