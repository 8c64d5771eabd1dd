//! The wire format: opcodes, an incremental request parser, and encoders for both ends.
//!
//! A request is one opcode byte and its fields; nothing tells its length in advance. The parser
//! therefore keeps the fields it has seen, so that a request that arrives in a thousand segments is
//! not parsed a thousand times, and it takes memory only for bytes that have arrived, whatever
//! lengths the sender announces.

use std::fmt;

/// What a client says first.
pub(crate) const MAGIC: u32 = 0x3C85_F7CE;

/// Length of both notices.
pub(crate) const NOTICE: usize = 16;
/// What a server with a secret tells a client that offers no proof. The client expects its ping's number here, which
/// is a process id and never begins like this.
pub(crate) const ASKS_FOR_SECRET: [u8; NOTICE] = *b"RCSTORE secret?\n";
/// What a server without secret tells a client that offers proof. The client expects a challenge here, which begins
/// with random bytes.
pub(crate) const HAS_NO_SECRET: [u8; NOTICE] = *b"RCSTORE nosecret";

macro_rules! opcodes {
    ($($name:ident = $value:literal: $head:expr, $group:expr;)*) => {
        /// A request's first byte.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Op { $($name = $value),* }

        impl Op {
            fn from_byte(b: u8) -> Option<Self> {
                match b { $($value => Some(Self::$name),)* _ => None }
            }

            /// The fields of the request: those that come once, then those that are repeated as
            /// often as the last `Count` says.
            fn fields(self) -> (&'static [Field], &'static [Field]) {
                use Field::*;
                match self { $(Self::$name => (&$head, &$group),)* }
            }
        }
    };
}

opcodes! {
    Validate = 0: [Magic], [];
    Set = 1: [Key, Value], [];
    CompareSet = 2: [Key, Value, Value], [];
    Get = 3: [Key], [];
    Add = 4: [Key, Number], [];
    Check = 5: [Count], [Key];
    Wait = 6: [Count], [Key];
    GetNumKeys = 7: [], [];
    DeleteKey = 8: [Key], [];
    Append = 9: [Key, Value], [];
    MultiGet = 10: [Count], [Key];
    MultiSet = 11: [Count], [Key, Value];
    CancelWait = 12: [], [];
    Ping = 13: [Nonce], [];
    QueuePush = 14: [Key, Value], [];
    QueuePop = 15: [Key], [];
    QueueLen = 16: [Key], [];
    ListKeys = 17: [], [];
    Barrier = 18: [Key, Number], [];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Magic,
    Nonce,
    Number,
    Count,
    Key,
    Value,
}

/// Answer to CHECK.
pub(crate) const READY: u8 = 0;
/// Answer to CHECK.
pub(crate) const NOT_READY: u8 = 1;
/// Answer to WAIT and BARRIER.
pub(crate) const STOP_WAITING: u8 = 0;
/// Answer to CANCEL_WAIT.
pub(crate) const WAIT_CANCELED: u8 = 1;

/// What a request may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) key: usize,
    pub(crate) value: usize,
    pub(crate) keys: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { key: 8 << 10, value: 8 << 20, keys: 131_072 }
    }
}

/// A complete request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Validate,
    Set { key: Vec<u8>, value: Vec<u8> },
    CompareSet { key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8> },
    Get { key: Vec<u8> },
    Add { key: Vec<u8>, delta: i64 },
    Check { keys: Vec<Vec<u8>> },
    Wait { keys: Vec<Vec<u8>> },
    GetNumKeys,
    DeleteKey { key: Vec<u8> },
    Append { key: Vec<u8>, value: Vec<u8> },
    MultiGet { keys: Vec<Vec<u8>> },
    MultiSet { pairs: Vec<(Vec<u8>, Vec<u8>)> },
    CancelWait,
    Ping { nonce: u32 },
    QueuePush { key: Vec<u8>, value: Vec<u8> },
    QueuePop { key: Vec<u8> },
    QueueLen { key: Vec<u8> },
    ListKeys,
    Barrier { key: Vec<u8>, world_size: i64 },
}

