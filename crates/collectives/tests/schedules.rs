//! Every algorithm over an in-memory world with random scheduling, against a serial computation.

mod common;

use collectives::{Algorithm, AnySchedule, Blocks, Request, Shape};
use comm_core::{DType, Operation, ReduceOp, Reducer};
use proptest::prelude::*;

use common::{Case, Kind, Mode, World};

const SIZES: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16];
const COUNTS: [usize; 8] = [0, 1, 2, 3, 5, 17, 1000, 4096 + 3];

/// The kinds of elements that an algorithm is tested with.
fn kinds(a: Algorithm) -> &'static [Kind] {
    match a.operation() {
        Operation::Broadcast
        | Operation::AllGather
        | Operation::AllGatherV
        | Operation::Gather
        | Operation::GatherV
        | Operation::Scatter
        | Operation::ScatterV
        | Operation::AllToAll
        | Operation::AllToAllV => &[Kind::I64Sum],
        _ if a.keeps_order() => &[Kind::I64Sum, Kind::F32Sum, Kind::I64Avg, Kind::Affine],
        _ => &[Kind::I64Sum, Kind::F32Sum, Kind::I64Avg, Kind::F32Avg],
    }
}

fn sweep(a: Algorithm) {
    let mut seed = 0;
    for n in SIZES {
        for elements in COUNTS {
            // Large cases run with one kind and larger segments; they are there for the many slices.
            let large = elements >= 1000;
            for &kind in &kinds(a)[..if large { 1 } else { kinds(a).len() }] {
                let segment = match elements {
                    0..1000 => 64,
                    1000 => 512,
                    _ => 1024,
                };
                for in_place in [0, u64::MAX] {
                    seed += 1;
                    let mode = [Mode::Eager, Mode::Rendezvous, Mode::Mixed][seed as usize % 3];
                    let case = Case { in_place, segment, mode, seed, ..Case::new(a, n, elements, kind) };
                    let roots = if !a.is_rooted() {
                        0..1
                    } else if large {
                        seed as usize % n..seed as usize % n + 1
                    } else {
                        0..n
                    };
                    for root in roots {
                        Case { root, ..case }.run();
                    }
                }
            }
        }
    }
}

macro_rules! sweeps {
    ($($name:ident: $a:ident;)*) => {$(
        #[test]
        fn $name() {
            sweep(Algorithm::$a);
        }
    )*

        #[test]
        fn every_algorithm_is_swept() {
            let swept = [$(Algorithm::$a,)* Algorithm::BarrierDissemination];
            for a in common::algorithms() {
                assert!(swept.contains(&a), "{a}");
            }
        }
    };
}

sweeps! {
    all_reduce_direct: AllReduceDirect;
    all_reduce_recursive_doubling: AllReduceRecursiveDoubling;
    all_reduce_ring: AllReduceRing;
    reduce_binomial: ReduceBinomial;
    reduce_chain: ReduceChain;
    reduce_ordered: ReduceOrdered;
    broadcast_binomial: BroadcastBinomial;
    broadcast_chain: BroadcastChain;
    all_gather_direct: AllGatherDirect;
    all_gather_bruck: AllGatherBruck;
    all_gather_ring: AllGatherRing;
    all_gather_v_direct: AllGatherVDirect;
    all_gather_v_ring: AllGatherVRing;
    reduce_scatter_direct: ReduceScatterDirect;
    reduce_scatter_ring: ReduceScatterRing;
    reduce_scatter_v_direct: ReduceScatterVDirect;
    reduce_scatter_v_ring: ReduceScatterVRing;
    all_to_all_direct: AllToAllDirect;
    all_to_all_bruck: AllToAllBruck;
    all_to_all_pairwise: AllToAllPairwise;
    all_to_all_v_direct: AllToAllVDirect;
    all_to_all_v_pairwise: AllToAllVPairwise;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_shapes_and_schedules(
        which in 0..Algorithm::ALL.len(),
        kind in 0usize..4,
        n in 1usize..20,
        elements in 0usize..200,
        root in 0usize..20,
        in_place in any::<u64>(),
        segment in 0usize..400,
        mode in prop::sample::select(vec![Mode::Eager, Mode::Rendezvous, Mode::Mixed]),
        seed in 0u64..1 << 40,
    ) {
        let a = Algorithm::ALL[which];
        if a != Algorithm::BarrierDissemination && common::algorithms().any(|b| a == b) {
            let kind = kinds(a)[kind % kinds(a).len()];
            Case { root: root % n, in_place, segment, mode, seed, ..Case::new(a, n, elements, kind) }.run();
        }
    }
}

