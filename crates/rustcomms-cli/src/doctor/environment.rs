//! The variables that this version reads.

use super::Findings;

/// All variables that this version reads or sets, and what they are for.
const KNOWN: [(&str, &str); 11] = [
    ("RUSTCOMMS_ALGO", "algorithm for every operation that has it"),
    ("RUSTCOMMS_SIMD", "most that reductions use of the processor"),
    ("RUSTCOMMS_TIMEOUT", "seconds that an operation may take"),
    ("RUSTCOMMS_RANK", "rank of this process"),
    ("RUSTCOMMS_WORLD_SIZE", "ranks of the run"),
    ("RUSTCOMMS_LOCAL_RANK", "rank on this host"),
    ("RUSTCOMMS_LOCAL_WORLD_SIZE", "ranks on this host"),
    ("RUSTCOMMS_NODE_RANK", "number of this host"),
    ("RUSTCOMMS_NNODES", "hosts of the run"),
    ("RUSTCOMMS_STORE", "where ranks meet"),
    ("RUSTCOMMS_RUN_ID", "name of the run"),
];

/// Lists what is set and says what is wrong with it.
pub(super) fn look(found: &mut Findings) {
    let mut set: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| name.to_uppercase().starts_with("RUSTCOMMS"))
        .collect();
    set.sort();
    if set.is_empty() {
        Findings::say("  no RUSTCOMMS_ variable is set");
    }
    for (name, value) in &set {
        match KNOWN.iter().find(|(known, _)| known == name) {
            Some((_, what)) => {
                Findings::say(&format!("  {name}={value} ({what})"));
                if let Some(e) = unusable(name, value) {
                    found.problem(&e);
                }
            }
            // Its value may be anything, a secret of another program too.
            None => found.warn(&format!("{name} is set, but nothing reads it; did you mean {}?", nearest(name))),
        }
    }
}

/// What is wrong with a value that this run does not try: it would be ignored, or a launched rank alone needs it.
fn unusable(name: &str, value: &str) -> Option<String> {
    match name {
        "RUSTCOMMS_TIMEOUT" if !value.parse::<f64>().is_ok_and(|s| s > 0.0 && s.is_finite()) => {
            Some(format!("{name}={value} is ignored: it is not a number of seconds above 0"))
        }
        "RUSTCOMMS_SIMD" if !["", "portable", "avx2", "avx512"].contains(&value) => {
            Some(format!("{name}={value} is ignored: it is none of portable, avx2, avx512"))
        }
        "RUSTCOMMS_STORE" => {
            let good =
                value.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
            (!good).then(|| format!("{name}={value} is not host:port"))
        }
        _ => None,
    }
}

/// The known name with the fewest edits.
fn nearest(name: &str) -> &'static str {
    let name = name.to_uppercase();
    KNOWN.iter().map(|(known, _)| *known).min_by_key(|known| edits(known, &name)).unwrap_or_default()
}

/// Letters to insert, remove, replace, or swap with their neighbour to make `b` of `a`.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_nearest_name() {
        assert_eq!(nearest("RUSTCOMMS_AGLO"), "RUSTCOMMS_ALGO");
        assert_eq!(nearest("rustcomms_timeout"), "RUSTCOMMS_TIMEOUT");
        assert_eq!(nearest("RUSTCOMMS_WORLDSIZE"), "RUSTCOMMS_WORLD_SIZE");
        assert_eq!(nearest("RUSTCOMMSRANK"), "RUSTCOMMS_RANK");
        assert_eq!(edits("abc", "acb"), 1);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("kitten", "sitting"), 3);
    }

    #[test]
    fn values_that_are_not_tried() {
        for (name, value) in [
            ("RUSTCOMMS_TIMEOUT", "5s"),
            ("RUSTCOMMS_TIMEOUT", "-1"),
            ("RUSTCOMMS_SIMD", "sse"),
            ("RUSTCOMMS_STORE", "node0"),
            ("RUSTCOMMS_STORE", "node0:70000"),
        ] {
            assert!(unusable(name, value).is_some_and(|e| e.contains(value)), "{name}={value}");
        }
        for (name, value) in [
            ("RUSTCOMMS_TIMEOUT", "0.5"),
            ("RUSTCOMMS_SIMD", "avx2"),
            ("RUSTCOMMS_ALGO", "x"),
            ("RUSTCOMMS_STORE", "[::1]:29500"),
        ] {
            assert_eq!(unusable(name, value), None, "{name}={value}");
        }
    }

    /// The names in the sources of all crates, and no others.
    #[test]
    fn every_variable_that_is_read_is_known() {
        fn names(dir: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    // Neither tests nor what is compared here.
                    if path.file_name().is_some_and(|n| n != "tests" && n != "doctor") {
                        names(&path, found);
                    }
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let quoted = text.split('"').filter(|t| t.starts_with("RUSTCOMMS_"));
                    found.extend(
                        quoted.filter(|t| t.chars().all(|c| c.is_ascii_uppercase() || c == '_')).map(str::to_owned),
                    );
                }
            }
        }
        let mut found = Vec::new();
        for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).unwrap() {
            let src = entry.unwrap().path().join("src");
            if src.is_dir() {
                names(&src, &mut found);
            }
        }
        found.retain(|name| !name.contains("TEST"));
        found.sort();
        found.dedup();
        let mut known: Vec<_> = KNOWN.iter().map(|(name, _)| (*name).to_owned()).collect();
        known.sort();
        assert_eq!(found, known);
    }
}
