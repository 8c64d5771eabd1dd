//! The store, and what the launchers of several nodes tell each other through it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use comm_core::{ErrorKind, Secret, Store};
use comm_store::{PrefixStore, TcpStore, TcpStoreServer, TcpStoreServerOptions};
use rustix::net::{AddressFamily, SocketType};

use super::{Event, OnFailure, Plan, Stop, beat, make_run_id, survive};

/// The launchers' keys, apart from those of the ranks.
const PREFIX: &str = "rustcomms-launch";
/// Where the first failure of a generation is. How many of these there are is how often the run was restarted, or has to
/// end: the one that comes first counts, however many nodes see one.
fn failure_key(generation: usize) -> String {
    format!("failure/{generation}")
}
/// How many nodes have joined node 0.
const MEMBERS: &str = "members";
/// The longest that one wait for a failure takes: connections that are silent for long are cut by firewalls.
const WATCH: Duration = Duration::from_secs(30);
/// How long one message to the store may take.
const MESSAGE: Duration = Duration::from_secs(5);

/// `host:port`, with brackets around IPv6 addresses.
pub(super) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// `host`, with the number of the interface that a link-local address names: nothing else takes names there.
pub(super) fn scoped(host: &str) -> Result<String, String> {
    let Some((address, scope)) = host.split_once('%') else { return Ok(host.to_owned()) };
    if scope.parse::<u32>().is_ok() {
        return Ok(host.to_owned());
    }
    let index = || {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        rustix::net::netdevice::name_to_index(&socket, scope)
    };
    let index = index().map_err(|e| format!("--master-addr {host}: there is no interface '{scope}' here ({e})"))?;
    Ok(format!("{address}%{index}"))
}

/// What went wrong first, on whichever node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) node: usize,
    pub(super) code: i32,
    /// The run is not to be restarted after it, however often it still could be.
    pub(super) last: bool,
    pub(super) text: String,
}

impl Failure {
    fn encode(&self) -> Vec<u8> {
        format!("{}\n{}\n{}\n{}", self.node, self.code, u8::from(self.last), self.text).into_bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut parts = text.splitn(4, '\n');
        let mut number = || parts.next().and_then(|p| p.parse::<u32>().ok());
        let (node, code) = (number().unwrap_or(0) as usize, number().unwrap_or(1) as i32);
        let last = number() != Some(0);
        Self { node, code, last, text: parts.next().unwrap_or("it failed").to_owned() }
    }
}

/// For what the nodes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// All ranks of the generation have ended well, on all nodes.
    Finished,
    /// The ranks of the generation before have ended on all nodes, so this one can start.
    Ready,
}

impl Meeting {
    fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Ready => "ready",
        }
    }
}

/// This launcher's place among the others.
#[derive(Debug)]
pub(super) struct Nodes {
    run_id: String,
    /// The store's port, also if the user named none.
    pub(super) port: u16,
    /// Restarts so far.
    pub(super) generation: usize,
    max_restarts: usize,
    node_rank: usize,
    nnodes: usize,
    /// Where the store is, for messages.
    addr: String,
    /// Only with several nodes.
    store: Option<Arc<PrefixStore>>,
    reports: Vec<JoinHandle<()>>,
    /// Whether the others know that this node needs them no more.
    parted: bool,
    /// Only on node 0. Dropped last.
    _server: Option<TcpStoreServer>,
}

impl Nodes {
    /// Hosts the store or waits for it, and agrees with the other nodes on what is run.
    pub(super) fn join(plan: &Plan, timeout: Duration, events: &Sender<Event>) -> Result<Self, Stop> {
        let server = (plan.node_rank == 0).then(|| host(plan)).transpose()?;
        let port = server.as_ref().map_or(plan.port, |s| s.local_addr().port());
        let mut nodes = Self {
            run_id: plan.run_id.clone().unwrap_or_else(make_run_id),
            port,
            generation: 0,
            max_restarts: plan.max_restarts,
            node_rank: plan.node_rank,
            nnodes: plan.nnodes,
            addr: String::new(),
            store: None,
            reports: Vec::new(),
            parted: false,
            _server: server,
        };
        if plan.nnodes > 1 {
            let addr = match plan.node_rank {
                0 => SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string(),
                _ => join_host_port(&plan.host, port),
            };
            let secret = Secret::from_environment().map_err(|e| Stop::new(2, e.to_string()))?;
            let store = TcpStore::connect_with(&addr, timeout, secret.as_ref());
            let store = store.map_err(|e| no_store(&addr, timeout, &e))?;
            let store = Arc::new(PrefixStore::new(PREFIX, Arc::new(store.with_timeout(MESSAGE))));
            nodes.agree(plan, &*store, &addr, timeout)?;
            nodes.addr = addr;
            nodes.store = Some(Arc::clone(&store));
            nodes.watch(events)?;
            let (node, addr, events) = (nodes.node_rank, nodes.addr.clone(), events.clone());
            let goes_on = plan.on_failure == OnFailure::Continue;
            spawn("beat", move || beat::beat(&*store, node, &addr, goes_on, &events))?;
        }
        Ok(nodes)
    }

