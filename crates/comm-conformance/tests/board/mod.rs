//! A small backend of a stranger's: N ranks in one process, bytes exchanged through one board, safe code only. It does
//! what `expected/example.toml` says.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{
    BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Communicator, DType, Device, Error, ErrorKind, HostBackend,
    OpDesc, OpQuery, Operation, RealClock, ReduceOp, Reducer, Result, Support, host_backend,
};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// What one rank puts on the board for a call: bytes, or why it does not.
type Note = std::result::Result<Vec<u8>, (usize, String)>;

#[derive(Debug, Default)]
struct State {
    /// By call and rank.
    notes: HashMap<(u64, usize), Note>,
    /// Ranks that are done with a call.
    left: HashMap<u64, usize>,
    /// By source, destination, tag and number.
    letters: HashMap<(usize, usize, u32, u64), Note>,
    failed: Option<Error>,
    finalized: usize,
}

#[derive(Debug, Default)]
struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct Board {
    info: BackendInfo,
    world: Arc<World>,
    clock: Arc<dyn Clock>,
}

/// The communicators of a world.
pub(crate) fn world(size: usize) -> Result<Vec<Communicator>> {
    let world = Arc::new(World::default());
    let one = |rank| {
        let info = BackendInfo::new("board", rank, size);
        let board = Board { info, world: Arc::clone(&world), clock: Arc::new(RealClock) };
        Communicator::from_backend(host_backend(board), Device::CPU, CommOptions::new().name("board"))
    };
    (0..size).map(one).collect()
}