fn barrier(n: usize, mode: Mode, seed: u64, held: &[usize]) -> (World, Vec<bool>) {
    let reducer = Reducer::builtin(ReduceOp::Sum, DType::U8).unwrap();
    let mut world = World::new(reducer, vec![[Vec::new(), Vec::new()]; n], mode, seed);
    world.allow_empty_messages();
    let shape = |rank| Shape { rank, size: n, bytes: 0, unit: 1, in_place: false, segment: 0 };
    let mut schedules: Vec<_> = (0..n)
        .map(|r| AnySchedule::new(Algorithm::BarrierDissemination, &Request::even(shape(r), 0)).unwrap())
        .collect();
    let ready = world.run_holding(&mut schedules, held);
    (world, ready)
}

#[test]
fn nobody_leaves_a_barrier_before_the_last_has_come() {
    for n in 2..=17 {
        for held in 0..n {
            let mode = [Mode::Eager, Mode::Mixed][held % 2];
            let (world, ready) = barrier(n, mode, (n * 100 + held) as u64, &[held]);
            assert_eq!(ready, vec![false; n], "{held} of {n} was late");
            for r in 0..n {
                assert_eq!(world.counts(r).messages, n.next_power_of_two().ilog2() as usize);
                assert_eq!(world.counts(r).bytes, 0);
            }
        }
    }
    barrier(1, Mode::Eager, 1, &[]);
    barrier(7, Mode::Rendezvous, 1, &[]);
}

#[test]
fn a_ring_sends_the_least_there_is() {
    for n in [2, 3, 4, 7, 8] {
        let elements = 840;
        let bytes = elements * 8;
        for in_place in [0, u64::MAX] {
            let case = Case { in_place, ..Case::new(Algorithm::AllReduceRing, n, elements, Kind::I64Avg) };
            let world = case.run();
            let mut finished = 0;
            for r in 0..n {
                let c = world.counts(r);
                assert_eq!(c.bytes, 2 * (n - 1) * bytes / n, "rank {r} of {n}");
                assert_eq!(c.messages, 2 * (n - 1) * (bytes / n).div_ceil(64));
                assert_eq!(c.peers.iter().collect::<Vec<_>>(), [&((r + 1) % n)]);
                assert_eq!(c.copied, 0, "the fold moves the data");
                assert!(c.most_sends <= 4 && c.most_recvs <= 4, "{c:?}");
                finished += c.finished;
            }
            assert_eq!(finished, bytes, "each element is finished once in the world");

            let scatter = Case { algorithm: Algorithm::ReduceScatterRing, elements: elements / n, ..case };
            let gather = Case { algorithm: Algorithm::AllGatherRing, elements: elements / n, ..case };
            let (scatter, gather) = (scatter.run(), gather.run());
            for r in 0..n {
                assert_eq!(scatter.counts(r).bytes, (n - 1) * bytes / n);
                assert_eq!(scatter.counts(r).copied, 0);
                assert_eq!(gather.counts(r).bytes, (n - 1) * bytes / n);
            }
        }
    }
}

#[test]
fn recursive_doubling_sends_log2_messages() {
    for n in SIZES {
        let world = Case { segment: 0, ..Case::new(Algorithm::AllReduceRecursiveDoubling, n, 100, Kind::Affine) }.run();
        let rounds = n.ilog2() as usize;
        let surplus = n - (1 << rounds);
        for r in 0..n {
            let served = r < 2 * surplus;
            let want = if !served { rounds } else { [1, rounds + 1][r % 2] };
            assert_eq!(world.counts(r).messages, want, "rank {r} of {n}");
            assert_eq!(world.counts(r).bytes, want * 1600);
        }
    }
}

#[test]
fn binomial_trees_have_log2_children_at_the_root_and_send_n_minus_1_messages() {
    for n in SIZES {
        for root in 0..n {
            let case = Case { segment: 0, root, ..Case::new(Algorithm::BroadcastBinomial, n, 10, Kind::I64Sum) };
            let down = case.run();
            let up = Case { algorithm: Algorithm::ReduceBinomial, ..case }.run();
            let rounds = n.next_power_of_two().ilog2() as usize;
            assert_eq!(down.counts(root).messages, rounds);
            assert_eq!(up.counts(root).most_recvs, rounds);
            assert_eq!((0..n).map(|r| down.counts(r).messages).sum::<usize>(), n - 1);
            for r in 0..n {
                assert!(down.counts(r).messages <= rounds);
                assert_eq!(up.counts(r).messages, usize::from(r != root));
            }
        }
    }
}

