//! `rustcomms store` as a real process.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use comm_core::Store;
use comm_store::TcpStore;
use rustix::process::{Pid, Signal, kill_process};

const LONG: Duration = Duration::from_secs(60);

/// Ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut c = Command::new(env!("CARGO_BIN_EXE_rustcomms"));
        c.arg("store").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(c.spawn().unwrap())
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn end(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                let mut err = String::new();
                self.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
                return (status, err);
            }
            assert!(start.elapsed() < LONG, "does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn it_prints_its_address_serves_and_ends_cleanly() {
    for (args, host, signal) in
        [(&["--port", "0"][..], "127.0.0.1", Signal::INT), (&["--addr", "::", "--port", "0"], "[::1]", Signal::TERM)]
    {
        if args.contains(&"::") && std::net::TcpListener::bind("[::1]:0").is_err() {
            continue; // no IPv6 here
        }
        let mut server = Server::start(args);
        let line = server.line();
        let port = line.rsplit_once(':').unwrap_or_else(|| panic!("{line}: {:?}", server.0.try_wait())).1;
        assert_ne!(port.parse::<u16>().unwrap(), 0);
        let store = TcpStore::connect(format!("{host}:{port}"), LONG).unwrap();
        store.set("k", b"v").unwrap();
        // A client that stays connected does not hold up the end.
        kill_process(Pid::from_child(&server.0), signal).unwrap();
        let (status, err) = server.end();
        assert_eq!((status.code(), &*err), (Some(0), ""));
        assert!(store.get("k", Duration::from_millis(100)).is_err());
    }
}

#[test]
fn it_ends_with_its_parent() {
    // The shell between ends when its input does.
    let mut shell = Command::new("/bin/sh")
        .args(["-c", "\"$0\" store --port 0 --exit-with-parent & read stop"])
        .arg(env!("CARGO_BIN_EXE_rustcomms"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(shell.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let store = TcpStore::connect(line.trim(), LONG).unwrap();
    store.set("k", b"v").unwrap();
    drop(shell.stdin.take());
    shell.wait().unwrap();
    // Only the store still holds the pipe.
    let start = Instant::now();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(rest.is_empty() && start.elapsed() < LONG, "{rest}");
}

#[test]
fn mistakes_are_explained() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (args, text) in [
        (&["--port", &*port][..], "cannot listen at 127.0.0.1:"),
        (&["--addr", "192.0.2.1", "--port", "0"], "cannot listen at 192.0.2.1:0"),
        (&["--addr", "", "--port", "0"], "no address"),
    ] {
        let (status, err) = Server::start(args).end();
        assert_eq!(status.code(), Some(1), "{args:?}: {err}");
        assert!(err.starts_with("rustcomms store: ") && err.contains(text), "{args:?}: {err}");
    }
    assert_eq!(Server::start(&["--port", "70000"]).end().0.code(), Some(2));
}
