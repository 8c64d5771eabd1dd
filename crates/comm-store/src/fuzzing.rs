//! What reads bytes of others, without sockets and files: for the fuzz targets and for this crate's own tests.
//!
//! Not part of the interface: it changes whenever the inside does.
#![doc(hidden)]

use std::collections::BTreeSet;
use std::time::Instant;

use comm_core::Secret;

use crate::auth::{self, Acceptor, CHALLENGE, HELLO, Initiator};
use crate::conn::{Answer, Conn, Fail, Wire};
use crate::desk::{CHUNK, Desk, Refusal};
use crate::file::layout;
use crate::protocol::{Encoder, Limits, MAGIC, Op};

/// What the peers of [`server`] and [`client`] know.
const SECRET: &str = "a secret of the tests";
/// Connections of [`server`].
const CONNS: u64 = 8;

fn secret() -> Secret {
    match Secret::new(SECRET) {
        Ok(s) => s,
        Err(e) => unreachable!("{e}"),
    }
}

/// Reads the front of some bytes.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    /// A number of one byte, or of two if it is odd.
    fn number(&mut self) -> usize {
        let low = usize::from(self.byte().unwrap_or(0));
        if low.is_multiple_of(2) { low / 2 } else { (low / 2) | (usize::from(self.byte().unwrap_or(0)) << 7) }
    }
}

/// What became of a [`server`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// The most memory that it counted, in bytes.
    pub most: usize,
    /// Bytes that it answered.
    pub said: usize,
    /// Connections that it closed or turned away.
    pub refused: usize,
    /// Connections that proved what they had to and introduced themselves.
    pub introduced: usize,
}

/// Plays a server with `max_memory`. The first byte says whether it has a secret (bit 0). Then come steps: a byte that
/// chooses a connection (its low three bits) and what happens to it (its high five): 0 to 23, that many bytes of input,
/// or as many as a number says that follows (0); 24 to 27, a number of bytes of its output are taken; 28 and 29, it does
/// what a good client does first; 30, it takes all its output; 31, it is closed.
///
/// # Panics
///
/// When the server holds more than it may, or its books do not balance.
pub fn server(data: &[u8], max_memory: usize) -> Played {
    let mut data = Bytes(data);
    let with_secret = data.byte().is_some_and(|b| b & 1 == 1);
    let limits = Limits { key: 256, value: 64 << 10, keys: 4096 };
    let mut desk = Desk::new(limits, max_memory, with_secret.then(secret));
    let (mut played, mut introduced) = (Played::default(), BTreeSet::new());
    let mut next = CONNS;
    let mut ids: Vec<u64> = (0..CONNS).collect();
    ids.iter().for_each(|id| desk.open(*id));
    while let Some(step) = data.byte() {
        let at = usize::from(step & 7);
        let id = ids[at];
        let mut result = match step >> 3 {
            what @ 0..24 => {
                let n = if what == 0 { data.number() } else { usize::from(what) };
                input(&mut desk, id, data.take(n))
            }
            24..28 => take(&mut desk, id, data.number(), &mut played),
            28 | 29 => introduce(&mut desk, id, with_secret),
            30 => take(&mut desk, id, usize::MAX, &mut played),
            _ => Err(Refusal::Close("the peer closes it".into())),
        };
        if desk.session(id).is_some_and(|s| s.introduced()) && introduced.insert(id) {
            played.introduced += 1;
        }
        if matches!(result, Err(Refusal::Tell(_))) {
            assert!(desk.session(id).is_some_and(|s| s.turned() && !s.introduced()), "told, and yet listened to");
            played.refused += 1;
            result = Ok(());
        }
        if result.is_err() {
            played.refused += 1;
            desk.close(id);
            desk.open(next);
            ids[at] = next;
            next += 1;
        }
        for woken in desk.take_woken() {
            assert!(desk.session(woken).is_none_or(|s| !s.output().is_empty()), "woken, and told nothing");
        }
        assert!(desk.used() <= max_memory, "{} bytes held, {max_memory} allowed", desk.used());
        played.most = played.most.max(desk.used());
    }
    desk.check();
    ids.iter().for_each(|id| desk.close(*id));
    desk.check();
    played
}

/// Input of a connection that is listening, as a socket would deliver it.
fn input(desk: &mut Desk, id: u64, bytes: &[u8]) -> Result<(), Refusal> {
    if desk.session(id).is_some_and(|s| s.listens()) { desk.input(id, bytes) } else { Ok(()) }
}

/// Takes up to `n` bytes of a connection's output.
fn take(desk: &mut Desk, id: u64, n: usize, played: &mut Played) -> Result<(), Refusal> {
    let mut left = n;
    while let Some(len) = desk.session(id).map(|s| s.output().len().min(left).min(CHUNK)).filter(|n| *n > 0) {
        played.said += len;
        left -= len;
        desk.sent(id, len)?;
    }
    Ok(())
}

/// What a good client does first; too late, it is nonsense like any other.
fn introduce(desk: &mut Desk, id: u64, with_secret: bool) -> Result<(), Refusal> {
    let mut hello = Vec::new();
    if with_secret && desk.session(id).is_some_and(|s| !s.introduced()) {
        let Ok((initiator, first)) = Initiator::new(&secret(), auth::STORE) else { return Ok(()) };
        let before = desk.session(id).map_or(0, |s| s.output().len());
        input(desk, id, &first)?;
        let challenge = desk.session(id).and_then(|s| s.output().get(before..before + CHALLENGE)?.try_into().ok());
        hello.extend(challenge.and_then(|c: [u8; CHALLENGE]| initiator.answer(&c)).unwrap_or([0; 32]));
    }
    hello.extend(Encoder::new().op(Op::Validate).u32(MAGIC).0);
    input(desk, id, &hello)
}

