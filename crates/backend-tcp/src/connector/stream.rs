//! A non-blocking socket on which fixed-size messages are read.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// The longest message of a handshake.
const LONGEST: usize = 64;

/// A connection that is in its handshake. Reads no byte beyond the message that is expected next.
pub(super) struct Stream {
    socket: TcpStream,
    buf: [u8; LONGEST],
    got: usize,
}

impl Stream {
    /// Takes a non-blocking socket.
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, buf: [0; LONGEST], got: 0 }
    }

    /// Begins to connect.
    pub(super) fn connect(addr: SocketAddr) -> std::io::Result<Self> {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&fd, &addr) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(Self::new(fd.into())),
            Err(e) => Err(e.into()),
        }
    }

    /// How connecting has ended; asked when the socket can be written to.
    pub(super) fn connected(&self) -> std::io::Result<()> {
        sockopt::socket_error(&self.socket)??;
        // While nobody listens on a local port, connecting to it can meet itself.
        if self.socket.local_addr()? == self.socket.peer_addr()? {
            return Err(IoKind::ConnectionRefused.into());
        }
        // Small messages must not wait for each other.
        let _ = sockopt::set_tcp_nodelay(&self.socket, true);
        Ok(())
    }

    /// The next message of `N` bytes; `None` when it is not complete yet.
    pub(super) fn read<const N: usize>(&mut self) -> Result<Option<[u8; N]>, String> {
        const { assert!(N <= LONGEST) };
        while self.got < N {
            match self.socket.read(&mut self.buf[self.got..N]) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
        self.got = 0;
        let mut message = [0; N];
        message.copy_from_slice(&self.buf[..N]);
        Ok(Some(message))
    }

    /// Writes a message. A new connection has room for the few bytes of a handshake; if not, it is of no use.
    pub(super) fn write(&mut self, message: &[u8]) -> Result<(), String> {
        loop {
            match self.socket.write(message) {
                Ok(n) if n == message.len() => return Ok(()),
                Ok(_) => return Err("it takes no data".into()),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    pub(super) fn into_socket(self) -> TcpStream {
        self.socket
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