    /// Compares this launcher's command line with node 0's.
    fn agree(&mut self, plan: &Plan, store: &dyn Store, addr: &str, timeout: Duration) -> Result<(), Stop> {
        let failed = |e: comm_core::Error| Stop::new(1, format!("the launchers cannot agree at {addr}: {e}"));
        if self.node_rank == 0 {
            let pairs = [
                ("nnodes", plan.nnodes.to_string()),
                ("nproc", plan.nproc.to_string()),
                ("max_restarts", plan.max_restarts.to_string()),
                ("on_failure", plan.on_failure.name().to_owned()),
                ("run_id", self.run_id.clone()),
            ];
            let pairs = pairs.iter().map(|(k, v)| (*k, v.as_bytes()));
            // In one call: who finds some of them finds all.
            store.multi_set(&pairs.chain(beat::EMPTY).collect::<Vec<_>>()).map_err(failed)?;
        } else {
            let theirs = store.multi_get(&["nnodes", "nproc", "max_restarts", "on_failure", "run_id"], timeout).map_err(|e| match e.kind() {
                ErrorKind::Timeout { .. } => Stop::new(
                    1,
                    format!("at {addr} there is a store, but no `rustcomms run --node-rank 0` behind it; is the port another program's?"),
                ),
                _ => failed(e),
            })?;
            let theirs: Vec<String> = theirs.iter().map(|v| String::from_utf8_lossy(v).into_owned()).collect();
            if plan.run_id.as_ref().is_some_and(|id| *id != theirs[4]) {
                let text = format!(
                    "the store at {addr} belongs to run '{}', not to '{}'; use another port",
                    theirs[4], self.run_id
                );
                // Another run's launcher, which lost its way, must not end this one.
                return Err(self.refused(store, text));
            }
            let ours = [
                ("--nnodes", plan.nnodes.to_string()),
                ("-n", plan.nproc.to_string()),
                ("--max-restarts", plan.max_restarts.to_string()),
                ("--on-failure", plan.on_failure.name().to_owned()),
            ];
            for ((option, ours), theirs_now) in ours.iter().zip(&theirs) {
                if ours != theirs_now {
                    let text = format!(
                        "node {} has {option} {ours} but node 0 has {option} {theirs_now}; they must be equal",
                        self.node_rank
                    );
                    return Err(self.does_not_fit(store, text, &theirs[0]));
                }
            }
            self.run_id.clone_from(&theirs[4]);
        }
        if store.add(&survive::joined_key(self.node_rank), 1).map_err(failed)? > 1 {
            let text =
                format!("there is a node {} in this run already; every node needs its own --node-rank", self.node_rank);
            return Err(self.refused(store, text));
        }
        if self.node_rank > 0 {
            store.add(MEMBERS, 1).map_err(failed)?;
            beat::enter(store, self.node_rank).map_err(failed)?;
        }
        Ok(())
    }

    /// This launcher is not let in; node 0 says so, too, because it may be waiting for it.
    fn refused(&self, store: &dyn Store, text: String) -> Stop {
        // If it cannot be told, it is told here at least.
        let _ = beat::refused(store, &format!("node {} was not let in: {text}", self.node_rank));
        Stop::new(2, text)
    }

