//! Copies the ranks' output to our own, whole lines at a time.
//!
//! One thread reads all pipes and does all writing, the launcher's own messages included, so no two
//! lines can mix, and a terminal that does not take output holds up neither signals nor timers.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Event;
use super::ranks::Pipes;

/// A longer line is cut, because it must be held in memory until it ends.
const MAX_LINE: usize = 16 << 20;
/// How long a message waits for the ranks to fall silent, so that it comes after what caused it.
const HOLD: Duration = Duration::from_millis(200);

#[derive(Debug)]
enum Note {
    Message(String),
    /// All ranks have ended; stop at the end of their pipes, or after this time if somebody who
    /// survived them holds those open.
    Finish(Duration),
}

/// The handle of the copying thread.
#[derive(Debug)]
pub(super) struct Output {
    notes: Sender<Note>,
    wake: UnixStream,
}

impl Output {
    pub(super) fn start(pipes: Vec<Pipes>, prefix: bool, events: Sender<Event>) -> std::io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let (notes, inbox) = mpsc::channel();
        let streams = pipes
            .into_iter()
            .flat_map(|p| {
                let prefix = if prefix { format!("[{}] ", p.rank) } else { String::new() };
                let stream =
                    |fd, err| Stream { fd: Some(fd), err, prefix: prefix.clone().into_bytes(), line: Vec::new() };
                [stream(p.out, false), stream(p.err, true)]
            })
            .collect();
        let mut copier = Copier {
            streams,
            woken,
            inbox,
            held: VecDeque::new(),
            until: None,
            buf: vec![0; 64 << 10],
            dead: [false; 2],
            events: events.clone(),
        };
        let work = move || {
            copier.run();
            // The main thread is gone only if the process ends.
            let _ = events.send(Event::Copied);
        };
        std::thread::Builder::new().name("output".into()).spawn(work)?;
        Ok(Self { notes, wake })
    }

    fn note(&self, note: Note) {
        // The thread ends only after Finish, and then nothing more is to be said.
        if self.notes.send(note).is_ok() {
            let _ = (&self.wake).write(&[0]);
        }
    }

    /// Says something on stderr, after the output that is there already.
    pub(super) fn say(&self, text: impl std::fmt::Display) {
        self.note(Note::Message(format!("rustcomms run: {text}\n")));
    }

    /// Copies the rest, and reports [`Event::Copied`].
    pub(super) fn finish(&self, patience: Duration) {
        self.note(Note::Finish(patience));
    }
}

#[derive(Debug)]
struct Stream {
    fd: Option<OwnedFd>,
    err: bool,
    prefix: Vec<u8>,
    /// The line that is not complete.
    line: Vec<u8>,
}

impl Stream {
    /// Takes `bytes` in, and returns what is to be written.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() + self.line.len() + 64);
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            out.extend_from_slice(&self.prefix);
            out.append(&mut self.line);
            out.extend_from_slice(&rest[..=end]);
            rest = &rest[end + 1..];
        }
        self.line.extend_from_slice(rest);
        if self.line.len() > MAX_LINE {
            out.extend_from_slice(&self.prefix);
            out.append(&mut self.line);
            out.push(b'\n');
        }
        out
    }
}

struct Copier {
    streams: Vec<Stream>,
    woken: UnixStream,
    inbox: Receiver<Note>,
    held: VecDeque<(String, Instant)>,
    /// When to stop although pipes are open.
    until: Option<Instant>,
    buf: Vec<u8>,
    /// Whether stdout and stderr have lost their readers.
    dead: [bool; 2],
    events: Sender<Event>,
}

impl Copier {
    fn run(&mut self) {
        loop {
            while let Ok(note) = self.inbox.try_recv() {
                match note {
                    Note::Message(text) => self.held.push_back((text, Instant::now() + HOLD)),
                    Note::Finish(patience) => self.until = Some(Instant::now() + patience),
                }
            }
            let now = Instant::now();
            let open = self.streams.iter().any(|s| s.fd.is_some());
            let over = self.until.is_some_and(|t| !open || now >= t);
            let timeout = match (over || !self.held.is_empty(), self.until) {
                (true, _) => Some(Duration::ZERO),
                (false, Some(t)) => Some(t.saturating_duration_since(now)),
                (false, None) => None,
            };
            let quiet = !self.copy(timeout);
            while let Some((_, t)) = self.held.front()
                && (quiet || over || Instant::now() >= *t)
            {
                let text = self.held.pop_front().map(|(text, _)| text).unwrap_or_default();
                self.write(true, text.as_bytes());
            }
            if over && (quiet || open) {
                break;
            }
        }
        self.tails();
    }

