//! Links between the ranks of a world: those it starts with, and those that data asks for later.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Weak};

use comm_core::Result;
use comm_transport::{Connect, Dialer, Endpoint, Link};
use parking_lot::Mutex;

use crate::ground::{Ground, Identity, here};

pub(crate) type Row = Vec<Option<Box<dyn Link>>>;

/// What a rank gets: its links, and who makes more.
pub(crate) struct Share {
    pub(crate) row: Row,
    pub(crate) wires: Option<Arc<Wires>>,
}

/// The links of one world.
pub(crate) struct Wires {
    ground: Arc<dyn Ground>,
    /// By rank.
    members: Vec<Identity>,
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

/// The shares of all ranks of a world on the ground under the calling thread, whose ranks have been nothing before.
pub(crate) fn shares(size: usize, connect: Connect) -> Vec<Share> {
    let (ground, _) = here();
    shares_on(&ground, &(0..size as Identity).collect::<Vec<_>>(), connect)
}

/// The shares of all ranks of a world.
pub(crate) fn shares_on(ground: &Arc<dyn Ground>, members: &[Identity], connect: Connect) -> Vec<Share> {
    let size = members.len();
    let mut rows: Vec<Row> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    let mut made = BTreeSet::new();
    let pairs = (0..size).flat_map(|a| connect.neighbours(a, size).into_iter().map(move |b| (a, b)));
    for (a, b) in pairs.filter(|(a, b)| a < b) {
        let (x, y) = ground.pair(members[a], members[b]);
        rows[a][b] = Some(x);
        rows[b][a] = Some(y);
        made.insert((a, b));
    }
    let sparse = made.len() < size * size.saturating_sub(1) / 2;
    let state = State { endpoints: vec![None; size], made, early: Vec::new() };
    let ground = Arc::clone(ground);
    let wires = sparse.then(|| Arc::new(Wires { ground, members: members.to_vec(), state: Mutex::new(state) }));
    rows.into_iter().map(|row| Share { row, wires: wires.clone() }).collect()
}

impl Wires {
    /// What rank `rank`'s endpoint dials with.
    pub(crate) fn dialer(self: &Arc<Self>, rank: usize) -> Result<Arc<dyn Dialer>> {
        // What could fail fails now, not when a call needs a link.
        self.ground.later(Box::new(|| ()))?;
        Ok(Arc::new(Plug { rank, wires: Arc::clone(self) }))
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
                let (x, y) = self.ground.pair(self.members[a], self.members[b]);
                // Links in memory have no descriptor that could fail to be watched.
                let _ = (from.attach(b, x), to.attach(a, y));
            }
            (Some(from), None) => from.lost_process(b),
            (None, _) => {}
        }
    }
}

struct Plug {
    rank: usize,
    wires: Arc<Wires>,
}

impl fmt::Debug for Plug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plug").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Dialer for Plug {
    fn dial(&self, peer: usize) {
        let (wires, me) = (Arc::downgrade(&self.wires), self.rank);
        let connect = move || {
            if let Some(wires) = wires.upgrade() {
                wires.connect(me, peer);
            }
        };
        // It worked when this object was made.
        let _ = self.wires.ground.later(Box::new(connect));
    }
}
