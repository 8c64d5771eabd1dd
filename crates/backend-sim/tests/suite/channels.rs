//! No channel blocks another: messages that nobody has asked for stay where they are while everything else
//! goes on, and do not pile up at the receiver.

use comm_core::{Communicator, Result, op, wait_all};

use super::values::mix;
use super::{END, Rank, same};

const BIG: usize = 64 << 20;

/// Resident bytes of this process.
pub fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn grown(since: u64) -> u64 {
    resident().saturating_sub(since)
}

fn reductions(comm: &Communicator, calls: usize) -> Result<()> {
    for k in 0..calls {
        let count = [1usize, 1000, 20_000][k % 3];
        let mut x = vec![(comm.rank() + k) as u64; count];
        comm.all_reduce(&mut x, op::Sum)?;
        let want = (0..comm.size()).map(|q| (q + k) as u64).sum::<u64>();
        assert!(x.iter().all(|v| *v == want), "call {k}");
    }
    Ok(())
}

fn big(seed: u8) -> Vec<u8> {
    (0..BIG).map(|i| (i >> 12) as u8 ^ i as u8 ^ seed).collect()
}

/// `bounded`: this process is one rank alone, so that its memory is the rank's.
pub fn unposted_large(r: &Rank<'_>, bounded: bool) -> Result<()> {
    if r.n < 2 {
        return Ok(());
    }
    reductions(r.comm, 9)?;
    let sent = if r.me == 0 { Some(r.comm.send_async(big(1), 1)?) } else { None };
    r.comm.barrier()?;
    let before = resident();
    reductions(r.comm, 100)?;
    if bounded && r.me == 1 {
        let g = grown(before);
        assert!(g < 24 << 20, "grew by {g} bytes before the receive was posted");
    }
    if let Some(w) = &sent {
        assert!(!w.is_completed(), "nobody has taken the message");
    }
    if r.me == 1 {
        let mut x = vec![0u8; BIG];
        r.comm.recv(&mut x, 0)?;
        same(&x, &big(1), &|| "64 MiB".into());
        if bounded {
            // The buffer itself and what it is compared with (freed again).
            let g = grown(before);
            assert!(g < (BIG as u64) + (24 << 20) + BIG as u64, "grew by {g} bytes");
        }
    }
    if let Some(w) = sent {
        assert_eq!(w.wait()?.len(), BIG);
    }
    r.comm.barrier()
}

/// The messages of one communicator do not hold up the calls of another, in both directions at once.
pub fn crossed(r: &Rank<'_>, make: &dyn Fn(&str) -> Result<Communicator>) -> Result<()> {
    if r.n < 2 {
        return Ok(());
    }
    let (a, b) = (make("a")?, make("b")?);
    // One direction.
    if r.me == 0 {
        let w = a.send_async(big(2), 1)?;
        reductions(&b, 50)?;
        w.wait()?;
    } else {
        reductions(&b, 50)?;
        if r.me == 1 {
            let mut x = vec![0u8; BIG];
            a.recv(&mut x, 0)?;
            same(&x, &big(2), &|| "crossed".into());
        }
    }
    // Both directions: each of the two has its message out on one communicator and works on the other.
    let (other, mine, theirs) = if r.me == 0 { (1, &a, &b) } else { (0, &b, &a) };
    if r.me < 2 {
        let w = mine.send_async(big(3 + r.me as u8), other)?;
        reductions(&a, 20)?;
        reductions(&b, 20)?;
        let mut x = vec![0u8; BIG];
        theirs.recv(&mut x, other)?;
        same(&x, &big(3 + other as u8), &|| "crossed both ways".into());
        w.wait()?;
    } else {
        reductions(&a, 20)?;
        reductions(&b, 20)?;
    }
    a.finalize(END)?;
    b.finalize(END)
}

/// Many small messages that are received late and in order.
pub fn unposted_small(r: &Rank<'_>, bounded: bool) -> Result<()> {
    const MESSAGES: usize = 10_000;
    if r.n < 2 {
        return Ok(());
    }
    let make = |k: usize| -> Vec<u64> { (0..128).map(|i| mix(k, i, 81)).collect() };
    reductions(r.comm, 9)?;
    r.comm.barrier()?;
    let before = resident();
    let sent = if r.me == 0 {
        (0..MESSAGES).map(|k| r.comm.send_async(make(k), 1)).collect::<Result<Vec<_>>>()?
    } else {
        Vec::new()
    };
    reductions(r.comm, 100)?;
    if bounded && r.me == 1 {
        let g = grown(before);
        assert!(g < 24 << 20, "grew by {g} bytes before the receives were posted");
    }
    if r.me == 1 {
        let mut x = vec![0u64; 128];
        for k in 0..MESSAGES {
            r.comm.recv(&mut x, 0)?;
            same(&x, &make(k), &|| format!("small message {k}"));
        }
    }
    wait_all(sent)?;
    r.comm.barrier()
}
