//! The data port, connections on demand, and larger worlds.

mod boot;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use boot::{LIMIT, all, memory, options, use_up, world};
use comm_core::{Communicator, Result, Secret};
use comm_store::TcpStoreServerOptions;

/// The listening sockets of this process.
fn listening() -> Vec<u16> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|f| Some(std::fs::read_link(f.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .filter_map(|l| Some(l.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut ports = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words[3] == "0A" && own.iter().any(|i| i == words[9]) {
                ports.push(u16::from_str_radix(words[1].rsplit(':').next().unwrap(), 16).unwrap());
            }
        }
    }
    ports
}

/// Strangers talk to the data ports while the ranks meet, and stay; the world comes together all the same.
#[test]
fn strangers_at_the_data_port() {
    let store = memory();
    let rank = |r: usize| {
        let o = options(&store, "strangers", r, 3);
        std::thread::spawn(move || backend_tcp::connect(o))
    };
    // Ranks 0 and 1 are there and wait for rank 2.
    let mut ranks = vec![rank(0), rank(1)];
    store.wait(&["rustcomms/run/strangers/1/0", "rustcomms/run/strangers/1/1"], LIMIT).unwrap();
    let mut strangers = Vec::new();
    for port in listening() {
        for i in 0..100 {
            // Other tests' ports come and go.
            let Ok(mut s) = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))) else { break };
            let _ = match i % 5 {
                0 => s.write_all(&[0xff; 10_000]),
                1 => s.write_all(b"GET / HTTP/1.1\r\nHost: a.name.that.is.long.enough.to.be.a.greeting\r\n\r\n"),
                2 => s.write_all(b"RCOMMS\r\n"),
                3 => s.write_all(&[b"RCOMMS\r\n", &[1u8, 0, 0, 0][..], &[7; 48]].concat()),
                _ => Ok(()),
            };
            strangers.push(s);
        }
    }
    assert!(strangers.len() >= 200, "the data ports were not found");
    ranks.push(rank(2));
    let comms: Vec<Communicator> = ranks.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
    // Who talks nonsense is hung up on.
    let mut dropped = 0;
    for s in &mut strangers {
        s.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut b = [0; 64];
        if !matches!(s.read(&mut b), Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut))
        {
            dropped += 1;
        }
    }
    assert!(dropped >= 100, "only {dropped} strangers were dropped");
    use_up(comms);
}

/// Two ranks that are not connected use each other at the same moment.
#[test]
fn both_ends_send_first() {
    for round in 0..50 {
        let store = memory();
        let comms = world(4, move |r| options(&store, "cross", r, 4).hint("connect", "ring"));
        let sums = all(comms, move |c: Result<Communicator>| {
            let c = c.unwrap();
            // 0 and 2, 1 and 3 are not neighbours.
            let peer = (c.rank() + 2) % 4;
            let out = vec![c.rank() as u32 + 10 * round; 5];
            let mut got = vec![0u32; 5];
            c.sendrecv(&out, &mut got, peer, peer).unwrap();
            assert_eq!(got, vec![peer as u32 + 10 * round; 5]);
            c.finalize(LIMIT).unwrap();
        });
        assert_eq!(sums.len(), 4);
    }
}

#[test]
fn worlds_with_few_connections_can_do_everything() {
    for n in 3..=8 {
        let store = memory();
        let comms = world(n, move |r| options(&store, "lazy", r, n).hint("connect", "ring"));
        let comms: Vec<Communicator> = all(comms, move |c: Result<Communicator>| {
            let c = c.unwrap();
            let (me, n) = (c.rank(), c.size());
            // From each to each, the receivers in another order than the senders.
            for k in 1..n {
                let (to, from) = ((me + k) % n, (me + n - k) % n);
                let out = vec![(me * n + to) as u64; 9];
                let mut got = vec![0u64; 9];
                if me < to {
                    c.send(&out, to).unwrap();
                    c.recv(&mut got, from).unwrap();
                } else {
                    let w = c.send_async(out, to).unwrap();
                    c.recv(&mut got, from).unwrap();
                    w.wait().unwrap();
                }
                assert_eq!(got, vec![(from * n + me) as u64; 9]);
            }
            assert_eq!(boot::sum_of_ranks(&c), n * (n - 1) / 2);
            let mut all = vec![0u64; 2 * n];
            c.all_to_all(&vec![me as u64; 2 * n], &mut all).unwrap();
            assert!(all.chunks(2).enumerate().all(|(r, b)| b == [r as u64; 2]));
            c
        });
        use_up(comms);
    }
}

