//! A world of ranks that are threads of one process: a backend of a few lines over a shared table.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustcomms::{
    BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Communicator, Device, Error, ErrorKind, HostBackend, OpDesc,
    OpQuery, Operation, PeerCause, Phase, RealClock, Reducer, Support, host_backend,
};

/// Called on a rank before each of its all_reduces is carried out.
pub(crate) type Hook = Arc<dyn Fn(usize) + Send + Sync>;

/// The communicators of `size` ranks.
pub(crate) fn world(size: usize, before_all_reduce: Option<Hook>) -> rustcomms::Result<Vec<Communicator>> {
    let table = Arc::new(Table { size, state: Mutex::default(), changed: Condvar::new() });
    let clock: Arc<dyn Clock> = Arc::new(RealClock);
    (0..size)
        .map(|rank| {
            let backend = MemoryBackend {
                info: BackendInfo::new("memory", rank, size),
                table: Arc::clone(&table),
                clock: Arc::clone(&clock),
                before_all_reduce: before_all_reduce.clone(),
            };
            Communicator::from_backend(host_backend(backend), Device::CPU, CommOptions::new().name("train"))
        })
        .collect()
}

/// The number under which ranks meet for finalize.
const END: u64 = u64::MAX;

struct Table {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    calls: HashMap<u64, Meeting>,
    failure: Option<Error>,
}

/// One collective call: what each rank brought, and how many have taken it all.
struct Meeting {
    desc: OpDesc,
    brought: Vec<Option<Vec<u8>>>,
    taken: usize,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, e: &Error) {
        self.lock().failure.get_or_insert_with(|| e.clone());
        self.changed.notify_all();
    }

    /// Brings bytes to a meeting and returns everybody's, in rank order.
    fn meet(
        &self,
        rank: usize,
        seq: u64,
        desc: OpDesc,
        bytes: &[u8],
        timeout: Duration,
    ) -> rustcomms::Result<Vec<Vec<u8>>> {
        let called = Instant::now();
        let mut s = self.lock();
        let new = || Meeting { desc, brought: vec![None; self.size], taken: 0 };
        let m = s.calls.entry(seq).or_insert_with(new);
        if m.desc.disagreement(&desc).is_some() {
            let ranks = (0..self.size).filter(|r| m.brought[*r].is_some()).collect();
            let e = Error::new(ErrorKind::Mismatch { seq, ranks, theirs: m.desc, ours: desc });
            s.failure.get_or_insert_with(|| e.clone());
            self.changed.notify_all();
            return Err(e);
        }
        m.brought[rank] = Some(bytes.to_vec());
        self.changed.notify_all();
        loop {
            // A meeting that everybody came to goes through even if a rank left afterwards.
            if let Some(m) = s.calls.get_mut(&seq)
                && m.brought.iter().all(Option::is_some)
            {
                let all = m.brought.iter().flatten().cloned().collect();
                m.taken += 1;
                if m.taken == self.size {
                    s.calls.remove(&seq);
                }
                return Ok(all);
            }
            if let Some(e) = &s.failure {
                return Err(e.clone());
            }
            let elapsed = called.elapsed();
            let Some(left) = timeout.checked_sub(elapsed).filter(|d| !d.is_zero()) else {
                let m = s.calls.get(&seq);
                let missing = (0..self.size).filter(|r| m.is_some_and(|m| m.brought[*r].is_none())).collect();
                return Err(Error::new(ErrorKind::Timeout {
                    phase: Phase::Running,
                    elapsed,
                    missing,
                    unmatched: Vec::new(),
                }));
            };
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct MemoryBackend {
    info: BackendInfo,
    table: Arc<Table>,
    clock: Arc<dyn Clock>,
    before_all_reduce: Option<Hook>,
}

impl std::fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryBackend").field("rank", &self.info.rank).finish_non_exhaustive()
    }
}

impl MemoryBackend {
    fn meet(&self, bytes: &[u8], call: &CallInfo<'_>) -> rustcomms::Result<Vec<Vec<u8>>> {
        self.table.meet(self.info.rank, call.seq, call.desc, bytes, call.timeout)
    }
}

impl HostBackend for MemoryBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        match query.operation {
            Operation::Broadcast | Operation::AllReduce | Operation::AllGather | Operation::Barrier => Support::Native,
            _ => Support::Unsupported { reason: "the training does not need it".into() },
        }
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn broadcast(&self, data: &mut [u8], root: usize, call: &CallInfo<'_>) -> rustcomms::Result<()> {
        data.copy_from_slice(&self.meet(data, call)?[root]);
        Ok(())
    }

    fn all_reduce(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> rustcomms::Result<()> {
        if let Some(hook) = &self.before_all_reduce {
            hook(self.info.rank);
        }
        reducer.prescale(data);
        // Every rank folds in rank order and so gets the same bits.
        let mut all = self.meet(data, call)?.into_iter();
        if let Some(first) = all.next() {
            data.copy_from_slice(&first);
        }
        for mut other in all {
            reducer.fold(data, &mut other);
        }
        reducer.finish(data, self.info.size);
        Ok(())
    }

    fn all_gather(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> rustcomms::Result<()> {
        output.copy_from_slice(&self.meet(input, call)?.concat());
        Ok(())
    }

    fn barrier(&self, call: &CallInfo<'_>) -> rustcomms::Result<()> {
        self.meet(&[], call).map(|_| ())
    }

    fn refuse(&self, _: &CallNumber, _: &OpDesc, reason: &str) {
        let kind = ErrorKind::PeerRefused { rank: self.info.rank, reason: reason.to_owned() };
        self.table.fail(&Error::new(kind));
    }

    fn failure(&self) -> Option<Error> {
        self.table.lock().failure.clone()
    }

    fn abort(&self, cause: &Error) {
        self.table.fail(cause);
    }

    fn finalize(&self, timeout: Duration) -> rustcomms::Result<()> {
        self.table.meet(self.info.rank, END, OpDesc::new(Operation::Finalize), &[], timeout).map(|_| ())
    }

    fn close(&self) {
        self.table.fail(&Error::new(ErrorKind::PeerFailed { rank: self.info.rank, cause: PeerCause::Closed }));
    }
}
