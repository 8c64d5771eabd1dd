//! [`MeshBackend`]: a backend over a group of an endpoint.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use comm_control::MeshControl;
use comm_core::{
    Backend, BackendInfo, CORE_HINTS, CallInfo, CallNumber, Clock, CommOptions, Control, DeviceKind, Error, HintSpec,
    OpDesc, OpQuery, OpRequest, Operation, Pending, ReconfigureRequest, Result, SplitRequest, Support, check_hints,
};
use comm_transport::{Connect, Endpoint, GroupId, GroupSpec};

use super::pool::Pool;
use super::regroup::Regroup;
use super::task::Messages;
use crate::schedule::Shape;
use crate::select::{Algorithm, Table};

/// The shortest heartbeat timeout that makes sense: it is counted in whole heartbeats.
const LEAST_HEARTBEAT: Duration = Duration::from_millis(1);

/// Settings of a [`MeshBackend`].
#[derive(Clone, Debug)]
pub struct MeshOptions {
    /// Which algorithm runs when.
    pub table: Table,
    /// Algorithm that is used for every operation that has it; from `RUSTCOMMS_ALGO` or the hint `algo`.
    pub forced: Option<String>,
    /// Bytes of a pipeline's segments.
    pub segment: usize,
    /// Which links a world has from the start; from `RUSTCOMMS_CONNECT` or the hint `connect`.
    pub connect: Connect,
}

/// Hints of every backend over an endpoint, beside the core's.
pub const MESH_HINTS: &[HintSpec] = &[HintSpec {
    name: "connect",
    doc: "links that a world has from the start: `auto` (all up to 8 ranks, else 2 log2 n of them, the others when data \
          needs them), `full` (all), or for tests `ring` (two, the others when anything needs them); the same on all ranks \
          (per communicator, or as RUSTCOMMS_CONNECT)",
}];

impl Default for MeshOptions {
    fn default() -> Self {
        Self { table: Table::tcp(), forced: None, segment: Shape::SEGMENT, connect: Connect::Auto }
    }
}

impl MeshOptions {
    /// What a communicator's options and the environment (`RUSTCOMMS_ALGO`) ask for. Backends call it before
    /// the ranks meet, so that a bad hint is one rank's error and not everybody's lost peer.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for unknown hints, for algorithms that do not exist, and for a heartbeat timeout below 1 ms.
    pub fn of(options: &CommOptions) -> Result<Self> {
        CommOptions::check_environment()?;
        check_hints(options.hints.keys().map(String::as_str), &[CORE_HINTS, MESH_HINTS])?;
        if options.heartbeat_timeout < LEAST_HEARTBEAT {
            return Err(Error::invalid(format!(
                "a heartbeat timeout of {:?} is too short: give at least {LEAST_HEARTBEAT:?}, or Duration::MAX for none",
                options.heartbeat_timeout
            )));
        }
        let asked = |hint: &str, variable: &str| {
            let environment = || std::env::var(variable).ok().filter(|v| !v.is_empty());
            options.hints.get(hint).cloned().or_else(environment)
        };
        let connect = match asked("connect", "RUSTCOMMS_CONNECT") {
            None => Connect::Auto,
            Some(text) => {
                text.parse().map_err(|e| Error::invalid(format!("{e} (RUSTCOMMS_CONNECT or hint connect)")))?
            }
        };
        let mesh = Self { forced: asked("algo", "RUSTCOMMS_ALGO"), connect, ..Self::default() };
        mesh.check()?;
        Ok(mesh)
    }

    fn check(&self) -> Result<()> {
        let Some(name) = self.forced.as_deref() else { return Ok(()) };
        if Algorithm::ALL.iter().any(|a| a.name() == name) {
            return Ok(());
        }
        let mut names: Vec<&str> = Algorithm::ALL.iter().map(|a| a.name()).collect();
        names.sort_unstable();
        names.dedup();
        let known = names.join(", ");
        Err(Error::invalid(format!("there is no algorithm '{name}' (RUSTCOMMS_ALGO or hint algo); there are: {known}")))
    }
}

