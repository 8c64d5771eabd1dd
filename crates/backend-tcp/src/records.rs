//! What ranks write into the store, and how it is read: bounded, and with the writer's name in every complaint.

use std::sync::OnceLock;

use comm_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::address::Addresses;
use crate::host::Host;
use crate::life::Life;

/// Longest record that is read.
pub(crate) const LONGEST: usize = 16 << 10;

/// What all ranks have to agree on. Begins, in all versions, with a [`Stamp`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) stamp: Stamp,
    pub(crate) size: usize,
    pub(crate) checksum: bool,
    /// Which links there are from the start, in a word.
    pub(crate) connect: String,
    /// Whether there is a secret.
    pub(crate) secret: bool,
}

/// Which version somebody speaks, and who it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    pub(crate) protocol: u32,
    pub(crate) rank: usize,
    pub(crate) host: String,
}

impl Stamp {
    pub(crate) fn who(&self) -> String {
        format!("rank {} on {}", self.rank, self.host)
    }
}

impl Settings {
    /// What the two say differently: in words, each side's.
    pub(crate) fn difference(&self, other: &Self) -> Option<(String, String)> {
        let on = |b: bool| if b { "on" } else { "off" };
        let has = |b: bool| if b { "has a secret (RUSTCOMMS_SECRET)" } else { "has no secret (RUSTCOMMS_SECRET)" };
        if self.size != other.size {
            return Some((format!("says world size {}", self.size), format!("says {}", other.size)));
        }
        if self.secret != other.secret {
            return Some((has(self.secret).into(), has(other.secret).into()));
        }
        if self.checksum != other.checksum {
            return Some((format!("has checksums {}", on(self.checksum)), format!("has them {}", on(other.checksum))));
        }
        if self.connect != other.connect {
            return Some((format!("says connect={}", self.connect), format!("says connect={}", other.connect)));
        }
        None
    }
}

/// What each rank publishes about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    pub(crate) rank: usize,
    pub(crate) host: Host,
    pub(crate) life: Life,
    /// A random number of this process: a pid can occur twice.
    pub(crate) process: u64,
    pub(crate) addrs: Addresses,
}

/// How an attempt to meet has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// All ranks have come; the number is secret to those who can read the store.
    Go { nonce: u64 },
    /// It has failed, for all ranks.
    Failed(Failure),
    /// A process of an earlier start has left its card there and is dead. Who waits goes on to the next attempt.
    Stale { who: String },
}

/// Why an attempt has failed, for those who were not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// A random number, by which the rank that wrote it knows it again.
    pub(crate) id: u64,
    /// When, in milliseconds since 1970.
    pub(crate) at: u64,
    pub(crate) rank: usize,
    pub(crate) host: String,
    /// What that rank says, as a sentence about it or in which it is named.
    pub(crate) what: String,
    pub(crate) arrived: Vec<String>,
    pub(crate) missing: Vec<usize>,
    /// Of ranks that speak different versions.
    pub(crate) versions: Vec<Stamp>,
}

impl Failure {
    /// The error of a rank that reads this and speaks `protocol`.
    pub(crate) fn error(&self, protocol: u32) -> Error {
        if let Some(other) = self.versions.iter().find(|v| v.protocol != protocol) {
            return ErrorKind::VersionSkew { ours: protocol, theirs: other.protocol, who: other.who() }.into();
        }
        Error::new(ErrorKind::Bootstrap {
            what: self.what.clone(),
            arrived: self.arrived.clone(),
            missing: self.missing.clone(),
        })
    }
}

/// Bytes of a record.
pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>> {
    let bytes = postcard::to_allocvec(record)
        .map_err(|e| Error::invalid(format!("a record for the store cannot be encoded: {e}")))?;
    if bytes.len() > LONGEST {
        let what = format!("a record for the store has {} bytes; the limit is {LONGEST}", bytes.len());
        return Err(Error::invalid(what));
    }
    Ok(bytes)
}

fn corrupt(rank: Option<usize>, what: &str, why: &str) -> Error {
    Error::new(ErrorKind::Corrupt { rank, what: format!("{what}: {why}") })
}

fn check_length(bytes: &[u8], rank: Option<usize>, what: &str) -> Result<()> {
    if bytes.len() <= LONGEST {
        return Ok(());
    }
    Err(corrupt(rank, what, &format!("it has {} bytes; the limit is {LONGEST}", bytes.len())))
}

/// Reads a record of `rank`; `what` names it in errors.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8], rank: Option<usize>, what: &str) -> Result<T> {
    check_length(bytes, rank, what)?;
    match postcard::take_from_bytes(bytes) {
        Ok((record, [])) => Ok(record),
        Ok((_, rest)) => Err(corrupt(rank, what, &format!("{} bytes follow it", rest.len()))),
        Err(e) => Err(corrupt(rank, what, &e.to_string())),
    }
}