/// A server that has answered already, in pieces: a byte says how long the next one is, 0 that nothing comes in time.
struct Script<'a>(Bytes<'a>);

impl Wire for Script<'_> {
    fn read_by(&mut self, buf: &mut [u8], _: Instant) -> Answer<usize> {
        match self.0.byte() {
            Some(0) => Err(Fail::TimedOut),
            Some(n) => {
                let piece = self.0.take(usize::from(n).min(buf.len()));
                buf[..piece.len()].copy_from_slice(piece);
                Ok(piece.len())
            }
            None => Ok(0),
        }
    }

    fn write_by(&mut self, bytes: &[u8], _: Instant) -> Answer<usize> {
        Ok(bytes.len())
    }
}

/// Gives the client of a store what a server might answer. The first byte chooses the call, the rest are answers in
/// pieces. Returns whether the call succeeded, and how many bytes it returned.
///
/// # Panics
///
/// When it returned more than had come.
pub fn client(data: &[u8]) -> (bool, usize) {
    let mut bytes = Bytes(data);
    let call = bytes.byte().unwrap_or(0);
    let script = Script(bytes);
    // Deadlines are the script's business, except that of the loops that poll.
    let now = Instant::now();
    let len = |v: Vec<u8>| v.len();
    let answer = match call % 16 {
        0 => Conn::greet(script, None, now).map(|_| 0),
        1 => Conn::greet(script, Some(&secret()), now).map(|_| 0),
        call => {
            let mut c = Conn::introduced(script);
            match call {
                2 => c.get("k", now, now).map(len),
                3 => c.multi_get(&["a", "b", "c"], now, now).map(|v| v.iter().map(Vec::len).sum()),
                4 => c.add("k", 1, now).map(|_| 8),
                5 => c.check(&["a", "b"], now).map(|_| 1),
                6 => c.wait(&["a", "b"], now, now).map(|()| 0),
                7 => c.compare_set("k", b"x", b"y", now).map(len),
                8 => c.delete_key("k", now).map(|_| 8),
                9 => c.num_keys(now).map(|_| 8),
                10 => c.queue_pop("q", now, now).map(len),
                11 => c.queue_len("q", now).map(|_| 8),
                // A byte that is no Unicode becomes a character of three.
                12 => c.list_keys(now).map(|v| v.iter().map(String::len).sum::<usize>() / 3),
                _ => c.send_confirmed(Encoder::new().op(Op::Set).key("k").bytes(b"v"), now).map(|()| 0),
            }
        }
    };
    let (ok, n) = answer.map_or((false, 0), |n| (true, n));
    assert!(n <= data.len(), "{n} bytes made of {}", data.len());
    (ok, n)
}

/// Both ends of the handshake on bytes of strangers.
///
/// # Panics
///
/// When a stranger passes.
pub fn handshake(data: &[u8]) {
    let mut data = Bytes(data);
    let (secret, mut hello, mut challenge, mut proof) = (secret(), [0; HELLO], [0; CHALLENGE], [0; auth::PROOF]);
    // Most are offers of proof, or little could go wrong.
    if data.byte().is_some_and(|b| b % 4 != 0) {
        hello[..8].copy_from_slice(&auth::MAGIC);
        hello[8..].iter_mut().zip(data.take(32)).for_each(|(to, from)| *to = *from);
    } else {
        hello.iter_mut().zip(data.take(HELLO)).for_each(|(to, from)| *to = *from);
    }
    proof.iter_mut().zip(data.take(auth::PROOF)).for_each(|(to, from)| *to = *from);
    challenge.iter_mut().zip(data.take(CHALLENGE)).for_each(|(to, from)| *to = *from);
    if let Ok(Some((acceptor, own))) = Acceptor::new(&secret, auth::STORE, &hello) {
        assert!(!acceptor.accepts(&proof), "a stranger's proof is accepted");
        let own_proof: [u8; auth::PROOF] = std::array::from_fn(|i| own[32 + i]);
        assert!(!acceptor.accepts(&own_proof), "the acceptor's own proof is accepted");
    }
    if let Ok((initiator, _)) = Initiator::new(&secret, auth::STORE) {
        assert!(initiator.answer(&challenge).is_none(), "a stranger's challenge is answered");
    }
}

/// The files of a [`FileStore`](crate::FileStore).
///
/// # Panics
///
/// When what was read is not what was written.
pub fn files(data: &[u8]) {
    let mut bytes = Bytes(data);
    let n = bytes.number();
    let key = String::from_utf8_lossy(bytes.take(n)).into_owned();
    let rest = bytes.0;
    let _ = (layout::key_of(rest), layout::read_marker(&String::from_utf8_lossy(rest)));
    if let Ok(at) = layout::body_of(rest, &key) {
        assert_eq!(layout::record(&key, &rest[at..]), rest);
    }
    let mut body = rest;
    while let Ok(Some((value, behind))) = layout::front(body) {
        assert!(value.len() + behind.len() < body.len(), "a queue that does not end");
        body = behind;
    }
    let name = layout::value_file(&key);
    assert!(name.len() < 255 && !name.contains('/') && name.bytes().all(|b| b.is_ascii_graphic()), "{name}");
    if let Some(back) = layout::decode(&name[2..]) {
        assert_eq!(back, key);
    }
    let _ = layout::decode(&key);
    let record = layout::record(&key, rest);
    assert_eq!(layout::body_of(&record, &key).map(|at| &record[at..]), Ok(rest));
}
