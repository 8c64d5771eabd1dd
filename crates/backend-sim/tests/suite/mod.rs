//! What every rank of a world does to show that the operations are right; shared by the tests of backend-sim
//! (ranks are threads) and of backend-tcp (ranks are processes).
#![allow(dead_code, missing_docs, unreachable_pub, missing_debug_implementations)]

pub mod ahead;
pub mod channels;
pub mod collectives;
pub mod concurrent;
pub mod futures;
pub mod movement;
pub mod torchcomms;
pub mod values;

use std::cell::Cell;
use std::fmt::Debug;
use std::time::Duration;

use collectives_crate::Algorithm;
use comm_core::{CallOptions, Communicator, Fnv, Operation, Result, With};

/// `collectives` is also the name of a module here.
pub mod collectives_crate {
    pub use ::collectives::Algorithm;
}

/// Elements that lie before and after every borrowed buffer and must not change.
const PAD: usize = 3;

/// The form in which a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Sync,
    Async,
    Scoped,
}

pub const FORMS: [Form; 3] = [Form::Sync, Form::Async, Form::Scoped];

/// One rank at work.
pub struct Rank<'c> {
    pub comm: &'c Communicator,
    pub n: usize,
    pub me: usize,
    hash: Cell<u64>,
    calls: Cell<usize>,
}

impl<'c> Rank<'c> {
    pub fn new(comm: &'c Communicator) -> Self {
        Self { comm, n: comm.size(), me: comm.rank(), hash: Cell::new(0), calls: Cell::new(0) }
    }

    /// A view that forces an algorithm.
    pub fn with(&self, algo: Option<Algorithm>) -> With<'c> {
        let o = CallOptions::new();
        self.comm.with(match algo {
            Some(a) => o.hint("algo", a.name()),
            None => o,
        })
    }

    /// A number that is the same on all ranks and goes up with every call.
    pub fn turn(&self) -> usize {
        self.calls.set(self.calls.get() + 1);
        self.calls.get()
    }

    /// A form that changes from call to call and from rank to rank.
    pub fn any_form(&self, turn: usize) -> Form {
        FORMS[(turn + self.me * (1 + turn / 3)) % 3]
    }

    /// Remembers bits that all ranks must have in common.
    pub fn common(&self, bits: impl IntoIterator<Item = u64>) {
        let mut h = Fnv::default();
        h.write(&self.hash.get().to_le_bytes());
        bits.into_iter().for_each(|b| h.write(&b.to_le_bytes()));
        self.hash.set(h.finish());
    }

    /// Compares what was remembered.
    pub fn compare(&self, what: &str) -> Result<()> {
        let mut all = vec![0u64; self.n];
        self.comm.all_gather(&[self.hash.get()], &mut all[..])?;
        assert!(all.iter().all(|h| *h == all[0]), "{what}: ranks have different bits: {all:x?}");
        Ok(())
    }
}

/// The algorithms of an operation that may run with such an operator; `None` is the table's choice.
pub fn algorithms(op: Operation, commutative: bool) -> Vec<Option<Algorithm>> {
    let of = Algorithm::ALL.iter().copied().filter(|a| a.operation() == op && (commutative || a.keeps_order()));
    std::iter::once(None).chain(of.map(Some)).collect()
}

/// A copy with sentinels around it.
pub fn padded<T: Copy>(x: &[T], sentinel: T) -> Vec<T> {
    let mut v = vec![sentinel; PAD];
    v.extend_from_slice(x);
    v.extend_from_slice(&[sentinel; PAD]);
    v
}

/// What lies between the sentinels, which must be untouched.
pub fn unpadded<T: Copy + PartialEq + Debug>(v: Vec<T>, sentinel: T) -> Vec<T> {
    let end = v.len() - PAD;
    for s in v[..PAD].iter().chain(&v[end..]) {
        assert_eq!(*s, sentinel, "written outside of the buffer");
    }
    v[PAD..end].to_vec()
}

/// The range of a padded buffer.
pub fn inner<T>(v: &mut [T]) -> &mut [T] {
    let end = v.len() - PAD;
    &mut v[PAD..end]
}

/// Compares long buffers without printing them.
pub fn same<T: PartialEq + Debug>(got: &[T], want: &[T], what: &dyn Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    if let Some(i) = got.iter().zip(want).position(|(a, b)| a != b) {
        panic!("{}: at {i} of {}: got {:?}, want {:?}", what(), got.len(), got[i], want[i]);
    }
}

/// Time that an orderly end may take.
pub const END: Duration = Duration::from_secs(20);