/// The first part of a record, whatever follows.
pub(crate) fn decode_stamp(bytes: &[u8], what: &str) -> Result<Stamp> {
    check_length(bytes, None, what)?;
    postcard::take_from_bytes(bytes).map(|(stamp, _)| stamp).map_err(|e| corrupt(None, what, &e.to_string()))
}

/// A rank's card; it must say that it is that rank's.
pub(crate) fn decode_card(bytes: &[u8], rank: usize) -> Result<Card> {
    let card: Card = decode(bytes, Some(rank), "its card in the store")?;
    if card.rank != rank {
        let what = format!("its card in the store says that it is of rank {}", card.rank);
        return Err(Error::new(ErrorKind::Corrupt { rank: Some(rank), what }));
    }
    Ok(card)
}

/// A random number, from the operating system through the standard library's hasher keys.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut h = std::collections::hash_map::RandomState::new().build_hasher();
    h.write_u32(std::process::id());
    h.finish()
}

/// This process's number. A process that was forked has another one than its parent.
pub(crate) fn process() -> u64 {
    static OWN: OnceLock<Mutex<(u32, u64)>> = OnceLock::new();
    let mut own = OWN.get_or_init(|| Mutex::new((std::process::id(), random()))).lock();
    if own.0 != std::process::id() {
        *own = (std::process::id(), random());
    }
    own.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{InterfaceFilter, published};
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn card() -> Card {
        let host = Host { name: "a".into(), id: "b".into() };
        let addrs = published(&InterfaceFilter::parse("lo").unwrap(), None, 80).unwrap();
        // As it is read: what is not published is not there.
        let addrs = decode(&encode(&addrs).unwrap(), None, "addresses").unwrap();
        Card { rank: 3, host, life: Life::this(), process: 9, addrs }
    }

    #[test]
    fn records_are_read_whole_or_not_at_all() {
        let bytes = encode(&card()).unwrap();
        assert_eq!(decode_card(&bytes, 3).unwrap(), card());
        assert!(decode_card(&bytes, 2).unwrap_err().to_string().contains("rank 2"));
        for n in 0..bytes.len() {
            assert!(matches!(
                decode_card(&bytes[..n], 3).unwrap_err().kind(),
                ErrorKind::Corrupt { rank: Some(3), .. }
            ));
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        assert!(decode_card(&longer, 3).unwrap_err().to_string().contains("1 bytes follow"));
        assert!(decode_card(&vec![0; LONGEST + 1], 3).unwrap_err().to_string().contains("limit"));
        // A length that claims more than there is.
        let mut lies = bytes;
        lies[1] = 0xff;
        assert!(decode_card(&lies, 3).is_err());
    }

    #[test]
    fn versions_come_first_and_each_side_names_the_other() {
        let stamp = |protocol, rank| Stamp { protocol, rank, host: "h".into() };
        let s = Settings { stamp: stamp(900, 2), size: 4, checksum: false, connect: "auto".into(), secret: false };
        let mut bytes = encode(&s).unwrap();
        bytes.truncate(bytes.len() - 3);
        bytes.extend([0xff; 40]);
        assert_eq!(decode_stamp(&bytes, "settings").unwrap(), s.stamp);
        let f = Failure {
            at: 0,
            id: 1,
            rank: 2,
            host: "h".into(),
            what: String::new(),
            arrived: Vec::new(),
            missing: Vec::new(),
            versions: vec![stamp(900, 2), stamp(901, 0)],
        };
        for (ours, theirs, who) in [(900, 901, "rank 0 on h"), (901, 900, "rank 2 on h")] {
            let expected = ErrorKind::VersionSkew { ours, theirs, who: who.into() };
            assert_eq!(f.error(ours).kind(), &expected);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_an_error(bytes in vec(any::<u8>(), 0..400)) {
            if let Ok(c) = decode_card(&bytes, 3) {
                prop_assert_eq!(c.rank, 3);
                encode(&c).unwrap();
            }
            let _ = decode_stamp(&bytes, "x");
            let _ = decode::<Settings>(&bytes, None, "x");
            if let Ok(v) = decode::<Verdict>(&bytes, None, "x") {
                prop_assert_eq!(decode::<Verdict>(&encode(&v).unwrap(), None, "x").unwrap(), v);
            }
        }

        /// A record that was written, with one byte changed, is another or none.
        #[test]
        fn a_changed_byte_does_no_harm(at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = encode(&card()).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = decode_card(&bytes, 3);
        }
    }
}
