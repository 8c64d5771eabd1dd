//! The operations over in-process ranks.

use backend_sim::run_ranks;
use comm_core::op;

#[test]
fn all_reduce_small_and_large() {
    for n in [1, 2, 3, 4, 5, 8] {
        for count in [0usize, 1, 7, 1000, 100_000] {
            let out = run_ranks(n, move |comm| {
                let mut x: Vec<i64> = (0..count as i64).map(|i| i + comm.rank() as i64).collect();
                comm.all_reduce(&mut x, op::Sum)?;
                Ok(x)
            })
            .unwrap_or_else(|e| panic!("n {n} count {count}: {e}"));
            let base: i64 = (0..n as i64).sum();
            for x in out {
                assert!(x.iter().enumerate().all(|(i, v)| *v == base + (n * i) as i64), "n {n} count {count}");
            }
        }
    }
}
