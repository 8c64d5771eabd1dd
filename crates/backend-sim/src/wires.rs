//! Pipes between the ranks of a world: those it starts with, and those that data asks for later.
//!
//! One thread per process makes the later ones, because an endpoint asks with its lock held and the pipe's other end
//! belongs to another endpoint.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use comm_core::{Error, Result};
use comm_transport::{Connect, Dialer, Endpoint, Link, MemLink};
use parking_lot::Mutex;

pub(crate) type Row = Vec<Option<Box<dyn Link>>>;

/// A world, and the two ranks that are to be joined.
type Request = (Weak<Wires>, usize, usize);

/// What a rank gets: its links, and who makes more.
pub(crate) struct Share {
    pub(crate) row: Row,
    pub(crate) wires: Option<Arc<Wires>>,
}

/// The pipes of one world.
pub(crate) struct Wires {
    state: Mutex<State>,
}

struct State {
    /// `None` until the rank has made its endpoint.
    endpoints: Vec<Option<Weak<Endpoint>>>,
    made: BTreeSet<(usize, usize)>,
    /// Asked for before both endpoints were there.
    early: Vec<(usize, usize)>,
}

impl fmt::Debug for Wires {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wires").finish_non_exhaustive()
    }
}

/// The shares of all ranks of a world.
pub(crate) fn shares(size: usize, connect: Connect) -> Vec<Share> {
    let mut rows: Vec<Row> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    let mut made = BTreeSet::new();
    let pairs = (0..size).flat_map(|a| connect.neighbours(a, size).into_iter().map(move |b| (a, b)));
    for (a, b) in pairs.filter(|(a, b)| a < b) {
        let (x, y) = MemLink::pair();
        rows[a][b] = Some(Box::new(x));
        rows[b][a] = Some(Box::new(y));
        made.insert((a, b));
    }
    let sparse = made.len() < size * size.saturating_sub(1) / 2;
    let state = State { endpoints: vec![None; size], made, early: Vec::new() };
    let wires = sparse.then(|| Arc::new(Wires { state: Mutex::new(state) }));
    rows.into_iter().map(|row| Share { row, wires: wires.clone() }).collect()
}

impl Wires {
    /// What rank `rank`'s endpoint dials with.
    pub(crate) fn dialer(self: &Arc<Self>, rank: usize) -> Result<Arc<dyn Dialer>> {
        Ok(Arc::new(Plug { rank, wires: Arc::clone(self), requests: electrician()? }))
    }

    /// Rank `rank` has made its endpoint.
    pub(crate) fn register(self: &Arc<Self>, rank: usize, endpoint: &Arc<Endpoint>) {
        let mut state = self.state.lock();
        state.endpoints[rank] = Some(Arc::downgrade(endpoint));
        let early = std::mem::take(&mut state.early);
        drop(state);
        for (a, b) in early {
            self.connect(a, b);
        }
    }

    fn connect(&self, a: usize, b: usize) {
        let mut state = self.state.lock();
        let pair = (a.min(b), a.max(b));
        if state.made.contains(&pair) {
            return;
        }
        let (Some(from), Some(to)) = (state.endpoints[a].clone(), state.endpoints[b].clone()) else {
            return state.early.push((a, b));
        };
        state.made.insert(pair);
        drop(state);
        match (from.upgrade(), to.upgrade()) {
            (Some(from), Some(to)) => {
                let (x, y) = MemLink::pair();
                // Pipes in memory have no descriptor that could fail to be watched.
                let _ = (from.attach(b, Box::new(x)), to.attach(a, Box::new(y)));
            }
            (Some(from), None) => from.lost_process(b),
            (None, _) => {}
        }
    }
}

struct Plug {
    rank: usize,
    wires: Arc<Wires>,
    requests: Sender<Request>,
}

impl fmt::Debug for Plug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plug").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Dialer for Plug {
    fn dial(&self, peer: usize) {
        // The thread lives as long as the process.
        let _ = self.requests.send((Arc::downgrade(&self.wires), self.rank, peer));
    }
}

/// Where requests for pipes go.
fn electrician() -> Result<Sender<Request>> {
    static REQUESTS: OnceLock<Mutex<Option<Sender<Request>>>> = OnceLock::new();
    let mut slot = REQUESTS.get_or_init(|| Mutex::new(None)).lock();
    if let Some(s) = &*slot {
        return Ok(s.clone());
    }
    let (tx, rx) = channel::<Request>();
    let work = move || {
        while let Ok((wires, a, b)) = rx.recv() {
            if let Some(wires) = wires.upgrade() {
                wires.connect(a, b);
            }
        }
    };
    std::thread::Builder::new()
        .name("rustcomms-wires".into())
        .spawn(work)
        .map_err(|e| Error::io("starting the thread that makes pipes", &e))?;
    *slot = Some(tx.clone());
    Ok(tx)
}