/// A [`Backend`] that runs schedules over a group of an endpoint.
pub struct MeshBackend {
    pub(super) info: BackendInfo,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) group: GroupId,
    pub(super) spec: GroupSpec,
    pub(super) control: Arc<MeshControl>,
    pub(super) options: MeshOptions,
    pub(super) pool: Arc<Pool>,
    /// How it gets another membership; `None` if it never does.
    pub(super) regroup: Option<Arc<dyn Regroup>>,
}

impl fmt::Debug for MeshBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshBackend").field("info", &self.info).field("options", &self.options).finish_non_exhaustive()
    }
}

impl Drop for MeshBackend {
    fn drop(&mut self) {
        self.endpoint.close(self.group);
        self.endpoint.forget(self.group);
    }
}

impl MeshBackend {
    /// Creates the group `spec` on the endpoint and a backend over it.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a forced algorithm that does not exist; else as [`Endpoint::create_group`].
    pub fn new(endpoint: Arc<Endpoint>, spec: GroupSpec, info: BackendInfo, options: MeshOptions) -> Result<Self> {
        let rank = info.rank;
        Self::introduced(endpoint, spec, rank, options, |_| Ok(info))
    }

    /// As [`new`](Self::new), for members that have to tell each other something before they know what the backend is:
    /// `info` gets the new group's control plane. When it fails, the group is closed.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and those of `info`.
    pub fn introduced(
        endpoint: Arc<Endpoint>,
        spec: GroupSpec,
        rank: usize,
        options: MeshOptions,
        info: impl FnOnce(&MeshControl) -> Result<BackendInfo>,
    ) -> Result<Self> {
        options.check()?;
        let group = endpoint.create_group(spec.clone())?;
        let control = Arc::new(MeshControl::new(Arc::clone(&endpoint), group, rank, spec.clone()));
        match info(&control) {
            Ok(info) => Ok(Self { info, endpoint, group, spec, control, options, pool: Arc::default(), regroup: None }),
            Err(e) => {
                endpoint.close(group);
                endpoint.forget(group);
                Err(e)
            }
        }
    }

    /// With a lineage, by which it can be given another membership.
    #[must_use]
    pub fn with_regroup(mut self, regroup: Arc<dyn Regroup>) -> Self {
        self.regroup = Some(regroup);
        self
    }

    fn regroup(&self, what: &str) -> Result<&Arc<dyn Regroup>> {
        let fixed =
            || Error::unsupported(what, format!("this communicator of {} has a fixed membership", self.info.name));
        self.regroup.as_ref().ok_or_else(fixed)
    }

    /// The endpoint, for tests and metrics.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(super) fn choose(
        &self,
        op: Operation,
        bytes: usize,
        commutative: bool,
        hint: Option<&str>,
    ) -> Result<Algorithm> {
        let table = &self.options.table;
        if let Some(name) = hint {
            return table.select(op, bytes, self.info.size, commutative, Some(name));
        }
        // The environment forces an algorithm for all operations; those that lack it keep their own choice.
        if let Some(name) = self.options.forced.as_deref()
            && Algorithm::from_name(op, name).is_some_and(|a| commutative || a.keeps_order())
        {
            return table.select(op, bytes, self.info.size, commutative, Some(name));
        }
        table.select(op, bytes, self.info.size, commutative, None)
    }

    /// What travels in headers: the call's descriptor and the algorithm, on which ranks must agree too.
    fn describe(call: &CallInfo<'_>, algorithm: Algorithm) -> OpDesc {
        let mut desc = call.desc;
        desc.flags = algorithm.code();
        desc
    }

    /// A call that cannot be made here is refused, so that the others do not wait for it.
    fn refused<T>(&self, call: &CallInfo<'_>, e: Error) -> Result<T> {
        if call.desc.operation.is_collective() {
            self.endpoint.refuse(self.group, call.seq, call.desc, &e.kind().to_string());
        }
        Err(e)
    }
}

/// What backend `name` does over a mesh, whoever its members are.
pub(super) fn supports(name: &str, query: &OpQuery) -> Support {
    if query.memory.kind != DeviceKind::Cpu {
        let reason = format!("backend {name} works on host memory; copy to the host first");
        return Support::Unsupported { reason };
    }
    match query.operation {
        Operation::Send | Operation::Recv | Operation::Batch | Operation::SendRecv => Support::Native,
        op if Algorithm::ALL.iter().any(|a| a.operation() == op) => Support::Native,
        other => Support::Unsupported { reason: format!("backend {name} does not have {other} yet") },
    }
}

