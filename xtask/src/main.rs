//! `cargo xtask`: the project's automation. `cargo xtask ci` is what CI runs, and what to run before a commit.
//!
//! It is not a build system: every step is a command that can be typed by hand, and is printed before it
//! runs. A program, not a script, so that deadlines, clean-up and expectations have unit tests.

mod accept;
mod args;
mod bench;
mod chaos;
mod ci;
mod compare;
mod conformance;
mod crates;
mod expect;
mod fuzz;
mod hygiene;
mod interop;
mod namespaces;
mod process;

use std::path::PathBuf;
use std::process::ExitCode;

use args::Command;

/// The root of the workspace: commands run there, wherever xtask is called from.
fn root() -> PathBuf {
    // What `cargo run` says goes first: with a target folder shared by several clones, the binary may have been
    // compiled in another one.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = PathBuf::from(here);
    here.parent().map_or_else(|| here.clone(), PathBuf::from)
}

fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let ended = match args::parse(&given) {
        Ok(Command::Help) => {
            print!("{}", args::help());
            Ok(())
        }
        Ok(Command::Bench(bench)) => bench::run(&root(), &bench).map_err(|e| format!("bench: FAILED: {e}")),
        Ok(Command::Compare(options)) => {
            compare::run(&root(), &options).map_err(|e| format!("bench compare: FAILED: {e}"))
        }
        Ok(Command::Ci(selection)) => ci::run(&root(), &selection),
        Ok(Command::Accept) => accept::run(&root()).map_err(|e| format!("accept: FAILED: {e}")),
        Ok(Command::Conformance { full }) => {
            conformance::run(&root(), full).map_err(|e| format!("conformance: FAILED: {e}"))
        }
        Ok(Command::Chaos(chosen)) => chaos::run(&root(), &chosen).map_err(|e| format!("chaos: FAILED: {e}")),
        Ok(Command::Interop) => interop::run(&root()).map_err(|e| format!("interop-store: FAILED: {e}")),
        Ok(Command::Fuzz(chosen)) => fuzz::run(&root(), &chosen).map_err(|e| format!("fuzz: FAILED: {e}")),
        Err(e) => Err(format!("xtask: {e}\nxtask: `cargo xtask --help` lists the commands")),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
