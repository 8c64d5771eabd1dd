//! Programs that start their own ranks, as processes: how failures end them, or do not.

mod again;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use rustcomms::CommOptions;
use rustcomms::launch::{self, LaunchOptions, OnFailure};

/// Tells a process that it is to start ranks, and with which script; or to be a rank that connects.
const SCRIPT: &str = "TEST_LAUNCH_SCRIPT";
const CONNECTS: &str = "TEST_LAUNCH_CONNECTS";
/// How many, and how they are looked after.
const RANKS: &str = "TEST_LAUNCH_RANKS";
const ON_FAILURE: &str = "TEST_LAUNCH_ON_FAILURE";
const GRACE: &str = "TEST_LAUNCH_GRACE";

/// Not a test but the program, in a process that [`spawn`] started.
#[test]
fn entry() {
    let var = |name| std::env::var(name).unwrap();
    if launch::is_rank() {
        assert!(std::env::var_os(CONNECTS).is_some());
        // Where rank 0 should be host or guest, it dies.
        if var("RUSTCOMMS_RANK") == "0" {
            std::process::exit(5);
        }
        let e = rustcomms::connect(CommOptions::new().bootstrap_timeout(Duration::from_secs(1))).unwrap_err();
        eprintln!("connect: {e}");
        std::process::exit(6);
    }
    let Ok(script) = std::env::var(SCRIPT) else { return };
    let mut options = LaunchOptions::new();
    match &*var(ON_FAILURE) {
        "" => {}
        "stop" => options = options.on_failure(OnFailure::Stop),
        "continue" => options = options.on_failure(OnFailure::Continue),
        other => panic!("{other}"),
    }
    if let Ok(grace) = std::env::var(GRACE) {
        options = options.grace(Duration::from_secs_f64(grace.parse().unwrap()));
    }
    let ranks = var(RANKS).parse().unwrap();
    let ended = if script.is_empty() {
        options.spawn_local(ranks)
    } else {
        options.spawn_program(ranks, &"/bin/sh".into(), &[OsString::from("-c"), script.into()])
    };
    match ended {
        // Nothing else tells the number.
        Ok(code) => std::process::exit((0..=255).find(|n| ExitCode::from(*n) == code).unwrap().into()),
        Err(e) => {
            eprintln!("launch: {e}");
            std::process::exit(99);
        }
    }
}

/// Starts a program whose ranks run `script`; returns how it ended and what all said.
fn spawn(on_failure: &str, ranks: usize, script: &str, change: impl FnOnce(&mut Command)) -> (Option<i32>, String) {
    spawn_by(&[], on_failure, ranks, script, change)
}

/// As [`spawn`], through a command that becomes the program.
fn spawn_by(
    before: &[&str],
    on_failure: &str,
    ranks: usize,
    script: &str,
    change: impl FnOnce(&mut Command),
) -> (Option<i32>, String) {
    let me = std::env::current_exe().unwrap();
    let me = me.to_str().unwrap();
    let mut c = Command::new(before.first().copied().unwrap_or(me));
    c.args(before.iter().skip(1)).args(before.first().map(|_| me));
    c.env(SCRIPT, script).env(RANKS, ranks.to_string()).env(ON_FAILURE, on_failure);
    again::entry(c, script, change)
}

fn grace(seconds: &'static str) -> impl FnOnce(&mut Command) {
    move |c| _ = c.env(GRACE, seconds)
}

/// Whether a process runs. A zombie does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn pid_in(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap()
}

#[test]
fn a_failure_stops_the_others() {
    for how in ["", "stop"] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("pid");
        let script = format!(
            "[ $RUSTCOMMS_RANK = 0 ] && {{ echo $$ > {0}.tmp; mv {0}.tmp {0}; exec sleep 1000; }}; \
             while [ ! -e {0} ]; do sleep 0.02; done; kill -9 $$",
            at.display()
        );
        let (code, text) = spawn(how, 2, &script, grace("0.1"));
        assert_eq!(code, Some(128 + 9), "{text}");
        assert!(text.contains("rank 1 failed first: signal: 9 (SIGKILL)"), "{text}");
        assert!(!text.contains("summary") && !text.contains("go on"), "{text}");
        assert!(!runs(&pid_in(&at)), "rank 0 still runs");
    }
}

/// Also for longer than the grace.
#[test]
fn the_others_go_on() {
    let script = "[ $RUSTCOMMS_RANK = 1 ] && kill -9 $$; [ $RUSTCOMMS_RANK = 2 ] && exit 4; sleep 1; echo end";
    let (code, text) = spawn("continue", 4, script, grace("0.1"));
    assert_eq!((code, text.matches("end\n").count()), (Some(0), 2), "{text}");
    for line in [
        "rank 1 failed: signal: 9 (SIGKILL); the others go on\n",
        "rank 2 failed: exit status: 4; the others go on\n",
        "summary: ranks 0, 3 ended well; rank 1 failed: signal: 9 (SIGKILL); rank 2 failed: exit status: 4\n",
    ] {
        assert_eq!(text.matches(line).count(), 1, "{line} in {text}");
    }
}

#[test]
fn if_none_ends_well_the_first_failure_is_the_code() {
    let script = "[ $RUSTCOMMS_RANK = 1 ] && exit 7; sleep 0.5; kill -15 $$";
    let (code, text) = spawn("continue", 2, script, |_| {});
    assert_eq!(code, Some(7), "{text}");
    let line = "summary: no rank ended well; rank 0 failed: signal: 15 (SIGTERM); rank 1 failed: exit status: 7\n";
    assert!(text.contains(line), "{text}");
    assert_eq!(spawn("continue", 1, "kill -9 $$", |_| {}).0, Some(128 + 9));
}

#[test]
fn who_ends_well_says_nothing() {
    for how in ["", "continue"] {
        let (code, text) = spawn(how, 3, "echo $RUSTCOMMS_RANK/$RUSTCOMMS_WORLD_SIZE", |_| {});
        assert_eq!(code, Some(0), "{text}");
        assert!(!text.contains("summary") && !text.contains("failed"), "{text}");
        assert!((0..3).all(|r| text.contains(&format!("{r}/3\n"))), "{text}");
    }
}

/// Nobody hangs who has not met a rank that is dead.
#[test]
fn a_world_that_does_not_form_ends() {
    let (code, text) = spawn("continue", 3, "", |c| _ = c.env(CONNECTS, "1"));
    assert_eq!((code, text.matches("connect: ").count()), (Some(5), 2), "{text}");
    let line =
        "summary: no rank ended well; rank 0 failed: exit status: 5; rank 1 failed: exit status: 6; rank 2 failed";
    assert!(text.contains(line), "{text}");
}

/// In a process that ignores `SIGCHLD` nobody knows how its children end; that is an error, no hang and no success.
#[test]
fn ends_that_nobody_tells_are_an_error() {
    for how in ["stop", "continue"] {
        let (code, text) = spawn_by(&["env", "--ignore-signal=CHLD"], how, 2, "true", |_| {});
        assert_eq!(code, Some(99), "{text}");
        assert!(text.contains("SIGCHLD"), "{text}");
    }
}
