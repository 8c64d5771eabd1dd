//! Blocks: the buffers of operations that deal in one part per rank.
//!
//! A part per rank may be an equal share of one buffer, an uneven one, or a buffer of its own. Backends see
//! all three as [`RawBlocks`] and [`RawBlocksMut`].

use std::fmt;
use std::sync::Arc;

use crate::buf::{Host, IntoBuf, IntoBufMut, RawBuf, RawBufMut};
use crate::device::Device;
use crate::dtype::{DType, Pod};
use crate::error::Result;

macro_rules! blocks {
    ($(#[$doc:meta])* $name:ident of $raw:ident) => {
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $name(Layout<$raw>);

        impl $name {
            /// `ranks` equal parts of one buffer. Panics when its bytes do not divide by `ranks`.
            #[must_use]
            pub const fn even(buf: $raw, ranks: usize) -> Self {
                assert!(ranks > 0 && buf.bytes().is_multiple_of(ranks), "blocks of unequal length");
                Self(Layout::Even(buf, ranks))
            }

            /// Parts of these lengths in bytes, one after the other in one buffer. Panics when they do not add up.
            #[must_use]
            pub fn packed(buf: $raw, bytes: &[usize]) -> Self {
                let mut end = 0usize;
                let ends: Arc<[usize]> = bytes.iter().map(|b| { end = end.saturating_add(*b); end }).collect();
                assert_eq!(end, buf.bytes(), "blocks that do not make up their buffer");
                Self(Layout::Packed(buf, ends))
            }

            /// Buffers of their own. They have one element type and lie on one device.
            #[must_use]
            pub fn list(bufs: Vec<$raw>) -> Self {
                Self(Layout::List(bufs.into()))
            }

            /// How many there are: the number of ranks.
            #[must_use]
            // There is a block for each rank, so there is always one.
            #[allow(clippy::len_without_is_empty)]
            pub fn len(&self) -> usize {
                match &self.0 {
                    Layout::Even(_, n) => *n,
                    Layout::Packed(_, ends) => ends.len(),
                    Layout::List(bufs) => bufs.len(),
                }
            }

            /// The block of a rank. Panics when there is no such rank.
            #[must_use]
            pub fn get(&self, rank: usize) -> $raw {
                match &self.0 {
                    Layout::Even(buf, n) => {
                        assert!(rank < *n, "a block of rank {rank} among {n}");
                        let each = buf.bytes() / n;
                        buf.slice(rank * each, each)
                    }
                    Layout::Packed(buf, ends) => {
                        let start = if rank == 0 { 0 } else { ends[rank - 1] };
                        buf.slice(start, ends[rank] - start)
                    }
                    Layout::List(bufs) => bufs[rank],
                }
            }

            /// The blocks in rank order.
            pub fn iter(&self) -> impl ExactSizeIterator<Item = $raw> + '_ {
                (0..self.len()).map(|r| self.get(r))
            }

            /// Bytes of all blocks together.
            #[must_use]
            pub fn bytes(&self) -> usize {
                match &self.0 {
                    Layout::Even(buf, _) | Layout::Packed(buf, _) => buf.bytes(),
                    Layout::List(bufs) => bufs.iter().map(|b| b.bytes()).sum(),
                }
            }

            /// The one buffer that all blocks make up in rank order; `None` when each is a buffer of its own.
            #[must_use]
            pub const fn whole(&self) -> Option<$raw> {
                match &self.0 {
                    Layout::Even(buf, _) | Layout::Packed(buf, _) => Some(*buf),
                    Layout::List(_) => None,
                }
            }

            /// True for equal parts of one buffer.
            #[must_use]
            pub const fn is_even(&self) -> bool {
                matches!(self.0, Layout::Even(..))
            }

            /// The element type.
            #[must_use]
            pub fn dtype(&self) -> DType {
                match &self.0 {
                    Layout::Even(buf, _) | Layout::Packed(buf, _) => buf.dtype(),
                    Layout::List(bufs) => bufs.first().map_or(DType::U8, $raw::dtype),
                }
            }

            /// Where the memory is.
            #[must_use]
            pub fn device(&self) -> Device {
                match &self.0 {
                    Layout::Even(buf, _) | Layout::Packed(buf, _) => buf.device(),
                    Layout::List(bufs) => bufs.first().map_or(Device::CPU, $raw::device),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_list().entries(self.iter()).finish()
            }
        }
    };
}

#[derive(Clone)]
enum Layout<B> {
    Even(B, usize),
    /// With the byte at which each block ends.
    Packed(B, Arc<[usize]>),
    List(Arc<[B]>),
}

blocks!(
    /// A block per rank, in rank order, that an operation reads.
    RawBlocks of RawBuf
);
blocks!(
    /// A block per rank, in rank order, that an operation writes.
    RawBlocksMut of RawBufMut
);

impl RawBlocksMut {
    /// The same blocks for reading.
    #[must_use]
    pub fn as_const(&self) -> RawBlocks {
        RawBlocks(match &self.0 {
            Layout::Even(buf, n) => Layout::Even(buf.as_const(), *n),
            Layout::Packed(buf, ends) => Layout::Packed(buf.as_const(), Arc::clone(ends)),
            Layout::List(bufs) => Layout::List(bufs.iter().map(RawBufMut::as_const).collect()),
        })
    }

    /// Whether a block and `other` share a byte.
    #[must_use]
    pub fn overlaps(&self, other: &RawBuf) -> bool {
        match &self.0 {
            Layout::Even(buf, _) | Layout::Packed(buf, _) => buf.overlaps(other),
            Layout::List(bufs) => bufs.iter().any(|b| b.overlaps(other)),
        }
    }
}

/// Buffers, one per rank, that an operation may read: the argument of the `_list` forms.
///
/// Implemented for borrowed and owned slices, vectors and arrays of anything that is [`IntoBuf`].
///
/// # Safety
///
/// As for [`IntoBuf`], for each of them.
pub unsafe trait IntoBufList<M = Host> {
    /// The element type.
    type Elem: Pod;

    /// The ranges, in rank order.
    fn bufs(&self) -> Result<Vec<RawBuf>>;
}

/// Buffers, one per rank, that an operation may write.
///
/// # Safety
///
/// As for [`IntoBufMut`], for each of them.
pub unsafe trait IntoBufListMut<M = Host>: IntoBufList<M> {
    /// The ranges, in rank order.
    fn bufs_mut(&mut self) -> Result<Vec<RawBufMut>>;
}

/// Lists for which the synchronous form is sound; see [`StreamOrdered`](crate::StreamOrdered).
///
/// # Safety
///
/// As for [`StreamOrdered`](crate::StreamOrdered), for each of the buffers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be lent to a synchronous operation",
    note = "borrow the list (`&x` or `&mut x`), or use the `_async` form, which takes ownership and gives it back"
)]
pub unsafe trait StreamOrderedList<M = Host>: IntoBufList<M> {}

