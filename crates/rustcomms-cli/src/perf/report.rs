//! What is printed and written: nccl-tests' table, and JSON.

use serde::Serialize;

use rustcomms::{DType, ReduceOp};

use super::plan::{Case, Plan, Step};

/// One form of an operation at one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Measured {
    /// Time of one call: the time of all timed calls by their number, averaged over ranks.
    pub(crate) time_us: f64,
    /// Time of the fastest call, each taken from its slowest rank.
    pub(crate) min_us: f64,
    /// Time that 99 of 100 calls stayed within, each taken from its slowest rank.
    pub(crate) p99_us: f64,
    /// GB/s of data.
    pub(crate) algbw: f64,
    /// GB/s that one link carries in an ideal algorithm.
    pub(crate) busbw: f64,
    /// Elements that were not as they should be, on all ranks together; `null` if nothing was checked.
    pub(crate) wrong: Option<u64>,
}

/// One line of the table, one object of the JSON array. What an operation does not have is `null`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) op: &'static str,
    pub(crate) backend: &'static str,
    pub(crate) transport: String,
    pub(crate) world: usize,
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    pub(crate) dtype: Option<&'static str>,
    pub(crate) redop: Option<&'static str>,
    pub(crate) root: Option<usize>,
    pub(crate) algorithm: Option<String>,
    pub(crate) out_of_place: Option<Measured>,
    pub(crate) in_place: Option<Measured>,
}

/// The type as nccl-tests calls it.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::I8 => "int8",
        DType::U8 => "uint8",
        DType::I16 => "int16",
        DType::U16 => "uint16",
        DType::I32 => "int32",
        DType::U32 => "uint32",
        DType::I64 => "int64",
        DType::U64 => "uint64",
        DType::F16 => "half",
        DType::Bf16 => "bfloat16",
        DType::F32 => "float",
        DType::F64 => "double",
        DType::E4M3 => "f8e4m3",
        DType::E5M2 => "f8e5m2",
        other => other.name(),
    }
}

/// A number with as many of two decimals as fit into `width`, else with an exponent as C prints it.
pub(crate) fn number(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = format!("{value:.decimals$}");
        if text.len() <= width {
            return text;
        }
    }
    let text = format!("{value:.*e}", usize::from(width >= 7));
    match text.split_once('e') {
        Some((mantissa, exponent)) => format!("{mantissa}e+{exponent:0>2}"),
        None => text,
    }
}

fn half(m: Option<&Measured>) -> String {
    let na = || "N/A".to_owned();
    let [time, alg, bus, wrong] = match m {
        Some(m) => {
            [number(m.time_us, 7), number(m.algbw, 6), number(m.busbw, 6), m.wrong.map_or_else(na, |w| w.to_string())]
        }
        None => [na(), na(), na(), na()],
    };
    format!("  {time:>7}  {alg:>6}  {bus:>6}  {wrong:>6}")
}

impl Row {
    /// The line of the table.
    pub(crate) fn line(&self) -> String {
        let dtype = self.dtype.and_then(DType::from_name).map_or("none", type_name);
        let root = self.root.map_or_else(|| "-1".to_owned(), |r| r.to_string());
        let redop = self.redop.unwrap_or("none");
        let (bytes, count) = (self.bytes, self.count);
        let (out, inp) = (half(self.out_of_place.as_ref()), half(self.in_place.as_ref()));
        format!("{bytes:>12}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}{out}{inp}")
    }
}

/// The lines that name the columns.
pub(crate) fn columns() -> String {
    let left = |a: &str, b: &str, c: [&str; 3]| format!("# {a:>10}  {b:>12}  {:>8}  {:>6}  {:>6}", c[0], c[1], c[2]);
    let right = |c: [&str; 4]| format!("  {:>7}  {:>6}  {:>6}  {:>6}", c[0], c[1], c[2], c[3]);
    let names = right(["time", "algbw", "busbw", "#wrong"]);
    let units = right(["(us)", "(GB/s)", "(GB/s)", ""]);
    let forms = format!("{}{:>23}{:>31}", left("", "", [""; 3]), "out-of-place", "in-place");
    let first = format!("{}{names}{names}", left("size", "count", ["type", "redop", "root"]));
    let second = format!("{}{units}{units}", left("(B)", "(elements)", [""; 3]));
    format!("#\n{}\n{}\n{}", forms.trim_end(), first.trim_end(), second.trim_end())
}

/// What is measured, for the head of the table.
pub(crate) fn settings(plan: &Plan) -> String {
    let (min, max) = plan.range;
    let step = match plan.step {
        Step::Factor(f) => format!("{f}(factor)"),
        Step::Bytes(b) => format!("{b}(bytes)"),
    };
    let (warmup, iters, checks) = (plan.warmup, plan.iters, plan.checks);
    format!("# minBytes {min} maxBytes {max} step: {step} warmup iters: {warmup} iters: {iters} validation: {checks}")
}

/// Which algorithm runs at which sizes, from the sizes in ascending order, and why not another that was asked for.
pub(crate) fn algorithms(by_size: &[(u64, String)], why_not: Option<&str>) -> Option<String> {
    let mut runs: Vec<(u64, u64, &str)> = Vec::new();
    for (bytes, name) in by_size {
        match runs.last_mut() {
            Some((_, to, same)) if same == name => *to = *bytes,
            _ => runs.push((*bytes, *bytes, name)),
        }
    }
    runs.retain(|r| !r.2.is_empty());
    if runs.is_empty() {
        return None;
    }
    let texts: Vec<_> = runs
        .iter()
        .map(
            |(from, to, name)| {
                if from == to { format!("{name} ({from} B)") } else { format!("{name} ({from} to {to} B)") }
            },
        )
        .collect();
    let why_not = why_not.map_or_else(String::new, |w| format!("; {w}"));
    Some(format!("# algorithm: {}{why_not}", texts.join(", ")))
}

