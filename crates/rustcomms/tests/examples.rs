//! The examples as processes: each starts its ranks, by itself and as a launcher does, and checks its own results.
//!
//! They are modules of this program, which runs itself again, so that they are never older than the test.

mod again;
#[path = "../examples/elastic.rs"]
mod elastic;
#[path = "../examples/exchange.rs"]
mod exchange;
#[path = "../examples/gathers.rs"]
mod gathers;
#[path = "../examples/messages.rs"]
mod messages;
#[path = "../examples/overlap.rs"]
mod overlap;
#[path = "../examples/reductions.rs"]
mod reductions;

use std::process::{Command, ExitCode};

use rustcomms::launch::{self, LaunchOptions, OnFailure};

/// Says which example this process is.
const WHICH: &str = "TEST_EXAMPLE";

/// Not a test but an example, in a process that [`run`] started.
#[test]
fn entry() {
    let Ok(which) = std::env::var(WHICH) else { return };
    let main = match which.as_str() {
        "elastic" => elastic::main,
        "elastic_world" => elastic_world,
        "exchange" => exchange::main,
        "gathers" => gathers::main,
        "messages" => messages::main,
        "overlap" => overlap::main,
        "reductions" => reductions::main,
        other => panic!("there is no example {other}"),
    };
    assert_eq!(main().unwrap_or_else(|e| panic!("{e}")), ExitCode::SUCCESS);
}

/// Runs an example on so many ranks; returns how it ended and what it printed.
fn run(which: &str, ranks: impl ToString, change: impl FnOnce(&mut Command)) -> (Option<i32>, String) {
    let mut c = Command::new(std::env::current_exe().unwrap());
    // For the test harness the number is the name of one more test, which does not exist.
    c.arg(ranks.to_string()).env(WHICH, which);
    again::entry(c, &format!("{which} on {} ranks", ranks.to_string()), change)
}

#[test]
fn elastic_loses_one_and_gains_one() {
    let (code, text) = run("elastic", 4, |_| {});
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(text.matches("elastic: generation 3 has 4 ranks, all right\n").count(), 1, "{text}");
}

/// What `rustcomms run -n 4 --on-failure continue` does.
fn elastic_world() -> rustcomms::Result<ExitCode> {
    if launch::is_rank() {
        elastic::main()
    } else {
        LaunchOptions::new().on_failure(OnFailure::Continue).spawn_local(4)
    }
}

#[test]
fn elastic_goes_on_under_a_launcher() {
    let (code, text) = run("elastic_world", 4, |_| {});
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(text.matches("elastic: generation 1 has 3 ranks, all right\n").count(), 1, "{text}");
    assert!(text.contains("summary: ranks 0, 2, 3 ended well; rank 1 failed: signal: 6 (SIGABRT)"), "{text}");
}

fn all_worlds(which: &str) {
    for ranks in 1..=5 {
        let (code, text) = run(which, ranks, |_| {});
        assert_eq!(code, Some(0), "{which} on {ranks} ranks: {text}");
        let line = format!("{which}: {ranks} ranks, all right\n");
        assert_eq!(text.matches(&line).count(), 1, "rank 0 says it, once: {text}");
    }
}

#[test]
fn exchange() {
    all_worlds("exchange");
}

#[test]
fn gathers() {
    all_worlds("gathers");
}

#[test]
fn messages() {
    all_worlds("messages");
}

#[test]
fn overlap() {
    all_worlds("overlap");
}

#[test]
fn reductions() {
    all_worlds("reductions");
}

#[test]
fn a_launchers_rank_starts_no_ranks() {
    // Alone in a launcher's world of one.
    let (code, text) = run("reductions", 3, |c| {
        c.env("RANK", "0").env("WORLD_SIZE", "1");
    });
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("reductions: 1 ranks, all right\n"), "{text}");
}

#[test]
fn a_failing_rank_fails_the_run() {
    // An algorithm that does not exist is refused by every rank.
    let (code, text) = run("reductions", 2, |c| {
        c.env("RUSTCOMMS_ALGO", "rnig");
    });
    assert_ne!(code, Some(0), "{text}");
    assert!(text.contains("there is no algorithm 'rnig'") && !text.contains("all right"), "{text}");
}

#[test]
fn an_argument_that_is_no_number_starts_nothing() {
    for which in ["exchange", "gathers", "messages", "overlap", "reductions"] {
        let (code, text) = run(which, "four", |_| {});
        assert_ne!(code, Some(0), "{which}: {text}");
        assert!(text.contains("'four' is not a number of ranks") && !text.contains("all right"), "{which}: {text}");
    }
}