    /// This launcher's options are not node 0's. While nodes are missing (of `nnodes`, as node 0 says), it is one of
    /// those, and the run cannot begin: it ends on all nodes. A run that is complete is not disturbed.
    fn does_not_fit(&self, store: &dyn Store, text: String, nnodes: &str) -> Stop {
        let nnodes: i64 = nnodes.parse().unwrap_or(0);
        if !store.add(MEMBERS, 0).is_ok_and(|n| n + 1 < nnodes) {
            return self.refused(store, text);
        }
        let ours = Failure { node: self.node_rank, code: 2, last: true, text: text.clone() };
        // As above.
        let _ = announce(store, 0, usize::MAX, &ours).and_then(|()| beat::part(store, self.node_rank));
        Stop::new(2, text)
    }

    /// The name of this generation of the run. The store outlives the ranks, so their keys must not meet those of the
    /// ranks before them.
    pub(super) fn run_id(&self) -> String {
        if self.generation == 0 { self.run_id.clone() } else { format!("{}.{}", self.run_id, self.generation) }
    }

    /// The name of the run, whatever the generation.
    pub(super) fn base_run_id(&self) -> &str {
        &self.run_id
    }

    /// Tells the main thread when another node fails in this generation, or the store.
    fn watch(&self, events: &Sender<Event>) -> Result<(), Stop> {
        let Some(store) = self.store.clone() else { return Ok(()) };
        let (generation, addr, events) = (self.generation, self.addr.clone(), events.clone());
        spawn("watch", move || watch(&store, generation, &addr, &events))
    }

    /// Tells the other nodes that this one failed, and with `last`, that there is to be no restart. Does not block.
    pub(super) fn report(&mut self, code: i32, text: String, last: bool) {
        let Some(store) = self.store.clone() else { return };
        let (generation, max) = (self.generation, self.max_restarts);
        let ours = Failure { node: self.node_rank, code, last, text };
        let send = move || {
            // If the store is gone, so is the run, and everybody knows.
            let _ = announce(&*store, generation, max, &ours);
        };
        self.reports.extend(std::thread::Builder::new().name("report".into()).spawn(send));
    }

    /// Waits until the others can know what was reported; as long as a message takes at most.
    pub(super) fn flush(&mut self) {
        for r in self.reports.drain(..) {
            // It has no way to fail that matters here.
            let _ = r.join();
        }
    }

    /// Tells the main thread when all nodes have come to `meeting` of this generation, or that they have not within
    /// `patience`, by [`Event::Met`].
    pub(super) fn meet(&self, meeting: Meeting, patience: Duration, events: &Sender<Event>) -> Result<(), Stop> {
        let (generation, node, nnodes) = (self.generation, self.node_rank, self.nnodes);
        let (store, events) = (self.store.clone(), events.clone());
        spawn("meet", move || {
            let result = match &store {
                Some(store) => meet(&**store, meeting, generation, node, nnodes, patience),
                None => Ok(()),
            };
            // The main thread is gone only if the process ends.
            let _ = events.send(Event::Met { generation, meeting, result });
        })
    }

    /// Goes on to the next generation: [`Event::Met`] tells when its ranks can start.
    pub(super) fn advance(&mut self, patience: Duration, events: &Sender<Event>) -> Result<(), Stop> {
        self.generation += 1;
        self.watch(events)?;
        self.meet(Meeting::Ready, patience, events)
    }

    /// Whether this node's ranks may be needed again after they have ended well.
    pub(super) fn must_stay(&self) -> bool {
        self.store.is_some() && self.max_restarts > 0
    }

    /// Whether this node hosts the store.
    pub(super) fn hosts(&self) -> bool {
        self.node_rank == 0
    }

    /// In a run that goes on after failures, when all ranks here have ended, `well` if at least one did so: tells the other
    /// nodes, and asks them if need be, in the background. [`Event::Verdict`] is the answer; false if there is none to wait for.
    pub(super) fn conclude(&self, well: bool, linger: Duration, events: &Sender<Event>) -> bool {
        let Some(store) = self.store.clone() else { return false };
        let (node, nnodes, events) = (self.node_rank, self.nnodes, events.clone());
        let ask = move || {
            let judged = match node {
                // Who failed does not wait for those who have not come: if they come, they find nobody.
                0 => survive::judge(&*store, nnodes, well, if well { linger } else { Duration::ZERO }).map(
                    |(well, missing)| {
                        if !missing.is_empty() {
                            let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
                            let text =
                                format!("these nodes have not come: {}; ending without them", missing.join(", "));
                            // The main thread is gone only if the process ends.
                            let _ = events.send(Event::NodeLost(text));
                        }
                        well
                    },
                ),
                _ => survive::leave_word(&*store, node, well)
                    .and_then(|()| if well { Ok(true) } else { survive::await_verdict(&*store) }),
            };
            // As above.
            let _ = events.send(Event::Verdict(judged.map_err(|e| format!("node 0's store is gone: {e}"))));
        };
        std::thread::Builder::new().name("conclude".into()).spawn(ask).is_ok()
    }

