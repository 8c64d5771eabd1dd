//! The wire format: a fixed header in front of every payload.
//!
//! The header carries the operation's descriptor, so that a receiver sees at once when its peer is in
//! another call. All integers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic |
//! | 2 | 1 | protocol version |
//! | 3 | 1 | kind; high bit: a checksum is present |
//! | 4 | 4 | payload length |
//! | 8 | 8 | communicator id |
//! | 16 | 4 | generation |
//! | 20 | 4 | step of a collective, tag of a message |
//! | 24 | 8 | sequence number |
//! | 32 | 8 | offset of this payload in its message |
//! | 40 | 8 | length of the whole message |
//! | 48 | 24 | operation descriptor |
//! | 72 | 4 | frame number on this link |
//! | 76 | 4 | CRC-32 of header (with this field 0) and payload, if present |

use comm_core::{DESC_BYTES, OpDesc, Operation};

/// Bytes of a header.
pub const HEADER: usize = 80;
/// Version of this protocol; ranks of one communicator must have the same.
pub const PROTOCOL: u8 = 1;
/// Longest payload of one frame. Longer messages travel in several.
pub const FRAGMENT: usize = 256 << 10;
/// Longest payload that is accepted.
pub(crate) const MAX_PAYLOAD: usize = FRAGMENT;
/// Longest message that the control plane reassembles.
pub(crate) const MAX_CONTROL: u64 = 64 << 20;

const MAGIC: [u8; 2] = [b'R', 0xc3];
const CRC_FLAG: u8 = 0x80;

/// What a frame is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Part of a collective: `seq`, `step`.
    Collective = 1,
    /// A whole point-to-point message sent before the receiver asked: `seq`, tag.
    Eager = 2,
    /// A point-to-point message is waiting at the sender.
    RequestToSend = 3,
    /// The receiver has a buffer for it.
    ClearToSend = 4,
    /// Part of a point-to-point message.
    P2pData = 5,
    /// Returns credit: `offset` bytes; step 0 for collectives, 1 for point-to-point.
    Credit = 6,
    /// A control-plane message: tag in `step`.
    Control = 7,
    /// The sender takes no part in collective `seq`; payload: why.
    Refuse = 8,
    /// The sender takes no part in a message: descriptor says which direction; payload: why.
    RefuseP2p = 9,
    /// The communicator has failed; payload: the cause.
    Abort = 10,
    /// The sender leaves the communicator: offset 1 after finalize, 0 without, 4 + `n` for another membership of generation
    /// `n`; 2 when it has seen all others leave, 3 when nothing more will come.
    Goodbye = 11,
    /// Nothing; shows that the sender lives.
    Heartbeat = 12,
    /// "I wait in call `seq`"; to the coordinator.
    Status = 13,
    /// "Where are you with respect to call `seq`?"; from the coordinator.
    Query = 14,
    /// "These ranks have arrived at call `seq`"; from the coordinator; payload: list.
    Arrivals = 15,
    /// "After call `seq` the hash over all my calls is `offset`"; to the coordinator.
    Publish = 16,
    /// Who has left, passed on by a neighbour; payload: list.
    News = 17,
    /// Part of an agreement on who is still there; payload: the message.
    Agree = 18,
}

impl Kind {
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Collective,
            2 => Self::Eager,
            3 => Self::RequestToSend,
            4 => Self::ClearToSend,
            5 => Self::P2pData,
            6 => Self::Credit,
            7 => Self::Control,
            8 => Self::Refuse,
            9 => Self::RefuseP2p,
            10 => Self::Abort,
            11 => Self::Goodbye,
            12 => Self::Heartbeat,
            13 => Self::Status,
            14 => Self::Query,
            15 => Self::Arrivals,
            16 => Self::Publish,
            17 => Self::News,
            18 => Self::Agree,
            _ => return None,
        })
    }

    /// Whether the payload goes to a user's buffer and may be long.
    pub(crate) const fn is_data(self) -> bool {
        matches!(self, Self::Collective | Self::Eager | Self::P2pData)
    }
}