/// More ranks than are connected fully, with hosts and local ranks of all.
#[test]
fn a_world_with_an_overlay() {
    for (n, connect) in [(9, "auto"), (17, "auto"), (12, "full")] {
        let store = memory();
        let comms = world(n, move |r| options(&store, "overlay", r, n).hint("connect", connect));
        let comms: Vec<Communicator> = comms.into_iter().map(Result::unwrap).collect();
        for (r, c) in comms.iter().enumerate() {
            let info = c.backend().info();
            assert_eq!((info.rank, info.size, info.local_rank, info.local_size), (r, n, r, n));
            assert_eq!(info.hosts, vec![boot::host(); n]);
        }
        use_up(comms);
    }
}

/// The same among processes, where things do happen at once; with a secret, too.
#[test]
fn processes_that_connect_on_demand() {
    for (round, n) in [(0, 4), (1, 5), (2, 10), (3, 6)] {
        let secret = (round > 1).then(|| Secret::new("s").unwrap());
        let server = TcpStoreServerOptions::new().secret(secret).bind("127.0.0.1:0").unwrap();
        let (addr, size, connect) = (server.local_addr().to_string(), n.to_string(), ["ring", "auto"][round % 2]);
        let ranks = (0..n).map(|r| {
            let r = r.to_string();
            let place = [("RUSTCOMMS_RANK", r.as_str()), ("RUSTCOMMS_WORLD_SIZE", &size), ("RUSTCOMMS_STORE", &addr)];
            let more = [("RUSTCOMMS_CONNECT", connect), (boot::PAIRS, "1"), ("RUSTCOMMS_SECRET", "s")];
            boot::spawn(LIMIT, &[&place[..], &more[..2 + round / 2]].concat())
        });
        let said = ranks.reduce(boot::Processes::and).unwrap().said();
        assert_eq!(said, vec![format!("OK {}", n * (n - 1) / 2); n]);
    }
}

/// Fast ranks are in calls that do not match while slow ones still learn where everybody is: that is what all are told,
/// and not that the world did not come together.
#[test]
fn a_mismatch_before_all_have_met() {
    for round in 0..8 {
        let (store, name) = (memory(), format!("soon{round}"));
        let ends = all(0..14, move |r| {
            let c = match backend_tcp::connect(options(&store, &name, r, 14)) {
                Ok(c) => c,
                Err(e) => return (e, None),
            };
            let mut x = [1u8];
            let called = if r == 5 { c.barrier() } else { c.all_reduce(&mut x, comm_core::op::Sum) };
            (called.unwrap_err(), Some(c))
        });
        for (e, _) in &ends {
            assert!(matches!(e.kind().name(), "Mismatch" | "Aborted"), "round {round}: {e}");
        }
    }
}

/// Many more ranks than cores start, reduce, and end; few of them are connected to each other.
#[test]
fn sixty_four_processes() {
    let server = comm_store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let ranks = (0..64).map(|r: usize| {
        let r = r.to_string();
        let place = [("RUSTCOMMS_RANK", r.as_str()), ("RUSTCOMMS_WORLD_SIZE", "64"), ("RUSTCOMMS_STORE", &addr)];
        boot::spawn(LIMIT, &[&place[..], &[(boot::LONG, "1")]].concat())
    });
    for said in ranks.reduce(boot::Processes::and).unwrap().said() {
        let links = said.strip_prefix("OK 2016 ").and_then(|l| l.parse::<usize>().ok());
        // Eleven neighbours, those that the long reduction needs, the store's connection and the listening socket.
        assert!(links.is_some_and(|l| l <= 32), "{said}");
    }
}

/// How often the connector has gone to sleep so far.
fn sleeps() -> u64 {
    let connector = std::fs::read_dir("/proc/self/task").unwrap().find_map(|t| {
        let status = std::fs::read_to_string(t.ok()?.path().join("status")).ok()?;
        // The kernel keeps 15 bytes of a thread's name.
        status.lines().next()?.ends_with("rustcomms-conne").then_some(status)
    });
    let status = connector.expect("there is no connector");
    let line = status.lines().find(|l| l.starts_with("voluntary_ctxt_switches")).unwrap();
    line.split_whitespace().last().unwrap().parse().unwrap()
}