macro_rules! readable {
    ($([$($g:tt)*] $t:ty;)*) => {$(
        // SAFETY: each element keeps `IntoBuf`'s promise, and holding the list holds its elements in place.
        unsafe impl<M, B: IntoBuf<M>, $($g)*> IntoBufList<M> for $t {
            type Elem = B::Elem;
            fn bufs(&self) -> Result<Vec<RawBuf>> {
                self.iter().map(IntoBuf::buf).collect()
            }
        }
    )*};
}

macro_rules! writable {
    ($([$($g:tt)*] $t:ty;)*) => {$(
        // SAFETY: as above.
        unsafe impl<M, B: IntoBufMut<M>, $($g)*> IntoBufList<M> for $t {
            type Elem = B::Elem;
            fn bufs(&self) -> Result<Vec<RawBuf>> {
                self.iter().map(IntoBuf::buf).collect()
            }
        }
        // SAFETY: as above; `&mut self` gives exclusive access to the elements.
        unsafe impl<M, B: IntoBufMut<M>, $($g)*> IntoBufListMut<M> for $t {
            fn bufs_mut(&mut self) -> Result<Vec<RawBufMut>> {
                self.iter_mut().map(IntoBufMut::buf_mut).collect()
            }
        }
    )*};
}

/// Owned lists may be written where their elements may.
macro_rules! owned {
    ($([$($g:tt)*] $t:ty;)*) => {
        readable! { $([$($g)*] $t;)* }
        $(
            // SAFETY: as above; `&mut self` gives exclusive access to the elements.
            unsafe impl<M, B: IntoBufMut<M>, $($g)*> IntoBufListMut<M> for $t {
                fn bufs_mut(&mut self) -> Result<Vec<RawBufMut>> {
                    self.iter_mut().map(IntoBufMut::buf_mut).collect()
                }
            }
        )*
    };
}

