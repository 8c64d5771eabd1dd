//! From arguments to what is measured: sizes, types, operators, roots.

use rustcomms::{DType, ReduceOp};

use super::Args;
use super::ops::{Sizing, Spec};

const DEFAULT_MIN: u64 = 8;
const DEFAULT_MAX: u64 = 64 << 20;
const DEFAULT_FACTOR: u64 = 4;
/// More sizes than this are a mistake.
const MOST_SIZES: usize = 100_000;

/// One table: a type, an operator and a root, at all sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) dtype: DType,
    pub(crate) redop: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
}

/// How sizes follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Factor(u64),
    Bytes(u64),
}

/// All that is measured.
pub(crate) struct Plan {
    pub(crate) spec: &'static Spec,
    pub(crate) cases: Vec<Case>,
    /// Sizes as asked for, before rounding.
    pub(crate) sizes: Vec<u64>,
    /// The smallest and the largest size that were asked for.
    pub(crate) range: (u64, u64),
    pub(crate) step: Step,
    /// Remarks for the head of the table.
    pub(crate) notes: Vec<String>,
    pub(crate) iters: usize,
    pub(crate) warmup: usize,
    /// Checked calls per form and size; 0 for none.
    pub(crate) checks: usize,
    pub(crate) algo: Option<String>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("op", &self.spec.name)
            .field("cases", &self.cases)
            .field("sizes", &self.sizes)
            .finish_non_exhaustive()
    }
}

impl Plan {
    /// The plan for a world of `ranks`, or what is wrong with the arguments.
    pub(crate) fn new(args: &Args, ranks: usize) -> Result<Self, String> {
        let spec = Spec::find(&args.op)?;
        let range = range(args, spec)?;
        let (sizes, step) = sizes(args, range)?;
        if args.algo.is_some() && !spec.has_algorithms() {
            return Err(format!("--algo: there is only one way to do {}", spec.name));
        }
        let mut notes = Vec::new();
        let mut unused = |given: bool, letter: &str, why: &str| {
            if given {
                notes.push(format!("{letter} has no effect: {} {why}", spec.name));
            }
        };
        unused(args.op_name.is_some() && !spec.reduces, "-o", "does not reduce");
        unused(args.root.is_some() && !spec.rooted, "-r", "has no root");
        unused(args.dtype.is_some() && spec.sizing == Sizing::Nothing, "-d", "has no data");

        let dtypes = choices(args.dtype.as_deref().unwrap_or("float"), "-d", "type", &DType::ALL, DType::from_name)?;
        let legal = ReduceOp::ALL.into_iter().filter(|o| DType::ALL.iter().any(|d| o.is_legal(*d))).collect::<Vec<_>>();
        let by_name = |n: &str| ReduceOp::from_name(n).filter(|o| legal.contains(o));
        let redops = choices(args.op_name.as_deref().unwrap_or("sum"), "-o", "operator", &legal, by_name)?;
        let redops = if spec.reduces { redops.into_iter().map(Some).collect() } else { vec![None] };
        let roots = if spec.rooted { roots(args, ranks)? } else { vec![None] };
        let dtypes = if spec.sizing == Sizing::Nothing { vec![DType::U8] } else { dtypes };

        let mut cases = Vec::new();
        for &dtype in &dtypes {
            for &redop in &redops {
                if let Some(op) = redop.filter(|o| !o.is_legal(dtype)) {
                    let types: Vec<_> = DType::ALL.into_iter().filter(|d| op.is_legal(*d)).map(|d| d.name()).collect();
                    if dtypes.len() == 1 && redops.len() == 1 {
                        return Err(format!("{op} is not defined on {dtype}; it is on {}", types.join(", ")));
                    }
                    notes.push(format!("skipped {op} on {dtype}: it is not defined"));
                    continue;
                }
                cases.extend(roots.iter().map(|&root| Case { dtype, redop, root }));
            }
        }
        Ok(Self {
            spec,
            cases,
            sizes,
            range,
            step,
            notes,
            iters: args.iters,
            warmup: args.warmup_iters,
            checks: args.check,
            algo: args.algo.clone(),
        })
    }

