//! Point-to-point messages and barriers.

use std::time::{Duration, SystemTime};

use comm_core::{CallOptions, Operation, Result};

use crate::buffer::{Guarded, Lend};
use crate::case::Form;
use crate::exec::{Ctx, Seen, block_on, call, lent};
use crate::kind::Item;
use crate::layout::layout;

/// How long the late rank of a barrier keeps the others waiting, and what clocks may be apart.
const LATE: Duration = Duration::from_millis(12);
const SKEW: Duration = Duration::from_millis(4);

/// The tags of the two messages that a batch sends to each rank.
const TAGS: [u32; 2] = [0, 5];

/// Runs a case of sends or receives.
pub(crate) fn run<T: Item>(x: &Ctx<'_>) -> Result<Seen> {
    let (n, me, root) = (x.comm.size(), x.comm.rank(), x.case.root);
    let (dst, src) = ((me + root) % n, (me + n - root % n) % n);
    let l = layout(x.case, n, me);
    let (i, o): (Guarded<T>, Guarded<T>) = (x.one(l.input.as_deref()), x.one(l.output.as_deref()));
    // The other half of the exchange is asynchronous: it is there before this half waits for it.
    let (i, o) = if x.case.op == Operation::Send {
        let other = x.with().recv_async(o, src)?;
        let (i,) = call!(x, send, send_async, [ref i], dst);
        (i, other.wait()?)
    } else {
        let other = x.with().send_async(i, dst)?;
        let (o,) = call!(x, recv, recv_async, [mut o], src);
        (other.wait()?, o)
    };
    let mut seen = Seen::default();
    x.check("input", &[i], l.input.as_deref(), &mut seen);
    x.check("output", &[o], l.output.as_deref(), &mut seen);
    Ok(seen)
}

/// Two messages from every rank to every rank, itself included.
pub(crate) fn batch<T: Item>(x: &Ctx<'_>) -> Result<Seen> {
    let (n, me) = (x.comm.size(), x.comm.rank());
    let l = layout(x.case, n, me);
    let (mut i, mut o): (Vec<Guarded<T>>, Vec<Guarded<T>>) = (x.many(l.input.as_deref()), x.many(l.output.as_deref()));
    let sends_first = me.is_multiple_of(2);
    // Index of a message, its peer and its tag. Tags are not added in the same order everywhere.
    let order: Vec<(usize, usize, u32)> = (0..n)
        .flat_map(|p| TAGS.into_iter().enumerate().map(move |(t, tag)| (2 * p + t, p, tag)))
        .map(|m| if me % 3 == 1 { (m.0 ^ 1, m.1, TAGS[usize::from(m.2 == TAGS[0])]) } else { m })
        .collect();
    match x.case.form {
        Form::Sync | Form::Dynamic | Form::Scoped => {
            let mut outs: Vec<Option<&mut [T]>> = o.iter_mut().map(|b| Some(b.slice_mut())).collect();
            let ins: Vec<&[T]> = i.iter().map(Guarded::slice).collect();
            macro_rules! fill {
                ($b:ident) => {
                    for sends in [sends_first, !sends_first] {
                        for (k, peer, tag) in &order {
                            $b = $b.tag(*tag);
                            if sends {
                                $b = $b.send(ins[*k], *peer)?;
                            } else if let Some(out) = outs[*k].take() {
                                $b = $b.recv(out, *peer)?;
                            }
                        }
                    }
                };
            }
            if x.case.form == Form::Scoped {
                x.with().scope(|s| {
                    let mut b = s.batch();
                    fill!(b);
                    b.issue()?.wait()
                })?;
            } else {
                let mut b = x.with().batch();
                fill!(b);
                b.issue()?;
            }
        }
        form => {
            let homes = (form == Form::Dropped).then(|| (i.tether(), o.tether()));
            let mut b = x.with().batch_async();
            let (mut ins, mut outs): (Vec<_>, Vec<_>) =
                (i.into_iter().map(Some).collect(), o.into_iter().map(Some).collect());
            let (mut in_slots, mut out_slots) = (Vec::new(), Vec::new());
            for sends in [sends_first, !sends_first] {
                for (k, peer, tag) in &order {
                    b.tag(*tag);
                    if sends {
                        let Some(buf) = ins[*k].take() else { continue };
                        in_slots.push((*k, b.send(buf, *peer)?));
                    } else {
                        let Some(buf) = outs[*k].take() else { continue };
                        out_slots.push((*k, b.recv(buf, *peer)?));
                    }
                }
            }
            in_slots.sort_by_key(|s| s.0);
            out_slots.sort_by_key(|s| s.0);
            let work = b.issue()?;
            (i, o) = match homes {
                Some((i, o)) => {
                    drop(work);
                    x.comm.with(CallOptions::new().timeout(x.timeout)).barrier()?;
                    (x.fetch(i)?, x.fetch(o)?)
                }
                None => {
                    let mut back = if form == Form::Future { block_on(work, x.timeout)? } else { work.wait()? };
                    (
                        in_slots.into_iter().filter_map(|(_, s)| back.take(s)).collect(),
                        out_slots.into_iter().filter_map(|(_, s)| back.take(s)).collect(),
                    )
                }
            };
        }
    }
    let mut seen = Seen::default();
    x.check("input", &i, l.input.as_deref(), &mut seen);
    x.check("output", &o, l.output.as_deref(), &mut seen);
    Ok(seen)
}

/// One rank comes late; nobody may have left before it came.
pub(crate) fn barrier(x: &Ctx<'_>) -> Result<Seen> {
    let (n, me) = (x.comm.size(), x.comm.rank());
    if x.case.seed as usize % n == me && n > 1 {
        std::thread::sleep(LATE);
    }
    let entered = now();
    match x.case.form {
        Form::Sync | Form::Dynamic => x.with().barrier()?,
        Form::Async => x.with().barrier_async()?.wait()?,
        Form::Future => block_on(x.with().barrier_async()?, x.timeout)?,
        Form::Scoped => x.with().scope(|s| s.barrier()?.wait())?,
        Form::Dropped => {
            drop(x.with().barrier_async()?);
            x.comm.with(CallOptions::new().timeout(x.timeout)).barrier()?;
        }
    }
    let left = now();
    let mut seen = Seen::default();
    let hosts = x.comm.hosts();
    // Clocks of several hosts cannot be compared.
    if hosts.iter().all(|h| *h == hosts[0])
        && let Some(all) = told(x, entered)
        && let Some((rank, late)) = all.into_iter().enumerate().find(|(_, t)| *t > left + SKEW.as_nanos() as u64)
    {
        let early = Duration::from_nanos(late - left);
        seen.complaints.push(format!("the barrier let this rank go {early:?} before rank {rank} had come"));
    }
    Ok(seen)
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Everybody's number, if there is a way to learn it.
fn told(x: &Ctx<'_>, mine: u64) -> Option<Vec<u64>> {
    if let Ok(control) = x.comm.control() {
        let all = control.exchange(&mine.to_le_bytes(), x.timeout).ok()?;
        return all.iter().map(|b| Some(u64::from_le_bytes(b.as_slice().try_into().ok()?))).collect();
    }
    let mut all = vec![0; x.comm.size()];
    x.comm.with(CallOptions::new().timeout(x.timeout)).all_gather(&[mine], &mut all).ok()?;
    Some(all)
}
