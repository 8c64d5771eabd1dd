//! What to compare, from the command line.

use std::path::PathBuf;
use std::time::Duration;

/// The text of `--help`.
pub const USAGE: &str = "cargo xtask bench compare: ours beside Open MPI and Gloo on this machine

    --against LIST      openmpi, gloo (both)
    --world LIST        ranks (2,4)
    --transport LIST    shm, tcp (both); ours has tcp only as yet: rows of shm show the peers alone
    --ops LIST          all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier, send_recv (all)
    --sizes LIST        bytes, or with K or M for KiB and MiB (8,1K,64K,1M,16M,256M)
    --pin WHICH         yes, no or both: ranks on one core each, or where the system puts them (both)
    --rounds N          pairs that a row needs (9 in worlds of 2, 5 in larger ones)
    --scale F           times the usual number of iterations (1; at most 10)
    --budget SECONDS    no round begins later (3600)
    --quick             a smoke test: few sizes, 2 rounds, a tenth of the iterations
    --json FILE         where the rows go (DIR/cpu.json)
    --out DIR           where cpu.md goes (benches/results; with --quick target/compare)
    --note TEXT         a line for cpu.md: what else ran meanwhile, say
    --peers DIR         the programs of the peers (target/peers)
";

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Op {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Barrier,
    SendRecv,
}

impl Op {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::AllToAll,
        Self::Barrier,
        Self::SendRecv,
    ];

    /// As on the command line and in results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::SendRecv => "send_recv",
        }
    }

    /// Whether its buffer is divided among the ranks.
    #[must_use]
    pub const fn is_divided(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllGather | Self::AllToAll)
    }
}

/// Whom ours is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Peer {
    OpenMpi,
    Gloo,
}

impl Peer {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::OpenMpi, Self::Gloo];

    /// As on the command line and in results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Gloo => "gloo",
        }
    }
}

/// What carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Transport {
    Shm,
    Tcp,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Shm, Self::Tcp];

    /// As on the command line and in results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// One operation at one size, as all sides run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The operation.
    pub op: Op,
    /// Size as asked for; 0 for a barrier.
    pub nominal: usize,
    /// Size as run: a multiple of a float for each rank where the buffer is divided.
    pub bytes: usize,
    /// Timed calls, a multiple of the world, so that every rank is root as often.
    pub iterations: usize,
    /// Calls before that.
    pub warm_up: usize,
}

impl Case {
    /// The case in a world of this size.
    #[must_use]
    pub fn new(op: Op, nominal: usize, world: usize, scale: f64) -> Self {
        let bytes = match op {
            Op::Barrier => 0,
            op if op.is_divided() => nominal.max(4).div_ceil(4 * world) * 4 * world,
            _ => nominal.max(4).next_multiple_of(4),
        };
        let usual = match bytes {
            0..=65_536 => 300.0,
            65_537..=1_048_576 => 40.0,
            1_048_577..=16_777_216 => 6.0,
            _ => 4.0,
        };
        let iterations = ((usual * scale) as usize).max(3).next_multiple_of(world);
        Self { op, nominal, bytes, iterations, warm_up: (iterations / 10 + 2).next_multiple_of(world) }
    }

    /// As the programs of all sides take it.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}:{}:{}:{}", self.op.name(), self.bytes, self.iterations, self.warm_up)
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "see USAGE")]
pub struct Options {
    pub against: Vec<Peer>,
    pub worlds: Vec<usize>,
    pub transports: Vec<Transport>,
    pub ops: Vec<Op>,
    pub sizes: Vec<usize>,
    pub pins: Vec<bool>,
    pub rounds: Option<usize>,
    pub scale: f64,
    pub budget: Duration,
    pub quick: bool,
    pub json: PathBuf,
    pub out: PathBuf,
    pub peers: PathBuf,
    pub note: String,
}

