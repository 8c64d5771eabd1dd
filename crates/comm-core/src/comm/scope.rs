//! Scopes: borrowed buffers, overlapping operations.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::buf::{IntoBuf, IntoBufMut};
use crate::comm::batch::{BatchedOp, Entries};
use crate::comm::ops::With;
use crate::comm::prepare::Prepared;
use crate::comm::{CallOptions, Communicator};
use crate::error::{Error, Result};
use crate::work::{AbortOnUnwind, Core, Hold, ScopedWork};

/// Where borrowed operations are started; see [`Communicator::scope`].
pub struct Scope<'scope, 'env: 'scope> {
    with: With<'env>,
    works: Mutex<Vec<Entry>>,
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// Something that only has to be kept alive.
trait Kept: Send {}
impl<T: Send> Kept for T {}

/// An operation of the scope and the memory it works on. The buffer is kept here, not only in the
/// handle, because an owned buffer's handle may be dropped while the operation is in flight.
struct Entry {
    core: Arc<Core>,
    _hold: Box<dyn Kept>,
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("works", &self.works.lock().len()).finish_non_exhaustive()
    }
}

type Panic = Box<dyn Any + Send>;

impl Scope<'_, '_> {
    /// Waits for everything. Returns the first error that nobody has seen, and the first panic of a
    /// buffer's destructor.
    fn finish(&self) -> (Result<()>, Option<Panic>) {
        let (mut first, mut panic) = (Ok(()), None);
        // Operations started while waiting (from another thread of the program) are waited for too.
        loop {
            let works = std::mem::take(&mut *self.works.lock());
            if works.is_empty() {
                return (first, panic);
            }
            // All have ended before the first destructor runs, which is user code.
            let guard = AbortOnUnwind;
            for e in &works {
                e.core.wait(None);
            }
            guard.defuse();
            for Entry { core, _hold: hold } in works {
                if let (Ok(()), false, Some(Err(e))) = (&first, core.was_observed(), core.outcome()) {
                    first = Err(e.clone());
                }
                if let Err(p) = catch_unwind(AssertUnwindSafe(|| drop(hold))) {
                    panic.get_or_insert(p);
                }
            }
        }
    }
}

impl<'env> With<'env> {
    /// [`Communicator::scope`] with options for all calls in it.
    ///
    /// # Errors
    ///
    /// As [`Communicator::scope`].
    pub fn scope<F, T>(&self, f: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        let scope = Scope { with: self.clone(), works: Mutex::default(), scope: PhantomData, env: PhantomData };
        let out = catch_unwind(AssertUnwindSafe(|| f(&scope)));
        let (finished, panic) = scope.finish();
        match (out, panic) {
            (Err(p), _) | (_, Some(p)) => resume_unwind(p),
            (Ok(Ok(v)), None) => finished.map(|()| v),
            (Ok(Err(e)), None) => Err(e),
        }
    }
}

impl Communicator {
    /// A [`scope`](Self::scope) whose operations the backend may coalesce into one launch. On CPU backends,
    /// which have no launches, it is just that.
    ///
    /// Counterpart: `ncclGroupStart` and `ncclGroupEnd`.
    ///
    /// # Errors
    ///
    /// As [`scope`](Self::scope).
    pub fn group<'env, F, T>(&'env self, f: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        /// Ends the group also when the closure unwinds: what was started must run for the scope to end.
        struct End<'a>(&'a dyn crate::Backend);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.group_end();
            }
        }
        let backend = self.backend().as_ref();
        self.scope(|s| {
            backend.group_begin();
            let _end = End(backend);
            f(s)
        })
    }
}

impl Communicator {
    /// Runs `f` with a scope in which operations borrow their buffers and overlap with each other and
    /// with computation. All of them are complete when this returns, also when `f` panics or fails;
    /// handles and borrows cannot leave the scope.
    ///
    /// ```no_run
    /// # use comm_core::{op, Communicator, Result};
    /// # fn f(comm: &Communicator) -> Result<()> {
    /// let (mut a, mut b) = (vec![1.0f32; 1024], vec![2.0f64; 1024]);
    /// comm.scope(|s| {
    ///     let first = s.all_reduce(&mut a, op::Sum)?;
    ///     s.all_reduce(&mut b, op::Max)?;
    ///     // … compute here …
    ///     let a = first.wait()?; // the borrow comes back early
    ///     a[0] += 1.0;
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The error of `f`, else the first error of an operation whose handle was not waited for.
    ///
    /// # Panics
    ///
    /// When `f` or a buffer's destructor panics, with its payload, after all operations have ended.
    pub fn scope<'env, F, T>(&'env self, f: F) -> Result<T>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    {
        self.with(CallOptions::new()).scope(f)
    }
}