    /// Says that this node needs the store no more. On node 0, waits for the others in the background,
    /// and reports [`Event::Lingered`]; false if there is nothing to wait for.
    pub(super) fn done(&mut self, failed: bool, linger: Duration, events: &Sender<Event>) -> bool {
        let Some(store) = self.store.clone() else { return false };
        self.flush();
        if self.node_rank > 0 {
            self.part();
            return false;
        }
        let nnodes = self.nnodes;
        let events_too = events.clone();
        let wait = move || {
            let waited = wait_for_others(&*store, nnodes, failed, linger);
            // The main thread is gone only if the process ends.
            let _ = events_too.send(Event::Lingered(waited));
        };
        std::thread::Builder::new().name("linger".into()).spawn(wait).is_ok()
    }

    /// Says that this node, unless it hosts the store, needs the others no more.
    pub(super) fn part(&mut self) {
        if self.node_rank == 0 || std::mem::replace(&mut self.parted, true) {
            return;
        }
        self.flush();
        if let Some(store) = &self.store {
            // If the store is gone, nobody waits for this.
            let _ = beat::part(&**store, self.node_rank);
        }
    }

    /// The first failure of this generation, if there was one and there are several nodes.
    pub(super) fn failure(&mut self) -> Option<Failure> {
        self.flush();
        let store = self.store.as_ref()?;
        store.get(&failure_key(self.generation), Duration::ZERO).ok().map(|v| Failure::decode(&v))
    }
}

impl Drop for Nodes {
    /// However this launcher ends: it is not lost.
    fn drop(&mut self) {
        self.part();
    }
}

