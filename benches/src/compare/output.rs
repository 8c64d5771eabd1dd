//! What the programs of all sides print.

use super::options::Case;

/// Microseconds per call of each case, from what a side's first rank printed.
///
/// # Errors
///
/// When that is not one `row` for each case, in their order and with their counts, and `done` at the end: a number that
/// does not belong to the case it is taken for would be worse than none.
pub fn parse(text: &str, cases: &[Case]) -> Result<Vec<f64>, String> {
    let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
    let mut times = Vec::with_capacity(cases.len());
    for case in cases {
        let line = lines.next().ok_or_else(|| format!("the output ends before the row of {}", case.text()))?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["row", op, bytes, iterations, us] = words[..] else {
            return Err(format!("'{line}' is no row of {}", case.text()));
        };
        if op != case.op.name() || bytes.parse() != Ok(case.bytes) || iterations.parse() != Ok(case.iterations) {
            return Err(format!("'{line}' stands where the row of {} should be", case.text()));
        }
        let us = us.parse::<f64>().ok().filter(|t| t.is_finite() && *t > 0.0);
        times.push(us.ok_or_else(|| format!("'{line}' has no time"))?);
    }
    match (lines.next(), lines.next()) {
        (Some("done"), None) => Ok(times),
        (Some("done"), Some(more)) | (Some(more), _) => Err(format!("'{more}' stands where the output should end")),
        (None, _) => Err("the output ends without 'done'".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::Op;
    use super::*;

    #[test]
    fn rows_and_what_is_none() {
        let cases = [Case::new(Op::Barrier, 0, 2, 1.0), Case::new(Op::AllReduce, 8, 2, 1.0)];
        let good = "row barrier 0 300 8.1250\nrow all_reduce 8 300 9.5\ndone\n";
        assert_eq!(parse(good, &cases), Ok(vec![8.125, 9.5]));
        for (bad, word) in [
            ("", "ends before the row of barrier"),
            ("row barrier 0 300 8\n", "ends before the row of all_reduce"),
            ("row barrier 0 300 8\nrow all_reduce 8 300 9\n", "without 'done'"),
            ("row all_reduce 8 300 9\nrow barrier 0 300 8\ndone", "where the row of barrier"),
            ("row barrier 0 301 8\nrow all_reduce 8 300 9\ndone", "where the row of barrier"),
            ("row barrier 0 300 8\nrow all_reduce 16 300 9\ndone", "where the row of all_reduce"),
            ("row barrier 0 300 nan\nrow all_reduce 8 300 9\ndone", "no time"),
            ("row barrier 0 300 0\nrow all_reduce 8 300 9\ndone", "no time"),
            ("row barrier 0 300\n", "is no row"),
            ("WARNING: something\n", "is no row"),
            ("row barrier 0 300 8\nrow all_reduce 8 300 9\ndone\nmore", "'more'"),
        ] {
            let e = parse(bad, &cases).unwrap_err();
            assert!(e.contains(word), "{bad:?}: {e}");
        }
    }
}
