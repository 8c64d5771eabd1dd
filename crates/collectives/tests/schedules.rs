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
            for a in Algorithm::ALL {
                assert!(swept.contains(a), "{a}");
            }
        }
    };
}

sweeps! {
    all_reduce_direct: AllReduceDirect;
    all_reduce_recursive_doubling: AllReduceRecursiveDoubling;
    all_reduce_rabenseifner: AllReduceRabenseifner;
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
    gather_binomial: GatherBinomial;
    gather_direct: GatherDirect;
    gather_v_direct: GatherVDirect;
    scatter_binomial: ScatterBinomial;
    scatter_direct: ScatterDirect;
    scatter_v_direct: ScatterVDirect;
    reduce_scatter_direct: ReduceScatterDirect;
    reduce_scatter_halving: ReduceScatterHalving;
    reduce_scatter_ring: ReduceScatterRing;
    reduce_scatter_v_direct: ReduceScatterVDirect;
    reduce_scatter_v_ring: ReduceScatterVRing;
    all_to_all_direct: AllToAllDirect;
    all_to_all_bruck: AllToAllBruck;
    all_to_all_pairwise: AllToAllPairwise;
    all_to_all_v_direct: AllToAllVDirect;
    all_to_all_v_pairwise: AllToAllVPairwise;
    scan_recursive_doubling: ScanRecursiveDoubling;
    scan_chain: ScanChain;
    exscan_recursive_doubling: ExscanRecursiveDoubling;
    exscan_chain: ExscanChain;
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
        if a != Algorithm::BarrierDissemination {
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
fn rabenseifner_sends_twice_the_buffer_less_a_share_in_twice_log2_messages() {
    for n in SIZES {
        // Not a multiple of the members, so that shares differ by an element.
        let (elements, unit) = (1001, 16);
        for in_place in [0, u64::MAX] {
            let case = Case::new(Algorithm::AllReduceRabenseifner, n, elements, Kind::Affine);
            let world = Case { segment: 0, in_place, ..case }.run();
            let rounds = n.ilog2() as usize;
            let members = 1 << rounds;
            let surplus = n - members;
            for r in 0..n {
                let c = world.counts(r);
                let served = r < 2 * surplus;
                let (messages, extra) = match (served, r % 2) {
                    (false, _) => (2 * rounds, 0),
                    (true, 0) => (1, 0),
                    (true, _) => (2 * rounds + 1, elements),
                };
                assert_eq!(c.messages, messages, "rank {r} of {n}");
                let shares = if served && r % 2 == 0 { elements } else { 2 * (elements - elements / members) + extra };
                let sent = c.bytes / unit;
                assert!(sent.abs_diff(shares) <= 2, "rank {r} of {n} sends {sent} elements and not {shares}");
                assert!(n == 1 || in_place != 0 || c.copied <= elements * unit, "{c:?}");
            }
            let finished: usize = (0..n).map(|r| world.counts(r).finished).sum();
            assert_eq!(finished, elements * unit, "each element is finished once in the world");
        }
    }
}

#[test]
fn halving_sends_each_block_of_others_once_in_log2_messages() {
    for n in SIZES {
        let world = Case { segment: 0, ..Case::new(Algorithm::ReduceScatterHalving, n, 3, Kind::Affine) }.run();
        let rounds = n.ilog2() as usize;
        let surplus = n - (1 << rounds);
        let finished: usize = (0..n).map(|r| world.counts(r).finished).sum();
        assert_eq!(finished, n * 48, "each element is finished once in the world");
        for r in 0..n {
            let (c, served) = (world.counts(r), r < 2 * surplus);
            // A member keeps its own block, and sends that of the surplus rank which it serves to that.
            let (messages, blocks) = match (served, r % 2) {
                (true, 0) => (1, n),
                (true, _) => (rounds + 1, n - 1),
                (false, _) => (rounds, n - 1),
            };
            assert_eq!((c.messages, c.bytes), (messages, blocks * 48), "rank {r} of {n}");
        }
    }
}

#[test]
fn trees_gather_and_scatter_in_log2_messages_at_the_root() {
    for n in SIZES {
        for root in [0, n / 2, n - 1] {
            let case = Case { segment: 0, root, ..Case::new(Algorithm::GatherBinomial, n, 3, Kind::I64Sum) };
            let up = case.run();
            let down = Case { algorithm: Algorithm::ScatterBinomial, ..case }.run();
            let rounds = n.next_power_of_two().ilog2() as usize;
            assert_eq!(up.counts(root).most_recvs, rounds);
            assert_eq!(down.counts(root).messages, rounds);
            assert_eq!(down.counts(root).bytes, (n - 1) * 24, "each block leaves the root once");
            for r in 0..n {
                assert_eq!(up.counts(r).messages, usize::from(r != root));
                assert_eq!(down.counts(r).most_recvs, usize::from(r != root));
            }
        }
    }
}

#[test]
fn a_root_has_few_messages_under_way_however_many_ranks_there_are() {
    for a in [Algorithm::GatherDirect, Algorithm::GatherVDirect, Algorithm::ScatterDirect, Algorithm::ScatterVDirect] {
        for mode in [Mode::Eager, Mode::Rendezvous] {
            let world = Case { root: 30, mode, ..Case::new(a, 50, 20, Kind::I64Sum) }.run();
            let c = world.counts(30);
            assert!(c.most_sends <= 16 && c.most_recvs <= 16, "{a}: {c:?}");
            assert!(c.most_sends.max(c.most_recvs) > 8, "{a}: {c:?}");
        }
    }
}

#[test]
fn lengths_that_only_two_ranks_know_are_told_even_if_they_are_nothing() {
    let messages = |a, elements| {
        let world = Case { root: 1, ..Case::new(a, 5, elements, Kind::I64Sum) }.run();
        (0..5).map(|r| world.counts(r).messages).sum::<usize>()
    };
    for (even, uneven) in
        [(Algorithm::GatherDirect, Algorithm::GatherVDirect), (Algorithm::ScatterDirect, Algorithm::ScatterVDirect)]
    {
        assert_eq!((messages(even, 0), messages(even, 5)), (0, 4));
        assert_eq!((messages(uneven, 0), messages(uneven, 5)), (4, 4));
    }
}

#[test]
#[should_panic(expected = "receives another length")]
fn a_root_that_expects_nothing_is_told_otherwise() {
    let blocks = |rank: usize| Blocks::Uneven([8, if rank == 0 { 0 } else { 8 }].into());
    let shape = |rank| Shape { rank, size: 2, bytes: 0, unit: 1, in_place: false, segment: 0 };
    let request = |rank| Request { shape: shape(rank), root: 0, blocks: blocks(rank) };
    let mut schedules: Vec<_> =
        (0..2).map(|r| AnySchedule::new(Algorithm::GatherVDirect, &request(r)).unwrap()).collect();
    let bufs = vec![[vec![1; 8], vec![0; 8]], [vec![2; 8], Vec::new()]];
    let reducer = Reducer::builtin(ReduceOp::Sum, DType::U8).unwrap();
    let mut world = World::new(reducer, bufs, Mode::Eager, 1);
    world.allow_empty_messages();
    world.run(&mut schedules);
}

#[test]
fn prefixes_need_log2_messages_or_one_per_segment() {
    for n in SIZES {
        for (doubling, chain) in [
            (Algorithm::ScanRecursiveDoubling, Algorithm::ScanChain),
            (Algorithm::ExscanRecursiveDoubling, Algorithm::ExscanChain),
        ] {
            let small = Case { segment: 0, ..Case::new(doubling, n, 100, Kind::Affine) }.run();
            let large = Case::new(chain, n, 100, Kind::Affine).run();
            for r in 0..n {
                let above = (0..5).filter(|k| r + (1 << k) < n).count();
                assert_eq!(small.counts(r).messages, above, "{doubling} rank {r} of {n}");
                let c = large.counts(r);
                assert_eq!(
                    (c.messages, c.bytes),
                    if r + 1 < n { (25, 1600) } else { (0, 0) },
                    "{chain} rank {r} of {n}"
                );
                assert!(c.most_sends <= 4 && c.most_recvs <= 4, "{c:?}");
            }
        }
    }
}

#[test]
fn the_same_algorithm_gives_the_same_bits_whatever_the_timing() {
    for &a in Algorithm::ALL.iter().filter(|a| a.operation() == Operation::AllReduce) {
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
    for &algorithm in Algorithm::ALL {
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
        for &a in Algorithm::ALL {
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