impl Options {
    /// Understands the arguments.
    ///
    /// # Errors
    ///
    /// An option or a value that is not known, with those that are; a value that is missing; a combination that cannot be run.
    pub fn parse(args: &[String]) -> Result<Self, String> {
        let quick = args.iter().any(|a| a == "--quick");
        let mut o = Self {
            against: Peer::ALL.to_vec(),
            worlds: if quick { vec![2] } else { vec![2, 4] },
            transports: Transport::ALL.to_vec(),
            ops: Op::ALL.to_vec(),
            sizes: if quick { vec![8, 64 << 10] } else { vec![8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20] },
            pins: vec![true, false],
            rounds: quick.then_some(2),
            scale: if quick { 0.1 } else { 1.0 },
            budget: Duration::from_secs(if quick { 300 } else { 3600 }),
            quick,
            json: PathBuf::new(),
            out: if quick { "target/compare".into() } else { "benches/results".into() },
            peers: "target/peers".into(),
            note: String::new(),
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let (name, inline) = arg.split_once('=').map_or((arg.as_str(), None), |(n, v)| (n, Some(v)));
            if arg == "--quick" {
                continue;
            }
            let known = name.starts_with("--")
                && USAGE.lines().any(|l| l.trim_start().split(' ').next() == Some(name))
                && name != "--quick";
            if !known {
                return Err(format!(
                    "compare does not know '{arg}'; `cargo xtask bench compare --help` lists its options"
                ));
            }
            let value = inline.or_else(|| args.next().map(String::as_str));
            let value = value.ok_or_else(|| format!("{name} needs a value"))?;
            match name {
                "--against" => {
                    o.against = list(
                        name,
                        value,
                        |v| Peer::ALL.into_iter().find(|p| p.name() == v),
                        names(&Peer::ALL, Peer::name),
                    )?
                }
                "--transport" => {
                    o.transports = list(
                        name,
                        value,
                        |v| Transport::ALL.into_iter().find(|t| t.name() == v),
                        names(&Transport::ALL, Transport::name),
                    )?;
                }
                "--ops" => {
                    o.ops =
                        list(name, value, |v| Op::ALL.into_iter().find(|p| p.name() == v), names(&Op::ALL, Op::name))?
                }
                "--world" => {
                    o.worlds =
                        list(name, value, |v| v.parse().ok().filter(|n| (2..=64).contains(n)), "2 to 64 ranks".into())?
                }
                "--sizes" => {
                    o.sizes = list(name, value, bytes, "sizes from 4 bytes to 1024M, such as 8, 64K or 16M".into())?
                }
                "--pin" => {
                    o.pins = match value {
                        "yes" => vec![true],
                        "no" => vec![false],
                        "both" => vec![true, false],
                        _ => return Err(format!("--pin takes yes, no or both, not '{value}'")),
                    }
                }
                "--rounds" => o.rounds = Some(number(name, value, 1.0, 1000.0)? as usize),
                "--scale" => o.scale = number(name, value, 1e-3, 10.0)?,
                "--budget" => o.budget = Duration::from_secs_f64(number(name, value, 1.0, 1e6)?),
                "--json" => o.json = value.into(),
                "--out" => o.out = value.into(),
                "--note" => o.note = value.into(),
                _ => o.peers = value.into(),
            }
        }
        if o.json.as_os_str().is_empty() {
            o.json = o.out.join("cpu.json");
        }
        match o.worlds.iter().find(|w| *w % 2 != 0) {
            Some(odd) if o.ops.contains(&Op::SendRecv) => Err(format!(
                "send_recv runs in pairs of ranks, which a world of {odd} is not: leave it out with --ops, or take an even --world"
            )),
            _ => Ok(o),
        }
    }

    /// Pairs that a row needs.
    #[must_use]
    pub fn need(&self, world: usize) -> usize {
        self.rounds.unwrap_or(if world <= 2 { 9 } else { 5 })
    }

    /// Bytes that the ranks of the largest world have at a time, without what the libraries need.
    #[must_use]
    pub fn memory(&self) -> usize {
        2 * self.worlds.iter().max().unwrap_or(&0) * self.sizes.iter().max().unwrap_or(&0)
    }

    /// The cases of an operation.
    #[must_use]
    pub fn cases(&self, op: Op, world: usize) -> Vec<Case> {
        match op {
            Op::Barrier => vec![Case::new(op, 0, world, self.scale)],
            _ => self.sizes.iter().map(|s| Case::new(op, *s, world, self.scale)).collect(),
        }
    }
}

fn names<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> String {
    all.iter().map(|t| name(*t)).collect::<Vec<_>>().join(", ")
}

fn list<T: PartialEq>(
    name: &str,
    value: &str,
    one: impl Fn(&str) -> Option<T>,
    known: String,
) -> Result<Vec<T>, String> {
    let mut all = Vec::new();
    for part in value.split(',').map(str::trim) {
        let item = one(part).ok_or_else(|| format!("{name} does not know '{part}'; known: {known}"))?;
        if all.contains(&item) {
            return Err(format!("{name} has '{part}' twice"));
        }
        all.push(item);
    }
    Ok(all)
}

