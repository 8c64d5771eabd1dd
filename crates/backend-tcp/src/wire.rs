//! The fixed-size messages that open a data connection.
//!
//! The dialer sends a greeting; the acceptor checks it and answers with one as long; if the answer accepts, the dialer
//! confirms with one byte, and only then do both ends use the connection. Without the confirmation, an answer that
//! comes too late would leave the two with different ideas of which of several connections is theirs.
//!
//! In the dynamic regime both say, too, which communicator they are and of which generation, and the dialer by which handle
//! it knows the acceptor. So who is asked for in vain says why: it has moved on, was finalized, or makes the same attempt with
//! other handles. Who hears the last confirms that as well, because its greeting may have lain in the queue of a port that
//! nobody served while it gave up.
//!
//! A dialer that only wants to know whether the other process runs says so in its greeting ([`PROBE`]), and is answered and
//! hung up on at once.

use comm_transport::PROTOCOL;

const MAGIC: [u8; 8] = *b"RCOMMS\r\n";
/// Length of a greeting and of its answer.
pub(crate) const GREETING: usize = 60;
/// In place of a number of attempt: the dialer wants no connection, only to know whether this process lives.
pub(crate) const PROBE: u32 = u32::MAX;
/// What the dialer says when it takes the connection, or has heard that the acceptor passes other handles.
pub(crate) const CONFIRM: u8 = 0x2b;

/// The acceptor's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// This connection is the one, if the dialer confirms.
    Accepted = 1,
    /// The acceptor is dialing itself, and its connection takes precedence.
    Busy = 2,
    /// The two are connected already.
    Linked = 3,
    /// The answer to a [`PROBE`]: this process runs.
    Alive = 4,
    /// The handle is stale: the acceptor's generation is another by now.
    Stale = 5,
    /// The acceptor has been finalized.
    Finalized = 6,
    /// The acceptor makes this attempt with other handles, or in another order.
    Differs = 7,
}

impl Outcome {
    pub(crate) fn of(code: u32) -> Option<Self> {
        let all = [Self::Accepted, Self::Busy, Self::Linked, Self::Alive, Self::Stale, Self::Finalized, Self::Differs];
        all.into_iter().find(|o| *o as u32 == code)
    }
}

/// Who connects to whom in which communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Hash of the rendezvous key, or of the attempt's uuid.
    pub(crate) key: u64,
    /// A random number that only those know who read it in the store, or a hash of all handles.
    pub(crate) nonce: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// In a greeting, the number of the dialer's attempt, which only grows, or [`PROBE`]; in an answer, an [`Outcome`].
    pub(crate) code: u32,
    /// In the dynamic regime: the sender's lineage.
    pub(crate) who: u64,
    /// And its generation.
    pub(crate) generation: u32,
    /// The token of the handle by which the dialer knows the acceptor.
    pub(crate) whom: u64,
}

impl Greeting {
    pub(crate) fn encode(&self) -> [u8; GREETING] {
        let mut b = [0; GREETING];
        b[..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&u32::from(PROTOCOL).to_le_bytes());
        b[12..20].copy_from_slice(&self.key.to_le_bytes());
        b[20..28].copy_from_slice(&self.nonce.to_le_bytes());
        b[28..32].copy_from_slice(&self.from.to_le_bytes());
        b[32..36].copy_from_slice(&self.to.to_le_bytes());
        b[36..40].copy_from_slice(&self.code.to_le_bytes());
        b[40..48].copy_from_slice(&self.who.to_le_bytes());
        b[48..52].copy_from_slice(&self.generation.to_le_bytes());
        b[52..60].copy_from_slice(&self.whom.to_le_bytes());
        b
    }

    pub(crate) fn decode(b: &[u8; GREETING]) -> Result<Self, String> {
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| b[i + k]));
        let long = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| b[i + k]));
        if b[..8] == comm_store::auth::MAGIC {
            return Err("it wants proof of a secret, and this rank has none: set RUSTCOMMS_SECRET alike on all".into());
        }
        if b[..8] != MAGIC {
            return Err("it is not a rustcomms greeting".into());
        }
        if word(8) != u32::from(PROTOCOL) {
            return Err(format!("it speaks protocol {}, this process {PROTOCOL}", word(8)));
        }
        Ok(Self {
            key: long(12),
            nonce: long(20),
            from: word(28),
            to: word(32),
            code: word(36),
            who: long(40),
            generation: word(48),
            whom: long(52),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_round_trip_and_garbage_is_named() {
        let g = Greeting { key: 7, nonce: 9, from: 3, to: 1, code: 5, who: 11, generation: 13, whom: 15 };
        assert_eq!(Greeting::decode(&g.encode()), Ok(g));
        assert!(Greeting::decode(&[0; GREETING]).unwrap_err().contains("not a rustcomms"));
        let mut b = g.encode();
        b[8] = 77;
        assert!(Greeting::decode(&b).unwrap_err().contains("protocol 77"));
        b[..8].copy_from_slice(&comm_store::auth::MAGIC);
        assert!(Greeting::decode(&b).unwrap_err().contains("RUSTCOMMS_SECRET"));
        for code in 1..=7 {
            assert_eq!(Outcome::of(code).map(|o| o as u32), Some(code));
        }
        assert_eq!((Outcome::of(0), Outcome::of(8)), (None, None));
    }
}
