//! The variables that this version reads.

use collectives::Algorithm;

use super::Findings;

/// The settings that users choose, what they are for, and what holds where they are not set.
const SETTINGS: [(&str, &str, &str); 10] = [
    ("RUSTCOMMS_ALGO", "algorithm for every operation that has it", "chosen by the table below"),
    ("RUSTCOMMS_SIMD", "most that reductions use of the processor", "all that it has"),
    ("RUSTCOMMS_LAUNCHER", "launcher whose variables count", "found out, see below"),
    ("RUSTCOMMS_PMI", "0: not to meet through the launcher's PMI server", "on, where no store is named"),
    ("RUSTCOMMS_SECRET", "what ranks and store prove to know", "none: whoever can connect is let in"),
    ("RUSTCOMMS_INTERFACE", "interfaces and networks that ranks use", "all"),
    ("RUSTCOMMS_CONNECT", "links that a world has from the start", "auto: all up to 8 ranks"),
    ("RUSTCOMMS_SIM_SEED", "seed of every simulation", "what the program says"),
    ("RUSTCOMMS_TIMEOUT", "seconds that an operation may take", "600"),
    ("RUSTCOMMS_BOOTSTRAP_TIMEOUT", "seconds that creation of a communicator may take", "120"),
];

/// What launchers set, and what it is for.
const LAUNCHER: [(&str, &str); 9] = [
    ("RUSTCOMMS_RANK", "rank of this process"),
    ("RUSTCOMMS_WORLD_SIZE", "ranks of the run"),
    ("RUSTCOMMS_LOCAL_RANK", "rank on this host"),
    ("RUSTCOMMS_LOCAL_WORLD_SIZE", "ranks on this host"),
    ("RUSTCOMMS_NODE_RANK", "number of this host"),
    ("RUSTCOMMS_NNODES", "hosts of the run"),
    ("RUSTCOMMS_STORE", "where ranks meet"),
    ("RUSTCOMMS_RUN_ID", "name of the run"),
    ("RUSTCOMMS_RESTART_COUNT", "restarts so far"),
];

/// By this one `cargo xtask` finds processes that outlive their command. It is no setting of anybody's.
const MARK: &str = "RUSTCOMMS_XTASK_RUN";

/// All variables that this version reads or sets, and what they are for.
fn known() -> impl Iterator<Item = (&'static str, &'static str)> {
    SETTINGS.iter().map(|(name, what, _)| (*name, *what)).chain(LAUNCHER)
}

/// Lists what is set and says what is wrong with it, then what is not set.
pub(super) fn look(found: &mut Findings) {
    let mut set: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| name.to_uppercase().starts_with("RUSTCOMMS") && name != MARK)
        .collect();
    set.sort();
    if set.is_empty() {
        Findings::say("  no RUSTCOMMS_ variable is set");
    }
    for (name, value) in &set {
        match known().find(|(known, _)| known == name) {
            Some((_, what)) => {
                // What is printed here gets into issues and logs.
                let shown = if name.contains("SECRET") { "(not shown)" } else { value };
                Findings::say(&format!("  {name}={shown} ({what})"));
                if let Some(e) = unusable(name, value) {
                    found.problem(&e);
                }
            }
            // Its value may be anything, a secret of another program too.
            None => found.warn(&format!("{name} is set, but nothing reads it; did you mean {}?", nearest(name))),
        }
    }
    let unset = |name: &&str| set.iter().all(|(set, _)| set != name);
    for (name, what, default) in SETTINGS.iter().filter(|s| unset(&s.0)) {
        Findings::say(&format!("  not set: {name} ({what}); default: {default}"));
    }
    let names: Vec<&str> = LAUNCHER.iter().map(|(name, _)| *name).filter(unset).collect();
    if !names.is_empty() {
        Findings::say(&format!("  not set, a launcher sets them: {}", names.join(", ")));
    }
}

/// Says which operations an algorithm that is forced on all of them changes.
pub(super) fn forced() -> Option<String> {
    let name = std::env::var("RUSTCOMMS_ALGO").ok().filter(|v| !v.is_empty())?;
    let having: Vec<String> =
        Algorithm::ALL.iter().filter(|a| a.name() == name).map(|a| a.operation().to_string()).collect();
    // No operation at all: that no communicator can be made says the loopback.
    (!having.is_empty())
        .then(|| format!("RUSTCOMMS_ALGO={name} overrides them where the operation has it: {}", having.join(", ")))
}

/// What is wrong with a value that this run does not try: it would be ignored, or a launched rank alone needs it.
fn unusable(name: &str, value: &str) -> Option<String> {
    match name {
        "RUSTCOMMS_TIMEOUT" | "RUSTCOMMS_BOOTSTRAP_TIMEOUT"
            if !value.parse::<f64>().is_ok_and(|s| s > 0.0 && s.is_finite()) =>
        {
            Some(format!("{name}={value} cannot be used: it is not a number of seconds above 0"))
        }
        "RUSTCOMMS_SIMD" if !["", "portable", "avx2", "avx512"].contains(&value) => {
            Some(format!("{name}={value} cannot be used: it is none of portable, avx2, avx512"))
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
    known().map(|(known, _)| known).min_by_key(|known| edits(known, &name)).unwrap_or_default()
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
        let mut known: Vec<_> = known().map(|(name, _)| name.to_owned()).collect();
        known.sort();
        assert_eq!(found, known);
    }

    #[test]
    fn every_variable_is_documented() {
        let tables = [include_str!("../../../../README.md"), include_str!("../../../rustcomms/src/lib.rs")];
        for (name, _) in known() {
            assert!(tables.iter().all(|t| t.contains(&format!("`{name}`"))), "{name}");
        }
    }
}
