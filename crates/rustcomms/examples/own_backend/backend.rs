//! The backend `board`: six operations for ranks that are threads of one process, over a board where they leave letters.
//!
//! Where a real backend has sockets or a library, two things matter too: no wait is without a deadline, and what ends one
//! rank's wait is told to all. Arguments arrive validated; the adapter adds batches and asynchronous and scoped forms.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustcomms::{
    BackendInfo, CallInfo, CallNumber, Clock, Communicator, Device, Error, ErrorKind, HostBackend, OpDesc, OpQuery,
    Operation as Op, PeerCause, Phase, RealClock, Reducer, Result, Support, host_backend, register_backend,
};

/// Makes `board` known to `new_comm`. Joining does not wait, the first call does. When all have joined, the name is free.
pub(crate) fn register() {
    let boards: Mutex<HashMap<String, (Arc<Board>, usize)>> = Mutex::default();
    register_backend("board", move |device, options| {
        let place = options.rank.zip(options.size).filter(|(rank, n)| rank < n && device == Device::CPU);
        let (rank, n) = place.ok_or_else(|| Error::invalid("backend board needs Device::CPU and rank_and_size"))?;
        let (mut boards, name) = (boards.lock(), options.effective_name().to_owned());
        let (board, joined) = boards.remove(&name).unwrap_or_default();
        if joined + 1 < n {
            boards.insert(name, (Arc::clone(&board), joined + 1));
        }
        let member = Member { info: BackendInfo::new("board", rank, n), board, clock: Arc::new(RealClock) };
        Communicator::from_backend(host_backend(member), device, options)
    });
}

/// Where ranks leave letters, and what tells them to look again.
type Board = (Mutex<State>, Condvar);

#[derive(Debug, Default)]
struct State {
    calls: HashMap<About, Call>,
    /// The rank that ended the communicator, and why.
    over: Option<(usize, Error)>,
}

/// The number of a call, and for a message its sender, receiver and tag.
type About = (u64, Option<(usize, usize, u32)>);
/// What each rank calls, with its letter, and how many ranks need them no more.
type Call = (BTreeMap<usize, (OpDesc, Letter)>, usize);
/// Bytes, or the reason why a rank refuses the call.
type Letter = Result<Arc<[u8]>, String>;

#[derive(Debug)]
struct Member {
    info: BackendInfo,
    board: Arc<Board>,
    clock: Arc<dyn Clock>,
}

impl Member {
    /// Leaves a letter, if any, waits until those of the ranks `from` are there, and returns all.
    fn meet(&self, about: About, mine: Option<Letter>, from: Range<usize>, call: &CallInfo) -> Result<Vec<Arc<[u8]>>> {
        let (me, ours, start, mut state) = (self.info.rank, call.desc, Instant::now(), self.board.0.lock());
        // A call made after the end does not pass, even if what it needs is there.
        let late = state.over.is_some();
        if let Some(letter) = mine {
            state.calls.entry(about).or_default().0.entry(me).or_insert((ours, letter));
            self.board.1.notify_all();
        }
        let read = |(&rank, (theirs, letter)): (&usize, &(OpDesc, Letter))| {
            // The two ends of a message differ in their operation.
            let operation = if about.1.is_some() { ours.operation } else { theirs.operation };
            match letter.clone() {
                Err(reason) => Err(ErrorKind::PeerRefused { rank, reason }),
                Ok(bytes) if ours.disagreement(&OpDesc { operation, ..*theirs }).is_none() => Ok(bytes),
                Ok(_) => Err(ErrorKind::Mismatch { seq: about.0, ranks: vec![rank], theirs: *theirs, ours }),
            }
        };
        let result = loop {
            let letters = &state.calls.entry(about).or_default().0;
            let missing: Vec<_> = from.clone().filter(|rank| !letters.contains_key(rank)).collect();
            // Refusals first: they end a call, not the communicator.
            let refusals = letters.iter().filter(|(_, (_, letter))| letter.is_err());
            let all: Result<_, _> = refusals.chain(letters).map(read).collect();
            let elapsed = start.elapsed();
            match (all, self.told(&state)) {
                (Ok(_), Some(e)) if late || !missing.is_empty() => return Err(e),
                (all, _) if all.is_err() || missing.is_empty() => break all,
                _ if elapsed < call.timeout => drop(self.board.1.wait_for(&mut state, call.timeout - elapsed)),
                _ => break Err(ErrorKind::Timeout { phase: Phase::Running, elapsed, missing, unmatched: Vec::new() }),
            }
        };
        if let Err(e @ (ErrorKind::Mismatch { .. } | ErrorKind::Timeout { .. })) = &result {
            state.over.get_or_insert_with(|| (me, e.clone().into()));
            self.board.1.notify_all();
        }
        let done = &mut state.calls.entry(about).or_default().1;
        *done += 1;
        // The last of all ranks, or of the two ends of a message, clears the call away.
        if *done == about.1.map_or(self.info.size, |_| 2) {
            state.calls.remove(&about);
        }
        result.map_err(Error::from)
    }