/// Scenes for processes of their own: other tests keep the one connector busy.
#[test]
fn child() {
    match std::env::var(SCENE).as_deref() {
        Ok("idle") => idle(),
        Ok("exhausted") => exhausted(),
        _ => boot::child(),
    }
}

const SCENE: &str = "RUSTCOMMS_MANY_SCENE";

fn idle() {
    let store = memory();
    let comms: Vec<Communicator> =
        world(3, move |r| options(&store, "idle", r, 3)).into_iter().map(Result::unwrap).collect();
    assert_eq!(listening().len(), 3, "one data port per rank");
    std::thread::sleep(Duration::from_millis(300));
    let before = sleeps();
    std::thread::sleep(Duration::from_secs(2));
    let woken = sleeps() - before;
    assert!(woken < 5, "the connector woke up {woken} times without anything to do");
    use_up(comms);
    let until = Instant::now() + LIMIT;
    while !listening().is_empty() {
        assert!(Instant::now() < until, "a data port stays open");
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("@OK 0");
    std::process::exit(0);
}

/// No descriptor is left to accept connections with: the connector waits a little rather than try at full speed.
fn exhausted() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let store = memory();
    let comms: Vec<Communicator> =
        world(2, move |r| options(&store, "full", r, 2)).into_iter().map(Result::unwrap).collect();
    let ports = listening();
    let sockets: Vec<_> =
        (0..6).map(|_| socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap()).collect();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    for (i, s) in sockets.iter().enumerate() {
        s.connect(&SocketAddr::from(([127, 0, 0, 1], ports[i % 2])).into()).unwrap();
    }
    std::thread::sleep(Duration::from_secs(1));
    setrlimit(Resource::Nofile, before).unwrap();
    let woken = sleeps();
    assert!(woken < 200, "the connector woke up {woken} times");
    // It comes round to them.
    for s in sockets {
        s.set_read_timeout(Some(LIMIT)).unwrap();
        let mut s = TcpStream::from(s);
        // A whole greeting, and not more: what lies unread when they hang up is an error here.
        s.write_all(&[0xff; 60]).unwrap();
        assert!(matches!(s.read(&mut [0; 8]), Ok(0)), "nobody hangs up");
    }
    use_up(comms);
    println!("@OK 0");
    std::process::exit(0);
}

#[test]
fn without_descriptors_the_connector_waits() {
    assert_eq!(boot::spawn(LIMIT, &[(SCENE, "exhausted")]).said(), ["OK 0"]);
}

#[test]
fn an_idle_connector_sleeps_and_ports_close_with_their_worlds() {
    assert_eq!(boot::spawn(LIMIT, &[(SCENE, "idle")]).said(), ["OK 0"]);
}

#[test]
fn a_store_is_asked_few_things() {
    let counting = Arc::new(Counting::default());
    let store: Arc<dyn comm_core::Store> = Arc::clone(&counting) as _;
    for (i, n) in [2, 5, 16].into_iter().enumerate() {
        let s = Arc::clone(&store);
        counting.calls.store(0, std::sync::atomic::Ordering::SeqCst);
        let comms = world(n, move |r| options(&s, &format!("n{i}"), r, n));
        let calls = counting.calls.load(std::sync::atomic::Ordering::SeqCst);
        drop(comms.into_iter().map(Result::unwrap).collect::<Vec<_>>());
        // Some may look whether another has given up, when this takes long.
        assert!(calls <= 10 * n, "{calls} calls for {n} ranks");
    }
}

/// A store that counts the calls.
#[derive(Debug, Default)]
struct Counting {
    inner: comm_store::MemoryStore,
    calls: std::sync::atomic::AtomicUsize,
}

impl Counting {
    fn inner(&self) -> &comm_store::MemoryStore {
        self.calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        &self.inner
    }
}

impl comm_core::Store for Counting {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner().set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner().get(key, timeout)
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner().add(key, delta)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.inner().check(keys)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.inner().wait(keys, timeout)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner().compare_set(key, expected, desired)
    }
    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner().delete_key(key)
    }
    fn num_keys(&self) -> Result<i64> {
        self.inner().num_keys()
    }
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner().append(key, value)
    }
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.inner().multi_get(keys, timeout)
    }
}
