//! Medians and quartiles.

/// Quartiles of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quartiles {
    /// A quarter lies below.
    pub q1: f64,
    /// The middle.
    pub median: f64,
    /// A quarter lies above.
    pub q3: f64,
}

impl Quartiles {
    /// Of these numbers, with linear interpolation between neighbours; `None` of none.
    #[must_use]
    pub fn of(numbers: &[f64]) -> Option<Self> {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |part: f64| {
            let place = part * last as f64;
            let below = place.floor();
            let (low, high) = (sorted[below as usize], sorted[place.ceil() as usize]);
            low + (high - low) * (place - below)
        };
        Some(Self { q1: at(0.25), median: at(0.5), q3: at(0.75) })
    }
}

/// Quartiles of theirs over ours, pair by pair: drift between rounds is in both of a pair, and goes out of the ratio.
#[must_use]
pub fn ratios(pairs: &[(f64, f64)]) -> Option<Quartiles> {
    Quartiles::of(&pairs.iter().map(|(ours, theirs)| theirs / ours).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_interpolate() {
        assert_eq!(Quartiles::of(&[]), None);
        assert_eq!(Quartiles::of(&[7.0]), Some(Quartiles { q1: 7.0, median: 7.0, q3: 7.0 }));
        assert_eq!(Quartiles::of(&[4.0, 1.0, 3.0, 2.0]), Some(Quartiles { q1: 1.75, median: 2.5, q3: 3.25 }));
        assert_eq!(Quartiles::of(&[5.0, 1.0, 3.0, 2.0, 4.0]), Some(Quartiles { q1: 2.0, median: 3.0, q3: 4.0 }));
    }

    #[test]
    fn ratios_are_theirs_over_ours_within_pairs() {
        // The machine is ten times slower in the second round: both sides are, and the ratio is not.
        let r = ratios(&[(1.0, 2.0), (10.0, 20.0), (1.0, 4.0)]).unwrap();
        assert_eq!(r, Quartiles { q1: 2.0, median: 2.0, q3: 3.0 });
        assert_eq!(ratios(&[]), None);
    }
}
