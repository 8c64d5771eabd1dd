//! A reference [`HostBackend`]: N ranks in one process, bytes exchanged through one board. Written in
//! safe code only, which is the point of that trait.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use comm_core::{
    BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Communicator, Device, Error, ErrorKind, HintSpec,
    HostBackend, OpDesc, OpQuery, Operation, Phase, RealClock, Reducer, Result, Support, host_backend,
};
use parking_lot::{Condvar, Mutex, MutexGuard};

const HINTS: &[HintSpec] = &[HintSpec { name: "chunk", doc: "bytes per message; ignored" }];

/// One collective call.
#[derive(Debug, Default)]
struct Board {
    arrived: BTreeMap<usize, Vec<u8>>,
    refused: Option<(usize, String)>,
    left: usize,
}

/// (source, destination, tag, number)
type Letter = (usize, usize, u32, u64);

#[derive(Debug, Default)]
struct State {
    boards: HashMap<u64, Board>,
    mail: HashMap<Letter, Result<Vec<u8>, (usize, String)>>,
    failed: Option<Error>,
    finalized: usize,
}

/// What the ranks share.
#[derive(Debug)]
pub(crate) struct World {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// Calls of `close`, over all ranks.
    pub(crate) closes: AtomicUsize,
    /// Calls of `finalize`, over all ranks.
    pub(crate) finalizes: AtomicUsize,
}

impl World {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            size,
            state: Mutex::default(),
            changed: Condvar::new(),
            closes: AtomicUsize::new(0),
            finalizes: AtomicUsize::new(0),
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The communicator of one rank.
    pub(crate) fn comm(self: &Arc<Self>, rank: usize) -> Communicator {
        self.comm_with(rank, CommOptions::new().name("toys").timeout(Duration::from_secs(10))).unwrap()
    }

    pub(crate) fn comm_with(self: &Arc<Self>, rank: usize, options: CommOptions) -> Result<Communicator> {
        self.comm_on(Device::CPU, rank, options)
    }

    /// A communicator that says it is for this device.
    pub(crate) fn comm_on(self: &Arc<Self>, device: Device, rank: usize, options: CommOptions) -> Result<Communicator> {
        let mut info = BackendInfo::new("toy", rank, self.size);
        info.hints = HINTS;
        let toy = Toy { info, world: Arc::clone(self), clock: Arc::new(RealClock) };
        Communicator::from_backend(host_backend(toy), device, options)
    }

    /// Ends everything in flight on all ranks.
    pub(crate) fn fail_all(&self, rank: usize, cause: &str) {
        let mut s = self.state.lock();
        s.failed.get_or_insert_with(|| Error::new(ErrorKind::Aborted { rank, cause: cause.into() }));
        drop(s);
        self.changed.notify_all();
    }

    /// Nothing is left of any call: no board that somebody did not leave, no letter unread.
    pub(crate) fn is_quiet(&self) -> bool {
        let s = self.state.lock();
        s.boards.is_empty() && s.mail.is_empty()
    }
}

#[derive(Debug)]
struct Toy {
    info: BackendInfo,
    world: Arc<World>,
    clock: Arc<dyn Clock>,
}

