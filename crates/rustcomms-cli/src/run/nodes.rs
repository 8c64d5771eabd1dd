//! The store, and what the launchers of several nodes tell each other through it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use comm_core::{ErrorKind, Store};
use comm_store::{PrefixStore, TcpStore, TcpStoreServer};

use super::{Event, Plan, Stop, make_run_id};

/// The launchers' keys, apart from those of the ranks.
const PREFIX: &str = "rustcomms-launch";
const FAILURE: &str = "failure";
/// How long one message to the store may take.
const MESSAGE: Duration = Duration::from_secs(5);

/// `host:port`, with brackets around IPv6 addresses.
pub(super) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// What went wrong first, on whichever node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) node: usize,
    pub(super) code: i32,
    pub(super) text: String,
}

impl Failure {
    fn encode(&self) -> Vec<u8> {
        format!("{}\n{}\n{}", self.node, self.code, self.text).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut parts = text.splitn(3, '\n');
        let mut number = || parts.next().and_then(|p| p.parse::<u32>().ok());
        let (node, code) = (number().unwrap_or(0) as usize, number().unwrap_or(1) as i32);
        Self { node, code, text: parts.next().unwrap_or("it failed").to_owned() }
    }
}

/// This launcher's place among the others.
#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) run_id: String,
    /// The store's port, also if the user named none.
    pub(super) port: u16,
    node_rank: usize,
    nnodes: usize,
    /// Only with several nodes.
    store: Option<Arc<PrefixStore>>,
    report: Option<JoinHandle<()>>,
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
            node_rank: plan.node_rank,
            nnodes: plan.nnodes,
            store: None,
            report: None,
            _server: server,
        };
        if plan.nnodes > 1 {
            let addr = match plan.node_rank {
                0 => SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string(),
                _ => join_host_port(&plan.host, port),
            };
            let store = TcpStore::connect(&addr, timeout).map_err(|e| no_store(&addr, timeout, &e))?;
            let store = Arc::new(PrefixStore::new(PREFIX, Arc::new(store.with_timeout(MESSAGE))));
            nodes.agree(plan, &*store, &addr, timeout)?;
            watch(Arc::clone(&store), addr, events.clone())?;
            nodes.store = Some(store);
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
                ("run_id", self.run_id.clone()),
            ];
            let pairs: Vec<(&str, &[u8])> = pairs.iter().map(|(k, v)| (*k, v.as_bytes())).collect();
            store.multi_set(&pairs).map_err(failed)?;
        } else {
            let theirs = store.multi_get(&["nnodes", "nproc", "run_id"], timeout).map_err(|e| match e.kind() {
                ErrorKind::Timeout { .. } => Stop::new(
                    1,
                    format!("at {addr} there is a store, but no `rustcomms run --node-rank 0` behind it; is the port another program's?"),
                ),
                _ => failed(e),
            })?;
            let theirs: Vec<String> = theirs.iter().map(|v| String::from_utf8_lossy(v).into_owned()).collect();
            let ours = [("--nnodes", plan.nnodes.to_string()), ("-n", plan.nproc.to_string())];
            for ((option, ours), theirs) in ours.iter().zip(&theirs) {
                if ours != theirs {
                    let text = format!(
                        "node {} has {option} {ours} but node 0 has {option} {theirs}; they must be equal",
                        self.node_rank
                    );
                    return Err(Stop::new(2, text));
                }
            }
            if plan.run_id.as_ref().is_some_and(|id| *id != theirs[2]) {
                let text = format!(
                    "the store at {addr} belongs to run '{}', not to '{}'; use another port",
                    theirs[2], self.run_id
                );
                return Err(Stop::new(2, text));
            }
            self.run_id.clone_from(&theirs[2]);
        }
        if store.add(&self.key("joined"), 1).map_err(failed)? > 1 {
            let text =
                format!("there is a node {} in this run already; every node needs its own --node-rank", self.node_rank);
            return Err(Stop::new(2, text));
        }
        Ok(())
    }

    fn key(&self, what: &str) -> String {
        format!("{what}/{}", self.node_rank)
    }

    /// Tells the other nodes that this one failed. Does not block.
    pub(super) fn report(&mut self, code: i32, text: String) {
        let Some(store) = self.store.clone() else { return };
        let failure = Failure { node: self.node_rank, code, text };
        let send = move || {
            // The first failure counts. If the store is gone, so is the run, and everybody knows.
            let _ = store.compare_set(FAILURE, b"", &failure.encode());
        };
        self.report = std::thread::Builder::new().name("report".into()).spawn(send).ok();
    }

    /// Says that this node's ranks have ended. On node 0, waits for the others in the background,
    /// and reports [`Event::Lingered`]; false if there is nothing to wait for.
    pub(super) fn done(&mut self, failed: bool, linger: Duration, events: &Sender<Event>) -> bool {
        let Some(store) = self.store.clone() else { return false };
        if let Some(r) = self.report.take() {
            // It has no way to fail that matters here.
            let _ = r.join();
        }
        if self.node_rank > 0 {
            // If the store is gone, nobody waits for this.
            let _ = store.set(&self.key("done"), b"");
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

    /// The first failure of the run, if there was one.
    pub(super) fn failure(&self) -> Option<Failure> {
        let store = self.store.as_ref()?;
        store.get(FAILURE, Duration::ZERO).ok().map(|v| Failure::decode(&v))
    }
}

fn wait_for_others(store: &dyn Store, nnodes: usize, failed: bool, linger: Duration) -> Result<(), String> {
    let mut others: Vec<usize> = (1..nnodes).collect();
    if failed {
        // Those who have not come yet will not be missed; if they come, they find nobody.
        others.retain(|n| store.check(&[&format!("joined/{n}")]).unwrap_or(false));
    }
    let keys: Vec<String> = others.iter().map(|n| format!("done/{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    store.wait(&keys, linger).map_err(|_| {
        let missing: Vec<String> = others
            .iter()
            .filter(|n| !store.check(&[&format!("done/{n}")]).unwrap_or(false))
            .map(usize::to_string)
            .collect();
        format!("after {linger:.0?} these nodes are not done: {}; ending the store without them", missing.join(", "))
    })
}

fn host(plan: &Plan) -> Result<TcpStoreServer, Stop> {
    let port = plan.port;
    let bound = if plan.nnodes == 1 {
        TcpStoreServer::bind((plan.host.as_str(), port))
    } else {
        // All addresses of both families, or of IPv4 where there is no IPv6.
        TcpStoreServer::bind(SocketAddr::from((IpAddr::from([0u16; 8]), port)))
            .or_else(|_| TcpStoreServer::bind((Ipv4Addr::UNSPECIFIED, port)))
    };
    bound.map_err(|e| Stop::new(1, format!("cannot host the store on port {port}; is another run using it? {e}")))
}

fn no_store(addr: &str, timeout: Duration, e: &comm_core::Error) -> Stop {
    let why = match e.kind() {
        ErrorKind::Bootstrap { what, .. } => what.clone(),
        _ => e.to_string(),
    };
    Stop::new(
        1,
        format!(
            "node 0's store at {addr} did not appear within {timeout:.0?}. Start `rustcomms run --node-rank 0` there, and \
             check --master-addr, --master-port and the firewall between the nodes ({why})"
        ),
    )
}

/// Tells the main thread when another node fails, or the store.
fn watch(store: Arc<PrefixStore>, addr: String, events: Sender<Event>) -> Result<(), Stop> {
    let work = move || {
        let mut lost = 0;
        let event = loop {
            match store.get(FAILURE, Duration::from_secs(3600)) {
                Ok(v) => break Event::Elsewhere(Failure::decode(&v)),
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
    };
    let started = std::thread::Builder::new().name("watch".into()).spawn(work);
    started.map(drop).map_err(|e| Stop::new(1, format!("cannot start a thread: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_survive_the_store() {
        let f = Failure { node: 3, code: 137, text: "rank 2 was killed\nwith two lines".into() };
        assert_eq!(Failure::decode(&f.encode()), f);
        assert_eq!(Failure::decode(b"junk").code, 1);
    }

    #[test]
    fn hosts_and_ports() {
        assert_eq!(join_host_port("a.b", 5), "a.b:5");
        assert_eq!(join_host_port("::1", 5), "[::1]:5");
    }
}
