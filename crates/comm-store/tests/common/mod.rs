//! What the tests share.
#![allow(dead_code, unreachable_pub)] // Each test file uses its part.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use comm_core::Store;
use comm_store::{TcpStore, TcpStoreServer};

/// Long enough for a loaded machine; nothing should take as long.
pub const LONG: Duration = Duration::from_secs(30);

/// The bytes of `text`, hex digits with blanks between.
pub fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).unwrap()).collect();
    digits.chunks(2).map(|d| (d[0] * 16 + d[1]) as u8).collect()
}

/// A connection without a client library.
pub struct Raw(pub TcpStream);

impl Raw {
    pub fn silent(addr: SocketAddr) -> Self {
        let s = TcpStream::connect(addr).unwrap();
        s.set_read_timeout(Some(LONG)).unwrap();
        s.set_write_timeout(Some(LONG)).unwrap();
        s.set_nodelay(true).unwrap();
        Self(s)
    }

    pub fn new(addr: SocketAddr) -> Self {
        let mut s = Self::silent(addr);
        s.say("00 cef7853c 0d 39300000");
        s.hear("39300000");
        s
    }

    pub fn say(&mut self, text: &str) {
        self.0.write_all(&hex(text)).unwrap();
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub fn hear(&mut self, text: &str) {
        let want = hex(text);
        let mut got = vec![0; want.len()];
        self.0.read_exact(&mut got).unwrap();
        assert_eq!(got, want);
    }

    /// Waits until the server has closed this connection, and says what it had said before.
    pub fn closed(mut self) -> Vec<u8> {
        let (mut said, mut buf) = (Vec::new(), [0; 4096]);
        loop {
            match self.0.read(&mut buf) {
                Ok(0) => return said,
                Ok(n) => said.extend(&buf[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return said,
                Err(e) => panic!("not closed: {e}"),
            }
        }
    }
}

/// Whether the server still serves.
pub fn still_serves(server: &TcpStoreServer) {
    let good = TcpStore::connect(server.local_addr(), LONG).unwrap();
    let n = good.add("good", 1).unwrap();
    assert_eq!(good.get("good", LONG).unwrap(), n.to_string().into_bytes());
}

/// Waits until `f`.
pub fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An empty directory, which goes away with this.
pub struct Shared(pub PathBuf);

impl Shared {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("rustcomms-store-{}-{n}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
