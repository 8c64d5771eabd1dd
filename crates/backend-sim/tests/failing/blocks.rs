//! Calls of the operations that deal in blocks, and of prefix reductions.

use super::*;
use comm_core::With;

/// One of two calls, or the third, by form; the last expression of each is the buffer with the result.
macro_rules! by_form {
    ($with:ident, $how:ident, $out:ident, $sync:expr, $async:expr, |$s:ident| $scoped:expr) => {{
        match $how {
            How::Sync => $sync?,
            How::Async => $out = $async?,
            How::Scoped => $with.scope(|$s| $scoped?.wait().map(drop))?,
        }
        Ok($out)
    }};
}

pub fn issue<T, O>(
    call: &Call,
    with: &With<'_>,
    how: How,
    (rank, n): (usize, usize),
    op: O,
    mine: &dyn Fn(usize) -> Vec<T>,
) -> Result<Vec<T>>
where
    T: Element + Send + 'static,
    O: Operator<T>,
{
    let (c, root) = (call.count, call.root);
    let counts = vec![c; n];
    let (one, mut all, mut out) = (mine(c), mine(c * n), mine(c));
    match call.op {
        Operation::AllGatherV => by_form!(
            with,
            how,
            all,
            with.all_gather_v(&one, &mut all, &counts),
            with.all_gather_v_async(one, all, &counts)?.wait().map(|b| b.1),
            |s| s.all_gather_v(&one, &mut all, &counts)
        ),
        // In place, the root's buffer holds the blocks of all and the others' what they contribute.
        Operation::Gather | Operation::GatherV => {
            let mut x = if rank == root { mine(c * n) } else { mine(c) };
            if call.op == Operation::Gather {
                by_form!(
                    with,
                    how,
                    x,
                    with.gather_in_place(&mut x, root),
                    with.gather_in_place_async(x, root)?.wait(),
                    |s| s.gather_in_place(&mut x, root)
                )
            } else {
                by_form!(
                    with,
                    how,
                    x,
                    with.gather_v_in_place(&mut x, &counts, root),
                    with.gather_v_in_place_async(x, &counts, root)?.wait(),
                    |s| s.gather_v_in_place(&mut x, &counts, root)
                )
            }
        }
        Operation::Scatter => by_form!(
            with,
            how,
            out,
            with.scatter(Some(&all), &mut out, root),
            with.scatter_async(Some(all), out, root)?.wait().map(|b| b.1),
            |s| s.scatter(Some(&all), &mut out, root)
        ),
        Operation::ScatterV => by_form!(
            with,
            how,
            out,
            with.scatter_v(Some(&all), &mut out, &counts, root),
            with.scatter_v_async(Some(all), out, &counts, root)?.wait().map(|b| b.1),
            |s| s.scatter_v(Some(&all), &mut out, &counts, root)
        ),
        Operation::ReduceScatterV => by_form!(
            with,
            how,
            out,
            with.reduce_scatter_v(&all, &mut out, &counts, op),
            with.reduce_scatter_v_async(all, out, &counts, op)?.wait().map(|b| b.1),
            |s| s.reduce_scatter_v(&all, &mut out, &counts, op)
        ),
        Operation::AllToAll => {
            let x = all.clone();
            by_form!(
                with,
                how,
                all,
                with.all_to_all(&x, &mut all),
                with.all_to_all_async(x, all)?.wait().map(|b| b.1),
                |s| s.all_to_all(&x, &mut all)
            )
        }
        Operation::AllToAllV => {
            let x = all.clone();
            by_form!(
                with,
                how,
                all,
                with.all_to_all_v(&x, &mut all, &counts, &counts),
                with.all_to_all_v_async(x, all, &counts, &counts)?.wait().map(|b| b.1),
                |s| s.all_to_all_v(&x, &mut all, &counts, &counts)
            )
        }
        Operation::Scan => by_form!(with, how, out, with.scan(&mut out, op), with.scan_async(out, op)?.wait(), |s| s
            .scan(&mut out, op)),
        Operation::Exscan => {
            by_form!(with, how, out, with.exscan(&mut out, op), with.exscan_async(out, op)?.wait(), |s| s
                .exscan(&mut out, op))
        }
        other => panic!("the tests have no {other}"),
    }
}
