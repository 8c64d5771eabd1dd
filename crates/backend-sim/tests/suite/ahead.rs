//! Ranks that are ahead: what they have issued must not take the room that the call needs in which the
//! others are.

use std::time::Duration;

use comm_core::{CallOptions, Result, op, wait_all};

use super::Rank;

/// A deadlock should not take the patience of a whole test.
fn options(algo: &str) -> CallOptions<'static> {
    CallOptions::new().hint("algo", algo).timeout(Duration::from_secs(20))
}

/// One rank issues many large operations at once; the others make the same calls one by one.
pub fn one_rank_ahead(r: &Rank<'_>) -> Result<()> {
    for leader in [0, r.n - 1] {
        for (algo, count, calls) in
            [("ring", 400_000usize, 20), ("direct", 60_000, 50), ("recursive_doubling", 200_000, 20)]
        {
            let w = r.comm.with(options(algo));
            let fresh = |k: usize| vec![(r.me + k) as u32; count];
            let check = |k: usize, x: &[u32]| {
                let want = (0..r.n).map(|q| (q + k) as u32).sum::<u32>();
                assert!(x.iter().all(|v| *v == want), "{algo}, call {k}");
            };
            if r.me == leader {
                let works = (0..calls).map(|k| w.all_reduce_async(fresh(k), op::Sum)).collect::<Result<Vec<_>>>()?;
                for (k, x) in wait_all(works)?.iter().enumerate() {
                    check(k, x);
                }
            } else {
                for k in 0..calls {
                    let mut x = fresh(k);
                    w.all_reduce(&mut x, op::Sum)?;
                    check(k, &x);
                }
            }
        }
        broadcasts(r, leader)?;
    }
    Ok(())
}

/// Long messages of many calls to the same peers.
fn broadcasts(r: &Rank<'_>, root: usize) -> Result<()> {
    for algo in ["binomial", "chain"] {
        let w = r.comm.with(options(algo));
        let count = 400_000;
        if r.me == root {
            let works = (0..20u32).map(|k| w.broadcast_async(vec![k + 1; count], root)).collect::<Result<Vec<_>>>()?;
            wait_all(works)?;
        } else {
            for k in 0..20u32 {
                let mut x = vec![0u32; count];
                w.broadcast(&mut x, root)?;
                assert!(x.iter().all(|v| *v == k + 1), "{algo}, call {k}");
            }
        }
    }
    Ok(())
}