impl Toy {
    /// Waits until `ready` finds something; fails with the world, or after the call's timeout.
    fn wait<T>(
        &self,
        s: &mut MutexGuard<'_, State>,
        timeout: Duration,
        mut ready: impl FnMut(&mut State) -> Option<Result<T>>,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> Result<T> {
        let start = Instant::now();
        loop {
            if let Some(r) = ready(s) {
                return r;
            }
            if let Some(e) = &s.failed {
                return Err(e.clone());
            }
            if self.world.changed.wait_until(s, start + timeout).timed_out() {
                let elapsed = start.elapsed();
                let e = Error::new(ErrorKind::Timeout {
                    phase: Phase::Running,
                    elapsed,
                    missing: missing(s),
                    unmatched: Vec::new(),
                });
                s.failed = Some(e.clone());
                self.world.changed.notify_all();
                return Err(e);
            }
        }
    }

    fn leave(&self, s: &mut State, seq: u64) {
        let b = s.boards.entry(seq).or_default();
        b.left += 1;
        if b.left == self.world.size {
            s.boards.remove(&seq);
        }
    }

    /// Everybody's bytes, in rank order.
    fn exchange(&self, bytes: &[u8], call: &CallInfo<'_>) -> Result<Vec<Vec<u8>>> {
        let (n, seq) = (self.world.size, call.seq);
        let mut s = self.world.state.lock();
        if let Some(e) = &s.failed {
            return Err(e.clone());
        }
        s.boards.entry(seq).or_default().arrived.insert(self.info.rank, bytes.to_vec());
        self.world.changed.notify_all();
        let ready = |s: &mut State| {
            let b = s.boards.get(&seq)?;
            if let Some((rank, reason)) = &b.refused {
                return Some(Err(Error::new(ErrorKind::PeerRefused { rank: *rank, reason: reason.clone() })));
            }
            (b.arrived.len() == n).then(|| Ok(b.arrived.values().cloned().collect()))
        };
        let missing = |s: &State| (0..n).filter(|r| !s.boards[&seq].arrived.contains_key(r)).collect();
        let all = self.wait(&mut s, call.timeout, ready, missing);
        self.leave(&mut s, seq);
        all
    }

    fn reduced(&self, data: &[u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<Vec<u8>> {
        let mut mine = data.to_vec();
        reducer.prescale(&mut mine);
        let mut all = self.exchange(&mine, call)?.into_iter();
        let mut acc = all.next().unwrap_or_default();
        for mut x in all {
            reducer.fold(&mut acc, &mut x);
        }
        reducer.finish(&mut acc, self.world.size);
        Ok(acc)
    }

    /// The reduction of the first `ranks` contributions.
    fn prefix(&self, ranks: usize, data: &[u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<Vec<u8>> {
        let mut mine = data.to_vec();
        reducer.prescale(&mut mine);
        let mut first = self.exchange(&mine, call)?.into_iter().take(ranks);
        let mut acc = first.next().unwrap_or_default();
        first.for_each(|mut x| reducer.fold(&mut acc, &mut x));
        reducer.finish(&mut acc, ranks);
        Ok(acc)
    }

    /// What the adapter promises: a length per rank, all of them together and this rank's own.
    fn check_lengths(&self, lengths: &[usize], all: usize, own: usize) {
        assert_eq!(lengths.len(), self.world.size, "{lengths:?}");
        assert_eq!(lengths.iter().sum::<usize>(), all, "{lengths:?}");
        assert_eq!(lengths[self.info.rank], own, "{lengths:?}");
    }

    /// The root has a buffer of all blocks, and nobody else has one.
    fn check_root(&self, has: bool, root: usize) {
        assert!(root < self.world.size && has == (root == self.info.rank), "{has} at {} of {root}", self.info.rank);
    }
}

/// Blocks for all ranks in one letter, preceded by their lengths.
fn addressed(blocks: &[u8], lengths: &[usize]) -> Vec<u8> {
    lengths.iter().flat_map(|l| l.to_ne_bytes()).chain(blocks.iter().copied()).collect()
}

/// The block of a rank in such a letter for `n`.
fn block_for(letter: &[u8], rank: usize, n: usize) -> &[u8] {
    let (head, mut rest) = letter.split_at(n * size_of::<usize>());
    for (r, length) in head.as_chunks().0.iter().enumerate() {
        let (block, more) = rest.split_at(usize::from_ne_bytes(*length));
        if r == rank {
            return block;
        }
        rest = more;
    }
    panic!("rank {rank} among {n}")
}

impl HostBackend for Toy {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        use Operation as O;
        match query.operation {
            O::Split | O::Reconfigure | O::Group | O::WindowCreate | O::Put | O::Get | O::Signal | O::WaitSignal => {
                Support::Unsupported { reason: format!("toys have no {}", query.operation) }
            }
            _ => Support::Native,
        }
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn send(&self, data: &[u8], peer: usize, tag: u32, seq: u64, _call: &CallInfo<'_>) -> Result<()> {
        let mut s = self.world.state.lock();
        if let Some(e) = &s.failed {
            return Err(e.clone());
        }
        let letter = (self.info.rank, peer, tag, seq);
        // The receiver may have refused this message before it was sent.
        if let Some(Err(_)) = s.mail.get(&letter) {
            return match s.mail.remove(&letter) {
                Some(Err((rank, reason))) => Err(Error::new(ErrorKind::PeerRefused { rank, reason })),
                _ => Ok(()),
            };
        }
        s.mail.insert(letter, Ok(data.to_vec()));
        drop(s);
        self.world.changed.notify_all();
        Ok(())
    }

    fn recv(&self, data: &mut [u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let letter = (peer, self.info.rank, tag, seq);
        let mut s = self.world.state.lock();
        let got = self.wait(&mut s, call.timeout, |s| s.mail.remove(&letter).map(Ok), |_| vec![peer])?;
        match got {
            Ok(bytes) if bytes.len() == data.len() => data.copy_from_slice(&bytes),
            Ok(bytes) => panic!("toys do not detect mismatches: got {} bytes, want {}", bytes.len(), data.len()),
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
        data.copy_from_slice(&self.reduced(data, reducer, call)?);
        Ok(())
    }

    fn reduce(&self, data: &mut [u8], reducer: &Reducer, root: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.reduced(data, reducer, call)?;
        if self.info.rank == root {
            data.copy_from_slice(&all);
        } else {
            // Allowed by the trait; the adapter must not let it reach the caller's buffer.
            data.fill(0xaa);
        }
        Ok(())
    }

    fn all_gather(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        output.copy_from_slice(&self.exchange(input, call)?.concat());
        Ok(())
    }

    fn reduce_scatter(&self, input: &[u8], output: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let all = self.reduced(input, reducer, call)?;
        let from = self.info.rank * output.len();
        output.copy_from_slice(&all[from..from + output.len()]);
        Ok(())
    }

    fn all_gather_v(&self, input: &[u8], output: &mut [u8], lengths: &[usize], call: &CallInfo<'_>) -> Result<()> {
        self.check_lengths(lengths, output.len(), input.len());
        let all = self.exchange(input, call)?;
        assert!(all.iter().map(Vec::len).eq(lengths.iter().copied()), "blocks {all:?} of lengths {lengths:?}");
        output.copy_from_slice(&all.concat());
        Ok(())
    }

    fn gather(&self, input: &[u8], output: Option<&mut [u8]>, root: usize, call: &CallInfo<'_>) -> Result<()> {
        self.check_root(output.is_some(), root);
        let all = self.exchange(input, call)?;
        output.into_iter().for_each(|o| o.copy_from_slice(&all.concat()));
        Ok(())
    }

    fn gather_v(
        &self,
        input: &[u8],
        output: Option<(&mut [u8], &[usize])>,
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        self.check_root(output.is_some(), root);
        let all = self.exchange(input, call)?;
        if let Some((output, lengths)) = output {
            self.check_lengths(lengths, output.len(), input.len());
            assert!(all.iter().map(Vec::len).eq(lengths.iter().copied()), "blocks {all:?} of lengths {lengths:?}");
            output.copy_from_slice(&all.concat());
        }
        Ok(())
    }

    fn scatter(&self, input: Option<&[u8]>, output: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        self.check_root(input.is_some(), root);
        assert!(input.is_none_or(|i| i.len() == output.len() * self.world.size));
        let all = self.exchange(input.unwrap_or_default(), call)?;
        output.copy_from_slice(&all[root][self.info.rank * output.len()..][..output.len()]);
        Ok(())
    }

    fn scatter_v(
        &self,
        input: Option<(&[u8], &[usize])>,
        output: &mut [u8],
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        self.check_root(input.is_some(), root);
        let letter = input.map_or_else(Vec::new, |(input, lengths)| {
            self.check_lengths(lengths, input.len(), output.len());
            addressed(input, lengths)
        });
        let all = self.exchange(&letter, call)?;
        output.copy_from_slice(block_for(&all[root], self.info.rank, self.world.size));
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
        self.check_lengths(lengths, input.len(), output.len());
        let all = self.reduced(input, reducer, call)?;
        let from: usize = lengths[..self.info.rank].iter().sum();
        output.copy_from_slice(&all[from..from + output.len()]);
        Ok(())
    }

    fn all_to_all(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        let n = self.world.size;
        assert!(input.len() == output.len() && input.len().is_multiple_of(n), "{} {}", input.len(), output.len());
        let each = input.len() / n;
        let all = self.exchange(input, call)?;
        let mine: Vec<u8> = all.iter().flat_map(|x| &x[self.info.rank * each..][..each]).copied().collect();
        output.copy_from_slice(&mine);
        Ok(())
    }

    fn all_to_all_v(
        &self,
        (input, sends): (&[u8], &[usize]),
        (output, receives): (&mut [u8], &[usize]),
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let (me, n) = (self.info.rank, self.world.size);
        self.check_lengths(sends, input.len(), receives[me]);
        self.check_lengths(receives, output.len(), sends[me]);
        let all = self.exchange(&addressed(input, sends), call)?;
        let mine: Vec<&[u8]> = all.iter().map(|x| block_for(x, me, n)).collect();
        assert!(mine.iter().map(|b| b.len()).eq(receives.iter().copied()), "{mine:?} for {receives:?}");
        output.copy_from_slice(&mine.concat());
        Ok(())
    }

    fn scan(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let prefix = self.prefix(self.info.rank + 1, data, reducer, call)?;
        data.copy_from_slice(&prefix);
        Ok(())
    }

    fn exscan(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let prefix = self.prefix(self.info.rank, data, reducer, call)?;
        if self.info.rank > 0 {
            data.copy_from_slice(&prefix);
        }
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
                let b = s.boards.entry(seq).or_default();
                b.refused.get_or_insert((me, reason.to_owned()));
                self.leave(&mut s, seq);
            }
            CallNumber::P2p { peer, tag, seq } => {
                let sends = desc.operation == Operation::Send;
                let letter = if sends { (me, peer, tag, seq) } else { (peer, me, tag, seq) };
                // If the other end has sent already there is nobody to tell.
                if s.mail.remove(&letter).is_none() {
                    s.mail.insert(letter, Err((me, reason.to_owned())));
                }
            }
            _ => {}
        }
        drop(s);
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
        self.world.finalizes.fetch_add(1, Ordering::SeqCst);
        let mut s = self.world.state.lock();
        if let Some(e) = &s.failed {
            return Err(e.clone());
        }
        s.finalized += 1;
        self.world.changed.notify_all();
        let n = self.world.size;
        self.wait(&mut s, timeout, |s| (s.finalized == n).then_some(Ok(())), |_| Vec::new())
    }

    fn close(&self) {
        self.world.closes.fetch_add(1, Ordering::SeqCst);
    }
}
