//! What a call is: [`Operation`], its descriptor [`OpDesc`], and the table of fields on which ranks must agree.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::op::ReduceOp;

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// The kind of an operation.
        #[non_exhaustive]
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Operation { $($(#[$doc])* $name = $code,)* }

        impl Operation {
            /// Every operation, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The method's name (`all_reduce`, …).
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The operation with this wire code.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }
        }
    };
}

operations! {
    /// Point-to-point send.
    Send = 0, "send";
    /// Point-to-point receive.
    Recv = 1, "recv";
    /// Several sends and receives issued together.
    Batch = 2, "batch";
    /// Send and receive in one call.
    SendRecv = 3, "sendrecv";
    /// Root's buffer to all.
    Broadcast = 4, "broadcast";
    /// Reduction whose result every rank gets.
    AllReduce = 5, "all_reduce";
    /// Reduction whose result the root gets.
    Reduce = 6, "reduce";
    /// Equal shards of all ranks to all, in rank order.
    AllGather = 7, "all_gather";
    /// Uneven shards of all ranks to all.
    AllGatherV = 8, "all_gather_v";
    /// Equal shards to the root.
    Gather = 9, "gather";
    /// Uneven shards to the root.
    GatherV = 10, "gather_v";
    /// Equal shards from the root.
    Scatter = 11, "scatter";
    /// Uneven shards from the root.
    ScatterV = 12, "scatter_v";
    /// Reduction of which each rank gets its shard.
    ReduceScatter = 13, "reduce_scatter";
    /// Reduction of which each rank gets its shard of uneven size.
    ReduceScatterV = 14, "reduce_scatter_v";
    /// Equal blocks between all pairs.
    AllToAll = 15, "all_to_all";
    /// Uneven blocks between all pairs.
    AllToAllV = 16, "all_to_all_v";
    /// Inclusive prefix reduction.
    Scan = 17, "scan";
    /// Exclusive prefix reduction.
    Exscan = 18, "exscan";
    /// All ranks wait for each other.
    Barrier = 19, "barrier";
    /// Creation of child communicators.
    Split = 20, "split";
    /// Change of membership.
    Reconfigure = 21, "reconfigure";
    /// Orderly end of a communicator.
    Finalize = 22, "finalize";
    /// Several operations coalesced into one launch.
    Group = 23, "group";
    /// Creation of a one-sided window.
    WindowCreate = 24, "window_create";
    /// One-sided write.
    Put = 25, "put";
    /// One-sided read.
    Get = 26, "get";
    /// One-sided signal.
    Signal = 27, "signal";
    /// Wait for a one-sided signal.
    WaitSignal = 28, "wait_signal";
    /// Setting up a persistent operation.
    PersistentInit = 29, "persistent_init";
    /// Running a persistent operation.
    PersistentStart = 30, "persistent_start";
    /// An object collective.
    Object = 31, "object";
    /// An operation defined outside this workspace.
    Custom = 32, "custom";
    /// Agreement on who is left after a failure.
    AgreeSurvivors = 33, "agree_survivors";
    /// A communicator of those who are left.
    Shrink = 34, "shrink";
    /// A barrier that names all who are missing.
    MonitoredBarrier = 35, "monitored_barrier";
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The fields of an [`OpDesc`] on which all ranks of one collective call must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The element type.
    pub dtype: bool,
    /// The reduce operator (its kind; the factor of `PreMulSum` may differ).
    pub redop: bool,
    /// The root rank.
    pub root: bool,
    /// The element count.
    pub count: bool,
    /// The hash of the split vector.
    pub splits: bool,
}

impl Operation {
    /// The table of agreeing fields.
    ///
    /// For point-to-point operations it tells what the two ends must agree on.
    #[must_use]
    pub const fn agreement(self) -> Agreement {
        const fn row(dtype: bool, redop: bool, root: bool, count: bool, splits: bool) -> Agreement {
            Agreement { dtype, redop, root, count, splits }
        }
        match self {
            Self::Send | Self::Recv => row(true, false, false, true, false),
            Self::Broadcast | Self::Gather | Self::Scatter => row(true, false, true, true, false),
            // Only the root knows the sizes of all; each pair is checked when the data arrives.
            Self::GatherV | Self::ScatterV => row(true, false, true, false, false),
            Self::AllReduce | Self::ReduceScatter | Self::Scan | Self::Exscan => row(true, true, false, true, false),
            Self::Reduce => row(true, true, true, true, false),
            Self::AllGather | Self::AllToAll => row(true, false, false, true, false),
            Self::AllGatherV => row(true, false, false, false, true),
            Self::ReduceScatterV => row(true, true, false, false, true),
            // Counts agree pairwise: checked when the data arrives.
            Self::AllToAllV | Self::SendRecv | Self::Batch => row(true, false, false, false, false),
            Self::PersistentInit | Self::PersistentStart | Self::WindowCreate => row(true, false, false, true, false),
            Self::Object => row(false, false, true, false, false),
            Self::Barrier
            | Self::Split
            | Self::Reconfigure
            | Self::Finalize
            | Self::Group
            | Self::Put
            | Self::Get
            | Self::Signal
            | Self::WaitSignal
            | Self::Custom
            | Self::AgreeSurvivors
            | Self::Shrink
            | Self::MonitoredBarrier => row(false, false, false, false, false),
        }
    }

