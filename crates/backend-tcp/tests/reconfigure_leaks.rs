//! Fifty memberships one after the other leave no descriptor and no thread. Alone in its process, for what it counts.

use std::thread;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, op};

const LIMIT: Duration = Duration::from_secs(60);

fn entries(of: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count()
}

fn form(uuid: u64, comms: &[Communicator]) -> Vec<Communicator> {
    let list: Vec<String> = comms.iter().map(|c| c.init_handle().unwrap()).collect();
    thread::scope(|s| {
        let call = |c: &Communicator| {
            let new = c.reconfigure(uuid, &list, LIMIT, &[]).unwrap();
            let mut x = [1i32];
            new.all_reduce(&mut x, op::Sum).unwrap();
            assert_eq!(x[0], 3);
            new
        };
        let calls: Vec<_> = comms.iter().map(|c| s.spawn(move || call(c))).collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    })
}

#[test]
fn descriptors_and_threads_are_as_before_after_fifty_memberships() {
    let new = || backend_tcp::connect(CommOptions::new().name("leaks").dynamic()).unwrap();
    let mut now: Vec<Communicator> = (0..3).map(|_| new()).collect();
    let mut before = (0, 0);
    for i in 0..55u64 {
        // The old ones are dropped.
        now = form(i, &now);
        if i % 10 == 7 {
            // And one that comes to nothing.
            let list: Vec<String> = now.iter().chain([&new()]).map(|c| c.init_handle().unwrap()).collect();
            assert!(now[0].reconfigure(1000 + i, &list, LIMIT, &[]).is_err());
        }
        if i == 4 {
            before = settled(None);
        }
    }
    let after = settled(Some(before));
    assert_eq!(after, before, "descriptors and threads");
}

/// Descriptors and threads, once they are `wanted`, or do not change for a while; what is closed may take a moment.
fn settled(wanted: Option<(usize, usize)>) -> (usize, usize) {
    let until = Instant::now() + Duration::from_secs(10);
    let mut last = (0, 0);
    let mut same = 0;
    loop {
        let now = (entries("fd"), entries("task"));
        same = if now == last { same + 1 } else { 0 };
        last = now;
        if wanted == Some(now) || (wanted.is_none() && same == 20) || Instant::now() > until {
            return now;
        }
        thread::sleep(Duration::from_millis(20));
    }
}