// SAFETY: buffers are handed to the endpoint as pieces of an operation; the endpoint touches them under its lock
// until a piece is done or the operation has ended, and removes what is left (`purge`) before it reports an
// operation as ended; `Flight` cancels an operation whose handle is dropped.
unsafe impl Backend for MeshBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        supports(self.info.name, query)
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        self.endpoint.clock()
    }

    unsafe fn run(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        let plan = match self.translate(request, call.algorithm) {
            Ok(p) => p,
            Err(e) => return self.refused(call, e),
        };
        let Some(plan) = plan else {
            let mut task = Messages::borrowed(request.messages());
            return self.endpoint.run(self.group, None, call.desc, call.timeout, &mut task);
        };
        let desc = Self::describe(call, plan.algorithm);
        // SAFETY: the caller lends the request's buffers until we return.
        match unsafe { self.bind(plan) } {
            Ok(mut task) => self.endpoint.run(self.group, Some(call.seq), desc, call.timeout, &mut task),
            Err(e) => self.refused(call, e),
        }
    }

    unsafe fn start(&self, request: OpRequest, call: &CallInfo<'_>) -> Result<Box<dyn Pending>> {
        let plan = match self.translate(&request, call.algorithm) {
            Ok(p) => p,
            Err(e) => return self.refused(call, e),
        };
        let Some(plan) = plan else {
            let ops = if let OpRequest::Batch(ops) = request { ops } else { request.messages().to_vec() };
            let task = Box::new(Messages::owned(ops));
            return self.endpoint.start(self.group, None, call.desc, call.timeout, task);
        };
        let desc = Self::describe(call, plan.algorithm);
        // SAFETY: the caller lends the request's buffers until completion or cancellation.
        match unsafe { self.bind(plan) } {
            Ok(task) => self.endpoint.start(self.group, Some(call.seq), desc, call.timeout, Box::new(task)),
            Err(e) => self.refused(call, e),
        }
    }

    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        match number {
            CallNumber::Collective(seq) => self.endpoint.refuse(self.group, *seq, *desc, reason),
            CallNumber::P2p { peer, tag, seq } => {
                self.endpoint.refuse_message(self.group, *peer, *tag, *seq, *desc, reason);
            }
            _ => {}
        }
    }

    fn control(&self) -> Option<Arc<dyn Control>> {
        Some(Arc::clone(&self.control) as Arc<dyn Control>)
    }

    fn failure(&self) -> Option<Error> {
        self.endpoint.failure(self.group)
    }

    fn abort(&self, cause: &Error) {
        self.endpoint.fail(self.group, cause);
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        if let Some(regroup) = &self.regroup {
            regroup.close();
        }
        self.endpoint.finalize(self.group, timeout)
    }

    fn close(&self) {
        self.endpoint.close(self.group);
    }

    fn split(&self, request: &SplitRequest) -> Result<Option<Arc<dyn Backend>>> {
        let child = self.split_group(request)?;
        Ok(child.map(|c| Arc::new(c) as Arc<dyn Backend>))
    }

    fn agree_survivors(&self, timeout: Duration) -> Result<Vec<usize>> {
        self.endpoint.agree_survivors(self.group, timeout).map(|s| s.ranks)
    }

    fn shrink(&self, survivors: &[usize], timeout: Duration) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.shrink_to(survivors, timeout)?))
    }

    fn reconfigure(&self, request: &ReconfigureRequest) -> Result<Arc<dyn Backend>> {
        let new = self.regroup("reconfigure")?.gather(request)?;
        // Those who are left out learn it when they need this rank; what they have among themselves goes on.
        self.endpoint.leave_for(self.group, new.info.generation);
        Ok(Arc::new(new))
    }

    fn init_handle(&self) -> Result<String> {
        self.regroup("init_handle")?.handle()
    }

    fn explain(&self, desc: &OpDesc) -> String {
        self.choose(desc.operation, desc.bytes() as usize, true, None).map(|a| a.name().to_owned()).unwrap_or_default()
    }
}
