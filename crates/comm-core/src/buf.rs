//! Buffers: how user memory becomes the erased ranges that backends work on.

use std::fmt;

use crate::device::Device;
use crate::dtype::{DType, Pod};
use crate::error::Result;

/// Marker of [`IntoBuf`] impls for host memory in this crate.
#[derive(Clone, Copy, Debug)]
pub struct Host;

macro_rules! raw {
    ($(#[$doc:meta])* $name:ident, $ptr:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name {
            ptr: $ptr,
            bytes: usize,
            dtype: DType,
            device: Device,
        }

        impl $name {
            /// Describes a range. Making one is safe; whoever hands it to a backend vouches for it.
            #[must_use]
            pub const fn new(ptr: $ptr, bytes: usize, dtype: DType, device: Device) -> Self {
                Self { ptr, bytes, dtype, device }
            }

            /// Address of the first byte.
            #[must_use]
            pub const fn ptr(&self) -> $ptr {
                self.ptr
            }

            /// Length in bytes.
            #[must_use]
            pub const fn bytes(&self) -> usize {
                self.bytes
            }

            /// Element type on the wire.
            #[must_use]
            pub const fn dtype(&self) -> DType {
                self.dtype
            }

            /// Length in wire elements.
            #[must_use]
            pub const fn count(&self) -> usize {
                self.bytes / self.dtype.size()
            }

            /// Where the memory is.
            #[must_use]
            pub const fn device(&self) -> Device {
                self.device
            }

            /// The part of `len` bytes from byte `off`. Panics when it does not lie inside.
            #[must_use]
            pub const fn slice(&self, off: usize, len: usize) -> Self {
                assert!(off <= self.bytes && len <= self.bytes - off, "sub-range outside of the buffer");
                Self { ptr: self.ptr.wrapping_add(off), bytes: len, dtype: self.dtype, device: self.device }
            }

            fn start(&self) -> usize {
                self.ptr as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({} x {} on {})"), self.count(), self.dtype, self.device)
            }
        }

        // SAFETY: a description of memory (address, length, type); dereferencing it is what needs care, and that
        // is the duty of whoever calls a backend's unsafe methods.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    };
}

raw!(
    /// A contiguous range that an operation reads.
    RawBuf,
    *const u8
);
raw!(
    /// A contiguous range that an operation writes.
    RawBufMut,
    *mut u8
);

impl RawBufMut {
    /// The same range for reading.
    #[must_use]
    pub const fn as_const(&self) -> RawBuf {
        RawBuf { ptr: self.ptr.cast_const(), bytes: self.bytes, dtype: self.dtype, device: self.device }
    }

    /// Whether this range and `other` share a byte.
    #[must_use]
    pub fn overlaps(&self, other: &RawBuf) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.start() < other.start() + other.bytes
            && other.start() < self.start() + self.bytes
    }
}

/// Something whose memory an operation may read.
///
/// The marker `M` lets other crates implement the trait for types that neither they nor this crate
/// define (`impl<T> IntoBuf<Cudarc> for CudaSlice<T>`); callers never name it.
///
/// # Safety
///
/// `buf` returns a range of initialised `Elem`s that stays where it is, allocated and unchanged by
/// anybody else, as long as `self` is neither moved out of its place, mutated nor dropped.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer that an operation can read",
    note = "buffers are slices, vectors, boxed slices and arrays of values that travel between ranks",
    note = "a single value `x` is a buffer as `[x]`, or borrowed as `std::slice::from_ref(&x)`"
)]
pub unsafe trait IntoBuf<M = Host> {
    /// The element type.
    type Elem: Pod;

    /// The range. Views that are not contiguous answer with an error that says so.
    fn buf(&self) -> Result<RawBuf>;
}

/// Something whose memory an operation may write.
///
/// # Safety
///
/// As for [`IntoBuf`], and the range may be written: holding `self` mutably excludes every other access.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer that an operation can write",
    note = "buffers are slices, vectors, boxed slices and arrays of values that travel between ranks",
    note = "a single value `x` is a buffer as `std::slice::from_mut(&mut x)`"
)]
pub unsafe trait IntoBufMut<M = Host>: IntoBuf<M> {
    /// The range.
    fn buf_mut(&mut self) -> Result<RawBufMut>;
}

/// Memory for which the synchronous form is sound on asynchronous devices.
///
/// On the CPU a synchronous call returns when the operation is done, so all borrowed host memory has it.
/// Owned host memory has it not: a synchronous call would drop the result, and arrays are `Copy`, so that
/// `comm.recv(x, 0)` instead of `comm.recv(&mut x, 0)` would compile and leave `x` unchanged (clippy even
/// proposed it). Handles of device memory that a caller keeps clones of may well have it.
///
/// # Safety
///
/// Dropping the memory and every later safe access to it are ordered, on the device, after the use
/// that an operation records on the memory's stream.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be lent to a synchronous operation",
    note = "borrow it (`&x` or `&mut x`), or use the `_async` form, which takes ownership and gives it back"
)]
pub unsafe trait StreamOrdered<M = Host>: IntoBuf<M> {}

