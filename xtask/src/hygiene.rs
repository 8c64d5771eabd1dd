//! Checks over the files that git tracks, for what no compiler refuses.

use std::path::{Path, PathBuf};

use crate::crates::{Member, Workspace};
use crate::process::Run;

/// Sources longer than this draw a remark…
const LONG: usize = 600;
/// … and longer than this are refused: such a file is more than one thing.
const TOO_LONG: usize = 700;

/// Unfinished work and tests that do not run. Written in pieces, so that this file passes its own check.
const STUBS: [&str; 4] =
    [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("db", "g!("), concat!("#[ig", "nore")];

/// Keys that each member takes from the workspace.
const INHERITED: [&str; 4] = ["version", "edition", "rust-version", "license"];

/// Runs all checks, prints every finding, and fails if there was one.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let workspace = Workspace::read(root)?;
    let files = tracked(root)?;
    let paths = machine_paths(root, std::env::var("HOME").ok().as_deref());
    let (mut found, mut remarks) = (Vec::new(), Vec::new());
    for file in &files {
        let name = file.display();
        // Deleted here but not yet in the index, a link, a submodule: nothing to read.
        let full = root.join(file);
        if !full.symlink_metadata().is_ok_and(|m| m.is_file()) {
            continue;
        }
        let bytes = std::fs::read(&full).map_err(|e| format!("cannot read {name}: {e}"))?;
        let Some(text) = as_text(&bytes) else {
            found.push(format!("{name}: a binary file; generate it, or keep it out of the repository"));
            continue;
        };
        found.extend(bad_lines(text, &paths).into_iter().map(|(line, what)| format!("{name}:{line}: {what}")));
        if file.extension().is_some_and(|e| e == "rs") {
            match text.lines().count() {
                n if n > TOO_LONG => found.push(format!("{name}: {n} lines, more than {TOO_LONG}; make it two files")),
                n if n > LONG => remarks.push(format!("{name}: {n} lines; above {LONG} a file wants to be two")),
                _ => {}
            }
        }
    }
    for member in &workspace.members {
        found.extend(member_problems(root, member)?);
    }
    for remark in &remarks {
        println!("    remark: {remark}");
    }
    for finding in &found {
        println!("    {finding}");
    }
    match found.as_slice() {
        [] => {
            println!("    {} files, {} members: nothing found", files.len(), workspace.members.len());
            Ok(())
        }
        [first, ..] => Err(format!("{} finding(s), listed above; the first: {first}", found.len())),
    }
}

/// The tracked files, relative to the root.
fn tracked(root: &Path) -> Result<Vec<PathBuf>, String> {
    // A clone that belongs to somebody else (a CI mount) is read, nothing in it is executed.
    let safe = format!("safe.directory={}", root.display());
    let list = Run::new(root, "git", &["-c", &safe, "ls-files", "-z"]).output()?;
    let files: Vec<PathBuf> = list.split('\0').filter(|n| !n.is_empty()).map(PathBuf::from).collect();
    if files.is_empty() {
        return Err("git tracks no file here; hygiene needs a clone".to_owned());
    }
    Ok(files)
}

/// Absolute paths that exist only on this machine.
fn machine_paths(root: &Path, home: Option<&str>) -> Vec<String> {
    let root = root.display().to_string();
    let all = [Some(root.as_str()), home].into_iter().flatten().map(|p| p.trim_end_matches('/'));
    all.filter(|p| p.starts_with('/')).map(str::to_owned).collect()
}

/// The file's text; `None` for a binary.
fn as_text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|t| !t.contains('\0'))
}

/// Lines that must not be there, with the reason.
fn bad_lines(text: &str, machine_paths: &[String]) -> Vec<(usize, String)> {
    let mut bad = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for stub in STUBS {
            if line.contains(stub) {
                bad.push((i + 1, format!("`{stub}` does not belong into a commit")));
            }
        }
        for path in machine_paths {
            if mentions_path(line, path) {
                bad.push((i + 1, format!("`{path}` is a path of this machine")));
            }
        }
    }
    bad
}