fn number(name: &str, value: &str, least: f64, most: f64) -> Result<f64, String> {
    let parsed = value.parse::<f64>().ok().filter(|x| (least..=most).contains(x));
    parsed.ok_or_else(|| format!("{name} takes a number from {least} to {most}, not '{value}'"))
}

fn bytes(text: &str) -> Option<usize> {
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(d) => (d, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |d| (d, 1 << 20)),
    };
    let n = digits.parse::<usize>().ok()?.checked_mul(unit)?;
    (4..=1 << 30).contains(&n).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn defaults() {
        let o = parse("").unwrap();
        assert_eq!((o.against.len(), o.worlds.as_slice(), o.ops.len()), (2, &[2, 4][..], 7));
        assert_eq!((o.need(2), o.need(4)), (9, 5));
        assert_eq!((o.json.to_str(), o.pins.len()), (Some("benches/results/cpu.json"), 2));
        assert_eq!(o.memory(), 2 << 30);
        assert_eq!((o.sizes.first(), o.sizes.last()), (Some(&8), Some(&(256 << 20))));
    }

    #[test]
    fn everything_can_be_chosen() {
        let o = parse(
            "--against gloo --world=2 --transport tcp --ops barrier,all_reduce --sizes 8,1K,16M --pin no --rounds 3 --scale 0.5 --budget 60 --json a.json --out there --peers p",
        )
        .unwrap();
        assert_eq!((o.against.as_slice(), o.transports.as_slice()), (&[Peer::Gloo][..], &[Transport::Tcp][..]));
        assert_eq!(
            (o.ops.as_slice(), o.sizes.as_slice()),
            (&[Op::Barrier, Op::AllReduce][..], &[8, 1024, 16 << 20][..])
        );
        assert_eq!((o.pins.as_slice(), o.need(2), o.need(4)), (&[false][..], 3, 3));
        assert_eq!((o.budget.as_secs(), o.json.to_str(), o.out.to_str()), (60, Some("a.json"), Some("there")));
        // A smoke test does not overwrite results, wherever it stands among the options.
        let o = parse("--ops barrier --quick").unwrap();
        assert_eq!((o.need(2), o.json.to_str()), (2, Some("target/compare/cpu.json")));
        assert_eq!(parse("--quick --rounds 4").unwrap().need(2), 4);
    }

    #[test]
    fn mistakes_name_the_choices() {
        for (line, words) in [
            ("--ops all_reduce,scan", &["'scan'", "reduce_scatter"][..]),
            ("--against mpich", &["'mpich'", "openmpi, gloo"]),
            ("--transport udp", &["'udp'", "shm, tcp"]),
            ("--world 1", &["'1'", "2 to 64"]),
            ("--world 2,two", &["'two'"]),
            ("--sizes 3", &["'3'", "64K"]),
            ("--sizes 99999999999999999999", &["'99999999999999999999'"]),
            ("--ops barrier,barrier", &["twice"]),
            ("--pin maybe", &["yes, no or both", "'maybe'"]),
            ("--rounds 0", &["--rounds", "'0'"]),
            ("--scale nan", &["--scale", "'nan'"]),
            ("--json", &["--json needs a value"]),
            ("--quick=yes", &["'--quick=yes'"]),
            ("--fast", &["'--fast'", "--help"]),
            ("all_reduce", &["'all_reduce'"]),
            ("cargo x", &["'cargo'"]),
            ("--scale 11", &["--scale", "10"]),
            ("--world 3", &["pairs", "world of 3", "--ops"]),
        ] {
            let e = parse(line).unwrap_err();
            assert!(words.iter().all(|w| e.contains(w)), "{line}: {e}");
        }
        assert!(parse("--world 3 --ops barrier").is_ok());
    }

    #[test]
    fn all_sides_get_the_same_cases() {
        assert_eq!(Case::new(Op::AllReduce, 8, 2, 1.0).text(), "all_reduce:8:300:32");
        // A float for each of four ranks, and every rank is root as often as the others.
        assert_eq!(Case::new(Op::AllToAll, 8, 4, 1.0).text(), "all_to_all:16:300:32");
        assert_eq!(Case::new(Op::Broadcast, 256 << 20, 3, 0.01).text(), "broadcast:268435456:3:3");
        assert_eq!(Case::new(Op::Barrier, 0, 4, 0.1).text(), "barrier:0:32:8");
        assert_eq!(Case::new(Op::AllGather, 10, 2, 1.0).bytes, 16);
    }
}
