//! What `rustcomms doctor` says of limits, network and libraries, as a real process with libraries made for the test.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// `rustcomms doctor`, changed.
fn doctor(change: impl FnOnce(&mut Command)) -> (Option<i32>, String) {
    let mut c = Command::new(env!("CARGO_BIN_EXE_rustcomms"));
    c.arg("doctor").stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        if text.starts_with("RUSTCOMMS_") && text != "RUSTCOMMS_XTASK_RUN" || ["RANK", "WORLD_SIZE"].contains(&&*text) {
            c.env_remove(name);
        }
    }
    change(&mut c);
    let Output { status, stdout, .. } = c.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap())
}

/// The lines of a section.
fn section<'a>(out: &'a str, name: &str) -> Vec<&'a str> {
    out.lines().skip_while(|l| *l != format!("{name}:")).skip(1).take_while(|l| !l.is_empty()).collect()
}

/// Builds a library from Rust.
fn library(dir: &Path, file: &str, source: &str) {
    let from = dir.join(format!("{file}.rs"));
    std::fs::write(&from, source).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "made", "-C", "panic=abort", "-o"])
        .args([&dir.join(file), &from])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// A library whose initialiser does `what`.
fn initialiser(what: &str) -> String {
    format!(
        "extern \"C\" fn init() {{ {what} }}\n#[used]\n#[unsafe(link_section = \".init_array\")]\nstatic INIT: extern \"C\" fn() = init;\n"
    )
}

#[test]
fn every_line_has_a_verdict() {
    let (_, out) = doctor(|_| {});
    for (name, n) in [("limits", 4), ("network", 3), ("libraries", 7)] {
        let lines = section(&out, name);
        assert_eq!(lines.len(), n, "{out}");
        let verdicts = ["  ok: ", "  note: ", "  PROBLEM: "];
        assert!(lines.iter().all(|l| verdicts.iter().any(|v| l.starts_with(v))), "{out}");
    }
    assert!(section(&out, "network")[0].starts_with("  ok: loopback of IPv4"), "{out}");
}

/// What libraries do to the process that loads them does not reach the doctor.
#[test]
fn libraries_are_loaded_and_survived() {
    let dir = tempfile::tempdir().unwrap();
    let version = "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn ncclGetVersion(v: *mut i32) -> i32 { \
        println!(\"noise\\nrustcomms-\"); print!(\"no end\"); unsafe { *v = 22304 }; 0 }";
    library(dir.path(), "libnccl.so.2", version);
    library(dir.path(), "libcuda.so.1", &initialiser("std::process::abort()"));
    library(dir.path(), "libibverbs.so.1", &initialiser("std::process::exit(3)"));
    // Its version function fails, which is no news: drivers without a device do that.
    let failing = "#[unsafe(no_mangle)] pub extern \"C\" fn hipRuntimeGetVersion(_: *mut i32) -> i32 { 100 }";
    library(dir.path(), "libamdhip64.so", failing);
    std::fs::write(dir.path().join("libfabric.so.1"), "no library").unwrap();
    let (code, out) = doctor(|c| {
        c.env("LD_LIBRARY_PATH", dir.path());
    });
    assert_eq!(code, Some(1), "{out}");
    let lines = section(&out, "libraries");
    let at = dir.path().canonicalize().unwrap();
    let at = at.display();
    let expect = |text: &str| assert!(lines.iter().any(|l| l.starts_with(text)), "{text}: {out}");
    expect(&format!("  ok: NCCL: version 2.23.4, {at}/libnccl.so.2"));
    expect("  PROBLEM: NVIDIA's driver: loading libcuda.so.1 kills the process by signal 6 (SIGABRT)");
    expect("  PROBLEM: RDMA verbs: loading libibverbs.so.1 ends the process with code 3");
    expect(&format!("  ok: AMD's runtime: {at}/libamdhip64.so"));
    expect("  note: libfabric: libfabric.so.1 is there, but cannot be loaded: ");
    // The rest of the examination took place.
    assert!(
        out.contains("loopback, two ranks over backend tcp:") && out.ends_with("\n2 problems, 0 warnings\n"),
        "{out}"
    );
}

#[test]
fn a_world_that_needs_more_descriptors_is_a_problem() {
    let (code, out) = doctor(|c| {
        // The shell's own limit goes to the doctor.
        let program = c.get_program().to_owned();
        let removed: Vec<_> = c.get_envs().map(|(name, _)| name.to_owned()).collect();
        *c = Command::new("/bin/sh");
        for name in &removed {
            c.env_remove(name);
        }
        c.args(["-c", "ulimit -n 128; exec \"$0\" doctor"]).arg(program).stdin(Stdio::null());
        c.envs([("RUSTCOMMS_RANK", "0"), ("RUSTCOMMS_WORLD_SIZE", "200"), ("RUSTCOMMS_STORE", "127.0.0.1:1")]);
    });
    assert_eq!(code, Some(1), "{out}");
    let line = section(&out, "limits")[0];
    for part in
        ["  PROBLEM: open descriptors: 128", "a rank of 200 needs about 231 ", "48 with those of rings", "at least 231"]
    {
        assert!(line.contains(part), "{part}: {out}");
    }
    assert!(out.ends_with("\n1 problem, 0 warnings\n"), "{out}");
}

#[test]
fn secrets_are_not_printed() {
    let (_, out) = doctor(|c| {
        c.env("RUSTCOMMS_SECRET", "hush-hush");
    });
    assert!(out.contains("RUSTCOMMS_SECRET") && !out.contains("hush-hush"), "{out}");
}
