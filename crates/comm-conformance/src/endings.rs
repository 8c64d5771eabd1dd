//! Calls that are to fail, and what there is afterwards: children that do not come about, that are called off, that somebody
//! misses; survivors and new memberships.

use std::time::Duration;

use comm_core::{CallOptions, Communicator, ErrorKind, Result, op};

/// What has to be waited for a rank that does not come.
const SHORT: Duration = Duration::from_millis(300);

/// The communicator works.
fn works(comm: &Communicator, timeout: Duration, what: &str, wrong: &mut Vec<String>) -> Result<()> {
    let n = comm.size() as i64;
    let mut x = [comm.rank() as i64 + 1; 3];
    comm.with(CallOptions::new().timeout(timeout)).all_reduce(&mut x, op::Sum)?;
    if x != [n * (n + 1) / 2; 3] {
        wrong.push(format!("{what}: a sum over {n} ranks is {x:?}"));
    }
    Ok(())
}

/// Notes a result that is not the error that was to come.
fn expect(wrong: &mut Vec<String>, what: &str, got: Result<()>, right: impl Fn(&ErrorKind) -> bool) {
    match got {
        Err(e) if right(e.kind()) => {}
        Err(e) => wrong.push(format!("{what} gave another error: {e}")),
        Ok(()) => wrong.push(format!("{what} went well")),
    }
}

/// Lists that do not fit together, and one that is bad in itself: an error on all ranks, and the parent goes on.
pub(crate) fn misfits(comm: &Communicator, seed: u64, timeout: Duration, wrong: &mut Vec<String>) -> Result<()> {
    let (n, me, odd) = (comm.size(), comm.rank(), seed as usize % comm.size());
    let all: Vec<usize> = (0..n).collect();
    let invalid = |k: &ErrorKind| matches!(k, ErrorKind::InvalidArgument { .. });
    let refused = |k: &ErrorKind| matches!(k, ErrorKind::PeerRefused { rank, .. } if *rank == odd);
    if n > 1 {
        // Each rank is in two lists; among two, in two orders.
        let pair = [me, (me + 1) % n];
        expect(wrong, "lists that overlap", comm.split(&pair, "pair").map(drop), invalid);
        let name = if me == odd { "odd" } else { "even" };
        expect(wrong, "names that differ", comm.split(&all, name).map(drop), invalid);
        let without: Vec<usize> = all.iter().copied().filter(|r| *r != odd).collect();
        let mine: &[usize] = if me == odd { &[] } else { &all };
        expect(wrong, "a member that passes nothing", comm.split(mine, "all").map(drop), invalid);
        if comm.split(if me == odd { &[] } else { &without }, "fits")?.is_some() == (me == odd) {
            wrong.push(format!("a child without rank {odd} exists on the wrong ranks"));
        }
    }
    let bad = [n];
    let got = comm.split(if me == odd { &bad } else { &all }, "bad").map(drop);
    expect(wrong, "a rank out of range", got, |k| if me == odd { invalid(k) } else { refused(k) });
    let work = (me == odd).then(|| comm.recv_async(vec![0u8; 3], odd)).transpose()?;
    let got = comm.dup("with open work").map(drop);
    expect(wrong, "a split with open work", got, |k| if me == odd { invalid(k) } else { refused(k) });
    if let Some(work) = work {
        comm.with(CallOptions::new().timeout(timeout)).send(&[1u8, 2, 3], odd)?;
        work.wait()?;
    }
    works(comm, timeout, "the parent after splits that failed", wrong)
}

