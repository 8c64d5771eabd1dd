//! Where the threads of one world meet and get their links.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result};
use comm_transport::Connect;
use parking_lot::{Condvar, Mutex};

use crate::wires::{Share, shares};

/// Ranks on their way to one world.
struct Meeting {
    connect: Connect,
    rows: Vec<Option<Share>>,
    arrived: Vec<bool>,
}

#[derive(Default)]
struct Place {
    open: Mutex<HashMap<String, Meeting>>,
    news: Condvar,
}

fn place() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(Place::default)
}

/// Waits until all ranks of a world have come and returns this rank's links.
pub(crate) fn join(name: &str, rank: usize, size: usize, connect: Connect, timeout: Duration) -> Result<Share> {
    if rank >= size {
        return Err(Error::invalid(format!("rank {rank} is not below the size {size}")));
    }
    let place = place();
    let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
    let mut open = place.open.lock();
    let meeting = open.entry(name.to_owned()).or_insert_with(|| Meeting {
        connect,
        rows: shares(size, connect).into_iter().map(Some).collect(),
        arrived: vec![false; size],
    });
    if meeting.rows.len() != size {
        return Err(Error::invalid(format!(
            "rank {rank} joins world '{name}' with size {size}, but the ranks before it said {}",
            meeting.rows.len()
        )));
    }
    if meeting.connect != connect {
        return Err(Error::invalid(format!(
            "rank {rank} joins world '{name}' with connect={connect}, but the ranks before it said {}",
            meeting.connect
        )));
    }
    if std::mem::replace(&mut meeting.arrived[rank], true) {
        return Err(Error::invalid(format!("two threads join world '{name}' as rank {rank}")));
    }
    let row = meeting.rows[rank].take();
    if meeting.arrived.iter().all(|a| *a) {
        // The name is free again for the next world.
        open.remove(name);
        place.news.notify_all();
    } else {
        let here =
            |open: &HashMap<String, Meeting>| open.get(name).is_some_and(|m| m.arrived[rank] && m.rows[rank].is_none());
        while here(&open) {
            if place.news.wait_until(&mut open, until).timed_out() && here(&open) {
                let m = open.remove(name);
                place.news.notify_all();
                return Err(missing(name, &m.map(|m| m.arrived).unwrap_or_default()));
            }
        }
    }
    drop(open);
    row.ok_or_else(|| Error::invalid(format!("world '{name}' was given up by another rank")))
}

fn missing(name: &str, arrived: &[bool]) -> Error {
    let ranks = |want: bool| arrived.iter().enumerate().filter(move |(_, a)| **a == want).map(|(r, _)| r);
    Error::new(ErrorKind::Bootstrap {
        what: format!("not all ranks joined world '{name}' in time"),
        arrived: ranks(true).map(|r| format!("rank {r}")).collect(),
        missing: ranks(false).collect(),
    })
}
