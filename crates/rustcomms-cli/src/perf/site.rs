//! The buffers of one call on one rank: filling them, calling, and checking what became of them.

use rustcomms::Result;

use super::numbers::{Numbers, Wrong};
use super::ops::{Call, Extent, Place, Spec, Want};

/// What outputs hold before a call.
const SENTINEL: u8 = 0xa5;

/// Which buffers a call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    OutOfPlace,
    InPlace,
}

impl Form {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OutOfPlace => "out of place",
            Self::InPlace => "in place",
        }
    }
}

/// Buffers, and where this rank is.
pub(crate) struct Site<'b> {
    spec: &'static Spec,
    place: Place,
    form: Form,
    /// Empty in place.
    send: &'b mut [u8],
    /// In place the one buffer.
    recv: &'b mut [u8],
}

impl<'b> Site<'b> {
    /// Cuts what the call needs from buffers that are long enough.
    pub(crate) fn new(
        spec: &'static Spec,
        place: Place,
        size: usize,
        form: Form,
        send: &'b mut [u8],
        recv: &'b mut [u8],
    ) -> Self {
        let (s, r) = spec.lengths(&place);
        let (s, r) = if form == Form::InPlace { (0, s.max(r)) } else { (s, r) };
        Self { spec, place, form, send: &mut send[..s * size], recv: &mut recv[..r * size] }
    }

    /// Writes this rank's input, and sentinels into the rest.
    pub(crate) fn fill(&mut self, numbers: &Numbers) {
        self.recv.fill(SENTINEL);
        let input = match self.form {
            Form::OutOfPlace => &mut *self.send,
            Form::InPlace => {
                let (at, _) = self.spec.offsets(&self.place);
                let (len, _) = self.spec.lengths(&self.place);
                let size = numbers.dtype.size();
                &mut self.recv[at * size..(at + len) * size]
            }
        };
        numbers.fill(self.place.rank, 0, input);
    }

    /// Makes the call.
    pub(crate) fn call(&mut self, call: &Call<'_>) -> Result<()> {
        match self.form {
            Form::OutOfPlace => self.spec.out_of_place.map_or(Ok(()), |f| f(call, self.send, self.recv)),
            Form::InPlace => self.spec.in_place.map_or(Ok(()), |f| f(call, self.recv)),
        }
    }

    /// What is wrong after one call on buffers filled from `numbers`. Indices are those of the output, then,
    /// out of place, of the input, which must not have changed.
    pub(crate) fn check(&self, numbers: &Numbers) -> Wrong {
        let (p, size) = (&self.place, numbers.dtype.size());
        let at = if self.form == Form::InPlace { self.spec.offsets(p).1 } else { 0 };
        let mut wrong = Wrong::default();
        for (i, want) in (self.spec.want)(p).into_iter().enumerate() {
            let got = &self.recv[(at + i * p.count) * size..(at + (i + 1) * p.count) * size];
            let part = match want {
                Want::From(rank, start) => numbers.compare_input(rank, start, got),
                Want::Reduced(start) => numbers.compare_reduced(0..p.ranks, start, got),
                Want::Kept if self.form == Form::OutOfPlace => numbers.compare_byte(SENTINEL, got),
                Want::Kept => numbers.compare_input(p.rank, i * p.count, got),
            };
            wrong.merge(i * p.count, part);
        }
        if self.form == Form::OutOfPlace {
            let output = if self.spec.recv == Extent::PerRank { p.count * p.ranks } else { p.count };
            wrong.merge(output, numbers.compare_input(p.rank, 0, self.send));
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::ops::{OPS, Sizing};
    use rustcomms::{DType, ReduceOp};

    /// Does by hand what the operation should do, for rank 1 of 3 with root `root`.
    fn perform(site: &mut Site<'_>, numbers: &Numbers, root: usize) {
        let (p, size) = (site.place, numbers.dtype.size());
        let shard = p.count * size;
        let whole = |rank: usize, elements: usize| {
            let mut x = vec![0; elements * size];
            numbers.fill(rank, 0, &mut x);
            x
        };
        let sum = |elements: usize| {
            let all: Vec<Vec<u8>> = (0..3).map(|r| whole(r, elements)).collect();
            (0..elements)
                .flat_map(|i| {
                    let at = |x: &Vec<u8>| i32::from_ne_bytes(x[4 * i..4 * i + 4].try_into().unwrap());
                    all.iter().map(at).fold(0i32, i32::wrapping_add).to_ne_bytes()
                })
                .collect::<Vec<u8>>()
        };
        let at = if site.form == Form::InPlace { site.spec.offsets(&p).1 * size } else { 0 };
        let out = &mut site.recv[at..];
        match site.spec.name {
            "sendrecv" => out[..shard].copy_from_slice(&whole(0, p.count)),
            "broadcast" => out[..shard].copy_from_slice(&whole(root, p.count)),
            "all_reduce" => out[..shard].copy_from_slice(&sum(p.count)),
            "reduce" if root == p.rank => out[..shard].copy_from_slice(&sum(p.count)),
            "reduce" => {}
            "all_gather" => (0..3).for_each(|r| out[r * shard..(r + 1) * shard].copy_from_slice(&whole(r, p.count))),
            "reduce_scatter" => out[..shard].copy_from_slice(&sum(3 * p.count)[shard..2 * shard]),
            other => panic!("the test does not know {other}"),
        }
    }

    #[test]
    fn right_results_pass_and_every_flipped_element_is_counted() {
        for spec in OPS.iter().filter(|s| s.sizing != Sizing::Nothing) {
            for (form, exists) in
                [(Form::OutOfPlace, spec.out_of_place.is_some()), (Form::InPlace, spec.in_place.is_some())]
            {
                for root in if spec.rooted && exists { vec![1, 2] } else { vec![0; usize::from(exists)] } {
                    let redop = spec.reduces.then_some(ReduceOp::Sum);
                    let numbers = Numbers { dtype: DType::I32, redop, ranks: 3, salt: 5 };
                    let place = Place { rank: 1, ranks: 3, root, count: 8 };
                    let (mut a, mut b) = (vec![0; 200], vec![0; 200]);
                    let mut site = Site::new(spec, place, 4, form, &mut a, &mut b);
                    let what = format!("{} {} root {root}", spec.name, form.name());
                    site.fill(&numbers);
                    // A reduce leaves others than the root's alone, a broadcast in place the root's.
                    let kept = (spec.want)(&place) == [Want::Kept]
                        || (spec.want)(&place) == [Want::From(1, 0)] && form == Form::InPlace;
                    assert_eq!(site.check(&numbers).count == 0, kept, "{what}: without the call");
                    perform(&mut site, &numbers, root);
                    assert_eq!(site.check(&numbers), Wrong::default(), "{what}");

                    let at = if form == Form::InPlace { spec.offsets(&place).1 } else { 0 };
                    let output = spec.lengths(&place).1;
                    for i in 0..output {
                        site.recv[4 * (at + i) + i % 4] ^= 0x10;
                        let wrong = site.check(&numbers);
                        assert_eq!((wrong.count, wrong.first.map(|f| f.0)), (1, Some(i)), "{what}");
                        site.recv[4 * (at + i) + i % 4] ^= 0x10;
                    }
                    if form == Form::OutOfPlace {
                        site.send[9] ^= 1;
                        let wrong = site.check(&numbers);
                        assert_eq!((wrong.count, wrong.first.map(|f| f.0)), (1, Some(output + 2)), "{what}: the input");
                    }
                }
            }
        }
    }
}
