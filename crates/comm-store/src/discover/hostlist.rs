//! Slurm's short forms: `gnode[10,20-22],x[001-003]-ib` for hosts and `4(x2),3` for counts.
//!
//! Text from the environment may say anything, so what it expands to is bounded before it is made.

/// More hosts than any cluster has.
const MOST: usize = 100_000;
/// And no more text than this.
const MOST_BYTES: usize = 16 << 20;

/// Numbers of one range, both ends included, and how many digits they have at least.
struct Range {
    from: u64,
    to: u64,
    width: usize,
}

enum Part<'a> {
    Text(&'a str),
    Numbers(Vec<Range>),
}

/// All hosts of `list`, in its order.
pub(super) fn hosts(list: &str) -> Result<Vec<String>, String> {
    let (mut out, mut bytes) = (Vec::new(), 0usize);
    for item in split(list)? {
        let parts = parts(item)?;
        let (mut count, mut longest) = (1usize, 0usize);
        for part in &parts {
            let (n, len) = match part {
                Part::Text(t) => (1, t.len()),
                Part::Numbers(ranges) => (
                    ranges
                        .iter()
                        .try_fold(0usize, |sum, r| {
                            sum.checked_add(usize::try_from(r.to - r.from).ok()?.checked_add(1)?)
                        })
                        .unwrap_or(usize::MAX),
                    ranges.iter().map(|r| r.width.max(20)).max().unwrap_or(0),
                ),
            };
            count = count.saturating_mul(n);
            longest = longest.saturating_add(len);
        }
        bytes = bytes.saturating_add(count.saturating_mul(longest));
        if count.saturating_add(out.len()) > MOST || bytes > MOST_BYTES {
            return Err(format!("it names more than {MOST} hosts, or more text than {} MiB", MOST_BYTES >> 20));
        }
        expand(&parts, &mut out);
    }
    Ok(out)
}

/// All counts of `list`, one per node.
pub(super) fn counts(list: &str) -> Result<Vec<usize>, String> {
    let mut out = Vec::new();
    for item in list.split(',') {
        let item = item.trim();
        let bad = || format!("'{}' is no count like 4 or 4(x2)", crate::shorten(item));
        let (count, times) = match item.split_once("(x") {
            None => (item, 1),
            Some((count, rest)) => {
                let times = rest.strip_suffix(')').ok_or_else(bad)?;
                (count, digits(times).and_then(|n| usize::try_from(n).ok()).ok_or_else(bad)?)
            }
        };
        let count = digits(count).and_then(|n| usize::try_from(n).ok()).ok_or_else(bad)?;
        if times > MOST - out.len() {
            return Err(format!("it counts more than {MOST} nodes"));
        }
        out.extend(std::iter::repeat_n(count, times));
    }
    Ok(out)
}

/// The items between those commas that are not in brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut out, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return Err(format!("the bracket at byte {at} has no partner")),
            ',' if !inside => {
                out.push(&list[start..at]);
                start = at + 1;
            }
            c if c.is_whitespace() || c.is_control() => return Err(format!("there is white space at byte {at}")),
            _ => {}
        }
    }
    if inside {
        return Err("its last bracket is not closed".into());
    }
    out.push(&list[start..]);
    if out.iter().any(|item| item.is_empty()) {
        return Err("it has a host without a name".into());
    }
    Ok(out)
}

/// An item whose brackets match.
fn parts(item: &str) -> Result<Vec<Part<'_>>, String> {
    let (mut out, mut rest) = (Vec::new(), item);
    while let Some((before, after)) = rest.split_once('[') {
        let (numbers, behind) = after.split_once(']').ok_or("its last bracket is not closed")?;
        out.push(Part::Text(before));
        let ranges = numbers
            .split(',')
            .map(|r| range(r).ok_or_else(|| format!("'{}' is no range of numbers", crate::shorten(r))));
        out.push(Part::Numbers(ranges.collect::<Result<_, _>>()?));
        rest = behind;
    }
    out.push(Part::Text(rest));
    Ok(out)
}

fn range(text: &str) -> Option<Range> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let width = from.len();
    let (from, to) = (digits(from)?, digits(to)?);
    (from <= to).then_some(Range { from, to, width })
}

