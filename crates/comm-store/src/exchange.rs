//! What a client says for each call, and what it makes of the answers.

use std::time::{Duration, Instant};

use crate::conn::{Answer, Conn, Fail, Wire};
use crate::deadline_after;
use crate::protocol::{Encoder, NOT_READY, Op, READY, STOP_WAITING, WAIT_CANCELED};

/// Waits for a queue begin anew this often: the server wakes one waiter per element, and if that
/// one dies before it takes the element, the others would not hear of it.
const QUEUE_SLICE: Duration = Duration::from_secs(1);

impl<W: Wire> Conn<W> {
    pub(crate) fn get(&mut self, key: &str, deadline: Instant, late: Instant) -> Answer<Vec<u8>> {
        loop {
            self.wait(&[key], deadline, late)?;
            self.send(&Encoder::new().op(Op::Get).key(key).0, late)?;
            let value = self.bytes(late)?;
            // Nothing is also what a key gives that was deleted after the wait.
            if !value.is_empty() || self.check(&[key], late)? {
                return Ok(value);
            }
        }
    }

    pub(crate) fn multi_get(&mut self, keys: &[&str], deadline: Instant, late: Instant) -> Answer<Vec<Vec<u8>>> {
        loop {
            self.wait(keys, deadline, late)?;
            self.send(&Encoder::new().op(Op::MultiGet).keys(keys).0, late)?;
            let values = keys.iter().map(|_| self.bytes(late)).collect::<Answer<Vec<_>>>()?;
            if values.iter().all(|v| !v.is_empty()) || self.check(keys, late)? {
                return Ok(values);
            }
        }
    }

    pub(crate) fn add(&mut self, key: &str, delta: i64, by: Instant) -> Answer<i64> {
        self.send(&Encoder::new().op(Op::Add).key(key).i64(delta).0, by)?;
        self.i64(by)
    }

    pub(crate) fn check(&mut self, keys: &[&str], deadline: Instant) -> Answer<bool> {
        self.send(&Encoder::new().op(Op::Check).keys(keys).0, deadline)?;
        match self.u8(deadline)? {
            READY => Ok(true),
            NOT_READY => Ok(false),
            b => Err(Fail::Bad(format!("it answered a check with {b}"))),
        }
    }

    /// Waits for the reply to WAIT until `deadline`, and then cancels it, for which the server has
    /// until `late`.
    pub(crate) fn wait(&mut self, keys: &[&str], deadline: Instant, late: Instant) -> Answer<()> {
        self.send(&Encoder::new().op(Op::Wait).keys(keys).0, late)?;
        match self.u8(deadline) {
            Ok(STOP_WAITING) => return Ok(()),
            Ok(b) => return Err(Fail::Bad(format!("it answered a wait with {b}"))),
            Err(Fail::TimedOut) => {}
            Err(e) => return Err(e),
        }
        self.send(&Encoder::new().op(Op::CancelWait).0, late)?;
        match self.u8(late)? {
            WAIT_CANCELED => Err(Fail::NotYet),
            // The wait ended while the cancellation was on its way, which is answered all the same.
            STOP_WAITING => match self.u8(late)? {
                WAIT_CANCELED => Ok(()),
                b => Err(Fail::Bad(format!("it answered a cancellation with {b}"))),
            },
            b => Err(Fail::Bad(format!("it answered a cancellation with {b}"))),
        }
    }

    pub(crate) fn compare_set(&mut self, key: &str, expected: &[u8], desired: &[u8], by: Instant) -> Answer<Vec<u8>> {
        self.send(&Encoder::new().op(Op::CompareSet).key(key).bytes(expected).bytes(desired).0, by)?;
        self.bytes(by)
    }

    pub(crate) fn delete_key(&mut self, key: &str, by: Instant) -> Answer<bool> {
        self.send(&Encoder::new().op(Op::DeleteKey).key(key).0, by)?;
        Ok(self.count("deleted keys", by)? > 0)
    }

    pub(crate) fn num_keys(&mut self, by: Instant) -> Answer<i64> {
        self.send(&Encoder::new().op(Op::GetNumKeys).0, by)?;
        self.count("keys", by)
    }

    pub(crate) fn queue_pop(&mut self, key: &str, deadline: Instant, late: Instant) -> Answer<Vec<u8>> {
        let mut pause = Duration::from_millis(1);
        loop {
            let slice = deadline.min(deadline_after(QUEUE_SLICE));
            match self.wait(&[key], slice, late) {
                Err(Fail::NotYet) if Instant::now() < deadline => continue,
                waited => waited?,
            }
            self.send(&Encoder::new().op(Op::QueuePop).key(key).0, late)?;
            if self.count("elements", late)? > 0 {
                return self.bytes(late);
            }
            // Another consumer was faster, or a plain value has the queue's name, for which the
            // wait ends at once.
            if Instant::now() >= deadline {
                return Err(Fail::NotYet);
            }
            std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    pub(crate) fn queue_len(&mut self, key: &str, by: Instant) -> Answer<i64> {
        self.send(&Encoder::new().op(Op::QueueLen).key(key).0, by)?;
        self.count("elements", by)
    }

    pub(crate) fn list_keys(&mut self, by: Instant) -> Answer<Vec<String>> {
        self.send(&Encoder::new().op(Op::ListKeys).0, by)?;
        let n = self.count("keys", by)?;
        let mut keys = Vec::new();
        for _ in 0..n {
            // Keys without the slash are PyTorch's own.
            if let Some((b'/', key)) = self.bytes(by)?.split_first() {
                keys.push(String::from_utf8_lossy(key).into_owned());
            }
        }
        Ok(keys)
    }
}
