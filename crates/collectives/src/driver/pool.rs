//! Scratch memory that operations borrow, so that small ones do not allocate.

use parking_lot::Mutex;

/// Buffers kept for reuse.
const KEPT: usize = 8;
/// Buffers longer than this are given back to the allocator.
const LONGEST: usize = 4 << 20;

#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    /// A buffer of exactly `len` bytes with arbitrary contents.
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        if len == 0 {
            return Vec::new();
        }
        let mut b = {
            let mut kept = self.0.lock();
            match kept.iter().position(|b| b.len() >= len) {
                Some(i) => kept.swap_remove(i),
                None => kept.pop().unwrap_or_default(),
            }
        };
        if b.len() < len {
            b.resize(len, 0);
        }
        b
    }

    pub(super) fn give(&self, b: Vec<u8>) {
        if b.is_empty() || b.len() > LONGEST {
            return;
        }
        let mut kept = self.0.lock();
        if kept.len() < KEPT {
            kept.push(b);
        }
    }
}