#[test]
fn chains_carry_the_buffer_once_per_link_with_a_bounded_window() {
    for a in [Algorithm::BroadcastChain, Algorithm::ReduceChain] {
        let world = Case { root: 2, ..Case::new(a, 5, 1000, Kind::I64Sum) }.run();
        let end = if a == Algorithm::BroadcastChain { 1 } else { 2 };
        for r in 0..5 {
            let c = world.counts(r);
            assert_eq!(c.bytes, if r == end { 0 } else { 8000 }, "{a} rank {r}");
            assert!(c.most_sends <= 4 && c.most_recvs <= 4, "{c:?}");
        }
    }
}

#[test]
fn direct_exchanges_send_one_message_per_peer() {
    for a in [Algorithm::AllReduceDirect, Algorithm::ReduceScatterDirect, Algorithm::AllGatherDirect] {
        let world = Case { segment: 0, ..Case::new(a, 6, 50, Kind::I64Sum) }.run();
        for r in 0..6 {
            assert_eq!((world.counts(r).messages, world.counts(r).bytes), (5, 5 * 400), "{a} rank {r}");
            assert_eq!(world.counts(r).peers.len(), 5);
        }
    }
    let world = Case { segment: 0, root: 3, ..Case::new(Algorithm::ReduceOrdered, 6, 50, Kind::Affine) }.run();
    for r in 0..6 {
        assert_eq!(world.counts(r).messages, usize::from(r != 3));
    }
}

#[test]
fn bruck_sends_one_message_per_round() {
    for n in SIZES {
        let rounds = n.next_power_of_two().ilog2() as usize;
        for in_place in [0, u64::MAX] {
            let case = Case { segment: 0, in_place, ..Case::new(Algorithm::AllGatherBruck, n, 10, Kind::I64Sum) };
            let gather = case.run();
            let trade = Case { algorithm: Algorithm::AllToAllBruck, ..case }.run();
            for r in 0..n {
                let (gather, trade) = (gather.counts(r), trade.counts(r));
                assert_eq!((gather.messages, gather.bytes), (rounds, (n - 1) * 80), "rank {r} of {n}");
                // A block takes as many hops as its distance has bits.
                let hops: usize = (0..n).map(|i| i.count_ones() as usize).sum();
                assert_eq!((trade.messages, trade.bytes), (rounds, hops * 80), "rank {r} of {n}");
                assert_eq!((gather.most_recvs, trade.most_recvs), (rounds, rounds), "receives are posted before");
            }
        }
    }
}

#[test]
fn exchanges_send_each_block_once_with_a_bounded_window() {
    for n in [2, 5, 8, 16, 30] {
        for (a, most) in [
            (Algorithm::AllToAllDirect, 16),
            (Algorithm::AllToAllPairwise, 8),
            (Algorithm::AllToAllVDirect, 16),
            (Algorithm::AllToAllVPairwise, 8),
        ] {
            for in_place in [0, u64::MAX] {
                let world = Case { in_place, ..Case::new(a, n, 20, Kind::I64Sum) }.run();
                // Uneven blocks, and only these, travel whole: 160 bytes are three segments of 64.
                let (uneven, each) = if a.operation() == Operation::AllToAllV { (true, 1) } else { (false, 3) };
                for r in 0..n {
                    let c = world.counts(r);
                    assert_eq!(c.messages, each * (n - 1), "{a} rank {r} of {n}, {c:?}");
                    assert!(uneven || c.bytes == 160 * (n - 1), "{a} rank {r} of {n}, {c:?}");
                    assert_eq!(c.peers.len(), n - 1);
                    assert!(c.most_sends <= most && c.most_recvs <= most, "{a} rank {r} of {n}, {c:?}");
                }
            }
        }
    }
}

/// Runs an algorithm on blocks of these lengths; block `b` of rank `r` is of bytes `16 r + b`, or, where a rank
/// has only one block, `r`.
fn uneven(algorithm: Algorithm, lens: &[usize], mode: Mode) -> World {
    let (n, all) = (lens.len(), lens.iter().sum());
    let gathers = algorithm.operation() == Operation::AllGatherV;
    let buffers = |r: usize| {
        let whole = (0..n).flat_map(|b| vec![(16 * r + b) as u8; lens[b]]).collect();
        if gathers { [vec![r as u8; lens[r]], vec![0xff; all]] } else { [whole, vec![0xff; lens[r]]] }
    };
    let reducer = Reducer::builtin(ReduceOp::Max, DType::U8).unwrap();
    let mut world = World::new(reducer, (0..n).map(buffers).collect(), mode, 7);
    let schedule = |rank| {
        let shape = Shape { rank, size: n, bytes: 0, unit: 1, in_place: false, segment: 8 };
        AnySchedule::new(algorithm, &Request { shape, root: 0, blocks: Blocks::Uneven(lens.into()) }).unwrap()
    };
    world.run(&mut (0..n).map(schedule).collect::<Vec<_>>());
    world
}