/// Reports a failure in `generation`. The first one counts; but where the others restart after that, up to generation
/// `max`, they have to hear of the end, too.
pub(super) fn announce(store: &dyn Store, mut generation: usize, max: usize, ours: &Failure) -> comm_core::Result<()> {
    let bytes = ours.encode();
    loop {
        let first = store.compare_set(&failure_key(generation), b"", &bytes)?;
        if !ours.last || generation >= max || Failure::decode(&first).last {
            return Ok(());
        }
        generation += 1;
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Stop> {
    let started = std::thread::Builder::new().name(name.into()).spawn(work);
    started.map(drop).map_err(|e| Stop::new(1, format!("cannot start a thread: {e}")))
}

fn meet(
    store: &dyn Store,
    meeting: Meeting,
    generation: usize,
    node: usize,
    nnodes: usize,
    patience: Duration,
) -> Result<(), String> {
    let key = |of: &str| format!("{}/{generation}/{of}", meeting.name());
    let all = key("all");
    let come = || {
        store.set(&key(&node.to_string()), b"")?;
        if usize::try_from(store.add(&key("count"), 1)?).is_ok_and(|n| n >= nnodes) {
            store.set(&all, b"")?;
        }
        store.wait(&[&all], patience)
    };
    come().map_err(|e| {
        let missing: Vec<String> =
            (0..nnodes).map(|n| n.to_string()).filter(|n| store.check(&[&key(n)]).is_ok_and(|there| !there)).collect();
        match (e.kind(), meeting) {
            (ErrorKind::Timeout { .. }, Meeting::Finished) => not_done(patience, &missing),
            (ErrorKind::Timeout { .. }, Meeting::Ready) => format!(
                "restart {generation}: after {patience:.0?} these nodes have not come: {}; their launchers may be gone, or \
                 cannot end their ranks",
                missing.join(", ")
            ),
            _ => format!("node 0's store is gone: {e}"),
        }
    })
}

fn not_done(patience: Duration, missing: &[String]) -> String {
    format!("after {patience:.0?} these nodes are not done: {}; ending the store without them", missing.join(", "))
}

fn wait_for_others(store: &dyn Store, nnodes: usize, failed: bool, linger: Duration) -> Result<(), String> {
    let mut others: Vec<usize> = (1..nnodes).collect();
    if failed {
        // Those who have not come yet will not be missed; if they come, they find nobody.
        others.retain(|n| store.check(&[&survive::joined_key(*n)]).unwrap_or(false));
    }
    let keys: Vec<String> = others.iter().map(|n| beat::done_key(*n)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    store.wait(&keys, linger).map_err(|_| {
        let missing: Vec<String> = others
            .iter()
            .filter(|n| !store.check(&[&beat::done_key(**n)]).unwrap_or(false))
            .map(usize::to_string)
            .collect();
        not_done(linger, &missing)
    })
}

fn host(plan: &Plan) -> Result<TcpStoreServer, Stop> {
    let port = plan.port;
    let options = TcpStoreServerOptions::of_environment().map_err(|e| Stop::new(2, e.to_string()))?;
    let listener = if plan.nnodes == 1 {
        TcpListener::bind((plan.host.as_str(), port))
    } else {
        // All addresses of both families, or of IPv4 where there is no IPv6.
        TcpListener::bind(SocketAddr::from((IpAddr::from([0u16; 8]), port)))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
    };
    let listener = listener.map_err(|e| Stop::new(1, cannot_host(&plan.host, port, &e)))?;
    options.serve(listener).map_err(|e| Stop::new(1, format!("cannot host the store on port {port}: {e}")))
}

/// Why the store cannot be at `host`, and which option is to blame.
fn cannot_host(host: &str, port: u16, e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot host the store on port {port}: another program, perhaps another run, has it; choose another \
             --master-port ({e})"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("cannot host the store at {host}: --master-addr {host} is no address of this host ({e})")
        }
        io::ErrorKind::PermissionDenied => format!(
            "cannot host the store on port {port}: low ports are for privileged programs; choose a --master-port above \
             1023 ({e})"
        ),
        _ => format!(
            "cannot host the store at {}: --master-addr or --master-port is wrong: {e}",
            join_host_port(host, port)
        ),
    }
}

fn no_store(addr: &str, timeout: Duration, e: &comm_core::Error) -> Stop {
    let why = match e.kind() {
        ErrorKind::Bootstrap { what, .. } => what.clone(),
        ErrorKind::InvalidArgument { what } => return Stop::new(2, what.clone()),
        _ => e.to_string(),
    };
    // There is a store, and it said no.
    if !why.starts_with(&format!("the store at {addr} could not be reached")) {
        return Stop::new(1, format!("{why}; node 0's launcher is expected there"));
    }
    Stop::new(
        1,
        format!(
            "node 0's store at {addr} did not appear within {timeout:.0?}. Start `rustcomms run --node-rank 0` there, and \
             check --master-addr, --master-port and the firewall between the nodes ({why})"
        ),
    )
}

fn watch(store: &PrefixStore, generation: usize, addr: &str, events: &Sender<Event>) {
    let mut lost = 0;
    let event = loop {
        match store.get(&failure_key(generation), WATCH) {
            Ok(v) => break Event::Elsewhere { generation, failure: Failure::decode(&v) },
            Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) => lost = 0,
            Err(e) => {
                // One connection can break; a store that cannot be reached again is gone.
                lost += 1;
                if lost > 1 {
                    break Event::StoreLost(format!("node 0's store at {addr} is gone: {e}"));
                }
            }
        }
    };
    // The main thread is gone only if the process ends.
    let _ = events.send(event);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_survive_the_store() {
        for last in [false, true] {
            let f = Failure { node: 3, code: 137, last, text: "rank 2 was killed\nwith two lines".into() };
            assert_eq!(Failure::decode(&f.encode()), f);
        }
        let junk = Failure::decode(b"junk");
        assert!(junk.code == 1 && junk.last);
    }

    #[test]
    fn hosts_and_ports() {
        assert_eq!(join_host_port("a.b", 5), "a.b:5");
        assert_eq!(join_host_port("::1", 5), "[::1]:5");
        assert_eq!(scoped("fe80::1%7").unwrap(), "fe80::1%7");
        assert_eq!(scoped("node-0").unwrap(), "node-0");
        let lo = scoped("fe80::1%lo").unwrap();
        assert!(join_host_port(&lo, 5).parse::<std::net::SocketAddrV6>().is_ok_and(|a| a.scope_id() > 0), "{lo}");
        assert!(scoped("fe80::1%no-such").unwrap_err().contains("no interface 'no-such' here"));
    }
}
