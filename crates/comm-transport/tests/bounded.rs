//! What a peer can make an endpoint hold is bounded. One test, because it looks at the memory of its process.

mod wire;

use comm_transport::FRAGMENT;
use wire::*;

#[test]
fn what_a_peer_can_make_us_hold_is_bounded() {
    a_flood_of_small_frames_costs_no_memory();
    frames_of_an_unknown_communicator_wait_within_bounds();
    messages_that_nobody_reads_have_an_end();
}

fn frames_of_an_unknown_communicator_wait_within_bounds() {
    let mut s = Scene::new();
    for kind in 1..=18u8 {
        s.send(Frame { comm: 5, total: 4, ..frame(kind) }, &[0; 4]);
    }
    s.still_listens();
    let before = memory();
    let big = vec![1u8; FRAGMENT];
    let mut sent = 0usize;
    while s.send(Frame { comm: 1000 + sent as u64, seq: 1, total: big.len() as u64, ..frame(COLLECTIVE) }, &big) {
        sent += 1;
        assert!(sent < 2000, "the endpoint takes everything");
    }
    s.corrupt("communicators that do not exist here");
    assert!(memory().saturating_sub(before) < 96 << 20, "{} bytes more", memory() - before);
}

fn a_flood_of_small_frames_costs_no_memory() {
    for kind in [CTS, CREDIT, REFUSE, REFUSE_P2P, HEARTBEAT, STATUS, QUERY, ARRIVALS] {
        let mut s = Scene::new();
        s.still_listens();
        let before = memory();
        let payload: Vec<u8> = if kind == REFUSE || kind == REFUSE_P2P { vec![b'x'; 20_000] } else { Vec::new() };
        for i in 0..4000u64 {
            let seq = if i % 7 == 0 { u64::MAX - i } else { i.wrapping_mul(0x9e37_79b9_7f4a_7c15) };
            let f = Frame { seq, step: i as u32, offset: u64::MAX - i, ..frame(kind) };
            assert!(s.send(f, &payload), "kind {kind}: {:?}", s.us.failure(s.bad));
        }
        if kind == REFUSE {
            // So many calls that this rank has not made cannot be remembered, and say that something is wrong.
            let e = s.failure();
            assert!(e.to_string().contains("refused more than"), "{e}");
        } else {
            s.still_listens();
        }
        let more = memory().saturating_sub(before);
        assert!(more < 48 << 20, "kind {kind}: {more} bytes more");
        s.unharmed();
    }
}

fn messages_that_nobody_reads_have_an_end() {
    let mut s = Scene::new();
    let mut sent = 0;
    while s.send(Frame { step: 1, total: 1, ..frame(CONTROL) }, b"x") {
        sent += 1;
        assert!(sent < 20_000, "the endpoint takes everything");
    }
    s.corrupt("that nobody reads");
    let mut s = Scene::new();
    let mut sent = 0;
    let before = memory();
    while s.send(Frame { step: 1, total: 1 << 18, ..frame(CONTROL) }, &vec![1; 1 << 18]) {
        sent += 1;
        assert!(sent < 2_000, "the endpoint takes everything");
    }
    s.corrupt("that nobody reads");
    assert!(memory().saturating_sub(before) < 400 << 20);
    let mut s = Scene::new();
    let mut seq = 0;
    while s.send(Frame { seq, total: 1 << 30, ..frame(RTS) }, &[]) {
        seq += 1;
        assert!(seq < 200_000, "the endpoint takes everything");
    }
    s.corrupt("announced messages that nobody receives");
}
