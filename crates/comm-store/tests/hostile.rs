//! Random and damaged bytes for the server and the client, without sockets: neither panics, and what they hold is
//! bounded. The fuzz targets of `fuzz/` are the same with more patience.

mod common;

use comm_store::fuzzing::{self, Played};
use proptest::prelude::*;

/// What the server of these tests may hold.
const MEMORY: usize = 4 << 20;

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

/// A request as PyTorch's client would write it; few keys, so that connections meet at them.
fn request() -> impl Strategy<Value = Vec<u8>> {
    let key = || prop::sample::select(vec![&b"/a"[..], b"/b", b"/q", b"/", b""]);
    let value = || {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..30),
            Just(b"41".to_vec()),
            (0..60_000usize).prop_map(|n| vec![7; n])
        ]
    };
    let keyed = prop::sample::select(vec![3u8, 8, 15, 16]);
    let valued = prop::sample::select(vec![1u8, 9, 14]);
    let listed = prop::sample::select(vec![5u8, 6, 6, 10]);
    let write = |op: u8, parts: &[&[u8]], last: &[u8]| {
        let mut out = vec![op];
        parts.iter().for_each(|p| put(&mut out, p));
        out.extend(last);
        out
    };
    prop_oneof![
        (keyed, key()).prop_map(move |(op, k)| write(op, &[k], &[])),
        (valued, key(), value()).prop_map(move |(op, k, v)| write(op, &[k, &v], &[])),
        (key(), value(), value()).prop_map(move |(k, e, d)| write(2, &[k, &e, &d], &[])),
        (prop::sample::select(vec![4u8, 18]), key(), -2..4i64).prop_map(move |(op, k, n)| write(
            op,
            &[k],
            &n.to_le_bytes()
        )),
        (listed, prop::collection::vec(key(), 0..40)).prop_map(move |(op, keys)| {
            let mut out = vec![op];
            out.extend((keys.len() as u64).to_le_bytes());
            keys.iter().for_each(|k| put(&mut out, k));
            out
        }),
        prop::collection::vec((key(), value()), 0..5).prop_map(move |pairs| {
            let mut out = vec![11];
            out.extend((pairs.len() as u64).to_le_bytes());
            pairs.iter().for_each(|(k, v)| {
                put(&mut out, k);
                put(&mut out, v);
            });
            out
        }),
        prop::sample::select(vec![vec![7u8], vec![12], vec![17], vec![13, 1, 2, 3, 4]]),
    ]
}

/// A number as the plays read it.
fn number(n: usize) -> Vec<u8> {
    if n < 128 { vec![2 * n as u8] } else { vec![(2 * (n & 127) + 1) as u8, (n >> 7) as u8] }
}

#[derive(Clone, Debug)]
enum Step {
    Input(Vec<u8>, Vec<usize>),
    Take(usize),
    Introduce,
    TakeAll,
    Close,
}

/// What one of eight connections does; mostly as it should.
fn step() -> impl Strategy<Value = (u8, Step)> {
    let damage = prop_oneof![
        6 => Just(None),
        1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(Some),
    ];
    let input =
        (request(), damage, prop::collection::vec(any::<usize>(), 0..4)).prop_map(|(mut bytes, damage, cuts)| {
            if let Some((at, value)) = damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            Step::Input(bytes, cuts)
        });
    let garbage = prop::collection::vec(any::<u8>(), 0..60).prop_map(|b| Step::Input(b, vec![]));
    let what = prop_oneof![
        12 => input,
        1 => garbage,
        2 => (0..30_000usize).prop_map(Step::Take),
        4 => Just(Step::Introduce),
        2 => Just(Step::TakeAll),
        1 => Just(Step::Close),
    ];
    (0..8u8, what)
}

/// The steps as [`fuzzing::server`] reads them.
fn script(secret: bool, steps: &[(u8, Step)]) -> Vec<u8> {
    let mut out = vec![u8::from(secret)];
    for (conn, step) in steps {
        match step {
            Step::Input(bytes, cuts) => {
                let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
                // A piece has a length of 15 bits.
                cuts.extend((0..bytes.len()).step_by(30_000));
                cuts.push(bytes.len());
                cuts.sort_unstable();
                for piece in cuts.windows(2) {
                    out.push(*conn);
                    out.extend(number(piece[1] - piece[0]));
                    out.extend(&bytes[piece[0]..piece[1]]);
                }
            }
            Step::Take(n) => {
                out.push(24 << 3 | conn);
                out.extend(number(*n));
            }
            Step::Introduce => out.push(28 << 3 | conn),
            Step::TakeAll => out.push(30 << 3 | conn),
            Step::Close => out.push(31 << 3 | conn),
        }
    }
    out
}

#[test]
fn a_play_is_what_it_says() {
    let get = [&[3u8][..], &2u64.to_le_bytes(), b"/a"].concat();
    let set = [&[1u8][..], &2u64.to_le_bytes(), b"/a", &40_000u64.to_le_bytes(), &[7; 40_000]].concat();
    for secret in [false, true] {
        let steps = [
            (3, Step::Introduce),
            (3, Step::Input(set.clone(), vec![5, 1000])),
            (4, Step::Introduce),
            (4, Step::Input(get.clone(), vec![1])),
            (4, Step::TakeAll),
            // Not introduced.
            (5, Step::Input(get.clone(), vec![])),
            (5, Step::TakeAll),
        ];
        let played = fuzzing::server(&script(secret, &steps), MEMORY);
        let said = 40_008 + if secret { 64 + 16 } else { 0 };
        let most = played.most;
        assert!((80_000..400_000).contains(&most), "{most}");
        assert_eq!(played, Played { most, said, refused: 1, introduced: 2 });
    }
}

