//! Costs that can be worked out by hand, and that the ways to run a case agree.

use collectives::Algorithm::{self, *};

use super::*;

/// Latency 1000 after the sender's overhead of 10, a byte 1, overhead 10, folding a byte 2.
const UNITS: Model = Model::flat(1010, 10, Rates { beta: 1 << 20, copy: 0, gamma: 2 << 20 });
/// Like sockets on one machine.
const LOOPBACK: Model = Model {
    knee: 2 << 20,
    far: Rates { beta: 420_000_000, copy: 350_000_000, gamma: 140_000_000 },
    ..Model::flat(7_500_000, 1_500_000, Rates { beta: 220_000_000, copy: 160_000_000, gamma: 90_000_000 })
};
const KIB: usize = 1 << 10;
const BUDGET: Budget = Budget { small: 300_000, whole: 300_000, cut: 300_000 };

fn all(algorithm: Algorithm, n: usize, bytes: usize) -> Counts {
    Case::new(algorithm, n, bytes).run(UNITS, Mode::All, BUDGET).unwrap()
}

fn log2(n: usize) -> u64 {
    u64::from(n.next_power_of_two().ilog2())
}

#[test]
fn a_message_takes_latency_bytes_and_two_overheads() {
    assert_eq!(all(BroadcastBinomial, 2, 100).time, 10 + 1000 + 100 + 10);
    // The fold comes on top.
    assert_eq!(all(ReduceBinomial, 2, 100).time, 10 + 1000 + 100 + 10 + 200);
    // The root's second message waits for its port, and goes one hop; its first goes two.
    let c = all(BroadcastBinomial, 3, 100);
    assert_eq!(c.time, 10 + 100 + 1000 + 100 + 10);
}

#[test]
fn a_message_may_come_before_its_sender_is_done_with_it() {
    let quick = Model::flat(100, 300, Rates::default());
    let run = |a, n| Case::new(a, n, 8).run(quick, Mode::All, BUDGET).unwrap().time;
    assert_eq!(run(BroadcastBinomial, 2), 100 + 300);
    // Both ways, each has its own message to send before it takes in the other's.
    assert_eq!(run(AllGatherDirect, 2), 300 + 300);
    assert_eq!(run(AllGatherDirect, 4), 3 * 300 + 3 * 300);
}

#[test]
fn handing_bytes_on_keeps_processors_busy() {
    let copying = Model { chunk: 30, ..Model::flat(1010, 10, Rates { beta: 4 << 20, copy: 3 << 20, gamma: 0 }) };
    let run = |a, n, bytes| Case::new(a, n, bytes).run(copying, Mode::All, BUDGET).unwrap().time;
    // One way, only the end of a message is taken out after it has come.
    assert_eq!(run(BroadcastBinomial, 2, 20), 10 + 1000 + 4 * 20 + 3 * 20 + 10);
    assert_eq!(run(BroadcastBinomial, 2, 1000), 10 + 1000 + 4 * 1000 + 3 * 30 + 10);
    // Both ways, a processor hands on one message and takes out the other.
    assert_eq!(run(AllGatherDirect, 2, 4000), 10 + 2 * 3 * 4000 + 10);
    // Two at once for the root: the second comes when the first is in, and is copied more quickly than it comes.
    assert_eq!(run(GatherDirect, 3, 1000), 10 + 1000 + 2 * 4 * 1000 + 3 * 30 + 10);
    // What is beyond the knee costs more, all of it alike: the mean of 1000 bytes at 4 and 1000 at 8.
    let bent = Model { knee: 1000, far: Rates { beta: 8 << 20, ..copying.near }, ..copying };
    let bent = Case::new(BroadcastBinomial, 2, 2000).run(bent, Mode::All, BUDGET).unwrap().time;
    assert_eq!(bent, 10 + 1000 + 6 * 2000 + 3 * 30 + 10);
}

#[test]
fn a_port_takes_one_message_at_a_time() {
    // All send to the root at once, whose port takes one block after the other.
    let c = all(GatherDirect, 9, 400);
    assert_eq!(c.time, 10 + 1000 + 8 * 400 + 10);
    assert_eq!((c.messages, c.bytes, c.most_received, c.most_bytes_received), (8, 3200, 8, 3200));
    // With empty ports the processor is what counts: 10 per message.
    let cheap = Model::flat(1010, 10, Rates::default());
    let c = Case::new(GatherDirect, 9, 400).run(cheap, Mode::All, BUDGET).unwrap();
    assert_eq!(c.time, 10 + 1000 + 8 * 10);
    // All at once over one port out.
    assert_eq!(all(ScatterDirect, 9, 400).time, 10 + 8 * 400 + 1000 + 10);
}

#[test]
fn the_barrier_takes_log_n_rounds() {
    for n in [2, 3, 7, 8, 100] {
        let c = all(BarrierDissemination, n, 0);
        assert_eq!(u64::from(c.rounds), log2(n));
        assert_eq!((c.messages, c.bytes), (n as u64 * log2(n), 0));
        assert_eq!((c.most_sent, c.time), (log2(n), log2(n) * (10 + 1000 + 10)));
    }
}

