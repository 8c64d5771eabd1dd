use super::*;

fn numbers(dtype: DType, redop: Option<ReduceOp>, ranks: usize) -> Numbers {
    Numbers { dtype, redop, ranks, prefix: false, salt: 7 }
}

fn pairs() -> impl Iterator<Item = (DType, ReduceOp)> {
    ReduceOp::ALL.into_iter().flat_map(|o| DType::ALL.map(|d| (d, o))).filter(|(d, o)| o.is_legal(*d))
}

fn bytes(n: &Numbers, x: i128) -> Vec<u8> {
    let mut out = Vec::new();
    n.put(x, &mut out);
    out
}

#[test]
fn floats_are_encoded_as_the_types_themselves_do() {
    for x in (-300i128..=300).chain([2048, -2048, 1 << 24, 57344, -448]) {
        let at = |d| bytes(&numbers(d, Some(ReduceOp::Max), 1), x);
        assert_eq!(at(DType::F32), (x as f32).to_ne_bytes(), "{x}");
        assert_eq!(at(DType::F64), (x as f64).to_ne_bytes(), "{x}");
        if x.abs() <= 256 {
            // The upper half of an f32 is a bfloat16.
            assert_eq!(u16::from_ne_bytes(at(DType::Bf16).try_into().unwrap()), ((x as f32).to_bits() >> 16) as u16);
        }
        if x.abs() <= 16 || x.abs() == 448 {
            assert_eq!(at(DType::E4M3), [rustcomms::E4M3::from_f32(x as f32).0], "{x}");
        }
        if x.abs() <= 8 || x == 57344 {
            assert_eq!(at(DType::E5M2), [rustcomms::E5M2::from_f32(x as f32).0], "{x}");
        }
    }
    let half = |x| u16::from_ne_bytes(bytes(&numbers(DType::F16, Some(ReduceOp::Sum), 1), x).try_into().unwrap());
    assert_eq!([half(1), half(-2), half(2047), half(2048)], [0x3c00, 0xc000, 0x67ff, 0x6800]);
}

/// The means of the first ranks are exact, and so are the sums on the way.
#[test]
fn means_of_the_first_few_are_integers() {
    for ranks in [1, 2, 3, 5, 8, 9, 40] {
        for (dtype, op) in pairs().filter(|(_, op)| *op == ReduceOp::Avg) {
            let Some(f) = float(dtype) else { continue };
            let n = Numbers { prefix: true, ..numbers(dtype, Some(op), ranks) };
            let mut seen = 0;
            for index in 0..60 {
                let sum = |k| (0..k).map(|r| n.input(r, index)).sum::<i128>();
                assert!((1..=ranks).all(|k| sum(k) % k as i128 == 0 && sum(k).abs() <= f.integers));
                seen += usize::from(sum(ranks) != 0);
            }
            assert!(seen > 30 || ranks as i128 > f.integers, "{dtype} {ranks}");
        }
    }
}

/// Whether all partial results in this order of ranks are exact, so that the order cannot matter.
fn partials_fit(n: &Numbers, f: &Float, index: usize, order: impl Iterator<Item = usize>) {
    let op = n.redop.unwrap();
    let mut acc = None;
    for r in order {
        let x = n.input(r, index);
        let next = match (acc, op) {
            (None, _) => x,
            (Some(a), ReduceOp::Prod) => a * x,
            (Some(a), ReduceOp::Min) => x.min(a),
            (Some(a), ReduceOp::Max) => x.max(a),
            (Some(a), _) => a + x,
        };
        let fits = if op == ReduceOp::Prod {
            next.unsigned_abs().is_power_of_two() && next.unsigned_abs() <= 1 << f.doublings
        } else {
            next.abs() <= f.integers
        };
        assert!(fits, "{op} on {} of {} ranks: {next}", n.dtype, n.ranks);
        acc = Some(next);
    }
    if op == ReduceOp::Avg {
        assert_eq!(acc.unwrap() % n.ranks as i128, 0, "the mean is an integer");
    }
}

#[test]
fn partial_results_on_floats_are_exact_in_every_order() {
    for ranks in [1, 2, 3, 5, 8, 9, 16, 17, 40, 300] {
        for (dtype, op) in pairs() {
            let Some(f) = float(dtype) else { continue };
            let n = numbers(dtype, Some(op), ranks);
            for index in 0..60 {
                partials_fit(&n, &f, index, 0..ranks);
                partials_fit(&n, &f, index, (0..ranks).rev());
                // All positive ones before all negative ones is the worst for sums.
                let mut sorted: Vec<_> = (0..ranks).collect();
                sorted.sort_by_key(|r| -n.input(*r, index));
                partials_fit(&n, &f, index, sorted.into_iter());
            }
        }
    }
}

