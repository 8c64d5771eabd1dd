//! Buffers with guard zones, and the three ways in which they are lent.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use comm_core::{Device, IntoBuf, IntoBufMut, RawBuf, RawBufMut, Result, StreamOrdered};

use crate::kind::{Item, Kind};
use crate::value::mix;

/// The bits that memory has before a call: something, and not everywhere the same.
pub(crate) fn sentinel(kind: Kind, i: usize) -> u128 {
    let h = mix(0x5e47_13e1 ^ (i as u64 % 251));
    kind.canonical(u128::from(h) << 64 | u128::from(!h))
}

/// A buffer between two guard zones. Its element type is `kind`; `T` has the same size.
#[derive(Debug)]
pub(crate) struct Guarded<T: Item> {
    mem: Vec<T>,
    guard: usize,
    kind: Kind,
    /// Where the memory goes when it is dropped.
    home: Option<Sender<Vec<T>>>,
}

impl<T: Item> Guarded<T> {
    /// `len` elements, made by `bits`, between guards of `guard` elements.
    pub(crate) fn new(kind: Kind, guard: usize, len: usize, mut bits: impl FnMut(usize) -> u128) -> Self {
        let total = len + 2 * guard;
        let mut element = |i: usize| {
            let inside = i.checked_sub(guard).filter(|i| *i < len);
            T::from_bits(inside.map_or_else(|| sentinel(kind, i), &mut bits))
        };
        Self { mem: (0..total).map(&mut element).collect(), guard, kind, home: None }
    }

    /// The type of its elements.
    pub(crate) const fn kind(&self) -> Kind {
        self.kind
    }

    /// Elements before the buffer.
    pub(crate) const fn guard(&self) -> usize {
        self.guard
    }

    /// The elements.
    pub(crate) fn slice(&self) -> &[T] {
        &self.mem[self.guard..self.guard + self.len()]
    }

    /// The elements, for writing.
    pub(crate) fn slice_mut(&mut self) -> &mut [T] {
        let end = self.guard + self.len();
        &mut self.mem[self.guard..end]
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.mem.len() - 2 * self.guard
    }

    /// The bits of an element.
    pub(crate) fn bits(&self, i: usize) -> u128 {
        self.mem[self.guard + i].to_bits()
    }

    /// The first element outside that was changed, as a distance from the buffer.
    pub(crate) fn spilled(&self) -> Option<String> {
        let (first, end) = (self.guard, self.guard + self.len());
        let is_bad = |i: &usize| self.mem[*i].to_bits() != sentinel(self.kind, *i);
        let before = (0..first).rev().find(is_bad).map(|i| format!("{} element(s) before the buffer", first - i));
        before.or_else(|| {
            (end..self.mem.len()).find(is_bad).map(|i| format!("{} element(s) after the buffer's end", i + 1 - end))
        })
    }
}

impl<T: Item> Drop for Guarded<T> {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            // Nobody may be waiting any more.
            let _ = home.send(std::mem::take(&mut self.mem));
        }
    }
}

// SAFETY: the range lies in a `Vec` that nobody changes while `self` is held and that does not move its elements; a `T` is
// as large as an element of `kind` and has no padding. Where `kind` is `bool`, what is written are bytes.
unsafe impl<T: Item> IntoBuf for Guarded<T> {
    type Elem = T;
    fn buf(&self) -> Result<RawBuf> {
        let mem = self.slice();
        Ok(RawBuf::new(mem.as_ptr().cast(), size_of_val(mem), self.kind.dtype(), Device::CPU))
    }
}

// SAFETY: as above; `&mut self` gives exclusive access to the elements.
unsafe impl<T: Item> IntoBufMut for Guarded<T> {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        let (kind, mem) = (self.kind, self.slice_mut());
        Ok(RawBufMut::new(mem.as_mut_ptr().cast(), size_of_val(mem), kind.dtype(), Device::CPU))
    }
}

/// A borrowed buffer.
macro_rules! borrowed {
    ($($t:ty),*) => {$(
        // SAFETY: that of the buffer itself, which stays borrowed.
        unsafe impl<T: Item> IntoBuf for $t {
            type Elem = T;
            fn buf(&self) -> Result<RawBuf> {
                Guarded::buf(self)
            }
        }
        // SAFETY: host memory; synchronous calls on the CPU finish before they return.
        unsafe impl<T: Item> StreamOrdered for $t {}
    )*};
}
borrowed!(&Guarded<T>, &mut Guarded<T>);

// SAFETY: as above; the borrow is exclusive.
unsafe impl<T: Item> IntoBufMut for &mut Guarded<T> {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        Guarded::buf_mut(self)
    }
}