    /// A letter from and to everybody, in rank order: all collectives are made of this.
    fn gather(&self, bytes: &[u8], call: &CallInfo) -> Result<Vec<Arc<[u8]>>> {
        self.meet((call.seq, None), Some(Ok(bytes.into())), 0..self.info.size, call)
    }

    /// Why this rank cannot go on.
    fn told(&self, state: &State) -> Option<Error> {
        let (rank, e) = state.over.clone()?;
        let same = matches!(e.kind(), ErrorKind::Aborted { .. } | ErrorKind::PeerFailed { .. } | ErrorKind::Finalized);
        Some(if same || rank == self.info.rank { e } else { ErrorKind::Aborted { rank, cause: e.to_string() }.into() })
    }
}

impl HostBackend for Member {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn supports(&self, query: &OpQuery) -> Support {
        match query.operation {
            Op::Broadcast | Op::AllReduce | Op::AllGather | Op::Send | Op::Recv | Op::Barrier => Support::Native,
            other => Support::Unsupported { reason: format!("backend board has no {other}") },
        }
    }

    fn broadcast(&self, data: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let mine: &[u8] = if self.info.rank == root { data } else { &[] };
        data.copy_from_slice(&self.gather(mine, call)?[root]);
        Ok(())
    }

    fn all_reduce(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        reducer.prescale(data);
        let all = self.gather(data, call)?;
        // Everybody folds in rank order: operators need not commute, and all ranks get the same bits.
        data.copy_from_slice(&all[0]);
        all[1..].iter().for_each(|x| reducer.fold(data, &mut x.to_vec()));
        reducer.finish(data, self.info.size);
        Ok(())
    }

    fn all_gather(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        output.copy_from_slice(&self.gather(input, call)?.concat());
        Ok(())
    }

    fn barrier(&self, call: &CallInfo<'_>) -> Result<()> {
        self.gather(&[], call).map(drop)
    }

    /// The letter waits for its receiver; this rank need not.
    fn send(&self, data: &[u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        self.meet((seq, Some((self.info.rank, peer, tag))), Some(Ok(data.into())), 0..0, call).map(drop)
    }

    fn recv(&self, data: &mut [u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        data.copy_from_slice(&self.meet((seq, Some((peer, self.info.rank, tag))), None, peer..peer + 1, call)?[0]);
        Ok(())
    }

    /// Whoever would wait for this rank in this call gets the reason instead.
    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        let me = self.info.rank;
        let about = match *number {
            CallNumber::Collective(seq) => (seq, None),
            CallNumber::P2p { peer, tag, seq } if desc.operation == Op::Send => (seq, Some((me, peer, tag))),
            CallNumber::P2p { peer, tag, seq } => (seq, Some((peer, me, tag))),
            _ => return,
        };
        let _ = self.meet(about, Some(Err(reason.to_owned())), 0..0, &CallInfo::new(*desc, 0, 0, Duration::ZERO));
    }

    fn failure(&self) -> Option<Error> {
        self.told(&self.board.0.lock()).filter(|e| *e.kind() != ErrorKind::Finalized)
    }

    fn abort(&self, cause: &Error) {
        self.board.0.lock().over.get_or_insert_with(|| (self.info.rank, cause.clone()));
        self.board.1.notify_all();
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        // No other call has this number. Once one rank is through, all get through.
        let call = CallInfo::new(OpDesc::new(Op::Finalize), u64::MAX, 0, timeout);
        self.barrier(&call).map(|()| self.abort(&ErrorKind::Finalized.into()))
    }

    fn close(&self) {
        self.abort(&ErrorKind::PeerFailed { rank: self.info.rank, cause: PeerCause::Closed }.into());
    }
}
