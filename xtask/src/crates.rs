//! What the workspace consists of, and what a crate may depend on.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::process::Run;

/// Crates that the CPU build must not pull in: anything for GPUs, and any async runtime. Programs choose their own.
const FORBIDDEN: [&str; 8] = ["cudarc", "nccl-sys", "rccl-sys", "hip-sys", "gpu", "tokio", "async-std", "smol"];
/// The crates that users of the CPU build depend on.
const CPU_ONLY: [&str; 2] = ["backend-tcp", "rustcomms"];

/// The members of the workspace and where their output goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Workspace {
    pub(crate) target: PathBuf,
    pub(crate) members: Vec<Member>,
}

/// One package.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// The folder of its manifest.
    pub(crate) dir: PathBuf,
    /// The root file of its library, if it is one.
    pub(crate) lib: Option<PathBuf>,
    /// The root files of its programs.
    pub(crate) bins: Vec<PathBuf>,
}

impl Workspace {
    /// Asks cargo.
    pub(crate) fn read(root: &Path) -> Result<Self, String> {
        let json = Run::cargo(root, &["metadata", "--no-deps", "--format-version", "1"]).output()?;
        Self::parse(&json).ok_or_else(|| "`cargo metadata` answered something else than a description".to_owned())
    }

    fn parse(json: &str) -> Option<Self> {
        let root: Value = serde_json::from_str(json).ok()?;
        let members = root["packages"].as_array()?.iter().map(Member::parse).collect::<Option<_>>()?;
        Some(Self { target: root["target_directory"].as_str()?.into(), members })
    }

    /// The published crates: those under `crates/`.
    pub(crate) fn crates<'a>(&'a self, root: &Path) -> impl Iterator<Item = &'a Member> {
        let under = root.join("crates");
        self.members.iter().filter(move |m| m.dir.starts_with(&under))
    }
}

impl Member {
    fn parse(package: &Value) -> Option<Self> {
        let manifest = Path::new(package["manifest_path"].as_str()?);
        let (mut lib, mut bins) = (None, Vec::new());
        for target in package["targets"].as_array()? {
            let file = PathBuf::from(target["src_path"].as_str()?);
            let kinds: Vec<&str> = target["kind"].as_array()?.iter().filter_map(Value::as_str).collect();
            if kinds.contains(&"bin") {
                bins.push(file);
            } else if kinds.iter().any(|k| k.ends_with("lib") || *k == "proc-macro") {
                lib = Some(file);
            }
        }
        Some(Self { name: package["name"].as_str()?.to_owned(), dir: manifest.parent()?.into(), lib, bins })
    }
}

/// Each crate builds alone (not only with features that a neighbour switches on), and the CPU build stays small.
pub(crate) fn alone(root: &Path) -> Result<(), String> {
    let workspace = Workspace::read(root)?;
    for member in workspace.crates(root) {
        Run::cargo(root, &["check", "--quiet", "-p", &member.name]).run()?;
    }
    for name in CPU_ONLY {
        let tree = Run::cargo(root, &["tree", "-p", name, "-e", "normal", "--prefix", "none"]).output()?;
        let found = forbidden_in(&tree);
        if !found.is_empty() {
            return Err(format!("{name} depends on {}; see `cargo tree -p {name} -i {}`", found.join(", "), found[0]));
        }
        println!("    {name} depends on none of {}", FORBIDDEN.join(", "));
    }
    Ok(())
}

/// The forbidden crates in the output of `cargo tree --prefix none`.
fn forbidden_in(tree: &str) -> Vec<&'static str> {
    let names: Vec<&str> = tree.lines().filter_map(|l| l.split_whitespace().next()).collect();
    FORBIDDEN.into_iter().filter(|f| names.contains(f)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_understood() {
        let json = r#"{"target_directory": "/w/target", "packages": [
            {"name": "comm-core", "manifest_path": "/w/crates/comm-core/Cargo.toml", "targets": [
                {"kind": ["lib"], "src_path": "/w/crates/comm-core/src/lib.rs"},
                {"kind": ["test"], "src_path": "/w/crates/comm-core/tests/a.rs"}]},
            {"name": "xtask", "manifest_path": "/w/xtask/Cargo.toml", "targets": [
                {"kind": ["bin"], "src_path": "/w/xtask/src/main.rs"}]}]}"#;
        let w = Workspace::parse(json).unwrap();
        assert_eq!(w.target, Path::new("/w/target"));
        assert_eq!(w.members[0].lib.as_deref(), Some(Path::new("/w/crates/comm-core/src/lib.rs")));
        assert_eq!(w.members[1].bins, [Path::new("/w/xtask/src/main.rs")]);
        let crates: Vec<&str> = w.crates(Path::new("/w")).map(|m| m.name.as_str()).collect();
        assert_eq!(crates, ["comm-core"]);
        assert_eq!(Workspace::parse("[]"), None);
    }

    #[test]
    fn forbidden_crates_are_found_by_whole_name() {
        let tree =
            "backend-tcp v0.1.0 (/w/crates/backend-tcp)\ncomm-core v0.1.0 (*)\ntokio-macros v2.0.0\nsmol_str v1.0.0\n";
        assert_eq!(forbidden_in(tree), [""; 0]);
        assert_eq!(forbidden_in(&format!("{tree}tokio v1.54.0\ngpu v0.1.0 (*)\n")), ["gpu", "tokio"]);
    }
}
