//! User code that panics inside an operation.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failing;

use comm_core::{CommOptions, ErrorKind, op};
use failing::{FORMS, HANGS, How, cases, run, timed, took};

/// A reduce function that panics on one rank: that rank and all others get an error that names it; the
/// process's engine lives on.
#[test]
fn a_reduce_function_that_panics() {
    let mut list = Vec::new();
    for n in 2..=4usize {
        for who in 0..n {
            for count in [10usize, 100_000] {
                for how in FORMS {
                    for commutative in [true, false] {
                        list.push((n, who, count, how, commutative));
                    }
                }
            }
        }
    }
    // The panics are expected; their texts would only bury other output.
    std::panic::set_hook(Box::new(|_| {}));
    cases(list, |&(n, who, count, how, commutative)| {
        let comms = backend_sim::world(n, &CommOptions::new().timeout(HANGS)).unwrap();
        let errors = run(&format!("{n} {who} {count} {how:?}"), &comms, move |comm| {
            let bad = comm.rank() == who;
            let f = op::custom(
                move |a: &mut [f32], b: &[f32]| {
                    assert!(!bad, "the user's bug");
                    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
                },
                commutative,
            );
            let mut x = vec![1f32; count];
            let (r, t) = timed(|| match how {
                How::Sync => comm.all_reduce(&mut x, f),
                How::Async => comm.all_reduce_async(x, f)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.all_reduce(&mut x, f)?.wait().map(drop)),
            });
            // With an order to keep, not every rank folds.
            let e = r.and_then(|()| comm.barrier());
            took("panicking function", t);
            e.err()
        });
        let Some(own) = &errors[who] else {
            assert!(!commutative, "a function that panics went well");
            return;
        };
        assert!(own.to_string().contains("the user's bug"), "{own}");
        for (r, e) in errors.iter().enumerate() {
            let e = e.as_ref().unwrap();
            assert!(matches!(e.kind(), ErrorKind::Aborted { rank, .. } if *rank == who), "rank {r}: {e}");
        }
        // The engine still makes progress for others.
        let comms = backend_sim::world(2, &CommOptions::new().timeout(HANGS)).unwrap();
        run("engine", &comms, |comm| {
            let w = comm.all_reduce_async(vec![1i32; 10], op::Sum).unwrap();
            while w.duration().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(w.wait().unwrap()[0], 2);
        });
    });
}