/// Digits only: `parse` would take a sign, too.
fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// The rightmost numbers run fastest.
fn expand(parts: &[Part<'_>], out: &mut Vec<String>) {
    let mut all = vec![String::new()];
    for part in parts {
        match part {
            Part::Text(t) => all.iter_mut().for_each(|name| name.push_str(t)),
            Part::Numbers(ranges) => {
                let numbers = || ranges.iter().flat_map(|r| (r.from..=r.to).map(move |n| (n, r.width)));
                all = all.iter().flat_map(|name| numbers().map(move |(n, w)| format!("{name}{n:0w$}"))).collect();
            }
        }
    }
    out.append(&mut all);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_slurm_writes() {
        for (list, want) in [
            ("a", "a"),
            ("gnode[10,20-22],x[001-003]-ib", "gnode10 gnode20 gnode21 gnode22 x001-ib x002-ib x003-ib"),
            ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
            ("n[7]", "n7"),
            ("n[98-101]", "n98 n99 n100 n101"),
            ("a-1,b-2.example.org", "a-1 b-2.example.org"),
        ] {
            assert_eq!(hosts(list).unwrap().join(" "), want, "{list}");
        }
        for (list, want) in
            [("4", vec![4]), ("4(x2),3", vec![4, 4, 3]), ("1(x3)", vec![1; 3]), ("2,1(x2),5", vec![2, 1, 1, 5])]
        {
            assert_eq!(counts(list).unwrap(), want, "{list}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for list in
            ["", ",", "a,,b", "a[", "a]", "a[1", "a[1-]", "a[-1]", "a[3-1]", "a[x]", "a[[1]]", "a b", "a[+1]", "a[]"]
        {
            assert!(hosts(list).is_err(), "{list}");
        }
        for list in
            ["", "x", "4(", "4(x", "4(x)", "4(2)", "(x2)", "-1", "+1", "4(x2)3", "4,,4", "99999999999999999999999"]
        {
            assert!(counts(list).is_err(), "{list}");
        }
    }

    #[test]
    fn what_is_too_much_is_refused_before_it_is_made() {
        for list in [
            "n[0-100000]",
            "n[0-18446744073709551615]",
            "n[0-18446744073709551615,0-18446744073709551615]",
            "a[0-9999]b[0-9999]c[0-9999]d[0-9999]e[0-9999]",
            "n[1-60000],m[1-60000]",
        ] {
            assert!(hosts(list).unwrap_err().contains("more than 100000"), "{list}");
        }
        assert!(hosts(&format!("{}[1-100000]", "long".repeat(100))).is_err());
        assert_eq!(hosts("n[1-100000]").unwrap().len(), MOST);
        assert!(counts("1(x100001)").unwrap_err().contains("more than"));
        assert!(counts("1(x99999),1(x2)").is_err());
        assert_eq!(counts("1(x99999),1").unwrap().len(), MOST);
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in "\\PC{0,60}") {
            let _ = (hosts(&list), counts(&list));
        }

        #[test]
        fn text_that_looks_right_never_panics(list in "[a-c0-9\\[\\],()x-]{0,40}") {
            if let Ok(all) = hosts(&list) {
                prop_assert!(!all.is_empty() && all.len() <= MOST);
            }
            if let Ok(all) = counts(&list) {
                prop_assert!(all.len() <= MOST);
            }
        }

        #[test]
        fn numbers_come_back(
            items in prop::collection::vec(("[a-z]{1,5}", 0u64..2000, 0u64..40, 1usize..6, "[a-z.]{0,3}"), 1..5),
            repeats in prop::collection::vec((0usize..300, 1usize..20), 1..8),
        ) {
            let list: Vec<String> = items
                .iter()
                .map(|(head, from, more, w, tail)| format!("{head}[{from:0w$}-{:0w$}]{tail}", from + more))
                .collect();
            let mut want = Vec::new();
            for (head, from, more, w, tail) in &items {
                for n in *from..=from + more {
                    // Padding counts digits; the format's own width is what Slurm's padding means.
                    let digits = n.to_string();
                    let zeros = w.max(&from.to_string().len()).saturating_sub(digits.len());
                    want.push(format!("{head}{}{digits}{tail}", "0".repeat(zeros)));
                }
            }
            prop_assert_eq!(hosts(&list.join(",")).unwrap(), want);
            let list: Vec<String> = repeats.iter().map(|(n, x)| format!("{n}(x{x})")).collect();
            let want: Vec<usize> = repeats.iter().flat_map(|(n, x)| vec![*n; *x]).collect();
            prop_assert_eq!(counts(&list.join(",")).unwrap(), want);
        }
    }
}