    /// Measurements in all.
    pub(crate) fn len(&self) -> usize {
        let forms = usize::from(self.spec.out_of_place.is_some()) + usize::from(self.spec.in_place.is_some());
        self.cases.len() * self.sizes.len() * forms
    }
}

trait Named {
    fn label(&self) -> &'static str;
}

impl Named for DType {
    fn label(&self) -> &'static str {
        self.name()
    }
}

impl Named for ReduceOp {
    fn label(&self) -> &'static str {
        self.name()
    }
}

/// `all`, or the one of this name.
fn choices<T: Named + Copy>(
    given: &str,
    letter: &str,
    what: &str,
    all: &[T],
    by_name: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, String> {
    if given == "all" {
        return Ok(all.to_vec());
    }
    by_name(given).map(|x| vec![x]).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(Named::label).collect();
        format!("{letter}: there is no {what} '{given}'; there are {}, and all", names.join(", "))
    })
}

fn roots(args: &Args, ranks: usize) -> Result<Vec<Option<usize>>, String> {
    match args.root.as_deref().unwrap_or("0") {
        "all" => Ok((0..ranks).map(Some).collect()),
        text => match text.parse() {
            Ok(root) if root < ranks => Ok(vec![Some(root)]),
            _ => Err(format!("-r: '{text}' is not a root; with {ranks} ranks there are 0 to {}, and all", ranks - 1)),
        },
    }
}

fn range(args: &Args, spec: &Spec) -> Result<(u64, u64), String> {
    if spec.sizing == Sizing::Nothing {
        return Ok((0, 0));
    }
    let (min, max) = (args.min_bytes.unwrap_or(DEFAULT_MIN), args.max_bytes.unwrap_or(DEFAULT_MAX));
    if min > max {
        return Err(format!("-b {min} is more than -e {max}; there would be no size to measure"));
    }
    Ok((min, max))
}

fn sizes(args: &Args, (min, max): (u64, u64)) -> Result<(Vec<u64>, Step), String> {
    let step = match (args.step_factor, args.step_bytes) {
        (_, Some(0)) => return Err("-i 0 would never reach the largest size; it must be at least 1".into()),
        (Some(f), _) if f < 2 => {
            return Err(format!("-f {f} would never reach the largest size; use at least 2, or -i to add bytes"));
        }
        (_, Some(b)) => Step::Bytes(b),
        (f, None) => Step::Factor(f.unwrap_or(DEFAULT_FACTOR)),
    };
    if min == 0 && max > 0 && matches!(step, Step::Factor(_)) {
        return Err("-b 0 never grows by a factor; use -i to add bytes".into());
    }
    let mut sizes = vec![min];
    let mut last = min;
    loop {
        let next = match step {
            Step::Factor(f) => last.checked_mul(f),
            Step::Bytes(b) => last.checked_add(b),
        };
        match next.filter(|n| *n <= max && *n > last) {
            Some(n) => last = n,
            None => return Ok((sizes, step)),
        }
        if sizes.len() == MOST_SIZES {
            return Err(format!("that would be more than {MOST_SIZES} sizes; raise -i"));
        }
        sizes.push(last);
    }
}