macro_rules! borrowed {
    ($($b:ident: [$($g:tt)*] $t:ty;)*) => {$(
        // SAFETY: borrowed host memory; synchronous calls on the CPU finish before they return.
        unsafe impl<B: $b<Host>, $($g)*> StreamOrderedList<Host> for $t {}
    )*};
}

readable! {
    [] &[B];
    [] &Vec<B>;
    [] &Box<[B]>;
    [const N: usize] &[B; N];
}

writable! {
    [] &mut [B];
    [] &mut Vec<B>;
    [] &mut Box<[B]>;
    [const N: usize] &mut [B; N];
}

owned! {
    [] Vec<B>;
    [] Box<[B]>;
    [const N: usize] [B; N];
}

borrowed! {
    IntoBuf: [] &[B];
    IntoBuf: [] &Vec<B>;
    IntoBuf: [] &Box<[B]>;
    IntoBuf: [const N: usize] &[B; N];
    IntoBufMut: [] &mut [B];
    IntoBufMut: [] &mut Vec<B>;
    IntoBufMut: [] &mut Box<[B]>;
    IntoBufMut: [const N: usize] &mut [B; N];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_layouts_of_the_same_blocks() {
        let mut x = [1u16, 2, 3, 4, 5, 6];
        let all = x.buf_mut().unwrap();
        let even = RawBlocksMut::even(all, 3);
        let packed = RawBlocksMut::packed(all, &[4, 4, 4]);
        let list = RawBlocksMut::list(packed.iter().collect());
        for b in [&even, &packed, &list] {
            assert_eq!((b.len(), b.bytes(), b.dtype()), (3, 12, DType::U16));
            for r in 0..3 {
                assert_eq!((b.get(r).ptr(), b.get(r).bytes()), (all.ptr().wrapping_add(4 * r), 4));
                assert_eq!(b.as_const().get(r).ptr(), b.get(r).ptr().cast_const());
            }
            assert!(b.overlaps(&all.slice(10, 2).as_const()));
        }
        assert!(even.whole().is_some() && packed.whole().is_some() && list.whole().is_none());
        assert!(even.is_even() && !packed.is_even());
    }

    #[test]
    fn uneven_and_empty_blocks() {
        let x = [0u8; 5];
        let b = RawBlocks::packed(x.buf().unwrap(), &[0, 3, 0, 2]);
        assert_eq!(b.iter().map(|b| b.bytes()).collect::<Vec<_>>(), [0, 3, 0, 2]);
        assert_eq!(b.get(3).ptr(), x.as_ptr().wrapping_add(3));
    }

    #[test]
    fn lists_of_many_kinds() {
        fn lens<M, L: IntoBufList<M>>(l: &L) -> Vec<usize> {
            l.bufs().unwrap().iter().map(RawBuf::count).collect()
        }
        fn lens_mut<M, L: IntoBufListMut<M>>(mut l: L) -> Vec<usize> {
            l.bufs_mut().unwrap().iter().map(RawBufMut::count).collect()
        }
        let (a, b) = ([1.0f32; 2], [2.0f32; 3]);
        assert_eq!(lens(&&[&a[..], &b[..]]), [2, 3]);
        assert_eq!(lens(&&vec![vec![1i8; 4], vec![]]), [4, 0]);
        assert_eq!(lens_mut(vec![vec![1i8; 4], vec![]]), [4, 0]);
        let mut v = [vec![0u64; 1], vec![0; 2]];
        assert_eq!(lens_mut(&mut v), [1, 2]);
        let (x, y) = v.split_at_mut(1);
        assert_eq!(lens_mut(&mut [&mut x[0][..], &mut y[0][..]]), [1, 2]);
    }
}
