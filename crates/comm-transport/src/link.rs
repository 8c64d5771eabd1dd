//! Links: ordered byte streams to one peer. Sockets here, in-process pipes for simulation and tests.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::{RecvFlags, SendFlags, recv, sendmsg};

use crate::wait::Notify;

/// A non-blocking, ordered, reliable byte stream to one peer.
pub trait Link: Send + fmt::Debug {
    /// Writes as much as possible of the two parts; `WouldBlock` when that is nothing.
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize>;

    /// Reads what is there; `Ok(0)` at the end of the stream, `WouldBlock` when nothing is there.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize>;

    /// The descriptor to poll, if there is one.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Connects the link to its endpoint's wake-ups; for links without descriptor.
    fn attach(&mut self, notify: &Arc<Notify>) {
        let _ = notify;
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub struct SocketLink {
    fd: OwnedFd,
}

impl SocketLink {
    /// Takes a connected stream socket (TCP or Unix) and makes it non-blocking.
    ///
    /// # Errors
    ///
    /// When the descriptor cannot be made non-blocking.
    pub fn new(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        let fd = socket.into();
        rustix::io::ioctl_fionbio(&fd, true)?;
        // Collectives are request and answer: waiting for more bytes only adds latency. Unix sockets have no such option.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Ok(Self { fd })
    }
}

impl Link for SocketLink {
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        let parts = match (head.is_empty(), body.is_empty()) {
            (false, true) => &parts[..1],
            (true, _) => &parts[1..],
            _ => &parts[..],
        };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.fd, parts, &mut rustix::net::SendAncillaryBuffer::default(), flags) {
                Err(rustix::io::Errno::INTR) => {}
                r => return r.map_err(io::Error::from),
            }
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(&self.fd, &mut *buf, RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::INTR) => {}
                Ok((n, _)) => return Ok(n),
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// Bytes that one direction of a [`MemLink`] holds before the writer has to wait.
const PIPE: usize = 1 << 20;

#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<PipeState>,
}

#[derive(Debug, Default)]
struct PipeState {
    bytes: VecDeque<u8>,
    closed: bool,
    starved: bool,
    reader: Option<Arc<Notify>>,
    writer: Option<Arc<Notify>>,
}

/// One end of an in-process byte pipe. Dropping an end closes both directions; what was written before
/// can still be read.
#[derive(Debug)]
pub struct MemLink {
    tx: Arc<Pipe>,
    rx: Arc<Pipe>,
}

impl MemLink {
    /// Two connected ends.
    #[must_use]
    pub fn pair() -> (Self, Self) {
        let (a, b) = (Arc::new(Pipe::default()), Arc::new(Pipe::default()));
        (Self { tx: Arc::clone(&a), rx: Arc::clone(&b) }, Self { tx: b, rx: a })
    }

    /// A full mesh: row `r` has rank `r`'s links, `None` to itself.
    #[must_use]
    pub fn mesh(size: usize) -> Vec<Vec<Option<Box<dyn Link>>>> {
        let mut rows: Vec<Vec<Option<Box<dyn Link>>>> = Vec::with_capacity(size);
        for b in 0..size {
            // One end of each link goes to a row that exists already, the other to the row being made.
            let mut row: Vec<Option<Box<dyn Link>>> = Vec::with_capacity(size);
            for earlier in &mut rows {
                let (x, y) = Self::pair();
                earlier[b] = Some(Box::new(x));
                row.push(Some(Box::new(y)));
            }
            row.resize_with(size, || None);
            rows.push(row);
        }
        rows
    }
}

impl Link for MemLink {
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        let mut s = self.tx.state.lock();
        if s.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = PIPE.saturating_sub(s.bytes.len());
        let (h, b) = (room.min(head.len()), room.saturating_sub(head.len()).min(body.len()));
        if h + b == 0 && head.len() + body.len() > 0 {
            s.starved = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        s.bytes.extend(&head[..h]);
        s.bytes.extend(&body[..b]);
        let reader = s.reader.clone();
        drop(s);
        if let Some(r) = reader {
            r.notify();
        }
        Ok(h + b)
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut s = self.rx.state.lock();
        if s.bytes.is_empty() {
            return if s.closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let n = buf.len().min(s.bytes.len());
        let (a, b) = s.bytes.as_slices();
        let first = n.min(a.len());
        buf[..first].copy_from_slice(&a[..first]);
        buf[first..n].copy_from_slice(&b[..n - first]);
        s.bytes.drain(..n);
        let writer = if std::mem::take(&mut s.starved) { s.writer.clone() } else { None };
        drop(s);
        if let Some(w) = writer {
            w.notify();
        }
        Ok(n)
    }

    fn attach(&mut self, notify: &Arc<Notify>) {
        self.rx.state.lock().reader = Some(Arc::clone(notify));
        self.tx.state.lock().writer = Some(Arc::clone(notify));
        // What arrived before the reader was known has not woken anybody.
        notify.notify();
    }
}

impl Drop for MemLink {
    fn drop(&mut self) {
        for p in [&self.tx, &self.rx] {
            let mut s = p.state.lock();
            s.closed = true;
            let both = [s.reader.clone(), s.writer.clone()];
            drop(s);
            for n in both.into_iter().flatten() {
                n.notify();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn would_block(r: &io::Result<usize>) -> bool {
        matches!(r, Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }

    fn exercise(mut a: impl Link, mut b: impl Link) {
        let mut buf = [0u8; 64];
        assert!(would_block(&b.read(&mut buf)));
        assert_eq!(a.write(b"head", b"body").unwrap(), 8);
        let mut got = Vec::new();
        while got.len() < 8 {
            if let Ok(n) = b.read(&mut buf[..3]) {
                got.extend_from_slice(&buf[..n]);
            }
        }
        assert_eq!(got, b"headbody");
        // Fill until it blocks, then drain.
        let chunk = vec![7u8; 100_000];
        let mut sent = 0;
        loop {
            let r = a.write(&[], &chunk);
            if would_block(&r) {
                break;
            }
            sent += r.unwrap();
        }
        let mut read = 0;
        let mut big = vec![0u8; 1 << 20];
        while read < sent {
            if let Ok(n) = b.read(&mut big) {
                assert!(big[..n].iter().all(|x| *x == 7));
                read += n;
            }
        }
        a.write(b"x", &[]).unwrap();
        drop(a);
        assert_eq!(b.read(&mut buf).unwrap(), 1);
        assert_eq!(b.read(&mut buf).unwrap(), 0);
    }

    #[test]
    fn links_are_byte_streams() {
        let (a, b) = MemLink::pair();
        exercise(a, b);
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        exercise(SocketLink::new(a).unwrap(), SocketLink::new(b).unwrap());
    }
}