/// What a call takes: a buffer, a buffer per rank, or perhaps one.
pub(crate) trait Lend: Sized + Send + 'static {
    /// Borrowed for reading.
    type Ref<'a>;
    /// Borrowed for writing.
    type Mut<'a>;
    /// Brings it back after it was dropped.
    type Home;

    /// Lends it for reading.
    fn lend(&self) -> Self::Ref<'_>;
    /// Lends it for writing.
    fn lend_mut(&mut self) -> Self::Mut<'_>;
    /// From now on it comes back when it is dropped.
    fn tether(&mut self) -> Self::Home;
    /// Waits until it was dropped; `None` when it is not within the time.
    fn fetch(home: Self::Home, timeout: Duration) -> Option<Self>;
}

/// Brings a buffer back.
#[derive(Debug)]
pub(crate) struct Tether<T> {
    from: Receiver<Vec<T>>,
    guard: usize,
    kind: Kind,
}

impl<T: Item> Lend for Guarded<T> {
    type Ref<'a> = &'a Self;
    type Mut<'a> = &'a mut Self;
    type Home = Tether<T>;

    fn lend(&self) -> &Self {
        self
    }

    fn lend_mut(&mut self) -> &mut Self {
        self
    }

    fn tether(&mut self) -> Tether<T> {
        let (to, from) = channel();
        self.home = Some(to);
        Tether { from, guard: self.guard, kind: self.kind }
    }

    fn fetch(home: Tether<T>, timeout: Duration) -> Option<Self> {
        let mem = home.from.recv_timeout(timeout).ok()?;
        Some(Self { mem, guard: home.guard, kind: home.kind, home: None })
    }
}

impl<T: Item> Lend for Vec<Guarded<T>> {
    type Ref<'a> = &'a Self;
    type Mut<'a> = &'a mut Self;
    type Home = Vec<Tether<T>>;

    fn lend(&self) -> &Self {
        self
    }

    fn lend_mut(&mut self) -> &mut Self {
        self
    }

    fn tether(&mut self) -> Vec<Tether<T>> {
        self.iter_mut().map(Lend::tether).collect()
    }

    fn fetch(home: Vec<Tether<T>>, timeout: Duration) -> Option<Self> {
        home.into_iter().map(|h| Guarded::fetch(h, timeout)).collect()
    }
}

impl<A: Lend, B: Lend> Lend for (A, B) {
    type Ref<'a> = (A::Ref<'a>, B::Ref<'a>);
    type Mut<'a> = (A::Mut<'a>, B::Mut<'a>);
    type Home = (A::Home, B::Home);

    fn lend(&self) -> Self::Ref<'_> {
        (self.0.lend(), self.1.lend())
    }

    fn lend_mut(&mut self) -> Self::Mut<'_> {
        (self.0.lend_mut(), self.1.lend_mut())
    }

    fn tether(&mut self) -> Self::Home {
        (self.0.tether(), self.1.tether())
    }

    fn fetch((a, b): Self::Home, timeout: Duration) -> Option<Self> {
        Some((A::fetch(a, timeout)?, B::fetch(b, timeout)?))
    }
}

impl<B: Lend> Lend for Option<B> {
    type Ref<'a> = Option<B::Ref<'a>>;
    type Mut<'a> = Option<B::Mut<'a>>;
    type Home = Option<B::Home>;

    fn lend(&self) -> Option<B::Ref<'_>> {
        self.as_ref().map(B::lend)
    }

    fn lend_mut(&mut self) -> Option<B::Mut<'_>> {
        self.as_mut().map(B::lend_mut)
    }

    fn tether(&mut self) -> Option<B::Home> {
        self.as_mut().map(B::tether)
    }

    fn fetch(home: Option<B::Home>, timeout: Duration) -> Option<Self> {
        match home {
            None => Some(None),
            Some(h) => B::fetch(h, timeout).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_tell_where_was_written() {
        let mut g = Guarded::<u16>::new(Kind::U16, 4, 3, |i| i as u128);
        assert_eq!((g.slice(), g.spilled()), (&[0u16, 1, 2][..], None));
        g.mem[7] ^= 1;
        assert_eq!(g.spilled().unwrap(), "1 element(s) after the buffer's end");
        g.mem[2] ^= 1;
        assert_eq!(g.spilled().unwrap(), "2 element(s) before the buffer");
    }

    #[test]
    fn a_dropped_buffer_comes_home() {
        let mut list = vec![Guarded::<u8>::new(Kind::U8, 1, 2, |i| i as u128)];
        let home = list.tether();
        let t = std::thread::spawn(move || drop(list));
        let back = Vec::<Guarded<u8>>::fetch(home, Duration::from_secs(5)).unwrap();
        assert_eq!(back[0].slice(), [0, 1]);
        t.join().unwrap();
        let (_to, from) = channel::<Vec<u8>>();
        let never = Tether { from, guard: 0, kind: Kind::U8 };
        assert!(Guarded::fetch(never, Duration::from_millis(1)).is_none());
    }
}