/// Why a connection is not worth keeping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bad {
    FirstByte(u8),
    Magic(u32),
    Opcode(u8),
    KeyTooLong(u64),
    ValueTooLong(u64),
    TooManyKeys(u64),
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FirstByte(b) => write!(f, "its first byte is {b:#04x}, so it does not speak the store's protocol"),
            Self::Magic(m) => write!(f, "its magic number is {m:#010x} instead of {MAGIC:#010x}"),
            Self::Opcode(b) => write!(f, "unknown opcode {b}"),
            Self::KeyTooLong(n) => write!(f, "a key of {n} bytes is too long"),
            Self::ValueTooLong(n) => write!(f, "a value of {n} bytes is too long"),
            Self::TooManyKeys(n) => write!(f, "a request with {n} keys is too large"),
        }
    }
}

/// What [`Parser::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All input is consumed, and the request is not complete.
    NeedMore,
    /// A request; more may follow in the input.
    Request(Request),
}

/// What an allocation takes beside its bytes, about.
const HEAP: usize = 16;

/// The state of one connection's input.
#[derive(Debug)]
pub(crate) struct Parser {
    limits: Limits,
    /// Whether the magic number has come. Until then nothing else is listened to.
    validated: bool,
    op: Option<Op>,
    /// Number of fields that are complete.
    at: usize,
    count: usize,
    fixed: [u8; 8],
    fixed_have: usize,
    number: u64,
    /// The text field that is arriving, and the length it will have.
    blob: Option<(Vec<u8>, usize)>,
    items: Vec<Vec<u8>>,
    items_bytes: usize,
}