#[test]
fn trees_and_chains_send_one_message_per_rank_but_the_root() {
    for n in [2, 3, 7, 8, 12, 100] {
        for a in [BroadcastBinomial, ReduceBinomial, GatherBinomial, ScatterBinomial, BroadcastChain, ReduceChain] {
            let c = all(a, n, 8);
            assert_eq!(c.messages, n as u64 - 1, "{a} {n}");
            let chain = if a.name() == "chain" { n as u64 - 1 } else { u64::from(n.ilog2()) };
            assert!((chain..=chain.max(log2(n))).contains(&u64::from(c.rounds)), "{a} {n}: {c:?}");
        }
        assert_eq!(all(BroadcastBinomial, n, 8).most_sent, log2(n));
        // Blocks of a subtree travel together; half of the world's, with 2^k ranks, in the last message.
        if n.is_power_of_two() {
            assert_eq!(all(GatherBinomial, n, 8).bytes, 8 * (n as u64 / 2) * log2(n));
        }
    }
}

#[test]
fn rings_take_a_round_per_hop_and_send_what_must_be_sent() {
    for n in [2, 3, 8, 12] {
        let bytes = 4 * n * 16;
        let c = all(AllReduceRing, n, bytes);
        assert_eq!(c.rounds as usize, 2 * (n - 1));
        assert_eq!(c.messages as usize, 2 * n * (n - 1));
        assert_eq!(c.most_bytes_sent as usize, 2 * (n - 1) * bytes / n);
        let hop = 10 + 1000 + bytes / n + 10;
        assert_eq!(c.time as usize, 2 * (n - 1) * hop + (n - 1) * 2 * bytes / n);
        let c = all(AllGatherRing, n, 64);
        assert_eq!((c.rounds as usize, c.messages as usize), (n - 1, n * (n - 1)));
        assert_eq!(c.time as usize, (n - 1) * (10 + 1000 + 64 + 10));
    }
}

#[test]
fn rabenseifner_sends_twice_the_buffer_less_a_share() {
    for n in [2, 4, 8, 64] {
        let c = all(AllReduceRabenseifner, n, 4 * KIB);
        assert_eq!(c.most_bytes_sent as usize, 2 * (n - 1) * 4 * KIB / n);
        assert_eq!((u64::from(c.rounds), c.messages), (2 * log2(n), 2 * n as u64 * log2(n)));
    }
    let c = all(AllReduceRecursiveDoubling, 8, 4 * KIB);
    assert_eq!((c.rounds, c.messages, c.most_bytes_sent as usize), (3, 24, 12 * KIB));
    assert_eq!(c.time as usize, 3 * (10 + 1000 + 4 * KIB + 10 + 2 * 4 * KIB));
    // One that is over gives first and gets last. With 9 ranks no chain has both ends there: what rank 0 gives is through the cube
    // when it has come to the opposite corner, which serves nobody. With 15 it does.
    assert_eq!(all(AllReduceRecursiveDoubling, 9, 4 * KIB).rounds, 4);
    assert_eq!(all(AllReduceRecursiveDoubling, 15, 4 * KIB).rounds, 5);
}

#[test]
fn exchanges_send_a_message_per_pair_and_bruck_one_per_round() {
    for n in [2, 3, 8, 40] {
        for a in [AllToAllDirect, AllToAllPairwise, AllToAllVDirect, AllGatherDirect, AllReduceDirect] {
            let c = all(a, n, 16);
            assert_eq!((c.messages as usize, c.most_received as usize), (n * (n - 1), n - 1), "{a}");
        }
        let c = all(AllGatherBruck, n, 16);
        assert_eq!((u64::from(c.rounds), c.messages), (log2(n), n as u64 * log2(n)));
        assert_eq!(c.most_bytes_sent as usize, 16 * (n - 1));
    }
    assert_eq!(all(AllToAllBruck, 8, 16).most_bytes_sent, 16 * 4 * 3);
}

#[test]
fn one_rank_for_all_gives_exactly_the_cost_of_all() {
    let mut exact = 0;
    for model in [UNITS, LOOPBACK] {
        for a in algorithms() {
            for n in [2, 3, 4, 7, 8, 12, 31, 32] {
                for bytes in [8, 1344, 64 * KIB, 600 * KIB] {
                    let case = Case::new(a, n, bytes);
                    if case.mode(Budget { small: 0, whole: 0, cut: 0 }) != Mode::One || n * bytes > 1 << 20 {
                        continue;
                    }
                    let (one, all) = (case.run(model, Mode::One, BUDGET), case.run(model, Mode::All, BUDGET));
                    assert_eq!(one.unwrap(), all.unwrap(), "{case}");
                    exact += 1;
                }
            }
        }
    }
    assert!(exact > 300, "{exact}");
}

