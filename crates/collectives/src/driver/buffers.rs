//! The memory that an operation works on, as schedules see it: three ranges of bytes.

use std::sync::Arc;

use comm_core::{RawBlocks, RawBlocksMut, RawBuf, RawBufMut, Reducer};

use super::pool::Pool;

/// User memory as one range, though it may consist of several pieces. Its pointers are written through only where
/// they came from memory to write.
#[derive(Debug)]
pub(super) struct Space {
    ptr: *mut u8,
    len: usize,
    /// Where each piece ends in the range, and begins in memory; empty for a single one.
    pieces: Vec<(usize, *mut u8)>,
}

/// The address of no bytes: not null, so that it may be that of an empty slice.
const NOWHERE: *mut u8 = std::ptr::NonNull::dangling().as_ptr();

impl Space {
    pub(super) const NONE: Self = Self { ptr: NOWHERE, len: 0, pieces: Vec::new() };

    const fn one(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, pieces: Vec::new() }
    }

    pub(super) const fn read(b: &RawBuf) -> Self {
        Self::one(b.ptr().cast_mut(), b.bytes())
    }

    pub(super) const fn write(b: &RawBufMut) -> Self {
        Self::one(b.ptr(), b.bytes())
    }

    pub(super) fn read_blocks(b: &RawBlocks) -> Self {
        b.whole().map_or_else(|| Self::list(b.iter().map(|b| (b.ptr().cast_mut(), b.bytes()))), |b| Self::read(&b))
    }

    pub(super) fn write_blocks(b: &RawBlocksMut) -> Self {
        b.whole().map_or_else(|| Self::list(b.iter().map(|b| (b.ptr(), b.bytes()))), |b| Self::write(&b))
    }

    fn list(parts: impl Iterator<Item = (*mut u8, usize)>) -> Self {
        let mut len = 0;
        let pieces = parts
            .map(|(ptr, bytes)| {
                len += bytes;
                (len, ptr)
            })
            .collect();
        Self { ptr: NOWHERE, len, pieces }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The address of a range. One that lies outside, or in two pieces, is a bug in a schedule; better a panic than a
    /// stray write.
    pub(super) fn at(&self, off: usize, len: usize) -> *mut u8 {
        assert!(off <= self.len && len <= self.len - off, "a schedule left its buffer: {off}+{len} of {}", self.len);
        if len == 0 {
            return NOWHERE;
        }
        if self.pieces.is_empty() {
            return self.ptr.wrapping_add(off);
        }
        let i = self.pieces.partition_point(|(end, _)| *end <= off);
        let (end, ptr) = self.pieces[i];
        let start = if i == 0 { 0 } else { self.pieces[i - 1].0 };
        assert!(off + len <= end, "a schedule crossed the border of a block: {off}+{len} beyond {end}");
        ptr.wrapping_add(off - start)
    }

    /// The pieces as ranges of memory.
    fn ranges(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let mut start = 0;
        let single = self.pieces.is_empty().then_some((self.ptr, self.len));
        single.into_iter().chain(self.pieces.iter().map(move |(end, ptr)| {
            let len = end - start;
            start = *end;
            (*ptr, len)
        }))
    }
}

/// The buffers of a collective; where there is none, its length is 0.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) input: Space,
    pub(super) output: Space,
    pub(super) scratch: Vec<u8>,
    /// A scaled copy of the input, for operators with a factor.
    temp: Vec<u8>,
    pool: Arc<Pool>,
}

impl Buffers {
    pub(super) fn new(input: Space, output: Space, pool: &Arc<Pool>) -> Self {
        Self { input, output, scratch: Vec::new(), temp: Vec::new(), pool: Arc::clone(pool) }
    }

    /// Takes the scratch memory of a schedule.
    pub(super) fn provide(&mut self, scratch: usize) {
        self.scratch = self.pool.take(scratch);
    }

    /// Scales what lies in the output.
    ///
    /// # Safety
    ///
    /// The range is valid and not used otherwise.
    pub(super) unsafe fn scale(&mut self, reducer: &Reducer) {
        for (ptr, len) in self.output.ranges().filter(|(_, len)| *len > 0) {
            // SAFETY: forwarded; an empty range needs no pointer.
            reducer.prescale(unsafe { std::slice::from_raw_parts_mut(ptr, len) });
        }
    }

    /// Replaces the input by a copy that the reducer has scaled; of an operation in place, the output's contents.
    ///
    /// # Safety
    ///
    /// The ranges are valid.
    pub(super) unsafe fn scale_copy(&mut self, reducer: &Reducer, in_place: bool) {
        let from = if in_place { &self.output } else { &self.input };
        let mut copy = Vec::with_capacity(from.len());
        for (ptr, len) in from.ranges().filter(|(_, len)| *len > 0) {
            // SAFETY: forwarded; an empty range needs no pointer.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(ptr.cast_const(), len) });
        }
        self.temp = copy;
        reducer.prescale(&mut self.temp);
        self.input = Space::one(self.temp.as_mut_ptr(), self.temp.len());
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.scratch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::{DType, Device};

    #[test]
    fn pieces_are_one_range() {
        let (mut a, mut b) = ([1u8, 2], [3u8, 4, 5]);
        let raw = |s: &mut [u8]| RawBufMut::new(s.as_mut_ptr(), s.len(), DType::U8, Device::CPU);
        let s = Space::write_blocks(&RawBlocksMut::list(vec![raw(&mut a), raw(&mut []), raw(&mut b)]));
        assert_eq!(s.len(), 5);
        assert_eq!(s.at(1, 1), a.as_mut_ptr().wrapping_add(1));
        assert_eq!(s.at(2, 3), b.as_mut_ptr());
        assert_eq!(s.at(4, 1), b.as_mut_ptr().wrapping_add(2));
        let _ = s.at(5, 0);
        assert!(std::panic::catch_unwind(|| s.at(1, 2)).is_err(), "a span in two pieces");
        assert!(std::panic::catch_unwind(|| s.at(4, 2)).is_err(), "a span beyond the end");
    }
}