#[test]
fn blocks_may_be_as_uneven_as_can_be() {
    for lens in [&[0, 0, 500, 0, 0][..], &[0, 0, 0], &[1, 0, 300, 2], &[700], &[0], &[9, 0, 0, 0, 0, 0, 0, 0, 100]] {
        for mode in [Mode::Eager, Mode::Rendezvous] {
            for a in [Algorithm::AllGatherVDirect, Algorithm::AllGatherVRing] {
                let world = uneven(a, lens, mode);
                let want: Vec<u8> = lens.iter().enumerate().flat_map(|(r, len)| vec![r as u8; *len]).collect();
                (0..lens.len()).for_each(|r| assert_eq!(world.output(r), want, "{a} rank {r} of {lens:?}"));
                if lens.iter().all(|len| *len == 0) {
                    assert_eq!(world.counts(0).messages, 0, "all know that there is nothing");
                }
            }
            for a in [Algorithm::ReduceScatterVDirect, Algorithm::ReduceScatterVRing] {
                let world = uneven(a, lens, mode);
                for (r, len) in lens.iter().enumerate() {
                    assert_eq!(world.output(r), vec![(16 * (lens.len() - 1) + r) as u8; *len], "{a} of {lens:?}");
                }
            }
        }
    }
}

#[test]
fn ends_that_alone_know_a_length_exchange_even_nothing() {
    for a in [Algorithm::AllToAllVDirect, Algorithm::AllToAllVPairwise] {
        let world = Case::new(a, 7, 0, Kind::I64Sum).run();
        for r in 0..7 {
            assert_eq!((world.counts(r).messages, world.counts(r).bytes), (6, 0), "{a}");
        }
    }
}

#[test]
fn the_same_algorithm_gives_the_same_bits_whatever_the_timing() {
    for a in [Algorithm::AllReduceDirect, Algorithm::AllReduceRecursiveDoubling, Algorithm::AllReduceRing] {
        let base = Case::new(a, 6, 100, Kind::F32Sum);
        // The seed also makes the inputs, so only the mode and who works in place vary.
        let first = base.run();
        for (mode, in_place) in [(Mode::Eager, u64::MAX), (Mode::Rendezvous, 0b10110)] {
            let again = Case { mode, in_place, ..base }.run();
            assert_eq!(again.output(5), first.output(5), "{a}");
        }
    }
}

#[test]
fn scratch_is_bounded_by_segments_not_by_the_buffer() {
    let (size, segment) = (8, 4096);
    for algorithm in common::algorithms() {
        for rank in 0..size {
            for in_place in [false, true] {
                let shape = Shape { rank, size, bytes: 64 << 20, unit: 4, in_place, segment };
                let schedule = AnySchedule::new(algorithm, &Request::even(shape, 5)).unwrap();
                let scratch = collectives::Schedule::scratch(&schedule);
                // Half a world for each of three rounds, half of one to send, one in place.
                let worlds = if algorithm == Algorithm::AllToAllBruck { 3 } else { 2 };
                assert!(scratch <= worlds * size * segment, "{algorithm} rank {rank}: {scratch}");
            }
        }
    }
}

#[test]
fn contradictory_numbers_are_errors() {
    let good = Shape { rank: 1, size: 2, bytes: 8, unit: 4, in_place: false, segment: 0 };
    let bad = [
        (Shape { rank: 2, ..good }, 0, "rank 2"),
        (Shape { size: 0, ..good }, 0, "world size 0"),
        (Shape { bytes: 6, ..good }, 0, "multiple"),
        (Shape { unit: 0, ..good }, 0, "unit"),
        (Shape { bytes: usize::MAX / 4 * 4, ..good }, 0, "address space"),
        (Shape { size: 1 << 30, ..good }, 0, "split"),
        (good, 2, "root 2"),
    ];
    for (shape, root, part) in bad {
        for a in common::algorithms() {
            match AnySchedule::new(a, &Request::even(shape, root)) {
                Ok(_) => assert!(part == "root 2" && !a.is_rooted(), "{a} {part}"),
                Err(e) => assert!(e.to_string().contains(part), "{e}"),
            }
        }
    }
    for segment in [0, 1, 3, usize::MAX] {
        let s = Shape { bytes: 40, segment, ..good }.effective_segment();
        assert!(s.is_multiple_of(4) && (4..=40).contains(&s), "{segment} -> {s}");
    }
}
