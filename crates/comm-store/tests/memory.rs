//! The process's memory stays bounded whatever comes in. Alone in its file, because other tests
//! would be measured, too.

mod common;

use std::io::Write;

use common::{Raw, hex, still_serves};

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
fn hostile_input_does_not_grow_the_process() {
    let server = comm_store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let part = vec![7; 256 << 10];
    let round = || {
        for head in [
            // An announced value of 8 MiB of which 256 KiB come; the same in a pair of 131,072; garbage.
            "00 cef7853c 01 0100000000000000 6b 0000800000000000",
            "00 cef7853c 0b 0000020000000000 0100000000000000 6b 0000800000000000",
            "00 cef7853c 06 0000020000000000 0010000000000000",
            "00 cef7853c 01 0100000000000000 6b 0000900000000000",
            "47",
        ] {
            let mut c = Raw::silent(server.local_addr());
            let _ = c.0.write_all(&hex(head)).and_then(|()| c.0.write_all(&part));
        }
        still_serves(&server);
    };
    (0..20).for_each(|_| round());
    let before = resident();
    (0..100).for_each(|_| round());
    let grown = resident().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes more after 500 hostile connections");
}