/// Whether the line holds this absolute path or one below it, and not merely a longer path with the same letters in it.
fn mentions_path(line: &str, path: &str) -> bool {
    let part_of_path = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + path.len()..].chars().next();
        // A preceding `}` or `)` is an expanded variable, `*` a pattern, `/` a doubled slash.
        !before.is_some_and(|c| part_of_path(c) || "/})*~".contains(c)) && !after.is_some_and(part_of_path)
    })
}

fn member_problems(root: &Path, member: &Member) -> Result<Vec<String>, String> {
    let read = |p: &Path| std::fs::read_to_string(p).map_err(|e| format!("cannot read {}: {e}", p.display()));
    let show = |p: &Path| p.strip_prefix(root).unwrap_or(p).display().to_string();
    let manifest = member.dir.join("Cargo.toml");
    let mut found: Vec<String> =
        manifest_problems(&read(&manifest)?).into_iter().map(|p| format!("{}: {p}", show(&manifest))).collect();
    if let Some(lib) = &member.lib {
        found.extend(lib_doc_problem(&read(lib)?).map(|p| format!("{}: {p}", show(lib))));
    }
    for bin in &member.bins {
        if doc_paragraphs(&read(bin)?).is_empty() {
            found.push(format!("{}: begins without a `//!` line that says what it is", show(bin)));
        }
    }
    Ok(found)
}

/// What a member's manifest writes itself instead of taking it from the workspace.
fn manifest_problems(manifest: &str) -> Vec<String> {
    let (mut inherited, mut lints, mut problems) = (Vec::new(), false, Vec::new());
    let mut section = String::new();
    // Named programs, less those without a page in the documentation.
    let mut pages = 0;
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = header.to_owned();
            pages += i32::from(section == "[bin]");
            continue;
        }
        let Some((key, value)) = line.split_once('=').map(|(k, v)| (k.trim(), v.trim())) else { continue };
        if key.starts_with('#') {
            continue;
        }
        // `key.workspace = true` and `key = { workspace = true, … }` mean the same.
        let (name, from_workspace) = match key.strip_suffix(".workspace") {
            Some(name) => (name, value.starts_with("true")),
            None => (key, value.contains("workspace = true")),
        };
        match section.as_str() {
            "package" if from_workspace => inherited.push(name),
            "[bin]" if name == "doc" && value.starts_with("false") => pages -= 1,
            "lints" => lints |= name == "workspace" && value.starts_with("true"),
            s if s.ends_with("dependencies") && !from_workspace => {
                problems.push(format!("dependency {name} does not come from [workspace.dependencies]"));
            }
            _ => {}
        }
    }
    problems.extend(
        INHERITED.into_iter().filter(|k| !inherited.contains(k)).map(|k| format!("lacks {k}.workspace = true")),
    );
    if !lints {
        problems.push("lacks [lints] workspace = true".to_owned());
    }
    if pages > 0 {
        problems.push("lacks doc = false in a [[bin]]; its page would have the place of a library's".to_owned());
    }
    problems
}

/// The paragraphs of the `//!` comment that a file begins with.
fn doc_paragraphs(source: &str) -> Vec<String> {
    let lines = source.lines().map_while(|l| l.strip_prefix("//!")).map(str::trim).collect::<Vec<_>>();
    let paragraphs = lines.split(|l| l.is_empty()).map(|p| p.join(" "));
    paragraphs.filter(|p| !p.is_empty()).collect()
}