impl Parser {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            validated: false,
            op: None,
            at: 0,
            count: 0,
            fixed: [0; 8],
            fixed_have: 0,
            number: 0,
            blob: None,
            items: Vec::new(),
            items_bytes: 0,
        }
    }

    /// Whether the client has said the magic number.
    pub(crate) fn validated(&self) -> bool {
        self.validated
    }

    /// Whether a request has begun and is not complete.
    pub(crate) fn in_request(&self) -> bool {
        self.op.is_some()
    }

    /// The memory that the incomplete request takes.
    pub(crate) fn held(&self) -> usize {
        self.items_bytes
            + self.items.capacity() * size_of::<Vec<u8>>()
            + self.blob.as_ref().map_or(0, |(b, _)| b.capacity())
    }

    /// Consumes `input` up to the end of the next request.
    pub(crate) fn next(&mut self, input: &mut &[u8]) -> Result<Step, Bad> {
        loop {
            let Some(op) = self.op else {
                let Some((&byte, rest)) = input.split_first() else { return Ok(Step::NeedMore) };
                if !self.validated && byte != Op::Validate as u8 {
                    return Err(Bad::FirstByte(byte));
                }
                self.op = Some(Op::from_byte(byte).ok_or(Bad::Opcode(byte))?);
                *input = rest;
                continue;
            };
            let Some(field) = self.field(op) else { return Ok(Step::Request(self.finish(op))) };
            let done = match field {
                Field::Magic | Field::Nonce => self.take_fixed(input, 4),
                Field::Number | Field::Count => self.take_fixed(input, 8),
                Field::Key => self.take_blob(input, self.limits.key, Bad::KeyTooLong)?,
                Field::Value => self.take_blob(input, self.limits.value, Bad::ValueTooLong)?,
            };
            if !done {
                return Ok(Step::NeedMore);
            }
            match field {
                Field::Magic if self.number != u64::from(MAGIC) => return Err(Bad::Magic(self.number as u32)),
                Field::Magic => self.validated = true,
                Field::Count => {
                    self.count = usize::try_from(self.number)
                        .ok()
                        .filter(|&n| n <= self.limits.keys)
                        .ok_or(Bad::TooManyKeys(self.number))?;
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    /// The field that comes next, if the request is not complete.
    fn field(&self, op: Op) -> Option<Field> {
        let (head, group) = op.fields();
        match self.at.checked_sub(head.len()) {
            None => Some(head[self.at]),
            Some(i) if i < self.count * group.len() => Some(group[i % group.len()]),
            Some(_) => None,
        }
    }

    /// Collects an integer of `n` bytes into `number`; false if it is not complete.
    fn take_fixed(&mut self, input: &mut &[u8], n: usize) -> bool {
        let take = (n - self.fixed_have).min(input.len());
        let (head, rest) = input.split_at(take);
        self.fixed[self.fixed_have..self.fixed_have + take].copy_from_slice(head);
        *input = rest;
        self.fixed_have += take;
        if self.fixed_have < n {
            return false;
        }
        self.fixed[n..].fill(0);
        self.number = u64::from_le_bytes(self.fixed);
        self.fixed_have = 0;
        true
    }

    /// Collects a length and that many bytes into `items`; false if they are not complete.
    fn take_blob(&mut self, input: &mut &[u8], limit: usize, bad: fn(u64) -> Bad) -> Result<bool, Bad> {
        if self.blob.is_none() {
            if !self.take_fixed(input, 8) {
                return Ok(false);
            }
            let len = usize::try_from(self.number).ok().filter(|&n| n <= limit).ok_or(bad(self.number))?;
            self.blob = Some((Vec::new(), len));
        }
        let Some((blob, len)) = &mut self.blob else { return Ok(false) };
        let take = (*len - blob.len()).min(input.len());
        let (head, rest) = input.split_at(take);
        if take == *len {
            blob.reserve_exact(take);
        }
        blob.extend_from_slice(head);
        *input = rest;
        if blob.len() < *len {
            return Ok(false);
        }
        if let Some((mut blob, _)) = self.blob.take() {
            // Stored values live long; the slack of growing piecewise should not.
            blob.shrink_to_fit();
            self.items_bytes += blob.capacity() + HEAP;
            self.items.push(blob);
        }
        Ok(true)
    }

    /// Builds the request from its fields and forgets them.
    fn finish(&mut self, op: Op) -> Request {
        let number = self.number;
        let keys = std::mem::take(&mut self.items);
        (self.op, self.at, self.count, self.items_bytes) = (None, 0, 0, 0);
        let mut items = keys.into_iter();
        // The field table put exactly as many items there as are taken here.
        let mut item = || items.next().unwrap_or_default();
        match op {
            Op::Validate => Request::Validate,
            Op::Set => Request::Set { key: item(), value: item() },
            Op::CompareSet => Request::CompareSet { key: item(), expected: item(), desired: item() },
            Op::Get => Request::Get { key: item() },
            Op::Add => Request::Add { key: item(), delta: number as i64 },
            Op::Check => Request::Check { keys: items.collect() },
            Op::Wait => Request::Wait { keys: items.collect() },
            Op::GetNumKeys => Request::GetNumKeys,
            Op::DeleteKey => Request::DeleteKey { key: item() },
            Op::Append => Request::Append { key: item(), value: item() },
            Op::MultiGet => Request::MultiGet { keys: items.collect() },
            Op::MultiSet => {
                let mut pairs = Vec::with_capacity(items.len() / 2);
                while let (Some(k), Some(v)) = (items.next(), items.next()) {
                    pairs.push((k, v));
                }
                Request::MultiSet { pairs }
            }
            Op::CancelWait => Request::CancelWait,
            Op::Ping => Request::Ping { nonce: number as u32 },
            Op::QueuePush => Request::QueuePush { key: item(), value: item() },
            Op::QueuePop => Request::QueuePop { key: item() },
            Op::QueueLen => Request::QueueLen { key: item() },
            Op::ListKeys => Request::ListKeys,
            Op::Barrier => Request::Barrier { key: item(), world_size: number as i64 },
        }
    }
}

/// Builds requests and replies.
#[derive(Debug, Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn op(mut self, op: Op) -> Self {
        self.0.push(op as u8);
        self
    }

    pub(crate) fn u32(mut self, v: u32) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, v: u64) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    pub(crate) fn i64(self, v: i64) -> Self {
        self.u64(v as u64)
    }

    pub(crate) fn bytes(mut self, v: &[u8]) -> Self {
        put_bytes(&mut self.0, v);
        self
    }

    /// A user's key. PyTorch's client puts a slash in front of those, to keep its own apart.
    pub(crate) fn key(mut self, key: &str) -> Self {
        self = self.u64(key.len() as u64 + 1);
        self.0.push(b'/');
        self.0.extend_from_slice(key.as_bytes());
        self
    }

    pub(crate) fn keys(self, keys: &[&str]) -> Self {
        keys.iter().fold(self.u64(keys.len() as u64), |e, k| e.key(k))
    }
}

/// Appends a length and the bytes.
pub(crate) fn put_bytes(out: &mut Vec<u8>, v: &[u8]) {
    out.extend_from_slice(&(v.len() as u64).to_le_bytes());
    out.extend_from_slice(v);
}

