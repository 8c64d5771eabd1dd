//! Two ranks over loopback: our `all_reduce` beside a bare exchange of the same bytes, in the same run.
//!
//! The peer is two processes that each write `bytes` to the other and read `bytes` from it, spinning on
//! non-blocking sockets, without framing, reduction or checks. For
//! small messages that is the least that sockets can do; for long ones it is not: it writes and reads in the order that comes
//! to mind, and ours has been faster. `cargo run --release -p benches --bin loopback`.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use benches::{median, pin, time};
use rustcomms::{CommOptions, Communicator, Result, launch, op};

const ROUNDS: usize = 11;

fn main() -> Result<ExitCode> {
    if !launch::is_rank() {
        return launch::spawn_local(2);
    }
    let comm = rustcomms::connect(CommOptions::new().name("loopback"))?;
    pin(comm.rank());
    let mut bare = connect_bare(&comm)?;
    if comm.rank() == 0 {
        println!(
            "# all_reduce of f32 over 2 ranks, sockets on loopback; bare: plain exchange of the same bytes; medians of {ROUNDS} interleaved rounds"
        );
        println!(
            "{:>10} {:>12} {:>12} {:>8} {:>12} {:>8}",
            "bytes", "bare us", "ours us", "ratio", "async us", "ratio"
        );
    }
    for bytes in [8usize, 1 << 10, 64 << 10, 1 << 20, 16 << 20] {
        let n = (200 << 20 >> bytes.ilog2().max(14)).clamp(5, 2000) as u32;
        let (mut f, mut o, mut a) = (Vec::new(), Vec::new(), Vec::new());
        let mut x = vec![0f32; bytes / 4];
        let (tx, mut rx) = (vec![1u8; bytes], vec![0u8; bytes]);
        for _ in 0..ROUNDS {
            comm.barrier()?;
            f.push(time(n, || exchange(&mut bare, &tx, &mut rx)));
            comm.barrier()?;
            let mut failed = Ok(());
            o.push(time(n, || failed = failed.clone().and_then(|()| comm.all_reduce(&mut x, op::Max))));
            failed?;
            comm.barrier()?;
            let mut y = Some(std::mem::take(&mut x));
            let mut failed = Ok(());
            a.push(time(n, || {
                if let Some(v) = y.take() {
                    match comm.all_reduce_async(v, op::Max).and_then(rustcomms::Work::wait) {
                        Ok(v) => y = Some(v),
                        Err(e) => failed = Err(e),
                    }
                }
            }));
            failed?;
            x = y.unwrap_or_default();
        }
        if comm.rank() == 0 {
            let (f, o, a) = (us(median(f)), us(median(o)), us(median(a)));
            println!("{bytes:>10} {f:>12.2} {o:>12.2} {:>8.2} {a:>12.2} {:>8.2}", o / f, a / f);
        }
    }
    comm.finalize(Duration::from_secs(10))?;
    Ok(ExitCode::SUCCESS)
}

fn us(d: Duration) -> f64 {
    d.as_secs_f64() * 1e6
}

/// A bare socket between the two ranks.
fn connect_bare(comm: &Communicator) -> Result<TcpStream> {
    let io = |e: std::io::Error| rustcomms::Error::io("the bare socket", &e);
    let mut port = [0u16];
    let s = if comm.rank() == 0 {
        let l = TcpListener::bind("127.0.0.1:0").map_err(io)?;
        port[0] = l.local_addr().map_err(io)?.port();
        comm.broadcast(&mut port[..], 0)?;
        l.accept().map_err(io)?.0
    } else {
        comm.broadcast(&mut port[..], 0)?;
        TcpStream::connect(("127.0.0.1", port[0])).map_err(io)?
    };
    s.set_nodelay(true).map_err(io)?;
    s.set_nonblocking(true).map_err(io)?;
    Ok(s)
}

fn exchange(s: &mut TcpStream, tx: &[u8], rx: &mut [u8]) {
    let (mut sent, mut got) = (0, 0);
    while sent < tx.len() || got < rx.len() {
        if sent < tx.len() {
            let part = &tx[sent..(sent + (512 << 10)).min(tx.len())];
            match s.write(part) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => panic!("{e}"),
            }
        }
        if got < rx.len() {
            match s.read(&mut rx[got..]) {
                Ok(0) => panic!("closed"),
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => panic!("{e}"),
            }
        }
    }
}