    /// Waits for output and copies it; whether there was any.
    fn copy(&mut self, timeout: Option<Duration>) -> bool {
        let mut ids = Vec::with_capacity(self.streams.len());
        let mut fds = Vec::with_capacity(self.streams.len() + 1);
        for (i, s) in self.streams.iter().enumerate() {
            if let Some(fd) = &s.fd {
                ids.push(i);
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
            }
        }
        fds.push(PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN));
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // Interrupted; the loop comes again.
            return false;
        }
        let ready: Vec<usize> =
            ids.iter().zip(&fds).filter(|(_, f)| !f.revents().is_empty()).map(|(i, _)| *i).collect();
        // Only a wake-up; what it is for is in the inbox.
        let _ = (&self.woken).read(&mut [0; 64]);
        for &i in &ready {
            let Some(fd) = &self.streams[i].fd else { continue };
            match rustix::io::read(fd, &mut self.buf[..]) {
                Ok(n) if n > 0 => {
                    let out = self.streams[i].take(&self.buf[..n]);
                    self.write(self.streams[i].err, &out);
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Ok(_) | Err(_) => self.end(i),
            }
        }
        !ready.is_empty()
    }

    /// A pipe has ended. Its last line is completed and written; without a prefix, the last of all is left as it is, for
    /// when nothing can follow on the same line.
    fn end(&mut self, i: usize) {
        self.streams[i].fd = None;
        let err = self.streams[i].err;
        let last = !self.streams.iter().any(|s| s.err == err && s.fd.is_some());
        let s = &mut self.streams[i];
        if !s.line.is_empty() && (!last || !s.prefix.is_empty()) {
            let out = s.take(b"\n");
            self.write(err, &out);
        }
    }

    /// Writes the incomplete last lines.
    fn tails(&mut self) {
        for err in [false, true] {
            let tails: Vec<Vec<u8>> = self
                .streams
                .iter_mut()
                .filter(|s| s.err == err && !s.line.is_empty())
                .map(|s| if s.prefix.is_empty() { std::mem::take(&mut s.line) } else { s.take(b"\n") })
                .collect();
            let glue: &[u8] = if self.streams.iter().all(|s| s.prefix.is_empty()) { b"\n" } else { b"" };
            self.write(err, &tails.join(glue));
        }
    }

    fn write(&mut self, err: bool, mut bytes: &[u8]) {
        let fd: BorrowedFd<'static> = if err { rustix::stdio::stderr() } else { rustix::stdio::stdout() };
        while !bytes.is_empty() && !self.dead[usize::from(err)] {
            match rustix::io::write(fd, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                // Somebody we share the terminal with has made it non-blocking.
                Err(Errno::AGAIN) => drop(poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], None)),
                // Nobody hears of the loss of stderr, so the ranks compute on without it.
                Err(_) if err => self.dead[1] = true,
                Err(e) => {
                    self.dead[0] = true;
                    let e = std::io::Error::from(e);
                    // The main thread is gone only if the process ends.
                    let _ = self.events.send(Event::OutputLost(e.kind(), e.to_string()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(prefix: &str) -> Stream {
        Stream { fd: None, err: false, prefix: prefix.into(), line: Vec::new() }
    }

    #[test]
    fn lines_come_out_whole_however_they_came_in() {
        let text = b"one\n\ntwo \xff\0 junk\r\nthree\nand no end";
        for piece in 1..text.len() {
            let mut s = stream("[7] ");
            let out: Vec<u8> = text.chunks(piece).flat_map(|p| s.take(p)).collect();
            assert_eq!(out, b"[7] one\n[7] \n[7] two \xff\0 junk\r\n[7] three\n");
            assert_eq!(s.line, b"and no end");
        }
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut s = stream("");
        let piece = vec![b'x'; 1 << 20];
        let written: usize = (0..100).map(|_| s.take(&piece).len()).sum();
        assert!(s.line.len() <= MAX_LINE && written > 64 << 20);
    }
}