    /// True for collectives in which the length of a block is known to its two ranks only.
    #[must_use]
    pub const fn is_pairwise(self) -> bool {
        matches!(self, Self::GatherV | Self::ScatterV | Self::AllToAllV)
    }

    /// True for calls that every member of the communicator makes, which advance `collective_seq`. A change of
    /// membership is none: its members may be others, and some of the old ones dead.
    #[must_use]
    pub const fn is_collective(self) -> bool {
        !matches!(
            self,
            Self::Send
                | Self::Recv
                | Self::Batch
                | Self::SendRecv
                | Self::Put
                | Self::Get
                | Self::Signal
                | Self::WaitSignal
                | Self::Reconfigure
                | Self::AgreeSurvivors
                | Self::Shrink
        )
    }
}

/// What one rank says about one call. Travels in every data header, so that disagreement is seen
/// by whoever receives the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OpDesc {
    /// The operation.
    pub operation: Operation,
    /// The element type, where there are elements.
    pub dtype: Option<DType>,
    /// The reduce operator, where there is one.
    pub redop: Option<ReduceOp>,
    /// The root rank, where there is one.
    pub root: Option<u32>,
    /// Elements per rank, as the operation's documentation defines it.
    pub count: u64,
    /// Hash of the split vector, 0 where there is none.
    pub splits: u64,
    /// The algorithm, as the backend numbers it; 0 where there is no choice. Must agree.
    pub flags: u8,
}

/// Bytes of an encoded [`OpDesc`].
pub const DESC_BYTES: usize = 24;

impl OpDesc {
    /// A descriptor of `operation` with everything else absent.
    #[must_use]
    pub const fn new(operation: Operation) -> Self {
        Self { operation, dtype: None, redop: None, root: None, count: 0, splits: 0, flags: 0 }
    }

    /// Sets element type and count.
    #[must_use]
    pub const fn elements(mut self, dtype: DType, count: usize) -> Self {
        self.dtype = Some(dtype);
        self.count = count as u64;
        self
    }

    /// Sets the reduce operator.
    #[must_use]
    pub const fn redop(mut self, op: ReduceOp) -> Self {
        self.redop = Some(op);
        self
    }

    /// Sets the root rank.
    #[must_use]
    pub const fn root(mut self, root: usize) -> Self {
        self.root = Some(root as u32);
        self
    }

    /// Sets the hash of a split vector.
    #[must_use]
    pub fn splits(mut self, splits: &[usize]) -> Self {
        let mut h = Fnv::default();
        for s in splits {
            h.write(&(*s as u64).to_le_bytes());
        }
        self.splits = h.finish();
        self
    }