/// Parses a size: a number of bytes, or of K, M, G (powers of two).
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 =
        number.parse().map_err(|_| "a size is a number of bytes, with K, M or G for powers of two".to_owned())?;
    let most = isize::MAX as u64;
    number.checked_mul(1 << shift).filter(|n| *n <= most).ok_or_else(|| "no memory is as large as that".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn plan(line: &str, ranks: usize) -> Result<Plan, String> {
        let cli = Cli::try_parse_from(std::iter::once("perf").chain(line.split_whitespace()));
        Plan::new(&cli.map_err(|e| e.to_string())?.args, ranks)
    }

    #[test]
    fn sizes_with_suffixes() {
        assert_eq!(["8", "64K", "3m", "1G", "0"].map(|s| size(s).unwrap()), [8, 65536, 3 << 20, 1 << 30, 0]);
        for bad in ["", "K", "-1", "1.5M", "8B", "9999999999G", "é"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_step_by_a_factor_or_by_bytes() {
        let sizes = |line: &str| plan(line, 2).unwrap().sizes;
        assert_eq!(sizes("all_reduce -b 8 -e 64K -f 8"), [8, 64, 512, 4096, 32768]);
        assert_eq!(sizes("all_reduce -b 1K -e 4K -i 1K"), [1024, 2048, 3072, 4096]);
        assert_eq!(sizes("all_reduce -b 8 -e 8"), [8]);
        assert_eq!(sizes("all_reduce -b 0 -e 0"), [0]);
        assert_eq!(sizes("all_reduce -b 0 -e 8 -i 4"), [0, 4, 8]);
        assert_eq!(sizes("barrier -b 8 -e 64"), [0]);
        let all = sizes("all_reduce");
        assert_eq!((all[0], all[1], *all.last().unwrap(), all.len()), (8, 32, 32 << 20, 12));
    }

    #[test]
    fn cases_are_the_legal_combinations() {
        let cases = |line: &str, n| plan(line, n).unwrap().cases;
        let one = |dtype, redop, root| Case { dtype, redop, root };
        assert_eq!(cases("all_reduce", 2), [one(DType::F32, Some(ReduceOp::Sum), None)]);
        assert_eq!(cases("all_gather -d half", 2), [one(DType::F16, None, None)]);
        assert_eq!(cases("broadcast -r all -d bool", 3), [0, 1, 2].map(|r| one(DType::Bool, None, Some(r))));
        assert_eq!(cases("barrier", 3).len(), 1);
        let all = plan("reduce -d all -o all", 2).unwrap();
        let legal = DType::ALL.map(|d| ReduceOp::ALL.iter().filter(|o| o.is_legal(d)).count()).iter().sum::<usize>();
        assert_eq!(all.cases.len(), legal);
        assert!(all.notes.contains(&"skipped band on f32: it is not defined".to_owned()), "{:?}", all.notes);
        assert!(all.cases.iter().all(|c| c.redop.unwrap().is_legal(c.dtype) && c.root == Some(0)));
        let notes = plan("all_gather -o max -r 1", 2).unwrap().notes;
        assert_eq!(notes, ["-o has no effect: all_gather does not reduce", "-r has no effect: all_gather has no root"]);
    }

    #[test]
    fn measurements_are_counted() {
        assert_eq!(plan("all_reduce -b 8 -e 64 -f 8 -d all -o min", 2).unwrap().len(), 15 * 2 * 2);
        assert_eq!(plan("sendrecv -b 8 -e 8", 2).unwrap().len(), 1);
        assert_eq!(plan("barrier", 2).unwrap().len(), 1);
    }

    #[test]
    fn mistakes_are_explained() {
        for (line, text) in [
            ("all_redcue", "the operations are sendrecv, broadcast"),
            ("all_reduce -d float31", "there is no type 'float31'; there are bool, i8"),
            (
                "all_reduce -o mulsum",
                "there is no operator 'mulsum'; there are sum, prod, min, max, avg, band, bor, bxor, and all",
            ),
            ("all_reduce -o premulsum", "no operator 'premulsum'"),
            ("all_reduce -o band", "band is not defined on f32; it is on bool, i8"),
            ("broadcast -r 2", "with 2 ranks there are 0 to 1, and all"),
            ("broadcast -r x", "'x' is not a root"),
            ("all_reduce -b 1M -e 1K", "-b 1048576 is more than -e 1024"),
            ("all_reduce -f 1", "use at least 2, or -i"),
            ("all_reduce -i 0", "-i 0 would never"),
            ("all_reduce -b 0", "-b 0 never grows"),
            ("all_reduce -i 1", "more than 100000 sizes"),
            ("all_reduce -n 0", "must be a number of at least 1"),
            ("all_reduce -b 8x", "a size is a number of bytes"),
            ("all_reduce -f 2 -i 8", "cannot be used with"),
            ("sendrecv --algo ring", "only one way to do sendrecv"),
        ] {
            let e = plan(line, 2).unwrap_err();
            assert!(e.contains(text), "{line}: {e}");
        }
    }
}