/// With a secret, nobody gets past the gate without it, whatever he says, and the server holds nothing for him.
#[test]
fn nothing_is_parsed_before_proof() {
    let hello = [&comm_store::auth::MAGIC[..], &[5; 32]].concat();
    let requests = [&[0u8, 0xce, 0xf7, 0x85, 0x3c][..], &[1], &2u64.to_le_bytes(), b"/a", &(8u64 << 20).to_le_bytes()];
    let requests = [&requests.concat()[..], &[9; 20_000]].concat();
    for proof in [vec![], vec![0; 32], vec![5; 32], vec![0xff; 31]] {
        for cuts in [vec![], vec![40], vec![40, 72], (0..100).collect()] {
            let all = [&hello[..], &proof, &requests].concat();
            let play = fuzzing::server(&script(true, &[(0, Step::Input(all, cuts))]), MEMORY);
            assert!(play.introduced == 0 && play.refused >= 1, "{play:?}");
            assert!(play.most < 8 * 400, "{play:?}");
        }
    }
}

/// The committed seeds of the fuzz targets, and through them whatever a target has found.
#[test]
fn the_seeds_do_no_harm() {
    let play = |target: &str, f: &dyn Fn(&[u8])| {
        let file = format!("{}/../../fuzz/seeds/{target}.txt", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).unwrap();
        let seeds = text.lines().filter(|l| !l.starts_with('#'));
        let hex = seeds.map(|l| l.split_once(' ').map_or("", |(_, hex)| hex));
        let n = hex.map(|h| f(&common::hex(h))).count();
        assert!(n > 4, "{target}: {n}");
    };
    let introduced = std::cell::Cell::new(0);
    play("store_server", &|b| introduced.set(introduced.get() + fuzzing::server(b, MEMORY).introduced));
    assert!(introduced.get() > 20, "{introduced:?}");
    let understood = std::cell::Cell::new(0);
    play("store_client", &|b| understood.set(understood.get() + usize::from(fuzzing::client(b).0)));
    assert!(understood.get() > 10, "{understood:?}");
    play("handshake", &fuzzing::handshake);
    play("filestore", &fuzzing::files);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn many_clients_of_which_some_are_bad(secret in any::<bool>(), steps in prop::collection::vec(step(), 0..80)) {
        fuzzing::server(&script(secret, &steps), MEMORY);
    }

    #[test]
    fn a_store_that_is_always_full(steps in prop::collection::vec(step(), 0..80)) {
        fuzzing::server(&script(false, &steps), 600 << 10);
    }

    #[test]
    fn any_steps_at_all(data in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzzing::server(&data, MEMORY);
    }

    #[test]
    fn strangers_do_not_get_in(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..8)) {
        let hello = comm_store::auth::MAGIC.to_vec();
        let steps: Vec<_> = std::iter::once(hello).chain(pieces).map(|b| (0, Step::Input(b, vec![]))).collect();
        let play = fuzzing::server(&script(true, &steps), MEMORY);
        prop_assert!(play.introduced == 0 && play.most < 8 * 400, "{play:?}");
    }

    /// Answers of small numbers, so that lengths make sense now and then.
    #[test]
    fn a_client_takes_any_answer(
        call in 0..16u8,
        pieces in prop::collection::vec(
            prop::collection::vec(prop_oneof![4 => Just(0u8), 2 => 1..20u8, 1 => any::<u8>()], 0..40),
            0..12,
        ),
    ) {
        let mut data = vec![call];
        for p in pieces {
            data.push(p.len() as u8);
            data.extend(p);
        }
        fuzzing::client(&data);
    }

    #[test]
    fn files_of_any_content(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzzing::files(&data);
    }

    #[test]
    fn handshakes_of_strangers(data in prop::collection::vec(any::<u8>(), 0..140)) {
        fuzzing::handshake(&data);
    }
}

/// Calls that succeed, so that the plays above are known to reach the end of something.
#[test]
fn a_client_understands_good_answers() {
    let value = [&3u64.to_le_bytes()[..], b"abc"].concat();
    let answers: [(u8, Vec<u8>, usize); 9] = [
        (2, [&[0][..], &value].concat(), 3),
        (3, [&[0][..], &value, &value, &value].concat(), 9),
        (4, vec![1; 8], 8),
        (5, vec![0], 1),
        (6, vec![0], 0),
        (7, value.clone(), 3),
        (9, vec![5, 0, 0, 0, 0, 0, 0, 0], 8),
        (10, [&[0, 1, 0, 0, 0, 0, 0, 0, 0][..], &value].concat(), 3),
        (13, vec![1, 0, 0, 0], 0),
    ];
    for (call, answer, n) in answers {
        let data = [&[call, answer.len() as u8][..], &answer].concat();
        assert_eq!(fuzzing::client(&data), (true, n), "{call}");
        // Cut off anywhere, it is an error.
        for end in 0..answer.len() {
            let data = [&[call, answer.len() as u8][..], &answer[..end]].concat();
            assert_eq!(fuzzing::client(&data), (false, 0), "{call} at {end}");
        }
    }
    // Negative counts and absurd lengths.
    for call in [7, 8, 9, 11, 12] {
        assert_eq!(fuzzing::client(&[&[call, 8][..], &[0xff; 8]].concat()), (false, 0), "{call}");
    }
    assert_eq!(fuzzing::client(&[&[7u8, 8][..], &(1u64 << 31).to_le_bytes()].concat()), (false, 0));
}
