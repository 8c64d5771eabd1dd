//! The backend `board`: broadcast, all_reduce, all_gather, send, recv and barrier for ranks that are threads of one process.
//!
//! Everything else answers `Unsupported`, batches and `sendrecv` come with send and recv, and the asynchronous and scoped
//! forms from the adapter. Arguments arrive validated.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustcomms::{
    BackendInfo, CallInfo, CallNumber, Clock, Communicator, DeviceKind, Error, ErrorKind, HostBackend, OpDesc, OpQuery,
    Operation, PeerCause, RealClock, Reducer, Result, Support, host_backend, register_backend,
};

use super::board::{About, Board};

/// Makes `board` known to `new_comm`. Each rank is created on a thread of its own, with `rank_and_size`.
pub(crate) fn register() {
    let worlds: Mutex<HashMap<String, Arc<Board>>> = Mutex::default();
    register_backend("board", move |device, options| {
        if device.kind != DeviceKind::Cpu {
            return Err(Error::unsupported(format!("device {device}"), "backend board works on host memory"));
        }
        let (Some(rank), Some(size)) = (options.rank, options.size) else {
            return Err(Error::invalid("backend board needs a rank and a size: CommOptions::rank_and_size"));
        };
        let name = options.effective_name().to_owned();
        let board = Arc::clone(worlds.lock().entry(name).or_insert_with(|| Arc::new(Board::new(size))));
        if rank >= size || size != board.size {
            return Err(Error::invalid(format!("rank {rank} of {size} in a world of {}", board.size)));
        }
        let info = BackendInfo::new("board", rank, size);
        let member = Member { info, everybody: (0..size).collect(), board, clock: Arc::new(RealClock) };
        let join = OpDesc::new(Operation::Custom);
        if !member.board.post(rank, &member.everybody, About::Start, &Ok((join, Arc::default()))) {
            return Err(Error::invalid(format!("rank {rank} has joined this world already")));
        }
        let met = member.board.take(rank, &member.everybody, About::Start, join, options.bootstrap_timeout);
        // All are here, or it has failed: the next world of this name is another one.
        worlds.lock().retain(|_, board| !Arc::ptr_eq(board, &member.board));
        met.map_err(|e| match e.kind() {
            ErrorKind::Timeout { missing, .. } => {
                let what = "not all ranks came to the board".to_owned();
                ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: missing.clone() }.into()
            }
            _ => e,
        })?;
        Communicator::from_backend(host_backend(member), device, options)
    });
}

/// One rank.
#[derive(Debug)]
struct Member {
    info: BackendInfo,
    everybody: Vec<usize>,
    board: Arc<Board>,
    clock: Arc<dyn Clock>,
}

impl Member {
    /// A letter to everybody and one from everybody, in rank order: all collectives are made of this.
    fn exchange(&self, about: About, desc: OpDesc, timeout: Duration, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.board.post(self.info.rank, &self.everybody, about, &Ok((desc, bytes.into())));
        self.board.take(self.info.rank, &self.everybody, about, desc, timeout)
    }

    fn gather(&self, bytes: &[u8], call: &CallInfo<'_>) -> Result<Vec<Arc<[u8]>>> {
        self.exchange(About::Collective(call.seq), call.desc, call.timeout, bytes)
    }
}

impl HostBackend for Member {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        use Operation as O;
        match query.operation {
            O::Broadcast | O::AllReduce | O::AllGather | O::Send | O::Recv | O::Barrier => Support::Native,
            other => Support::Unsupported { reason: format!("backend board has no {other}") },
        }
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn send(&self, data: &[u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let me = self.info.rank;
        if let Some(e) = self.failure() {
            return Err(e);
        }
        if let Some(Err(reason)) = self.board.remove(peer, me, About::Declined { tag, seq }) {
            return Err(ErrorKind::PeerRefused { rank: peer, reason }.into());
        }
        // The letter waits; this rank need not.
        self.board.post(me, &[peer], About::Message { tag, seq }, &Ok((call.desc, data.into())));
        Ok(())
    }

    fn recv(&self, data: &mut [u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let about = About::Message { tag, seq };
        data.copy_from_slice(&self.board.take(self.info.rank, &[peer], about, call.desc, call.timeout)?[0]);
        Ok(())
    }

    fn broadcast(&self, data: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let all = self.gather(if self.info.rank == root { data } else { &[] }, call)?;
        data.copy_from_slice(&all[root]);
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

    /// Whoever would wait for this rank's letter gets the reason instead.
    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        let (me, refused) = (self.info.rank, Err(reason.to_owned()));
        match *number {
            CallNumber::Collective(seq) => {
                let others: Vec<_> = self.everybody.iter().copied().filter(|rank| *rank != me).collect();
                self.board.post(me, &others, About::Collective(seq), &refused);
            }
            CallNumber::P2p { peer, tag, seq } if desc.operation == Operation::Send => {
                self.board.post(me, &[peer], About::Message { tag, seq }, &refused);
            }
            // If the message is there already, its sender is done with it.
            CallNumber::P2p { peer, tag, seq }
                if self.board.remove(peer, me, About::Message { tag, seq }).is_none() =>
            {
                self.board.post(me, &[peer], About::Declined { tag, seq }, &refused);
            }
            _ => {}
        }
    }

    fn failure(&self) -> Option<Error> {
        self.board.failure(self.info.rank)
    }

    fn abort(&self, cause: &Error) {
        self.board.end(self.info.rank, cause);
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        self.exchange(About::End, OpDesc::new(Operation::Finalize), timeout, &[])?;
        self.board.retire(self.info.rank);
        Ok(())
    }

    fn close(&self) {
        let (rank, cause) = (self.info.rank, PeerCause::Closed);
        self.board.end(rank, &ErrorKind::PeerFailed { rank, cause }.into());
    }
}