impl<'scope, 'env> Scope<'scope, 'env> {
    pub(super) fn go<B: Send + 'scope>(
        &'scope self,
        buf: B,
        prepare: impl FnOnce(&With<'env>, &mut B) -> Prepared,
    ) -> Result<ScopedWork<'scope, B>> {
        let (core, hold): (Arc<Core>, Arc<Hold<B>>) = self.with.scoped(buf, |b| prepare(&self.with, b))?;
        let kept: Box<dyn Kept + 'scope> = Box::new(Arc::clone(&hold));
        // SAFETY: only the lifetime changes. `finish` empties the list before 'scope ends, also on unwinding, and
        // nothing moves an entry out of the scope before that.
        let kept = unsafe { std::mem::transmute::<Box<dyn Kept + 'scope>, Box<dyn Kept + 'static>>(kept) };
        let mut works = self.works.lock();
        works.push(Entry { core: Arc::clone(&core), _hold: kept });
        // Long scopes should not accumulate records of operations that went well. Not at every call: where many
        // are in flight there is little to find.
        let gone: Vec<Entry> = if works.len() >= 64 && works.len().is_power_of_two() {
            works.extract_if(.., |e| matches!(e.core.outcome(), Some(Ok(())))).collect()
        } else {
            Vec::new()
        };
        // Destructors of buffers are user code and may come back here.
        drop(works);
        drop(gone);
        Ok(ScopedWork { core, hold, scope: PhantomData })
    }

    /// See [`Communicator::barrier`].
    ///
    /// # Errors
    ///
    /// As there; those of the transfer come from the handle.
    pub fn barrier(&'scope self) -> Result<ScopedWork<'scope, ()>> {
        self.go((), |w, ()| w.prep_barrier())
    }

    /// A batch of borrowed messages that is issued into this scope.
    #[must_use]
    pub fn batch(&'scope self) -> ScopedBatch<'scope, 'env> {
        ScopedBatch { entries: Entries::new(self.with.clone()), scope: self }
    }
}

/// A batch inside a scope; see [`Scope::batch`].
#[derive(Debug)]
pub struct ScopedBatch<'scope, 'env> {
    entries: Entries<'env>,
    scope: &'scope Scope<'scope, 'env>,
}

impl<'scope, 'env> ScopedBatch<'scope, 'env> {
    /// Adds a send.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range.
    pub fn send<T: crate::Pod>(mut self, buf: &'scope [T], dst: usize) -> Result<Self> {
        self.entries.send(IntoBuf::buf(&buf), dst)?;
        Ok(self)
    }

    /// Adds a receive.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range.
    pub fn recv<T: crate::Pod>(mut self, buf: &'scope mut [T], src: usize) -> Result<Self> {
        let mut buf = buf;
        self.entries.recv(IntoBufMut::buf_mut(&mut buf), src)?;
        Ok(self)
    }

    /// Sets the tag of the messages that are added after this.
    #[must_use]
    pub fn tag(mut self, tag: u32) -> Self {
        self.entries.tag(tag);
        self
    }

    /// What has been added so far.
    #[must_use]
    pub fn ops(&self) -> Vec<BatchedOp> {
        self.entries.ops()
    }

    /// Starts all messages.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an empty batch.
    pub fn issue(self) -> Result<ScopedWork<'scope, ()>> {
        self.scope.go((), |_, ()| self.entries.prepare())
    }
}

// `Scope` is handed out by shared reference and may be used from several threads of the program.
const _: () = {
    const fn send_sync<T: Send + Sync>() {}
    send_sync::<Communicator>();
    send_sync::<Scope<'_, '_>>();
    send_sync::<Error>();
};