/// The lines under the table.
pub(crate) fn footer(rows: &[Row]) -> String {
    let forms = || rows.iter().flat_map(|r| [r.out_of_place, r.in_place]).flatten();
    let wrong: u64 = forms().filter_map(|m| m.wrong).sum();
    let mean = forms().map(|m| m.busbw).sum::<f64>() / forms().count().max(1) as f64;
    let verdict = if wrong == 0 { "OK" } else { "FAILED" };
    format!("# Out of bounds values : {wrong} {verdict}\n# Avg bus bandwidth    : {mean:.6}\n#")
}

/// A short name of a case, for messages.
pub(crate) fn describe(case: &Case) -> String {
    let redop = case.redop.map_or_else(String::new, |r: ReduceOp| format!(" {r}"));
    let root = case.root.map_or_else(String::new, |r| format!(" root {r}"));
    format!("{}{redop}{root}", case.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(time_us: f64, bw: f64, wrong: Option<u64>) -> Measured {
        Measured { time_us, min_us: 1.0, p99_us: 2.0, algbw: bw, busbw: bw * 1.5, wrong }
    }

    fn row() -> Row {
        Row {
            op: "all_reduce",
            backend: "tcp",
            transport: "sockets".into(),
            world: 4,
            bytes: 1024,
            count: 256,
            dtype: Some("f32"),
            redop: Some("sum"),
            root: None,
            algorithm: Some("direct".into()),
            out_of_place: Some(measured(123.456, 0.008, Some(0))),
            in_place: Some(measured(98.7, 0.01, None)),
        }
    }

    #[test]
    fn numbers_have_the_decimals_that_fit() {
        let seven = [0.0, 9.876, 9999.99, 12345.67, 1234567.0, 12345678.0, 1e12].map(|x| number(x, 7));
        assert_eq!(seven, ["0.00", "9.88", "9999.99", "12345.7", "1234567", "1.2e+07", "1.0e+12"]);
        let six = [999.99, 1234.5, 123456.0, 1234567.0].map(|x| number(x, 6));
        assert_eq!(six, ["999.99", "1234.5", "123456", "1e+06"]);
    }

    #[test]
    fn lines_are_nccl_tests() {
        let want = "        1024           256     float     sum      -1   123.46    0.01    0.01       0    98.70    0.01    0.01     N/A";
        assert_eq!(row().line(), want);
        let other = Row { root: Some(3), redop: None, in_place: None, dtype: Some("e4m3"), ..row() };
        let want = "        1024           256    f8e4m3    none       3   123.46    0.01    0.01       0      N/A     N/A     N/A     N/A";
        assert_eq!(other.line(), want);
        let none = Row { dtype: None, ..row() };
        assert!(none.line().contains("      none     sum"));
        // The names stand over their columns, ends aligned.
        let columns = columns();
        assert!(columns.lines().all(|l| l.starts_with('#')));
        let names = columns.lines().find(|l| l.contains("busbw")).unwrap();
        let line = row().line();
        let ends = |l: &str| {
            let l = format!("{l} ");
            l.char_indices()
                .skip(13)
                .filter(|(i, c)| *c == ' ' && l.as_bytes()[i - 1] != b' ')
                .map(|(i, _)| i)
                .collect::<Vec<_>>()
        };
        assert_eq!(ends(names), ends(&line));
    }

    #[test]
    fn json_has_the_fields() {
        let v = serde_json::to_value([row(), Row { redop: None, in_place: None, ..row() }]).unwrap();
        assert_eq!(v[0]["op"], "all_reduce");
        assert_eq!((&v[0]["dtype"], &v[0]["root"]), (&"f32".into(), &serde_json::Value::Null));
        assert_eq!((&v[0]["out_of_place"]["wrong"], &v[0]["in_place"]["wrong"]), (&0.into(), &serde_json::Value::Null));
        assert!(v[1].as_object().unwrap().contains_key("in_place") && v[1]["in_place"].is_null());
        let mut keys: Vec<_> = v[0]["in_place"].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["algbw", "busbw", "min_us", "p99_us", "time_us", "wrong"]);
    }

    #[test]
    fn the_footer_sums_up() {
        let bad = Row { in_place: Some(measured(1.0, 3.0, Some(7))), out_of_place: None, ..row() };
        assert_eq!(footer(&[row()]), "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.013500\n#");
        let text = footer(&[row(), bad]);
        assert!(text.starts_with("# Out of bounds values : 7 FAILED\n"), "{text}");
        assert!(text.contains("# Avg bus bandwidth    : 1.509000\n"), "{text}");
    }

    #[test]
    fn algorithms_by_range() {
        let of = |list: &[(u64, &str)], why_not| {
            algorithms(&list.iter().map(|(b, n)| (*b, (*n).to_owned())).collect::<Vec<_>>(), why_not)
        };
        let text = of(&[(8, "direct"), (64, "direct"), (512, "ring")], None).unwrap();
        assert_eq!(text, "# algorithm: direct (8 to 64 B), ring (512 B)");
        assert_eq!(of(&[(8, "chain")], Some("no ring")).unwrap(), "# algorithm: chain (8 B); no ring");
        assert_eq!(of(&[(8, "")], Some("no ring")), None);
    }
}
