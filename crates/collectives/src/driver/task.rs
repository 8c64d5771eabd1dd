//! Operations as tasks of an endpoint.

use std::task::Poll;

use comm_core::{OpDesc, Operation, P2pOp, Reducer, Result};
use comm_transport::{Message, PieceId, Port, Sink, Task};

use super::buffers::Buffers;
use crate::schedule::{AnySchedule, Buf, Schedule, Span, Token, Transport};

/// A schedule bound to its buffers.
pub(super) struct Collective {
    schedule: AnySchedule,
    buffers: Buffers,
    reducer: Option<Reducer>,
    rank: usize,
    size: usize,
}

// SAFETY: the raw pointers lead to buffers that the caller of `Backend::run` / `Backend::start` keeps valid and
// unaliased until completion, whichever thread polls; polls happen one at a time under the endpoint's lock.
unsafe impl Send for Collective {}

impl Collective {
    pub(super) fn new(
        schedule: AnySchedule,
        mut buffers: Buffers,
        reducer: Option<Reducer>,
        rank: usize,
        size: usize,
    ) -> Self {
        buffers.provide(schedule.scratch());
        Self { schedule, buffers, reducer, rank, size }
    }
}

impl Task for Collective {
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<Result<()>> {
        let mut bound = Bound {
            port,
            buffers: &mut self.buffers,
            reducer: self.reducer.as_ref(),
            rank: self.rank,
            size: self.size,
        };
        // What a panicking operator left must not travel: ask before the schedule sends, and at the end.
        let sound = |r: Option<&Reducer>| r.map_or(Ok(()), |r| r.check(self.rank));
        if let Err(e) = sound(bound.reducer) {
            return Poll::Ready(Err(e));
        }
        let polled = self.schedule.poll(&mut bound);
        match (polled, sound(self.reducer.as_ref())) {
            (Poll::Ready(Ok(())), Err(e)) => Poll::Ready(Err(e)),
            (polled, _) => polled,
        }
    }
}

struct Bound<'a, 'p> {
    port: &'a mut Port<'p>,
    buffers: &'a mut Buffers,
    reducer: Option<&'a Reducer>,
    rank: usize,
    size: usize,
}

impl Bound<'_, '_> {
    /// The address of a span.
    fn read(&mut self, s: Span) -> *const u8 {
        match s.buf {
            Buf::Input => self.buffers.input.at(s.off, s.len).cast_const(),
            Buf::Output | Buf::Scratch => self.write(s).cast_const(),
        }
    }

    fn write(&mut self, s: Span) -> *mut u8 {
        let len = self.buffers.scratch.len();
        match s.buf {
            Buf::Output => self.buffers.output.at(s.off, s.len),
            Buf::Scratch if s.off <= len && s.len <= len - s.off => {
                self.buffers.scratch.as_mut_ptr().wrapping_add(s.off)
            }
            // Better a panic than a stray write.
            _ => panic!("a schedule left its buffer: {s:?} of {len} bytes"),
        }
    }

    /// Two disjoint spans as slices.
    fn pair(&mut self, acc: Span, x: Span) -> (&mut [u8], &mut [u8]) {
        let disjoint = acc.buf != x.buf || acc.off + acc.len <= x.off || x.off + x.len <= acc.off;
        assert!(disjoint, "a schedule folds overlapping spans: {acc:?} and {x:?}");
        let (a, b) = (self.write(acc), self.write(x));
        if acc.len == 0 || x.len == 0 {
            return (&mut [], &mut []);
        }
        // SAFETY: both spans lie in buffers that are valid and ours (Collective's contract), were checked to lie
        // inside them, and do not overlap: distinct buffers of a request are disjoint.
        unsafe { (std::slice::from_raw_parts_mut(a, acc.len), std::slice::from_raw_parts_mut(b, x.len)) }
    }
}

