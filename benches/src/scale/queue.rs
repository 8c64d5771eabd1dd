//! A priority queue for times that never go back: a radix heap.

/// Something with a time.
pub(super) trait Timed {
    /// When it happens.
    fn time(&self) -> u64;
}

/// Times that are pushed must not be before the last one that was popped. Pushing and popping take constant time but for moves
/// between buckets, of which each element sees fewer than the number of bits in which times differ.
#[derive(Debug)]
pub(super) struct Queue<E> {
    /// Bucket `i` holds those whose highest bit that differs from `last` is bit `i - 1`.
    buckets: Vec<Vec<E>>,
    last: u64,
}

impl<E: Timed> Queue<E> {
    pub(super) fn new() -> Self {
        Self { buckets: (0..=64).map(|_| Vec::new()).collect(), last: 0 }
    }

    pub(super) fn push(&mut self, e: E) {
        debug_assert!(e.time() >= self.last, "time goes back");
        let bucket = (64 - (e.time() ^ self.last).leading_zeros()) as usize;
        self.buckets[bucket].push(e);
    }

    /// Swaps all of the earliest time into `batch`, which must be empty; false if there are none.
    pub(super) fn pop(&mut self, batch: &mut Vec<E>) -> bool {
        if self.buckets[0].is_empty() {
            let Some(i) = self.buckets.iter().position(|b| !b.is_empty()) else { return false };
            let moved = std::mem::take(&mut self.buckets[i]);
            self.last = moved.iter().map(E::time).min().unwrap_or(self.last);
            for e in moved {
                self.push(e);
            }
        }
        std::mem::swap(&mut self.buckets[0], batch);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Timed for u64 {
        fn time(&self) -> u64 {
            *self
        }
    }

    #[test]
    fn times_come_in_order_with_all_their_equals() {
        let (mut q, mut seed, mut batch) = (Queue::new(), 1u64, Vec::new());
        let mut model = std::collections::BTreeMap::<u64, usize>::new();
        for _ in 0..100 {
            q.push(seed % 7);
            *model.entry(seed % 7).or_default() += 1;
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        }
        while q.pop(&mut batch) {
            let (t, n) = model.pop_first().unwrap();
            assert_eq!(batch, vec![t; n]);
            batch.clear();
            if model.len() < 50 && seed != 0 {
                for shift in [60, 40, 5] {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let later = t + (seed >> shift);
                    if later < u64::MAX / 4 {
                        q.push(later);
                        *model.entry(later).or_default() += 1;
                    } else {
                        seed = 0;
                        break;
                    }
                }
            }
        }
        assert!(model.is_empty());
    }
}