/// A library says in its first paragraph what it is, and in the second what it is not.
fn lib_doc_problem(source: &str) -> Option<String> {
    let paragraphs = doc_paragraphs(source);
    let says_not = |p: &String| p.to_lowercase().split(|c: char| !c.is_alphanumeric()).any(|w| w == "not");
    match paragraphs.get(1) {
        _ if paragraphs.is_empty() => Some("begins without a `//!` line that says what the crate is".to_owned()),
        Some(second) if says_not(second) => None,
        _ => Some("the second paragraph of its `//!` comment does not say what the crate is not".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stubs_are_found_with_their_line() {
        for stub in STUBS {
            let bad = bad_lines(&format!("fine\n    {stub}"), &[]);
            assert_eq!(bad.len(), 1, "{stub}");
            assert_eq!(bad[0].0, 2);
        }
        assert!(bad_lines("the macro todo! in prose, an ignored attribute", &[]).is_empty());
    }

    #[test]
    fn machine_paths_are_found_as_whole_paths() {
        let paths = machine_paths(Path::new("/ex/ws"), Some("/me/"));
        assert_eq!(paths, ["/ex/ws", "/me"]);
        for bad in ["see /me/.cargo", "\"/me\"", "cd /ex/ws", "x=/ex/ws/target", "file:/me:"] {
            assert_eq!(bad_lines(bad, &paths).len(), 1, "{bad}");
        }
        for good in ["${X}/me/y", "bytes/me", "/meadow", "/me-less", "/ex/ws2", "crates/me/x", "//me"] {
            assert!(bad_lines(good, &paths).is_empty(), "{good}");
        }
        // No home, a home that is the root of everything: nothing to look for.
        assert_eq!(machine_paths(Path::new("/w"), None), ["/w"]);
        assert_eq!(machine_paths(Path::new("/w"), Some("/")), ["/w"]);
    }

    #[test]
    fn binaries_are_told_from_text() {
        assert_eq!(as_text("grün".as_bytes()), Some("grün"));
        assert_eq!(as_text(b"a\0b"), None);
        assert_eq!(as_text(&[0xff, 0xfe, 0x41]), None);
    }

    const GOOD: &str = "[package]\nname = \"x\"\nversion.workspace = true\nedition = { workspace = true }\n\
        rust-version.workspace = true\nlicense.workspace = true\n\n[dependencies]\ncomm-core.workspace = true\n\
        # a = \"1\"\nserde = { workspace = true, features = [\n    \"rc\",\n] }\n\n[features]\ndefault = [\"tcp\"]\n\n\
        [lints]\nworkspace = true\n";

    #[test]
    fn manifests_inherit() {
        assert_eq!(manifest_problems(GOOD), Vec::<String>::new());
        let own = GOOD.replace("version.workspace = true\nedition", "version = \"0.3.0\"\nedition");
        assert_eq!(manifest_problems(&own), ["lacks version.workspace = true"]);
        let own = GOOD.replace("comm-core.workspace = true", "comm-core = { path = \"../comm-core\" }\nlibc = \"0.2\"");
        assert_eq!(
            manifest_problems(&own),
            ["comm-core", "libc"].map(|n| format!("dependency {n} does not come from [workspace.dependencies]"))
        );
        let own = GOOD.replace("[dependencies]", "[target.'cfg(unix)'.dev-dependencies]\nnix = \"1\"\n[dependencies]");
        assert_eq!(manifest_problems(&own).len(), 1);
        let own = GOOD.replace("[lints]\nworkspace = true", "[lints]\n");
        assert_eq!(manifest_problems(&own), ["lacks [lints] workspace = true"]);
        let own = format!("{GOOD}[[bin]]\nname = \"x\"\ndoc = false\n[[bin]]\nname = \"y\"\n");
        assert!(manifest_problems(&own)[0].starts_with("lacks doc = false in a [[bin]]"));
        assert_eq!(manifest_problems(&format!("{own}doc = false\n")), Vec::<String>::new());
        // A key of another section does not count.
        let own = GOOD.replace("license.workspace = true", "").replace("[features]", "[x]\nlicense.workspace = true");
        assert_eq!(manifest_problems(&own), ["lacks license.workspace = true"]);
    }

    #[test]
    fn library_docs_say_what_and_what_not() {
        assert_eq!(lib_doc_problem("//! It is a\n//! store.\n//!\n//! It is not a queue.\nmod a;\n"), None);
        assert_eq!(lib_doc_problem("//! A store.\n//!\n//! Not here: sockets.\n"), None);
        assert!(lib_doc_problem("mod a;\n//! late\n").unwrap().contains("what the crate is"));
        assert!(lib_doc_problem("//! It is not one paragraph.\n").unwrap().contains("second paragraph"));
        assert!(lib_doc_problem("//! A store.\n//!\n//! It is notable.\n//!\n//! It is not third.\n").is_some());
    }
}