impl Board {
    fn wait<T>(
        &self,
        s: &mut MutexGuard<'_, State>,
        timeout: Duration,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(found) = ready(s) {
                return Ok(found);
            }
            if let Some(e) = &s.failed {
                return Err(e.clone());
            }
            if self.world.changed.wait_until(s, until).timed_out() {
                return Err(Error::new(ErrorKind::Aborted { rank: self.info.rank, cause: "timed out".into() }));
            }
        }
    }

    fn leave(&self, s: &mut State, seq: u64) {
        let left = s.left.entry(seq).or_default();
        *left += 1;
        if *left == self.info.size {
            s.left.remove(&seq);
            s.notes.retain(|(of, _), _| *of != seq);
        }
    }

    /// Everybody's bytes, in rank order.
    fn exchange(&self, mine: &[u8], call: &CallInfo<'_>) -> Result<Vec<Vec<u8>>> {
        let (seq, n) = (call.seq, self.info.size);
        let mut s = self.world.state.lock();
        s.notes.insert((seq, self.info.rank), Ok(mine.to_vec()));
        self.world.changed.notify_all();
        let all = self.wait(&mut s, call.timeout, |s| {
            let there: Option<Vec<&Note>> = (0..n).map(|r| s.notes.get(&(seq, r))).collect();
            there.map(|notes| notes.into_iter().cloned().collect::<std::result::Result<Vec<_>, _>>())
        })?;
        self.leave(&mut s, seq);
        all.map_err(|(rank, reason)| Error::new(ErrorKind::PeerRefused { rank, reason }))
    }

    fn reduced(&self, data: &[u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<Vec<u8>> {
        let mut mine = data.to_vec();
        reducer.prescale(&mut mine);
        let mut all = self.exchange(&mine, call)?.into_iter();
        let mut acc = all.next().unwrap_or_default();
        all.for_each(|mut x| reducer.fold(&mut acc, &mut x));
        reducer.finish(&mut acc, self.info.size);
        Ok(acc)
    }

    /// Cuts what each rank sent to all into its blocks, and keeps those for this rank.
    fn dealt(&self, all: &[Vec<u8>], lengths: impl Fn(usize) -> (usize, usize)) -> Vec<u8> {
        let mine = |(r, sent): (usize, &Vec<u8>)| {
            let (at, len) = lengths(r);
            sent[at..at + len].to_vec()
        };
        all.iter().enumerate().flat_map(mine).collect()
    }

    fn note(&self, text: &str) -> Note {
        Err((self.info.rank, text.to_owned()))
    }
}

fn start(lengths: &[usize], rank: usize) -> usize {
    lengths[..rank].iter().sum()
}

fn is_left_out(op: Operation, dtype: Option<DType>, redop: Option<ReduceOp>) -> bool {
    let tiny = matches!(dtype, Some(DType::E4M3 | DType::E5M2));
    match op {
        Operation::Scan | Operation::Exscan | Operation::Split => true,
        Operation::AllReduce => tiny && redop == Some(ReduceOp::Avg),
        _ => false,
    }
}

impl HostBackend for Board {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, q: &OpQuery) -> Support {
        if is_left_out(q.operation, q.dtype, q.redop) {
            return Support::Unsupported { reason: "left out on purpose".into() };
        }
        Support::Native
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn send(&self, data: &[u8], peer: usize, tag: u32, seq: u64, _: &CallInfo<'_>) -> Result<()> {
        self.world.state.lock().letters.insert((self.info.rank, peer, tag, seq), Ok(data.to_vec()));
        self.world.changed.notify_all();
        Ok(())
    }

    fn recv(&self, data: &mut [u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let mut s = self.world.state.lock();
        let letter = (peer, self.info.rank, tag, seq);
        match self.wait(&mut s, call.timeout, |s| s.letters.remove(&letter))? {
            Ok(bytes) => data.copy_from_slice(&bytes),
            Err((rank, reason)) => return Err(Error::new(ErrorKind::PeerRefused { rank, reason })),
        }
        Ok(())
    }

    fn broadcast(&self, data: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.exchange(if self.info.rank == root { data } else { &[] }, call)?;
        data.copy_from_slice(&all[root]);
        Ok(())
    }

    fn all_reduce(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        if is_left_out(Operation::AllReduce, Some(reducer.dtype()), Some(reducer.op())) {
            return Err(self.lacks(call));
        }
        data.copy_from_slice(&self.reduced(data, reducer, call)?);
        Ok(())
    }

    fn reduce(&self, data: &mut [u8], reducer: &Reducer, root: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.reduced(data, reducer, call)?;
        if self.info.rank == root {
            data.copy_from_slice(&all);
        }
        Ok(())
    }

    fn all_gather(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        output.copy_from_slice(&self.exchange(input, call)?.concat());
        Ok(())
    }

    fn all_gather_v(&self, input: &[u8], output: &mut [u8], _: &[usize], call: &CallInfo<'_>) -> Result<()> {
        self.all_gather(input, output, call)
    }

    fn gather(&self, input: &[u8], output: Option<&mut [u8]>, _: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.exchange(input, call)?.concat();
        output.into_iter().for_each(|o| o.copy_from_slice(&all));
        Ok(())
    }

    fn gather_v(
        &self,
        input: &[u8],
        output: Option<(&mut [u8], &[usize])>,
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        self.gather(input, output.map(|o| o.0), root, call)
    }

    fn scatter(&self, input: Option<&[u8]>, output: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.exchange(input.unwrap_or_default(), call)?;
        let at = self.info.rank * output.len();
        output.copy_from_slice(&all[root][at..at + output.len()]);
        Ok(())
    }

    fn scatter_v(
        &self,
        input: Option<(&[u8], &[usize])>,
        output: &mut [u8],
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        // The lengths go before the blocks.
        let head = |l: &[usize]| l.iter().flat_map(|x| (*x as u64).to_le_bytes()).collect::<Vec<u8>>();
        let mine = input.map(|(data, lengths)| [head(lengths), data.to_vec()].concat()).unwrap_or_default();
        let sent = self.exchange(&mine, call)?.swap_remove(root);
        let (head, data) = sent.split_at(8 * self.info.size);
        let number = |b: &[u8]| b.iter().rev().fold(0, |x, b| x << 8 | usize::from(*b));
        let lengths: Vec<usize> = head.chunks(8).map(number).collect();
        let at = start(&lengths, self.info.rank);
        output.copy_from_slice(&data[at..at + output.len()]);
        Ok(())
    }

    fn reduce_scatter(&self, input: &[u8], output: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let all = self.reduced(input, reducer, call)?;
        let at = self.info.rank * output.len();
        output.copy_from_slice(&all[at..at + output.len()]);
        Ok(())
    }

    fn reduce_scatter_v(
        &self,
        input: &[u8],
        lengths: &[usize],
        output: &mut [u8],
        reducer: &Reducer,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let all = self.reduced(input, reducer, call)?;
        let at = start(lengths, self.info.rank);
        output.copy_from_slice(&all[at..at + output.len()]);
        Ok(())
    }

    fn all_to_all(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        let block = input.len() / self.info.size;
        let all = self.exchange(input, call)?;
        output.copy_from_slice(&self.dealt(&all, |_| (self.info.rank * block, block)));
        Ok(())
    }

    fn all_to_all_v(
        &self,
        (input, sends): (&[u8], &[usize]),
        (output, receives): (&mut [u8], &[usize]),
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let head = sends.iter().flat_map(|x| (*x as u64).to_le_bytes()).collect::<Vec<u8>>();
        let all = self.exchange(&[head, input.to_vec()].concat(), call)?;
        let number = |b: &[u8]| b.iter().rev().fold(0, |x, b| x << 8 | usize::from(*b));
        let n = self.info.size;
        let at = |r: usize| {
            let lengths: Vec<usize> = all[r][..8 * n].chunks(8).map(number).collect();
            (8 * n + start(&lengths, self.info.rank), receives[r])
        };
        output.copy_from_slice(&self.dealt(&all, at));
        Ok(())
    }

    fn barrier(&self, call: &CallInfo<'_>) -> Result<()> {
        self.exchange(&[], call).map(drop)
    }

    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        let mut s = self.world.state.lock();
        let me = self.info.rank;
        match *number {
            CallNumber::Collective(seq) => {
                s.notes.insert((seq, me), self.note(reason));
                self.leave(&mut s, seq);
            }
            CallNumber::P2p { peer, tag, seq } if desc.operation == Operation::Send => {
                s.letters.insert((me, peer, tag, seq), self.note(reason));
            }
            _ => {}
        }
        self.world.changed.notify_all();
    }

    fn failure(&self) -> Option<Error> {
        self.world.state.lock().failed.clone()
    }

    fn abort(&self, cause: &Error) {
        self.world.state.lock().failed.get_or_insert_with(|| cause.clone());
        self.world.changed.notify_all();
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        let mut s = self.world.state.lock();
        s.finalized += 1;
        self.world.changed.notify_all();
        let n = self.info.size;
        self.wait(&mut s, timeout, |s| (s.finalized == n).then_some(()))
    }

    fn close(&self) {}
}
