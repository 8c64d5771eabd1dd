//! A client of the PMI-1 key-value server that `mpiexec` of MPICH, Intel MPI and MVAPICH runs for its ranks: lines of
//! text, one answer to each.
//!
//! An MPI library in this process talks to the same server, so as little as possible is said: no `init`, which Hydra does
//! not need, and `finalize` only when the process ends, because it closes the connection for whoever comes later. Without
//! it, Hydra ends all other ranks when this one exits. The descriptor is used without changing its flags or options.
//! Replies, limits and these habits are those of Hydra 4.0.2; Intel MPI and MVAPICH were not tried.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::inherited;

/// Lines are not believed to be longer. Hydra's longest answer has about 1,100 bytes.
const MAX_LINE: usize = 4096;
/// The key under which rank 0 publishes.
const KEY: &str = "rustcomms-store";
/// What is published in place of a value when rank 0 has none.
const NOTHING: &str = "-";
/// The usual reasons for the end of a conversation.
const CLOSED: &str = "it closed the connection, as it does when an earlier program of this rank, or MPI_Finalize, has ended the conversation";
/// How long the end of the process waits for the server to hear of it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How the launcher's PMI server is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PmiServer {
    /// Through the inherited descriptor of this number: `PMI_FD`.
    Descriptor(i32),
    /// At `host:port`, where this process is known as `id`: `PMI_PORT` and `PMI_ID`.
    Port {
        /// `host:port`.
        addr: String,
        /// What the launcher calls this process.
        id: String,
    },
}

impl std::fmt::Display for PmiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Descriptor(fd) => write!(f, "PMI_FD={fd}"),
            Self::Port { addr, id } => write!(f, "PMI_PORT={addr}, PMI_ID={id}"),
        }
    }
}

/// A conversation with the server.
#[derive(Debug)]
pub(super) struct Client {
    socket: OwnedFd,
    deadline: Instant,
    started: Instant,
}

/// One answer: `cmd=NAME` and the other `key=value` words. The value of `value`, which is always last, is all that follows.
#[derive(Debug)]
struct Reply(Vec<(String, String)>);

