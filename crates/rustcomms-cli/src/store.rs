//! `rustcomms store`: the rendezvous store alone.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use comm_store::TcpStoreServerOptions;
use rustix::process::getppid;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::run::raise_descriptor_limit;

/// How often it is looked whether the parent lives.
const LOOK: Duration = Duration::from_millis(100);

/// Run a store at which ranks find each other, until SIGINT or SIGTERM.
///
/// Prints the address at which it listens, ADDRESS:PORT, as its only line, when ranks can connect. Ranks
/// are told of it by RUSTCOMMS_STORE (beside RUSTCOMMS_RANK and RUSTCOMMS_WORLD_SIZE). Runs that
/// share a store need names of their own in RUSTCOMMS_RUN_ID. The protocol is that of PyTorch's TCPStore.
///
/// RUSTCOMMS_SECRET, if set, is what everybody must know who uses the store: the ranks need the same. Ranks that
/// set a secret in their program only (CommOptions::secret) do not get into a store that has another or none; set
/// the variable on both sides instead.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address or host name to listen at; :: is every address of this host.
    #[arg(long, value_name = "A", default_value = "127.0.0.1")]
    addr: String,
    /// Port to listen at; 0 is a free one.
    #[arg(long, value_name = "P", default_value_t = 29_500)]
    port: u16,
    /// End when the process that started this one has ended.
    #[arg(long)]
    exit_with_parent: bool,
}

/// Runs the command.
pub(crate) fn execute(args: &Args) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            // If nobody reads it, the exit code is left.
            let _ = writeln!(std::io::stderr().lock(), "rustcomms store: {text}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &Args) -> Result<(), String> {
    let parent = getppid();
    // Before anybody can know that there is somebody to signal.
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| format!("cannot handle signals: {e}"))?;
    // Every rank has a connection.
    raise_descriptor_limit();
    let at = address(&args.addr, args.port)?;
    let options = TcpStoreServerOptions::of_environment().map_err(|e| e.to_string())?;
    let server = options.bind(at).map_err(|e| format!("cannot listen at {at}: {e}"))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", server.local_addr())
        .and_then(|()| out.flush())
        .map_err(|e| format!("cannot print the address: {e}"))?;
    drop(out);
    let (tx, rx) = mpsc::channel();
    let wait = move || {
        if signals.forever().next().is_some() {
            // The main thread is gone only if the process ends.
            let _ = tx.send(());
        }
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(wait)
        .map_err(|e| format!("cannot start a thread: {e}"))?;
    let patience = if args.exit_with_parent { LOOK } else { Duration::from_secs(86_400) };
    while let Err(RecvTimeoutError::Timeout) = rx.recv_timeout(patience) {
        // An orphan gets another parent.
        if args.exit_with_parent && getppid() != parent {
            break;
        }
    }
    Ok(())
}

/// As the user writes it, with or without brackets around IPv6 addresses; the first address of a name.
fn address(host: &str, port: u16) -> Result<SocketAddr, String> {
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let found = (host, port).to_socket_addrs().map_err(|e| format!("'{host}' is no address of this host: {e}"))?;
    let all: Vec<SocketAddr> = found.collect();
    all.first().copied().ok_or_else(|| format!("'{host}' has no address"))
}
