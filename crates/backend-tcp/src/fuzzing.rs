//! What reads bytes of other processes, for the fuzz targets; no interface of the crate.

use crate::records::{LONGEST, Settings, Verdict, decode, decode_card, decode_stamp};
use crate::wire::{GREETING, Greeting, Outcome};

/// The opening of a data connection, as the acceptor and the dialer read it.
///
/// # Panics
///
/// When a greeting that was accepted is another one after writing it again.
pub fn greeting(data: &[u8]) {
    for part in data.chunks_exact(GREETING) {
        let bytes: [u8; GREETING] = std::array::from_fn(|i| part[i]);
        if let Ok(g) = Greeting::decode(&bytes) {
            assert_eq!(g.encode(), bytes);
            let _ = Outcome::of(g.code);
        }
    }
}

/// What ranks put into the store for each other. The first byte chooses the kind.
///
/// # Panics
///
/// When a record that was accepted has a length that none has.
pub fn records(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let read = match kind % 4 {
        0 => decode_card(bytes, 0).map(drop),
        1 => decode::<Settings>(bytes, None, "settings").map(drop),
        2 => decode::<Verdict>(bytes, None, "a verdict").map(drop),
        _ => decode_stamp(bytes, "a stamp").map(drop),
    };
    assert!(read.is_err() || bytes.len() <= LONGEST);
}