impl Reply {
    fn parse(line: &str) -> Self {
        let (words, value) = match line.split_once(" value=") {
            Some((words, value)) => (words, Some(value)),
            None => (line, None),
        };
        let words = words.split_whitespace().filter_map(|w| w.split_once('='));
        let words = words.chain(value.map(|v| ("value", v.trim_end())));
        Self(words.map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

impl Client {
    pub(super) fn open(server: &PmiServer, deadline: Instant) -> Result<Self> {
        let socket = match server {
            PmiServer::Descriptor(fd) => inherited::socket(*fd).map_err(|why| broken(&why))?,
            PmiServer::Port { addr, .. } => connect(addr, deadline)?.into(),
        };
        let mut client = Self { socket, deadline, started: Instant::now() };
        if let PmiServer::Port { id, .. } = server {
            client.say(&format!("cmd=initack pmiid={id}\n"))?;
            // Behind its answer come size, rank and debug level, one line each, in one or more segments.
            let lines = client.hear(4)?;
            if lines.lines().next().is_none_or(|l| Reply::parse(l).get("cmd") != Some("initack")) {
                return Err(broken(&format!("it answered initack with '{}'", shown(&lines))));
            }
        }
        Ok(client)
    }

    /// Meets all other ranks of the job, and returns what rank 0 brought. `mine` is rank 0's: at most 100 bytes long
    /// texts without blanks, of which as many are published as the server takes.
    pub(super) fn meet(&mut self, mine: Option<&Result<Vec<String>>>) -> Result<Vec<String>> {
        let kvs = self.ask("cmd=get_my_kvsname", "my_kvsname")?;
        let kvs =
            kvs.get("kvsname").filter(|n| n.len() <= 256).ok_or_else(|| broken("it told no name of its space"))?;
        if let Some(mine) = mine {
            let longest = self.ask("cmd=get_maxes", "maxes")?.get("vallen_max").and_then(|n| n.parse().ok());
            let value = match mine {
                Ok(all) => fitting(all, longest.unwrap_or(256)),
                // The others are at the barrier: they must not wait there for nothing.
                Err(_) => NOTHING.to_owned(),
            };
            let put = self.ask(&format!("cmd=put kvsname={kvs} key={KEY} value={value}"), "put_result")?;
            if put.get("rc") != Some("0") {
                return Err(broken(&format!("it did not take '{value}': {}", put.get("msg").unwrap_or("no reason"))));
            }
        }
        self.ask("cmd=barrier_in", "barrier_out")?;
        if let Some(mine) = mine {
            return mine.clone();
        }
        let got = self.ask(&format!("cmd=get kvsname={kvs} key={KEY}"), "get_result")?;
        match got.get("value").filter(|v| got.get("rc") == Some("0") && !v.is_empty()) {
            Some(NOTHING) => Err(bootstrap("rank 0 could not open the store; its own error says why".into())),
            Some(value) => Ok(value.split(',').map(str::to_owned).collect()),
            None => Err(bootstrap("rank 0 published nothing through the launcher's PMI server".into())),
        }
    }

    /// Sends a line and returns its answer.
    fn ask(&mut self, line: &str, want: &str) -> Result<Reply> {
        self.say(&format!("{line}\n"))?;
        let answer = self.hear(1).map_err(|e| e.with_context(|| crate::in_call(&format!("PMI '{}'", shown(line)))))?;
        let reply = Reply::parse(&answer);
        match reply.get("cmd") {
            Some(cmd) if cmd == want => Ok(reply),
            _ => Err(broken(&format!("it answered '{}' with '{}'", shown(line), shown(&answer)))),
        }
    }

    fn say(&mut self, text: &str) -> Result<()> {
        let mut bytes = text.as_bytes();
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::AGAIN) => self.until(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(gone(e)),
            }
        }
        Ok(())
    }

    /// `lines` lines, and no byte behind them: whoever else speaks to the server here must find its answers.
    fn hear(&mut self, lines: usize) -> Result<String> {
        let mut text = Vec::new();
        let mut buf = [0; MAX_LINE];
        loop {
            match recv(&self.socket, &mut buf[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(broken(CLOSED)),
                Ok((n, _)) => text.extend_from_slice(&buf[..n]),
                Err(Errno::AGAIN) => self.until(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(gone(e)),
            }
            let ends = text.iter().filter(|b| **b == b'\n').count();
            if ends > lines || (ends == lines && text.last() != Some(&b'\n')) || text.len() > MAX_LINE {
                return Err(broken(&format!(
                    "it said more than was asked: '{}'",
                    shown(&String::from_utf8_lossy(&text))
                )));
            }
            if ends == lines {
                return String::from_utf8(text).map_err(|_| broken("its answer is no text"));
            }
        }
    }

    /// Waits until the socket can be read or written.
    fn until(&self, what: PollFlags) -> Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(crate::timed_out("meeting through the launcher's PMI server", self.started));
        }
        let left = left.min(Duration::from_secs(3600));
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&self.socket, what)], Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(gone(e)),
        }
    }

    /// Says goodbye for this process, and does not mind if nobody listens: an MPI library may have done it.
    fn goodbye(&mut self) {
        self.deadline = Instant::now() + LAST_WORDS;
        let _ = self.ask("cmd=finalize", "finalize_ack");
    }

    /// Keeps the conversation until the process exits, and ends it then.
    pub(super) fn keep(self) {
        static KEPT: Mutex<Option<(u32, Client)>> = Mutex::new(None);
        extern "C" fn at_exit() {
            // Not in a child that was forked off, whose parent still runs.
            if let Some(mut kept) = KEPT.try_lock()
                && let Some((_, mut client)) = kept.take_if(|(pid, _)| *pid == std::process::id())
            {
                client.goodbye();
            }
        }
        let before = KEPT.lock().replace((std::process::id(), self));
        if before.is_none() && !inherited::at_exit(at_exit) {
            tracing::debug!("the launcher's PMI server will not be told that this process ends");
        }
    }
}

/// As many of `all` as the longest value takes, with commas between; one at least.
fn fitting(all: &[String], longest: usize) -> String {
    let mut value = all.first().cloned().unwrap_or_else(|| NOTHING.to_owned());
    for one in all.iter().skip(1) {
        // The limit counts the C string's end.
        if value.len() + 1 + one.len() >= longest {
            break;
        }
        value = value + "," + one;
    }
    value
}

fn connect(addr: &str, deadline: Instant) -> Result<TcpStream> {
    let fail = |e: io::Error| Error::io(format!("connecting to the launcher's PMI server at {addr}"), &e);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for a in addr.to_socket_addrs().map_err(fail)? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&a, left) {
            Ok(s) => return Ok(s),
            Err(e) => last = e,
        }
    }
    Err(fail(last))
}

fn shown(text: &str) -> String {
    crate::shorten(text.trim_end()).escape_debug().to_string()
}

fn gone(e: Errno) -> Error {
    match e {
        Errno::PIPE | Errno::CONNRESET => broken(CLOSED),
        e => broken(&io::Error::from(e).to_string()),
    }
}

fn bootstrap(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}

fn broken(why: &str) -> Error {
    bootstrap(format!(
        "the launcher's PMI server cannot be used: {why}. Set MASTER_ADDR and MASTER_PORT on all ranks to meet without it"
    ))
}

#[cfg(test)]
mod tests;
