use super::*;
use crate::perf::ops::{Blocks, Extent, OPS, Spec};
use crate::perf::plan::Step;

fn plan(spec: &'static Spec, sizes: &[u64], case: Case) -> Plan {
    Plan {
        spec,
        cases: vec![case],
        sizes: sizes.to_vec(),
        range: (0, 0),
        step: Step::Factor(2),
        notes: Vec::new(),
        iters: 2,
        warmup: 1,
        checks: 2,
        algo: None,
    }
}

/// Runs a plan on simulated ranks.
fn simulate(ranks: usize, plan: impl Fn() -> Plan + Send + Sync + 'static) -> Vec<Outcome> {
    let rank = move |comm: Communicator| {
        let mut screen = Screen::new(false, false, 0);
        let outcome = run(&comm, &plan(), &mut screen).map_err(|e| rustcomms::Error::invalid(e.to_string()))?;
        comm.finalize(Duration::from_secs(20))?;
        Ok(outcome)
    };
    rustcomms::testing::run_ranks(ranks, rank).unwrap()
}

const SUM: Case = Case { dtype: DType::F32, redop: Some(ReduceOp::Sum), root: None };

/// An all_reduce that damages one element on rank 1, and on rank 2 the input.
static FAULTY: Spec = Spec {
    name: "faulty",
    operation: rustcomms::Operation::AllReduce,
    reduces: true,
    prefix: false,
    rooted: false,
    sizing: Sizing::Whole,
    blocks: Blocks::Even,
    bus: |_| 1.0,
    send: Extent::One,
    recv: Extent::One,
    want: |p| vec![(p.count, crate::perf::ops::Want::Reduced(p.ranks, 0))],
    keeps_rest: false,
    out_of_place: Some(|c, p, send, recv| {
        (OPS[2].out_of_place.unwrap())(c, p, send, recv)?;
        if c.comm.rank() == 1 {
            recv[5] ^= 1;
        }
        Ok(())
    }),
    in_place: Some(|c, p, buf| {
        // One rank forgets to take part with its own data.
        if c.comm.rank() == 2 {
            buf.fill(0);
        }
        (OPS[2].in_place.unwrap())(c, p, buf)
    }),
};

#[test]
fn wrong_results_are_counted_on_all_ranks() {
    let outcomes = simulate(3, || plan(&FAULTY, &[64, 128], SUM));
    for o in &outcomes {
        // Two checked calls, one element on one rank each.
        let out: Vec<_> = o.rows.iter().map(|r| r.out_of_place.unwrap().wrong).collect();
        assert_eq!(out, [Some(2), Some(2)]);
        // All elements on all ranks; some of what was forgotten may have been 0.
        let inp: u64 = o.rows.iter().map(|r| r.in_place.unwrap().wrong.unwrap()).sum();
        assert!((200..=2 * 3 * (16 + 32)).contains(&inp), "{inp}");
        assert_eq!(o.wrong, 4 + inp);
    }
}

/// A barrier that does not wait.
static OPEN: Spec = Spec {
    name: "open",
    operation: rustcomms::Operation::Barrier,
    reduces: false,
    prefix: false,
    rooted: false,
    sizing: Sizing::Nothing,
    blocks: Blocks::Even,
    bus: |_| 1.0,
    send: Extent::One,
    recv: Extent::One,
    want: |_| Vec::new(),
    keeps_rest: false,
    out_of_place: Some(|_, _, _, _| Ok(())),
    in_place: None,
};

#[test]
fn a_barrier_that_does_not_wait_is_seen() {
    let case = Case { dtype: DType::U8, redop: None, root: None };
    let outcomes = simulate(2, move || plan(&OPEN, &[0], case));
    // In each of the two checks' four rounds the punctual rank leaves too early.
    assert!(outcomes.iter().all(|o| o.wrong >= 4), "{outcomes:?}");
    let barrier = OPS.iter().find(|s| s.operation == rustcomms::Operation::Barrier).unwrap();
    let outcomes = simulate(3, move || plan(barrier, &[0], case));
    assert!(outcomes.iter().all(|o| o.wrong == 0 && o.rows[0].out_of_place.unwrap().wrong == Some(0)), "{outcomes:?}");
}

#[test]
fn all_types_and_operators_are_right_on_simulated_ranks() {
    for ranks in [1, 3] {
        for spec in OPS {
            for dtype in DType::ALL {
                let redops: Vec<_> = if spec.reduces {
                    ReduceOp::ALL.into_iter().filter(|o| o.is_legal(dtype)).map(Some).collect()
                } else {
                    vec![None]
                };
                let root = spec.rooted.then_some(ranks - 1);
                let cases = move || redops.iter().map(|&redop| Case { dtype, redop, root }).collect();
                let outcomes = simulate(ranks, move || Plan { cases: cases(), ..plan(spec, &[0, 48, 4096], SUM) });
                for o in outcomes {
                    assert_eq!(o.wrong, 0, "{} on {dtype}: {:?}", spec.name, o.rows);
                }
            }
        }
    }
}

#[test]
fn checks_can_be_left_out() {
    let outcomes = simulate(2, || Plan { checks: 0, ..plan(&FAULTY, &[64], SUM) });
    assert!(outcomes.iter().all(|o| o.wrong == 0 && o.rows[0].in_place.unwrap().wrong.is_none()));
}

#[test]
fn times_are_of_the_slowest_rank_per_call() {
    // Two ranks, four calls.
    let t = Times::of(&[1000, 2000, 3000, 4000, 5000, 1000, 1000, 1000], 2);
    assert_eq!(t, Times { mean: 18.0 / 8.0, min: 2.0, p99: 5.0 });
    let all: Vec<u64> = (1..=200).map(|i| i * 1000).collect();
    assert_eq!(Times::of(&all, 1), Times { mean: 100.5, min: 1.0, p99: 198.0 });
    assert_eq!(Times::of(&[7000], 1), Times { mean: 7.0, min: 7.0, p99: 7.0 });
}
