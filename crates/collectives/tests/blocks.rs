//! What exchanges of blocks send: Bruck's algorithms, all_to_all, and blocks of uneven length.

mod common;

use collectives::{Algorithm, AnySchedule, Blocks, Request, Shape};
use comm_core::{DType, Operation, ReduceOp, Reducer};

use common::{Case, Kind, Mode, World};

#[test]
fn bruck_sends_one_message_per_round() {
    for n in 1..=17_usize {
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
#[should_panic(expected = "receives another length")]
fn ends_that_disagree_about_a_length_find_out() {
    // Rank 1 expects nothing from rank 0.
    let lens = |rank: usize| if rank == 0 { ([1, 8], [1, 4]) } else { ([4, 2], [0, 2]) };
    let schedule = |rank: usize| {
        let shape = Shape { rank, size: 2, bytes: 0, unit: 1, in_place: false, segment: 0 };
        let blocks = Blocks::Pairs { send: lens(rank).0.into(), recv: lens(rank).1.into() };
        AnySchedule::new(Algorithm::AllToAllVDirect, &Request { shape, root: 0, blocks }).unwrap()
    };
    let reducer = Reducer::builtin(ReduceOp::Sum, DType::U8).unwrap();
    let bufs = vec![[vec![1; 9], vec![0; 5]], [vec![2; 6], vec![0; 2]]];
    let mut world = World::new(reducer, bufs, Mode::Eager, 1);
    world.allow_empty_messages();
    world.run(&mut (0..2).map(schedule).collect::<Vec<_>>());
}