#[test]
fn results_depend_on_the_ranks_and_vary() {
    for ranks in [2, 3, 5, 8, 20] {
        for (dtype, op) in pairs() {
            let n = numbers(dtype, Some(op), ranks);
            let results: std::collections::BTreeSet<_> = (0..200).map(|i| n.reduced(0..ranks, i)).collect();
            let cancels = op == ReduceOp::Avg && float(dtype).is_some_and(|f| ranks as i128 > f.integers);
            // Only the mean over more ranks than the type can count is always 0.
            assert!(results.len() > 1 || cancels, "{op} on {dtype} of {ranks} ranks: {results:?}");
            // A missing rank is seen somewhere.
            let missed = (0..2000).any(|i| n.reduced(0..ranks - 1, i) != n.reduced(0..ranks, i));
            assert!(missed || cancels, "{op} on {dtype} of {ranks} ranks");
        }
    }
}

#[test]
fn integers_wrap_and_means_are_truncated() {
    let n = numbers(DType::I8, Some(ReduceOp::Avg), 3);
    assert_eq!(n.wrap(200), -56);
    for i in 0..500 {
        let sum = (0..3).map(|r| n.input(r, i) as i8).fold(0i8, i8::wrapping_add);
        assert_eq!(n.reduced(0..3, i), i128::from(sum) / 3);
    }
    let n = numbers(DType::U64, Some(ReduceOp::Prod), 5);
    for i in 0..100 {
        let product = (0..5).map(|r| n.input(r, i) as u64).fold(1, u64::wrapping_mul);
        assert_eq!(n.reduced(0..5, i), i128::from(product));
        assert_eq!(product % 2, 1);
    }
    let n = numbers(DType::Bool, None, 2);
    assert!((0..100).all(|i| (0..=1).contains(&n.input(0, i))));
}

#[test]
fn data_of_other_ranks_calls_and_places_differs() {
    let n = numbers(DType::F32, None, 4);
    let data = |n: &Numbers, rank, start| {
        let mut out = vec![0; 400];
        n.fill(rank, start, &mut out);
        out
    };
    let base = data(&n, 1, 10);
    assert_ne!(base, data(&n, 2, 10));
    assert_ne!(base, data(&n, 1, 11));
    assert_ne!(base, data(&Numbers { salt: 8, ..n.clone() }, 1, 10));
    assert_eq!(data(&n, 1, 11)[..396], base[4..]);
}

#[test]
fn a_flipped_element_is_found_and_named() {
    for (dtype, op) in pairs().map(|(d, o)| (d, Some(o))).chain(DType::ALL.map(|d| (d, None))) {
        let n = numbers(dtype, op, 3);
        let size = dtype.size();
        // Longer than a period, so that tables repeat.
        let len = PERIOD + 1000;
        let mut buf = vec![0; len * size];
        n.fill(2, 5, &mut buf);
        assert_eq!(n.compare_input(2, 5, &buf), Wrong::default());
        for at in [0, 17, PERIOD - 1, PERIOD, len - 1] {
            let mut bad = buf.clone();
            bad[at * size + size - 1] ^= 1;
            let wrong = n.compare_input(2, 5, &bad);
            assert_eq!((wrong.count, wrong.first.unwrap().0), (1, at), "{dtype} {op:?}");
        }
        let mut bad = buf.clone();
        bad.rotate_left(size);
        assert!(n.compare_input(2, 5, &bad).count > 0, "{dtype} {op:?}: a shift by one is seen");
    }
}

#[test]
fn reductions_are_compared_from_any_start() {
    let n = numbers(DType::I32, Some(ReduceOp::Sum), 3);
    let len = 2 * PERIOD;
    let start = 100_000;
    let mut sum = vec![0i32; len];
    for r in 0..3 {
        let mut x = vec![0; 4 * len];
        n.fill(r, start, &mut x);
        for (s, x) in sum.iter_mut().zip(x.chunks_exact(4)) {
            *s = s.wrapping_add(i32::from_ne_bytes(x.try_into().unwrap()));
        }
    }
    let mut got: Vec<u8> = sum.iter().flat_map(|s| s.to_ne_bytes()).collect();
    assert_eq!(n.compare_reduced(0..3, start, &got), Wrong::default());
    got[4 * (PERIOD + 3)] ^= 0x80;
    let wrong = n.compare_reduced(0..3, start, &got);
    assert_eq!((wrong.count, wrong.first.unwrap().0), (1, PERIOD + 3));
    assert!(n.compare_reduced(0..2, start, &got).count > 1000);
}

#[test]
fn untouched_memory_and_merged_parts() {
    let n = numbers(DType::U16, None, 2);
    let mut buf = vec![0xa5; 20];
    assert_eq!(n.compare_byte(0xa5, &buf).count, 0);
    buf[7] = 0;
    let mut all = Wrong::default();
    all.merge(0, n.compare_byte(0xa5, &buf[..4]));
    all.merge(100, n.compare_byte(0xa5, &buf));
    all.merge(200, n.compare_byte(0xa5, &buf));
    assert_eq!((all.count, all.first.unwrap().0), (2, 103));
    assert_eq!(n.compare_byte(0xa5, &[]).count, 0);
}