/// Reads a number as `stoll` does: blanks before it and anything after it are ignored.
pub(crate) fn parse_number(text: &[u8]) -> Option<i64> {
    let start = text.iter().position(|b| !b.is_ascii_whitespace() && *b != 0x0b)?;
    let text = &text[start..];
    let sign = usize::from(matches!(text.first(), Some(b'+' | b'-')));
    let digits = text[sign..].iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&text[..sign + digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(r: &Request) -> Vec<u8> {
        let list =
            |op, keys: &[Vec<u8>]| keys.iter().fold(Encoder::new().op(op).u64(keys.len() as u64), |e, k| e.bytes(k)).0;
        let kv = |op, k: &[u8], v: &[u8]| Encoder::new().op(op).bytes(k).bytes(v).0;
        let k = |op, k: &[u8]| Encoder::new().op(op).bytes(k).0;
        match r {
            Request::Validate => Encoder::new().op(Op::Validate).u32(MAGIC).0,
            Request::Set { key, value } => kv(Op::Set, key, value),
            Request::CompareSet { key, expected, desired } => {
                Encoder::new().op(Op::CompareSet).bytes(key).bytes(expected).bytes(desired).0
            }
            Request::Get { key } => k(Op::Get, key),
            Request::Add { key, delta } => Encoder::new().op(Op::Add).bytes(key).i64(*delta).0,
            Request::Check { keys } => list(Op::Check, keys),
            Request::Wait { keys } => list(Op::Wait, keys),
            Request::GetNumKeys => vec![Op::GetNumKeys as u8],
            Request::DeleteKey { key } => k(Op::DeleteKey, key),
            Request::Append { key, value } => kv(Op::Append, key, value),
            Request::MultiGet { keys } => list(Op::MultiGet, keys),
            Request::MultiSet { pairs } => {
                pairs
                    .iter()
                    .fold(Encoder::new().op(Op::MultiSet).u64(pairs.len() as u64), |e, (k, v)| e.bytes(k).bytes(v))
                    .0
            }
            Request::CancelWait => vec![Op::CancelWait as u8],
            Request::Ping { nonce } => Encoder::new().op(Op::Ping).u32(*nonce).0,
            Request::QueuePush { key, value } => kv(Op::QueuePush, key, value),
            Request::QueuePop { key } => k(Op::QueuePop, key),
            Request::QueueLen { key } => k(Op::QueueLen, key),
            Request::ListKeys => vec![Op::ListKeys as u8],
            Request::Barrier { key, world_size } => Encoder::new().op(Op::Barrier).bytes(key).i64(*world_size).0,
        }
    }

    fn any_request() -> impl Strategy<Value = Request> {
        let key = || prop::collection::vec(any::<u8>(), 0..20);
        let value = || prop::collection::vec(any::<u8>(), 0..200);
        let keys = move || prop::collection::vec(key(), 0..6);
        prop_oneof![
            Just(Request::Validate),
            (key(), value()).prop_map(|(key, value)| Request::Set { key, value }),
            (key(), value(), value()).prop_map(|(key, expected, desired)| Request::CompareSet {
                key,
                expected,
                desired
            }),
            key().prop_map(|key| Request::Get { key }),
            (key(), any::<i64>()).prop_map(|(key, delta)| Request::Add { key, delta }),
            keys().prop_map(|keys| Request::Check { keys }),
            keys().prop_map(|keys| Request::Wait { keys }),
            Just(Request::GetNumKeys),
            key().prop_map(|key| Request::DeleteKey { key }),
            (key(), value()).prop_map(|(key, value)| Request::Append { key, value }),
            keys().prop_map(|keys| Request::MultiGet { keys }),
            prop::collection::vec((key(), value()), 0..5).prop_map(|pairs| Request::MultiSet { pairs }),
            Just(Request::CancelWait),
            any::<u32>().prop_map(|nonce| Request::Ping { nonce }),
            (key(), value()).prop_map(|(key, value)| Request::QueuePush { key, value }),
            key().prop_map(|key| Request::QueuePop { key }),
            key().prop_map(|key| Request::QueueLen { key }),
            Just(Request::ListKeys),
            (key(), any::<i64>()).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
        ]
    }

    /// Parses `bytes` cut at `cuts`.
    fn parse(bytes: &[u8], cuts: &[usize], limits: Limits) -> Result<(Vec<Request>, Parser), Bad> {
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
        cuts.push(bytes.len());
        cuts.sort_unstable();
        let (mut parser, mut found, mut from) = (Parser::new(limits), Vec::new(), 0);
        for to in cuts {
            let mut piece = &bytes[from..to];
            while let Step::Request(r) = parser.next(&mut piece)? {
                found.push(r);
            }
            assert!(piece.is_empty(), "NeedMore with input left");
            from = to;
        }
        Ok((found, parser))
    }

    proptest! {
        #[test]
        fn any_segmentation_parses_alike(
            requests in prop::collection::vec(any_request(), 0..8),
            cuts in prop::collection::vec(any::<usize>(), 0..40),
        ) {
            let mut all = vec![Request::Validate];
            all.extend(requests);
            let bytes: Vec<u8> = all.iter().flat_map(encode).collect();
            let (found, parser) = parse(&bytes, &cuts, Limits::default()).unwrap();
            prop_assert_eq!(&found, &all);
            prop_assert!(!parser.in_request());
            prop_assert_eq!(parser.held(), 0);
            let every: Vec<usize> = (0..bytes.len()).collect();
            prop_assert_eq!(&parse(&bytes, &every, Limits::default()).unwrap().0, &all);
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_hold_no_more_than_came(
            bytes in prop::collection::vec(prop_oneof![3 => 0u8..20, 1 => any::<u8>()], 0..400),
            cuts in prop::collection::vec(any::<usize>(), 0..10),
        ) {
            let mut input = encode(&Request::Validate);
            input.extend(&bytes);
            let limits = Limits { key: 64, value: 256, keys: 16 };
            if let Ok((_, parser)) = parse(&input, &cuts, limits) {
                // Every item cost its sender at least the 8 bytes of its length.
                prop_assert!(parser.held() <= 128 + 8 * input.len(), "{} for {}", parser.held(), input.len());
            }
            // And without the handshake.
            let _ = parse(&bytes, &cuts, limits);
        }
    }

    #[test]
    fn announced_lengths_cost_nothing() {
        let mut parser = Parser::new(Limits::default());
        let mut bytes = encode(&Request::Validate);
        bytes.extend(Encoder::new().op(Op::MultiSet).u64(131_072).bytes(b"k").u64(8 << 20).0);
        bytes.extend([7; 100]);
        let mut input = &bytes[..];
        assert_eq!(parser.next(&mut input), Ok(Step::Request(Request::Validate)));
        assert_eq!(parser.next(&mut input), Ok(Step::NeedMore));
        assert!(parser.held() < 1000, "{}", parser.held());
    }

    #[test]
    fn limits_and_nonsense_are_refused() {
        let refused = |bytes: Vec<u8>| {
            let mut all = encode(&Request::Validate);
            all.extend(bytes);
            parse(&all, &[], Limits::default()).unwrap_err()
        };
        assert_eq!(refused(Encoder::new().op(Op::Get).u64(8193).0), Bad::KeyTooLong(8193));
        assert_eq!(refused(Encoder::new().op(Op::Get).u64(u64::MAX).0), Bad::KeyTooLong(u64::MAX));
        assert_eq!(refused(Encoder::new().op(Op::Set).bytes(b"k").u64((8 << 20) + 1).0), Bad::ValueTooLong(8_388_609));
        assert_eq!(refused(Encoder::new().op(Op::Check).u64(131_073).0), Bad::TooManyKeys(131_073));
        assert_eq!(refused(Encoder::new().op(Op::MultiSet).u64(u64::MAX).0), Bad::TooManyKeys(u64::MAX));
        assert_eq!(refused(vec![19]), Bad::Opcode(19));
        assert_eq!(parse(b"GET / HTTP/1.1", &[], Limits::default()).unwrap_err(), Bad::FirstByte(b'G'));
        assert_eq!(parse(&[1], &[], Limits::default()).unwrap_err(), Bad::FirstByte(1));
        assert_eq!(parse(&[0, 1, 2, 3, 4], &[], Limits::default()).unwrap_err(), Bad::Magic(0x0403_0201));
    }

    #[test]
    fn numbers_are_read_as_stoll_reads_them() {
        assert_eq!(parse_number(b"42"), Some(42));
        assert_eq!(parse_number(b" \t-7abc"), Some(-7));
        assert_eq!(parse_number(b"+5"), Some(5));
        assert_eq!(parse_number(b"-9223372036854775808"), Some(i64::MIN));
        for bad in [&b""[..], b"  ", b"abc", b"-", b"9223372036854775808", b"\xff1"] {
            assert_eq!(parse_number(bad), None, "{bad:?}");
        }
    }
}