fn host_buf<T: Pod>(s: &[T]) -> RawBuf {
    RawBuf::new(s.as_ptr().cast(), size_of_val(s), T::DTYPE, Device::CPU)
}

fn host_buf_mut<T: Pod>(s: &mut [T]) -> RawBufMut {
    RawBufMut::new(s.as_mut_ptr().cast(), size_of_val(s), T::DTYPE, Device::CPU)
}

macro_rules! readable {
    ($([$($g:tt)*] $t:ty;)*) => {$(
        // SAFETY: a slice of `Pod`s; borrowed or owned memory that does not move or change while `self` is held.
        unsafe impl<T: Pod, $($g)*> IntoBuf<Host> for $t {
            type Elem = T;
            fn buf(&self) -> Result<RawBuf> {
                Ok(host_buf(&self[..]))
            }
        }
    )*};
}

macro_rules! writable {
    ($([$($g:tt)*] $t:ty;)*) => {
        readable! { $([$($g)*] $t;)* }
        $(
            // SAFETY: as above; `&mut self` gives exclusive access to the slice.
            unsafe impl<T: Pod, $($g)*> IntoBufMut<Host> for $t {
                fn buf_mut(&mut self) -> Result<RawBufMut> {
                    Ok(host_buf_mut(&mut self[..]))
                }
            }
        )*
    };
}

macro_rules! borrowed {
    ($([$($g:tt)*] $t:ty;)*) => {$(
        // SAFETY: host memory; synchronous calls on the CPU finish before they return.
        unsafe impl<T: Pod, $($g)*> StreamOrdered<Host> for $t {}
    )*};
}

readable! {
    [] &[T];
    [] &Vec<T>;
    [] &Box<[T]>;
    [const N: usize] &[T; N];
}

borrowed! {
    [] &[T];
    [] &Vec<T>;
    [] &Box<[T]>;
    [const N: usize] &[T; N];
    [] &mut [T];
    [] &mut Vec<T>;
    [] &mut Box<[T]>;
    [const N: usize] &mut [T; N];
}

writable! {
    [] &mut [T];
    [] &mut Vec<T>;
    [] &mut Box<[T]>;
    [const N: usize] &mut [T; N];
    [] Vec<T>;
    [] Box<[T]>;
    [const N: usize] [T; N];
}

/// A buffer whose element type is known only at run time, for the `_dyn` calls.
#[derive(Debug)]
pub struct DynBuf<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

/// A writable buffer whose element type is known only at run time, for the `_dyn` calls.
#[derive(Debug)]
pub struct DynBufMut<'a> {
    bytes: &'a mut [u8],
    dtype: DType,
}

impl<'a> DynBuf<'a> {
    /// Bytes that hold elements of `dtype`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length is not a multiple of the element size.
    pub fn new(bytes: &'a [u8], dtype: DType) -> Result<Self> {
        whole(bytes.len(), dtype)?;
        Ok(Self { bytes, dtype })
    }

    pub(crate) fn raw(&self) -> RawBuf {
        RawBuf::new(self.bytes.as_ptr(), self.bytes.len(), self.dtype, Device::CPU)
    }
}

impl<'a> DynBufMut<'a> {
    /// Bytes that hold elements of `dtype`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length is not a multiple of the element size.
    pub fn new(bytes: &'a mut [u8], dtype: DType) -> Result<Self> {
        whole(bytes.len(), dtype)?;
        Ok(Self { bytes, dtype })
    }

    pub(crate) fn raw(&mut self) -> RawBufMut {
        RawBufMut::new(self.bytes.as_mut_ptr(), self.bytes.len(), self.dtype, Device::CPU)
    }
}

fn whole(len: usize, dtype: DType) -> Result<()> {
    if len.is_multiple_of(dtype.size()) {
        return Ok(());
    }
    Err(crate::Error::invalid(format!(
        "{len} bytes are not a whole number of {dtype} elements of {} bytes",
        dtype.size()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_by_bytes_and_empty_ranges_never_overlap() {
        let mut x = [0u32; 8];
        let all = x.buf_mut().unwrap();
        let (a, b) = (all.slice(0, 16), all.slice(16, 16));
        assert!(!a.overlaps(&b.as_const()));
        assert!(all.overlaps(&b.as_const()));
        assert!(all.slice(12, 8).overlaps(&a.as_const()));
        assert!(!all.overlaps(&all.slice(4, 0).as_const()));
        assert_eq!(all.count(), 8);
    }

    #[test]
    fn dynamic_buffers_hold_whole_elements() {
        assert!(DynBuf::new(&[0; 6], DType::F32).is_err());
        assert_eq!(DynBuf::new(&[0; 8], DType::F32).unwrap().raw().count(), 2);
    }
}