/// Whether a frame that begins with these bytes carries users' data, and is not one of the endpoints' own small ones.
/// For links that count.
#[must_use]
pub fn carries_data(frame: &[u8]) -> bool {
    frame.get(3).and_then(|code| Kind::from_code(code & !CRC_FLAG)).is_some_and(Kind::is_data)
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) len: u32,
    pub(crate) comm: u64,
    pub(crate) generation: u32,
    pub(crate) step: u32,
    pub(crate) seq: u64,
    pub(crate) offset: u64,
    pub(crate) total: u64,
    pub(crate) desc: OpDesc,
    pub(crate) frame: u32,
    pub(crate) crc: Option<u32>,
}

/// Why bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadHeader {
    Magic,
    Version(u8),
    Kind(u8),
    Length(u32),
    Range,
    Desc,
}

impl std::fmt::Display for BadHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("the bytes are not a rustcomms frame"),
            Self::Version(v) => write!(f, "the frame has protocol version {v}, this process speaks {PROTOCOL}"),
            Self::Kind(k) => write!(f, "the frame has unknown kind {k}"),
            Self::Length(n) => write!(f, "the frame announces {n} bytes, more than the {MAX_PAYLOAD} allowed"),
            Self::Range => f.write_str("the frame's part lies outside of its message"),
            Self::Desc => f.write_str("the frame's operation descriptor has unknown codes"),
        }
    }
}

impl Header {
    pub(crate) fn new(kind: Kind, comm: u64, generation: u32) -> Self {
        Self {
            kind,
            len: 0,
            comm,
            generation,
            step: 0,
            seq: 0,
            offset: 0,
            total: 0,
            desc: OpDesc::new(Operation::Custom),
            frame: 0,
            crc: None,
        }
    }

    /// Encodes; `payload` is only read when a checksum is wanted.
    pub(crate) fn encode(&self, checksum_of: Option<&[u8]>) -> [u8; HEADER] {
        let mut b = [0u8; HEADER];
        b[0..2].copy_from_slice(&MAGIC);
        b[2] = PROTOCOL;
        b[3] = self.kind as u8 | if checksum_of.is_some() { CRC_FLAG } else { 0 };
        b[4..8].copy_from_slice(&self.len.to_le_bytes());
        b[8..16].copy_from_slice(&self.comm.to_le_bytes());
        b[16..20].copy_from_slice(&self.generation.to_le_bytes());
        b[20..24].copy_from_slice(&self.step.to_le_bytes());
        b[24..32].copy_from_slice(&self.seq.to_le_bytes());
        b[32..40].copy_from_slice(&self.offset.to_le_bytes());
        b[40..48].copy_from_slice(&self.total.to_le_bytes());
        b[48..48 + DESC_BYTES].copy_from_slice(&self.desc.to_bytes());
        b[72..76].copy_from_slice(&self.frame.to_le_bytes());
        if let Some(payload) = checksum_of {
            let mut h = crc32fast::Hasher::new();
            h.update(&b[..76]);
            h.update(payload);
            b[76..80].copy_from_slice(&h.finalize().to_le_bytes());
        }
        b
    }

