//! Names and contents of a file store's files.
//!
//! A run's directory holds `run` (the marker), `lock`, a file per key (`k.` and its percent-encoded name) and one per
//! queue (`q.`). A name that is too long for a file system is shortened and ends in a hash; the file's head tells the
//! key, so that two keys of one hash are noticed.

use comm_core::Fnv;

/// The marker's name.
pub(super) const MARKER: &str = "run";
/// The lock's name.
pub(super) const LOCK: &str = "lock";
/// What marks the names that are not finished, or no longer wanted.
pub(super) const HIDDEN: char = '.';

const MARKER_HEAD: &str = "rustcomms file store 2";
const MAGIC: &[u8; 4] = b"rcf2";
/// The magic, the key's length (4 bytes), the body's (8), and a hash of the body (8).
const HEAD: usize = 24;
/// The largest file that is written, and of which more than its head is read.
pub(super) const MOST: usize = 256 << 20;
/// The longest key; as in a [`TcpStore`](crate::TcpStore), about.
pub(super) const MOST_KEY: usize = 8 << 10;
/// The largest marker.
pub(super) const MOST_MARKER: usize = 64 << 10;
/// So much of a file tells its key.
pub(super) const START: usize = HEAD + MOST_KEY;
/// File systems allow 255 bytes; a prefix and a hash come on top.
const MOST_NAME: usize = 180;

/// `key` with everything but `A-Z a-z 0-9 - _ .` as `%XX`. Never starts with a dot, which would hide it.
pub(super) fn encode(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    for (i, b) in key.bytes().enumerate() {
        if b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_') || (b == b'.' && i > 0) {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    if out.len() > MOST_NAME {
        // `~` is encoded, so no short name looks like this one.
        let more = Fnv::hash(format!("{key}{}", key.len()).as_bytes());
        out.truncate(100);
        out.push_str(&format!("~{:016x}{more:016x}", Fnv::hash(key.as_bytes())));
    }
    out
}

/// The key of an encoded name; `None` if it was shortened, or is none.
pub(crate) fn decode(name: &str) -> Option<String> {
    let mut out = Vec::with_capacity(name.len());
    let mut bytes = name.bytes();
    while let Some(b) = bytes.next() {
        match b {
            b'~' => return None,
            b'%' => {
                let digit = |b: Option<u8>| char::from(b?).to_digit(16);
                let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
                out.push((high * 16 + low) as u8);
            }
            b => out.push(b),
        }
    }
    String::from_utf8(out).ok()
}

/// The file of a key's value.
pub(crate) fn value_file(key: &str) -> String {
    format!("k.{}", encode(key))
}

/// The file of a queue.
pub(super) fn queue_file(key: &str) -> String {
    format!("q.{}", encode(key))
}

/// A file's contents: whose they are, how much there is, and what.
pub(crate) fn record(key: &str, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + key.len() + body.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    out.extend_from_slice(&Fnv::hash(body).to_le_bytes());
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(body);
    out
}

/// The key that a file belongs to, of which this is the start.
pub(crate) fn key_of(bytes: &[u8]) -> Option<&str> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (len, _) = rest.split_first_chunk()?;
    let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
    std::str::from_utf8(bytes.get(HEAD..)?.get(..len)?).ok()
}

/// Where a file's body starts if it is the key's and whole, else what is wrong.
pub(crate) fn body_of(bytes: &[u8], key: &str) -> Result<usize, &'static str> {
    let of = key_of(bytes).ok_or("was not written by this store")?;
    if of != key {
        return Err("belongs to another key of the same hash");
    }
    let at = HEAD + of.len();
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    if word(8) != (bytes.len() - at) as u64 {
        return Err("is cut off, or longer than it was written");
    }
    if word(16) != Fnv::hash(&bytes[at..]) {
        return Err("holds something else than was written");
    }
    Ok(at)
}

/// Adds an element to a queue's body.
pub(super) fn push(body: &mut Vec<u8>, value: &[u8]) {
    body.extend_from_slice(&(value.len() as u64).to_le_bytes());
    body.extend_from_slice(value);
}

/// A queue's body ends in the middle of an element.
#[derive(Debug)]
pub(crate) struct CutOff;

/// An element, and what is behind it.
type Front<'a> = (&'a [u8], &'a [u8]);

/// The first element of a queue's body and what is behind it; `None` at the end, an error if it is cut off.
pub(crate) fn front(body: &[u8]) -> Result<Option<Front<'_>>, CutOff> {
    if body.is_empty() {
        return Ok(None);
    }
    let (len, rest) = body.split_first_chunk().ok_or(CutOff)?;
    let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| CutOff)?;
    rest.split_at_checked(len).map(Some).ok_or(CutOff)
}

/// The marker of a run.
pub(super) fn marker(run: &str, nonce: &str) -> String {
    format!("{MARKER_HEAD}\n{nonce}\n{run}\n")
}

/// The nonce and the run of a marker.
pub(crate) fn read_marker(text: &str) -> Option<(&str, &str)> {
    let (nonce, run) = text.strip_prefix(MARKER_HEAD)?.strip_prefix('\n')?.split_once('\n')?;
    Some((nonce, run.strip_suffix('\n')?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_plain_short_and_apart() {
        for key in ["", ".", "..", "a/b", "a%2Fb", "ключ", "a\0b\n", "~", "A", "a", ".hidden"] {
            let name = encode(key);
            assert!(name.bytes().all(|b| b.is_ascii_graphic() && b != b'/') && !name.starts_with(HIDDEN), "{name}");
            assert_eq!(decode(&name).as_deref(), Some(key));
        }
        let (a, b) = ("é".repeat(4000) + "a", "é".repeat(4000) + "b");
        assert_ne!(encode(&a), encode(&b));
        assert!(value_file(&a).len() < 255 && decode(&encode(&a)).is_none());
    }

    proptest! {
        #[test]
        fn records_come_back(key in ".{0,40}", body in prop::collection::vec(any::<u8>(), 0..60)) {
            let bytes = record(&key, &body);
            let at = body_of(&bytes, &key).unwrap();
            prop_assert_eq!((key_of(&bytes), &bytes[at..]), (Some(key.as_str()), &body[..]));
            let other = [key.as_str(), "x"].concat();
            prop_assert!(body_of(&bytes, &other).is_err());
            // Neither a part of it, nor with more behind it, nor with a bit changed, is it taken for whole.
            for end in 0..bytes.len() {
                prop_assert!(body_of(&bytes[..end], &key).is_err());
            }
            prop_assert!(body_of(&[&bytes[..], b"x"].concat(), &key).is_err());
            for bit in 0..8 * bytes.len() {
                let mut bent = bytes.clone();
                bent[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(body_of(&bent, &key).is_err(), "bit {}", bit);
            }
            prop_assert_eq!(decode(&encode(&key)), (!encode(&key).contains('~')).then_some(key));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60), text in ".{0,40}") {
            let _ = (key_of(&bytes), body_of(&bytes, &text), front(&bytes), decode(&text), read_marker(&text));
            let _ = body_of(&[&MAGIC[..], &bytes].concat(), &text);
        }

        #[test]
        fn queues_come_back(values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..10)) {
            let mut body = Vec::new();
            values.iter().for_each(|v| push(&mut body, v));
            let (mut got, mut rest) = (Vec::new(), &body[..]);
            while let Some((value, behind)) = front(rest).unwrap() {
                got.push(value.to_vec());
                rest = behind;
            }
            prop_assert_eq!(got, values);
            prop_assert!(body.is_empty() || front(&body[..body.len().min(7)]).is_err());
        }
    }
}