impl Transport for Bound<'_, '_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn send(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        if let Some(r) = self.reducer {
            r.check(self.rank)?;
        }
        let ptr = self.read(span);
        // SAFETY: the span lies in a buffer that is valid until the operation is closed, and a schedule does not
        // change a span under an unfinished send (its contract, checked by its tests).
        unsafe { self.port.send(peer, step, ptr, span.len) }.map(|p| Token(p.0))
    }

    fn recv(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        let sink = Sink::Copy(self.write(span));
        // SAFETY: as for `send`.
        unsafe { self.port.recv(peer, step, sink, span.len) }.map(|p| Token(p.0))
    }

    fn recv_fold(&mut self, peer: usize, step: u32, dst: Span, own: Span) -> Result<Token> {
        let Some(reducer) = self.reducer.cloned() else {
            return Err(comm_core::Error::invalid("a schedule folds in an operation without operator"));
        };
        let sink = Sink::Fold { own: self.read(own), dst: self.write(dst), reducer };
        // SAFETY: as for `send`.
        unsafe { self.port.recv(peer, step, sink, dst.len) }.map(|p| Token(p.0))
    }

    fn is_done(&self, t: Token) -> bool {
        self.port.is_done(PieceId(t.0))
    }

    fn copy(&mut self, dst: Span, src: Span) {
        assert_eq!(dst.len, src.len, "a schedule copies between spans of different lengths");
        let (from, to) = (self.read(src), self.write(dst));
        // SAFETY: both ranges were checked; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, src.len) };
    }

    fn fold(&mut self, acc: Span, x: Span) {
        if let Some(r) = self.reducer {
            let (a, b) = self.pair(acc, x);
            r.fold(a, b);
        }
    }

    fn fold_rev(&mut self, acc: Span, x: Span) {
        if let Some(r) = self.reducer {
            let (a, b) = self.pair(acc, x);
            r.fold_rev(a, b);
        }
    }

    fn finish(&mut self, span: Span, ranks: usize) {
        if let Some(r) = self.reducer
            && r.needs_finish(ranks)
        {
            let ptr = self.write(span);
            // SAFETY: checked range of a buffer that is valid and ours.
            let bytes = unsafe { std::slice::from_raw_parts_mut(ptr, span.len) };
            r.finish(bytes, ranks);
        }
    }
}

/// Point-to-point messages that progress together.
pub(super) struct Messages<'a> {
    ops: std::borrow::Cow<'a, [P2pOp]>,
    posted: bool,
}

impl<'a> Messages<'a> {
    pub(super) const fn borrowed(ops: &'a [P2pOp]) -> Self {
        Self { ops: std::borrow::Cow::Borrowed(ops), posted: false }
    }

    pub(super) const fn owned(ops: Vec<P2pOp>) -> Messages<'static> {
        Messages { ops: std::borrow::Cow::Owned(ops), posted: false }
    }
}

impl Task for Messages<'_> {
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<Result<()>> {
        if !self.posted {
            self.posted = true;
            let mut first = Ok(());
            for op in self.ops.iter() {
                // All are posted even when one cannot be: its end may have to tell the others' ends.
                // SAFETY: the request's buffers are valid until the operation is closed (Backend's contract).
                let r = unsafe { post(port, op) };
                first = first.and(r.map(drop));
            }
            if let Err(e) = first {
                return Poll::Ready(Err(e));
            }
        }
        if port.all_done() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

/// Posts one message.
///
/// # Safety
///
/// As [`Port::send_message`] and [`Port::recv_message`].
unsafe fn post(port: &mut Port<'_>, op: &P2pOp) -> Result<PieceId> {
    let message = |operation, peer, tag, seq, bytes, dtype, count| Message {
        peer,
        tag,
        seq,
        desc: OpDesc::new(operation).elements(dtype, count),
        bytes,
    };
    // SAFETY: forwarded.
    unsafe {
        match op {
            P2pOp::Send { buf, peer, tag, seq } => {
                let m = message(Operation::Send, *peer, *tag, *seq, buf.bytes(), buf.dtype(), buf.count());
                port.send_message(m, buf.ptr())
            }
            P2pOp::Recv { buf, peer, tag, seq } => {
                let m = message(Operation::Recv, *peer, *tag, *seq, buf.bytes(), buf.dtype(), buf.count());
                port.recv_message(m, buf.ptr())
            }
            other => {
                Err(comm_core::Error::unsupported(format!("{other:?}"), "this backend does not know such messages"))
            }
        }
    }
}
