//! Where the threads of one world meet and get their links.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use comm_core::{Clock, Error, ErrorKind, Result};
use comm_transport::Connect;
use parking_lot::Mutex;

use crate::meeting::Meeting;
use crate::wires::{Share, shares};

type Open = HashMap<String, (Connect, Arc<Meeting>)>;

fn open() -> &'static Mutex<Open> {
    static OPEN: OnceLock<Mutex<Open>> = OnceLock::new();
    OPEN.get_or_init(Mutex::default)
}

/// Waits until all ranks of a world have come and returns this rank's links.
pub(crate) fn join(
    name: &str,
    rank: usize,
    size: usize,
    connect: Connect,
    timeout: Duration,
    clock: &Arc<dyn Clock>,
) -> Result<Share> {
    if rank >= size {
        return Err(Error::invalid(format!("rank {rank} is not below the size {size}")));
    }
    let until = clock.now().after(timeout);
    let meeting = {
        let mut open = open().lock();
        let make = || (connect, Arc::new(Meeting::new(shares(size, connect))));
        let (theirs, meeting) = open.entry(name.to_owned()).or_insert_with(make);
        if meeting.size() != size {
            return Err(Error::invalid(format!(
                "rank {rank} joins world '{name}' with size {size}, but the ranks before it said {}",
                meeting.size()
            )));
        }
        if *theirs != connect {
            return Err(Error::invalid(format!(
                "rank {rank} joins world '{name}' with connect={connect}, but the ranks before it said {theirs}"
            )));
        }
        if !meeting.enter(rank) {
            return Err(Error::invalid(format!("two threads join world '{name}' as rank {rank}")));
        }
        Arc::clone(meeting)
    };
    let share = meeting.wait(rank, clock, until, |_| None, |arrived| missing(name, size, arrived));
    // The name is free again for the next world.
    let mut open = open().lock();
    if open.get(name).is_some_and(|(_, m)| Arc::ptr_eq(m, &meeting)) {
        open.remove(name);
    }
    share
}

fn missing(name: &str, size: usize, arrived: &[usize]) -> Error {
    Error::new(ErrorKind::Bootstrap {
        what: format!("not all ranks joined world '{name}' in time"),
        arrived: arrived.iter().map(|r| format!("rank {r}")).collect(),
        missing: (0..size).filter(|r| !arrived.contains(r)).collect(),
    })
}