#[test]
fn one_rank_for_nearly_all_gives_nearly_the_cost_of_all() {
    for a in [AllReduceRing, AllReduceDirect, ReduceScatterDirect] {
        for (n, bytes) in [(7, 64 * KIB), (12, 600 * KIB), (31, 64 * KIB), (31, 8), (100, 8), (20, 1 << 20)] {
            let case = Case::new(a, n, bytes);
            if case.mode(Budget { small: 0, whole: 0, cut: 0 }) == Mode::OneAbout {
                let one = case.run(LOOPBACK, Mode::OneAbout, BUDGET).unwrap();
                let all = case.run(LOOPBACK, Mode::All, BUDGET).unwrap();
                close(&case, one, all, 0.1);
            }
        }
    }
}

#[test]
fn few_chunks_of_a_ring_go_at_their_own_speed() {
    // Taking in and sending takes longer than a message's way, so that a rank with a message in every hop is late.
    let busy = Model { alpha: 3_000_000, overhead: 8_000_000, ..LOOPBACK };
    for model in [LOOPBACK, busy] {
        for (n, elements) in [(100, 1), (100, 2), (400, 2), (400, 20), (400, 100), (400, 300), (400, 399)] {
            let case = Case::new(AllReduceRing, n, 4 * elements);
            let one = case.run(model, Mode::OneAbout, BUDGET).unwrap();
            // A gap of one chunk in a ring that is full but for it holds up all, by turns.
            let tolerance = if elements + 1 == n { 0.2 } else { 0.1 };
            close(&case, one, case.run(model, Mode::All, BUDGET).unwrap(), tolerance);
        }
    }
}

fn close(case: &Case, got: Counts, want: Counts, tolerance: f64) {
    let off = |a: u64, b: u64| (a as f64 / b as f64 - 1.0).abs();
    assert!(off(got.time, want.time) < tolerance, "{case}: {got:?} for {want:?}");
    assert!(off(got.messages, want.messages) < 0.02, "{case}: {got:?} for {want:?}");
    assert!(off(got.bytes, want.bytes) < 0.02, "{case}: {got:?} for {want:?}");
    assert!(off(got.most_bytes_sent, want.most_bytes_sent) < 0.02, "{case}: {got:?} for {want:?}");
}

#[test]
fn lines_end_where_the_whole_does() {
    let mut lines = 0;
    for a in algorithms() {
        for (n, bytes) in [(12, 16 << 20), (100, 4 << 20)] {
            let case = Case::new(a, n, bytes);
            let none = Budget { small: 0, whole: 0, cut: 0 };
            let bare = case.mode(none) == Mode::Line && case.bytes / case.piece() > 8;
            if bare && case.pieces() < 400 {
                let line = case.run(LOOPBACK, Mode::Line, Budget { small: 0, whole: 0, cut: 20_000 }).unwrap();
                let all = case.run(LOOPBACK, Mode::All, BUDGET).unwrap();
                close(&case, line, all, 0.03);
                lines += 1;
            }
        }
    }
    assert!(lines >= 10, "{lines}");
}

#[test]
fn patience_changes_nothing() {
    use collectives::AnySchedule;
    for (a, patience) in
        [(AllGatherDirect, Patience::All), (AllReduceDirect, Patience::Sends), (ReduceScatterDirect, Patience::Sends)]
    {
        for n in [2, 3, 20] {
            let case = Case::new(a, n, 64 * KIB);
            let run = |p| {
                let make = |r| -> rustcomms::Result<AnySchedule> { case.schedule(r) };
                Engine::all(LOOPBACK.at(64 * KIB), n as u32, Symmetry::Rotation, p).run(make).unwrap()
            };
            assert_eq!(run(patience), run(Patience::None), "{case}");
        }
    }
}

#[test]
fn the_results_are_right_and_larger_worlds_are_not_called_checked() {
    for a in algorithms() {
        for (n, bytes) in [(2, 8), (3, 64 * KIB), (12, 1200), (4, 300 * KIB), (21, 8)] {
            assert_eq!(check(&Case::new(a, n, bytes), LOOPBACK).unwrap(), Some(()), "{a}");
        }
        assert_eq!(check(&Case::new(a, 65, 8), LOOPBACK).unwrap(), None);
    }
}

#[test]
fn operations_with_lengths_run_the_schedules_of_those_without() {
    let pairs = [
        (AllGatherVDirect, AllGatherDirect),
        (AllGatherVRing, AllGatherRing),
        (ReduceScatterVDirect, ReduceScatterDirect),
        (ReduceScatterVRing, ReduceScatterRing),
        (GatherVDirect, GatherDirect),
        (ScatterVDirect, ScatterDirect),
    ];
    for (v, even) in pairs {
        for (n, bytes) in [(2, 8), (7, 64 * KIB), (12, 600 * KIB)] {
            assert_eq!(all(v, n, bytes), all(even, n, bytes), "{v}");
        }
    }
    // Each algorithm is costed, or is one of these.
    assert_eq!(algorithms().count() + pairs.len(), Algorithm::ALL.len());
}

#[test]
fn a_wrong_symmetry_is_an_error_and_not_a_number() {
    let case = Case::new(BroadcastBinomial, 8, 64);
    let e = case.run(UNITS, Mode::One, BUDGET).unwrap_err();
    assert!(e.to_string().contains("unmatched"), "{e}");
}
