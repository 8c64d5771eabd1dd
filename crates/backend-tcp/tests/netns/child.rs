//! What the processes play: a rank, or the store.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, op};
use comm_store::TcpStoreServer;

use super::netns::{PORT, SCENE};

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

/// Plays a scene if this process is a child, and never comes back then.
pub(crate) fn play() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    // A child must not outlive the test: it ends with its standard input.
    std::thread::spawn(|| {
        while matches!(std::io::stdin().read(&mut [0u8; 1]), Ok(1)) {}
        std::process::exit(99);
    });
    match scene.as_str() {
        "rank" => rank(),
        "store" => {
            let _server = TcpStoreServer::bind((Ipv6Addr::UNSPECIFIED, PORT)).unwrap();
            say("READY");
            // Until the standard input ends.
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        other => panic!("no scene {other}"),
    }
    std::process::exit(0);
}

fn rank() {
    let t = Instant::now();
    let timeout = Duration::from_secs(30);
    let comm = backend_tcp::connect(CommOptions::new().timeout(timeout).bootstrap_timeout(timeout)).unwrap();
    say(&format!("JOINED {}", t.elapsed().as_millis()));
    say(&format!("LOCAL {}", comm.local_size()));
    // Hosts may have one name: here all have.
    let here = comm.split_by_host("here").unwrap();
    assert_eq!((here.rank(), here.size()), (comm.local_rank(), comm.local_size()));
    let n = comm.size();
    let mut x = vec![comm.rank() as f32 + 1.0; 100_000];
    comm.all_reduce(&mut x, op::Sum).unwrap();
    let want = (n * (n + 1) / 2) as f32;
    assert!(x.iter().all(|v| *v == want), "the sum is {}, not {want}", x[0]);
    // Every pair has something to say to each other, so all connections that there can be are there.
    let send: Vec<u64> = (0..n).map(|r| (comm.rank() * n + r) as u64).collect();
    let mut got = vec![0u64; n];
    comm.all_to_all(&send, &mut got).unwrap();
    assert!(got.iter().enumerate().all(|(r, v)| *v == (r * n + comm.rank()) as u64), "{got:?}");
    for c in sockets().unwrap() {
        match c {
            Conn { state: LISTEN, own: (ip, PORT), .. } => say(&format!("LISTEN {ip}")),
            Conn { state: ESTABLISHED, own, peer } if own.1 != PORT && peer.1 != PORT => {
                say(&format!("DATA {} {}", own.0, peer.0));
            }
            _ => {}
        }
    }
    // Nobody leaves before all have looked.
    comm.barrier().unwrap();
    comm.finalize(Duration::from_secs(20)).unwrap();
    say("DONE");
}

/// States in the kernel's tables.
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;

struct Conn {
    state: u8,
    own: (IpAddr, u16),
    peer: (IpAddr, u16),
}

/// This process's TCP sockets, from the kernel's tables.
fn sockets() -> std::io::Result<Vec<Conn>> {
    let mut inodes = Vec::new();
    for fd in std::fs::read_dir("/proc/self/fd")? {
        // The descriptor of the folder itself is closed by then.
        let Ok(target) = std::fs::read_link(fd?.path()) else { continue };
        if let Some(inode) = target.to_string_lossy().strip_prefix("socket:[").and_then(|t| t.strip_suffix(']')) {
            inodes.push(inode.to_owned());
        }
    }
    let mut found = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if inodes.iter().any(|i| i == words[9]) {
                let state = u8::from_str_radix(words[3], 16).unwrap();
                found.push(Conn { state, own: address(words[1]), peer: address(words[2]) });
            }
        }
    }
    Ok(found)
}

/// `0100007F:1F90`: words of 32 bits as they lie in memory.
fn address(text: &str) -> (IpAddr, u16) {
    let (ip, port) = text.split_once(':').unwrap();
    let bytes: Vec<u8> =
        (0..ip.len()).step_by(8).flat_map(|i| u32::from_str_radix(&ip[i..i + 8], 16).unwrap().to_ne_bytes()).collect();
    let ip = match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(v4) => IpAddr::V4(Ipv4Addr::from(v4)),
        Err(_) => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.as_slice()).unwrap())),
    };
    (ip.to_canonical(), u16::from_str_radix(port, 16).unwrap())
}
