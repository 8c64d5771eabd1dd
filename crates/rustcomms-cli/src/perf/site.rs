//! The buffers of one call on one rank: filling them, calling, and checking what became of them.

use std::ops::Range;

use rustcomms::{DType, Result};

use super::numbers::{Numbers, Wrong};
use super::ops::{Call, Place, Spec, Want};

/// What outputs hold before a call.
const fn sentinel(dtype: DType) -> u8 {
    // Whatever an output holds, the library makes valid `bool`s of it.
    if matches!(dtype, DType::Bool) { 1 } else { 0xa5 }
}

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
        self.recv.fill(sentinel(numbers.dtype));
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
            Form::OutOfPlace => self.spec.out_of_place.map_or(Ok(()), |f| f(call, &self.place, self.send, self.recv)),
            Form::InPlace => self.spec.in_place.map_or(Ok(()), |f| f(call, &self.place, self.recv)),
        }
    }

    /// What is wrong after one call on buffers filled from `numbers`. Indices are those of the output, then,
    /// out of place, of the input, which must not have changed, and in place of the whole buffer.
    pub(crate) fn check(&self, numbers: &Numbers) -> Wrong {
        let (p, size) = (&self.place, numbers.dtype.size());
        let first = if self.form == Form::InPlace { self.spec.offsets(p).1 } else { 0 };
        let mut wrong = Wrong::default();
        let mut at = first;
        for (len, want) in (self.spec.want)(p) {
            let got = &self.recv[at * size..(at + len) * size];
            let part = match want {
                Want::From(rank, start) => numbers.compare_input(rank, start, got),
                Want::Reduced(ranks, start) => numbers.compare_reduced(0..ranks, start, got),
                Want::Kept => self.compare_kept(numbers, at..at + len),
            };
            wrong.merge(at - first, part);
            at += len;
        }
        if self.form == Form::OutOfPlace {
            wrong.merge(at, numbers.compare_input(p.rank, 0, self.send));
        } else if self.spec.keeps_rest {
            let end = self.recv.len() / size;
            wrong.merge(0, self.compare_kept(numbers, 0..first));
            wrong.merge(at, self.compare_kept(numbers, at..end));
        }
        wrong
    }

    /// Compares a range of elements of the output's buffer with what was there before the call. Indices count from
    /// the range's start.
    fn compare_kept(&self, numbers: &Numbers, range: Range<usize>) -> Wrong {
        let (p, size) = (&self.place, numbers.dtype.size());
        // In place, the input and sentinels around it.
        let input = match self.form {
            Form::OutOfPlace => 0..0,
            Form::InPlace => {
                let start = self.spec.offsets(p).0;
                start..start + self.spec.lengths(p).0
            }
        };
        let cut = |at: usize| at.clamp(range.start, range.end);
        let bytes = |from: usize, to: usize| &self.recv[from * size..to * size];
        let (from, to) = (cut(input.start), cut(input.end));
        let mut wrong = numbers.compare_byte(sentinel(numbers.dtype), bytes(range.start, from));
        let own = numbers.compare_input(p.rank, from.saturating_sub(input.start), bytes(from, to));
        wrong.merge(from - range.start, own);
        wrong.merge(to - range.start, numbers.compare_byte(sentinel(numbers.dtype), bytes(to, range.end)));
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::ops::{OPS, Sizing};
    use rustcomms::ReduceOp;

    /// Does by hand what the operation should do, for rank 1 of 3 with root `root`.
    fn perform(site: &mut Site<'_>, numbers: &Numbers, root: usize) {
        let (p, size) = (site.place, numbers.dtype.size());
        let shard = p.count * size;
        let whole = |rank: usize, elements: usize| {
            let mut x = vec![0; elements * size];
            numbers.fill(rank, 0, &mut x);
            x
        };
        let sum_of = |ranks: usize, elements: usize| {
            let all: Vec<Vec<u8>> = (0..ranks).map(|r| whole(r, elements)).collect();
            (0..elements)
                .flat_map(|i| {
                    let at = |x: &Vec<u8>| i32::from_ne_bytes(x[4 * i..4 * i + 4].try_into().unwrap());
                    all.iter().map(at).fold(0i32, i32::wrapping_add).to_ne_bytes()
                })
                .collect::<Vec<u8>>()
        };
        let sum = |elements: usize| sum_of(3, elements);
        // Uneven shards of 8 elements are 12, 4, and 8.
        let uneven = |all: Vec<u8>, r: usize| all[[0, 12, 16, 24][r] * size..[0, 12, 16, 24][r + 1] * size].to_vec();
        let uneven_shards = || (0..3).flat_map(|r| whole(r, [12, 4, 8][r])).collect::<Vec<u8>>();
        let at = if site.form == Form::InPlace { site.spec.offsets(&p).1 * size } else { 0 };
        let out = &mut site.recv[at..];
        match site.spec.name {
            "sendrecv" => out[..shard].copy_from_slice(&whole(0, p.count)),
            "broadcast" => out[..shard].copy_from_slice(&whole(root, p.count)),
            "all_reduce" => out[..shard].copy_from_slice(&sum(p.count)),
            "reduce" if root == p.rank => out[..shard].copy_from_slice(&sum(p.count)),
            "reduce" => {}
            "all_gather" => (0..3).for_each(|r| out[r * shard..(r + 1) * shard].copy_from_slice(&whole(r, p.count))),
            "all_gather_v" => out[..3 * shard].copy_from_slice(&uneven_shards()),
            "gather" if root == p.rank => {
                (0..3).for_each(|r| out[r * shard..(r + 1) * shard].copy_from_slice(&whole(r, p.count)));
            }
            "gather_v" if root == p.rank => out[..3 * shard].copy_from_slice(&uneven_shards()),
            "gather" | "gather_v" => {}
            "scatter" => out[..shard].copy_from_slice(&whole(root, 3 * p.count)[shard..2 * shard]),
            "scatter_v" => out[..4 * size].copy_from_slice(&uneven(whole(root, 24), 1)),
            "reduce_scatter" => out[..shard].copy_from_slice(&sum(3 * p.count)[shard..2 * shard]),
            "reduce_scatter_v" => out[..4 * size].copy_from_slice(&uneven(sum(24), 1)),
            "all_to_all" => {
                let block = |r| whole(r, 3 * p.count)[shard..2 * shard].to_vec();
                (0..3).for_each(|r| out[r * shard..(r + 1) * shard].copy_from_slice(&block(r)));
            }
            "all_to_all_v" => {
                // Blocks for rank 1: 4 elements after 12 of rank 0, 8 after 4 of rank 1, 12 after 8 of rank 2.
                let block = |r, from: usize, len: usize| whole(r, 24)[from * size..(from + len) * size].to_vec();
                out[..3 * shard].copy_from_slice(&[block(0, 12, 4), block(1, 4, 8), block(2, 8, 12)].concat());
            }
            "scan" => out[..shard].copy_from_slice(&sum_of(2, p.count)),
            "exscan" => out[..shard].copy_from_slice(&sum_of(1, p.count)),
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
                    let numbers = Numbers { dtype: DType::I32, redop, ranks: 3, prefix: spec.prefix, salt: 5 };
                    let place = Place { rank: 1, ranks: 3, root, count: 8, blocks: spec.blocks };
                    let (mut a, mut b) = (vec![0; 200], vec![0; 200]);
                    let mut site = Site::new(spec, place, 4, form, &mut a, &mut b);
                    let what = format!("{} {} root {root}", spec.name, form.name());
                    site.fill(&numbers);
                    // Reduces and gathers leave others than the root's alone, what comes from the root, in place,
                    // the root's.
                    let from_root = ["broadcast", "scatter", "scatter_v"].contains(&spec.name);
                    let kept = (spec.want)(&place).iter().all(|(_, want)| *want == Want::Kept)
                        || from_root && root == 1 && form == Form::InPlace;
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
                    if form == Form::InPlace && spec.keeps_rest {
                        for i in (0..at).chain(at + output..site.recv.len() / 4) {
                            site.recv[4 * i] ^= 1;
                            let wrong = site.check(&numbers);
                            assert_eq!((wrong.count, wrong.first.map(|f| f.0)), (1, Some(i)), "{what}: the rest");
                            site.recv[4 * i] ^= 1;
                        }
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