/// A child is called off on one rank; its members find together again, and the parent has heard nothing.
pub(crate) fn called_off(comm: &Communicator, seed: u64, timeout: Duration, wrong: &mut Vec<String>) -> Result<()> {
    let (n, odd) = (comm.size(), seed as usize % comm.size());
    let child = comm.dup("called off")?;
    if comm.rank() == odd {
        child.abort("the suite calls it off");
    }
    let by = |k: &ErrorKind| matches!(k, ErrorKind::Aborted { rank, cause } if *rank == odd && cause.contains("calls it off"));
    let got = child.with(CallOptions::new().timeout(timeout)).barrier();
    // Alone there is nobody to wait for, but it is over all the same.
    expect(wrong, "a barrier of a child that was called off", got, by);
    expect(wrong, "its cause", child.cause().map_or(Ok(()), Err), by);
    let again = child.shrink(timeout)?;
    if (again.rank(), again.size()) != (comm.rank(), n) {
        wrong.push(format!("rank {} of {n} survives as {} of {}", comm.rank(), again.rank(), again.size()));
    }
    works(&again, timeout, "the survivors", wrong)?;
    works(comm, timeout, "the parent of a child that was called off", wrong)?;
    again.finalize(timeout)
}

/// A rank does not come to a monitored barrier of a child: all others name it, and it gets an error when it comes.
pub(crate) fn missed(comm: &Communicator, seed: u64, timeout: Duration, wrong: &mut Vec<String>) -> Result<()> {
    let (n, odd) = (comm.size(), seed as usize % comm.size());
    let child = comm.dup("missed")?;
    child.monitored_barrier(timeout)?;
    if n > 1 {
        if comm.rank() != odd {
            // On a machine that is busy others may be late as well.
            let named = |k: &ErrorKind| matches!(k, ErrorKind::Timeout { missing, .. } if missing.contains(&odd));
            expect(wrong, "a barrier to which a rank does not come", child.monitored_barrier(SHORT), named);
        }
        works(comm, timeout, "the parent meanwhile", wrong)?;
        if comm.rank() == odd {
            let told = |k: &ErrorKind| matches!(k, ErrorKind::Aborted { .. } | ErrorKind::Timeout { .. });
            expect(wrong, "the late rank's barrier", child.monitored_barrier(timeout), told);
        }
    }
    works(comm, timeout, "the parent of a child that somebody missed", wrong)
}

/// A child's members form a new communicator, in another order; the old one is stale.
pub(crate) fn regrouped(comm: &Communicator, seed: u64, timeout: Duration, wrong: &mut Vec<String>) -> Result<()> {
    let (n, me) = (comm.size(), comm.rank());
    let w = comm.with(CallOptions::new().timeout(timeout));
    let child = comm.dup("regrouped")?;
    let own = child.init_handle()?.into_bytes();
    let mut lengths = vec![0u64; n];
    w.all_gather(&[own.len() as u64], &mut lengths)?;
    let most = lengths.iter().copied().max().unwrap_or(0) as usize;
    let mut padded = own;
    padded.resize(most, 0);
    let mut all = vec![0u8; most * n];
    w.all_gather(&padded, &mut all)?;
    let read = |(bytes, len): (&[u8], &u64)| String::from_utf8_lossy(&bytes[..*len as usize]).into_owned();
    let mut handles: Vec<String> = all.chunks(most.max(1)).zip(&lengths).map(read).collect();
    handles.reverse();
    let new = child.reconfigure(seed, handles, timeout, &[])?;
    if (new.rank(), new.size()) != (n - 1 - me, n) || new.generation() <= child.generation() {
        let place = (new.rank(), new.size(), new.generation());
        wrong.push(format!("rank {me} of {n} has become (rank, size, generation) {place:?}"));
    }
    works(&new, timeout, "the new membership", wrong)?;
    let stale = |k: &ErrorKind| matches!(k, ErrorKind::StaleGeneration { .. });
    expect(wrong, "a call of the old membership", child.barrier(), stale);
    new.finalize(timeout)?;
    works(comm, timeout, "the parent of a child with another membership", wrong)
}

#[cfg(test)]
mod tests {
    use comm_core::Error;

    use super::*;

    #[test]
    fn complaints_say_what_went_otherwise() {
        let mut wrong = Vec::new();
        expect(&mut wrong, "x", Ok(()), |_| true);
        expect(&mut wrong, "y", Err(Error::invalid("z")), |_| false);
        expect(&mut wrong, "z", Err(Error::invalid("z")), |_| true);
        assert!(wrong.len() == 2 && wrong[0].contains("went well") && wrong[1].contains("another error"), "{wrong:?}");
    }
}