    /// Decodes and checks everything that can be checked without context.
    pub(crate) fn decode(b: &[u8; HEADER]) -> Result<Self, BadHeader> {
        fn array<const N: usize>(b: &[u8; HEADER], at: usize) -> [u8; N] {
            std::array::from_fn(|i| b[at + i])
        }
        if b[0..2] != MAGIC {
            return Err(BadHeader::Magic);
        }
        if b[2] != PROTOCOL {
            return Err(BadHeader::Version(b[2]));
        }
        let kind = Kind::from_code(b[3] & !CRC_FLAG).ok_or(BadHeader::Kind(b[3]))?;
        let len = u32::from_le_bytes(array(b, 4));
        if len as usize > MAX_PAYLOAD {
            return Err(BadHeader::Length(len));
        }
        let h = Self {
            kind,
            len,
            comm: u64::from_le_bytes(array(b, 8)),
            generation: u32::from_le_bytes(array(b, 16)),
            step: u32::from_le_bytes(array(b, 20)),
            seq: u64::from_le_bytes(array(b, 24)),
            offset: u64::from_le_bytes(array(b, 32)),
            total: u64::from_le_bytes(array(b, 40)),
            desc: OpDesc::from_bytes(&array(b, 48)).ok_or(BadHeader::Desc)?,
            frame: u32::from_le_bytes(array(b, 72)),
            crc: (b[3] & CRC_FLAG != 0).then(|| u32::from_le_bytes(array(b, 76))),
        };
        let spans = kind.is_data() || kind == Kind::Control;
        if spans && h.offset.checked_add(u64::from(len)).is_none_or(|end| end > h.total) {
            return Err(BadHeader::Range);
        }
        if kind == Kind::Eager && u64::from(len) != h.total || kind == Kind::Control && h.total > MAX_CONTROL {
            return Err(BadHeader::Range);
        }
        Ok(h)
    }

    /// A hasher that has seen this header's bytes as received.
    pub(crate) fn crc_start(raw: &[u8; HEADER]) -> crc32fast::Hasher {
        let mut h = crc32fast::Hasher::new();
        h.update(&raw[..76]);
        h
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::{DType, ReduceOp};
    use proptest::prelude::*;

    fn sample() -> Header {
        Header {
            len: 5,
            step: 3,
            seq: 9,
            offset: 2,
            total: 7,
            desc: OpDesc::new(Operation::AllReduce).elements(DType::F32, 7).redop(ReduceOp::Sum),
            frame: 11,
            ..Header::new(Kind::Collective, 42, 1)
        }
    }

    #[test]
    fn round_trip_with_and_without_checksum() {
        let h = sample();
        assert_eq!(Header::decode(&h.encode(None)).unwrap(), h);
        let raw = h.encode(Some(b"abcde"));
        let d = Header::decode(&raw).unwrap();
        let mut c = Header::crc_start(&raw);
        c.update(b"abcde");
        assert_eq!(d.crc, Some(c.finalize()));
        for k in 1..=18 {
            assert_eq!(Kind::from_code(k).unwrap() as u8, k);
        }
    }

    #[test]
    fn bad_headers_say_why() {
        let good = sample().encode(None);
        let mut b = good;
        b[0] = 0;
        assert_eq!(Header::decode(&b), Err(BadHeader::Magic));
        let mut b = good;
        b[2] = 9;
        assert_eq!(Header::decode(&b), Err(BadHeader::Version(9)));
        let mut b = good;
        b[3] = 77;
        assert_eq!(Header::decode(&b), Err(BadHeader::Kind(77)));
        let mut b = good;
        b[7] = 0xff;
        assert!(matches!(Header::decode(&b), Err(BadHeader::Length(_))));
        let mut b = good;
        b[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(Header::decode(&b), Err(BadHeader::Range));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_accepted_ones_are_bounded(b in prop::array::uniform32(any::<u8>()), c in prop::array::uniform32(any::<u8>()), fix in any::<bool>()) {
            let mut raw = [0u8; HEADER];
            raw[..32].copy_from_slice(&b);
            raw[32..64].copy_from_slice(&c);
            if fix {
                raw[..3].copy_from_slice(&[b'R', 0xc3, PROTOCOL]);
                raw[3] = 1 + raw[3] % 18;
            }
            if let Ok(h) = Header::decode(&raw) {
                prop_assert!(h.len as usize <= MAX_PAYLOAD);
                if h.kind.is_data() {
                    prop_assert!(h.offset + u64::from(h.len) <= h.total);
                }
            }
        }
    }
}