    /// Bytes of one rank's count.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.count * self.dtype.map_or(0, |d| d.size() as u64)
    }

    /// The name of the first field in which two descriptors of the same call disagree although
    /// they must not; `None` when they are compatible.
    #[must_use]
    pub fn disagreement(&self, other: &Self) -> Option<&'static str> {
        if self.operation != other.operation {
            return Some("operation");
        }
        let a = self.operation.agreement();
        if a.dtype && self.dtype != other.dtype {
            return Some("dtype");
        }
        if a.redop && self.redop != other.redop {
            return Some("operator");
        }
        if a.root && self.root != other.root {
            return Some("root");
        }
        if a.count && self.count != other.count {
            return Some("count");
        }
        if a.splits && self.splits != other.splits {
            return Some("splits");
        }
        if self.flags != other.flags {
            return Some("algorithm");
        }
        None
    }

    /// A hash over the fields that must agree, for rolling hashes.
    #[must_use]
    pub fn agreement_hash(&self) -> u64 {
        let a = self.operation.agreement();
        let mut d = *self;
        if !a.dtype {
            d.dtype = None;
        }
        if !a.redop {
            d.redop = None;
        }
        if !a.root {
            d.root = None;
        }
        if !a.count {
            d.count = 0;
        }
        if !a.splits {
            d.splits = 0;
        }
        let mut h = Fnv::default();
        h.write(&d.to_bytes());
        h.finish()
    }

    /// The wire form.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; DESC_BYTES] {
        let mut b = [0u8; DESC_BYTES];
        b[0] = self.operation as u8;
        b[1] = self.dtype.map_or(0xff, DType::code);
        b[2] = self.redop.map_or(0xff, |r| r as u8);
        b[3] = self.flags;
        b[4..8].copy_from_slice(&self.root.unwrap_or(u32::MAX).to_le_bytes());
        b[8..16].copy_from_slice(&self.count.to_le_bytes());
        b[16..24].copy_from_slice(&self.splits.to_le_bytes());
        b
    }

    /// Parses the wire form; `None` when a code is unknown.
    #[must_use]
    pub fn from_bytes(b: &[u8; DESC_BYTES]) -> Option<Self> {
        let opt = |c: u8| if c == 0xff { None } else { Some(c) };
        let root = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| b[i + k]));
        Some(Self {
            operation: Operation::from_code(b[0])?,
            dtype: match opt(b[1]) {
                None => None,
                Some(c) => Some(DType::from_code(c)?),
            },
            redop: match opt(b[2]) {
                None => None,
                Some(c) => Some(ReduceOp::from_code(c)?),
            },
            flags: b[3],
            root: (root != u32::MAX).then_some(root),
            count: word(8),
            splits: word(16),
        })
    }
}

impl fmt::Display for OpDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.operation)?;
        let mut sep = "";
        if let Some(d) = self.dtype {
            write!(f, "{d}, count {}", self.count)?;
            sep = ", ";
        }
        if let Some(r) = self.redop {
            write!(f, "{sep}{r}")?;
            sep = ", ";
        }
        if let Some(r) = self.root {
            write!(f, "{sep}root {r}")?;
            sep = ", ";
        }
        if self.splits != 0 {
            write!(f, "{sep}splits #{:08x}", self.splits as u32)?;
        }
        f.write_str(")")
    }
}

/// FNV-1a, 64 bit: stable across processes and versions, unlike the standard hasher.
#[derive(Clone, Copy, Debug)]
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Folds bytes in.
    pub fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The hash so far.
    #[must_use]
    pub const fn finish(&self) -> u64 {
        self.0
    }

    /// The hash of one byte string.
    #[must_use]
    pub fn hash(bytes: &[u8]) -> u64 {
        let mut h = Self::default();
        h.write(bytes);
        h.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_round_trips() {
        for &op in Operation::ALL {
            let d = OpDesc::new(op).elements(DType::Bf16, 7).redop(ReduceOp::Max).root(3).splits(&[1, 0, 2]);
            assert_eq!(OpDesc::from_bytes(&d.to_bytes()), Some(d));
        }
        let mut b = OpDesc::new(Operation::Barrier).to_bytes();
        assert_eq!(OpDesc::from_bytes(&b), Some(OpDesc::new(Operation::Barrier)));
        b[0] = 200;
        assert_eq!(OpDesc::from_bytes(&b), None);
    }

    #[test]
    fn the_table_says_what_must_agree() {
        let a = OpDesc::new(Operation::AllReduce).elements(DType::F32, 4).redop(ReduceOp::Sum);
        assert_eq!(a.disagreement(&a), None);
        assert_eq!(a.disagreement(&a.elements(DType::F32, 5)), Some("count"));
        assert_eq!(a.disagreement(&a.elements(DType::F64, 4)), Some("dtype"));
        assert_eq!(a.disagreement(&a.redop(ReduceOp::Max)), Some("operator"));
        let b = OpDesc::new(Operation::Broadcast).elements(DType::F32, 4).root(0);
        assert_eq!(b.disagreement(&b.root(1)), Some("root"));
        assert_eq!(b.disagreement(&a), Some("operation"));
        let bar = OpDesc::new(Operation::Barrier);
        assert_eq!(bar.disagreement(&bar.elements(DType::F32, 9)), None);
        assert_eq!(bar.agreement_hash(), bar.elements(DType::F32, 9).agreement_hash());
        assert_ne!(b.agreement_hash(), b.root(1).agreement_hash());
    }
}
