//! The client against servers that answer as Hydra does, and against others that do not.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};

use rustix::io::{FdFlags, fcntl_setfd};

use super::*;

const LONG: Duration = Duration::from_secs(30);

fn client(socket: impl Into<OwnedFd>, timeout: Duration) -> Client {
    Client { socket: socket.into(), deadline: Instant::now() + timeout, started: Instant::now() }
}

/// What all connections of a fake server share.
struct Space {
    values: Mutex<HashMap<String, String>>,
    barrier: Barrier,
    longest: usize,
}

impl Space {
    fn new(ranks: usize, longest: usize) -> Arc<Self> {
        Arc::new(Self { values: Mutex::default(), barrier: Barrier::new(ranks), longest })
    }

    /// Serves one rank until it hangs up, and returns what it asked.
    fn serve(&self, stream: impl std::io::Read + Write + Copyable) -> Vec<String> {
        let mut out = stream.copy();
        let mut asked = Vec::new();
        for line in BufReader::new(stream).lines() {
            let Ok(line) = line else { break };
            let words: HashMap<&str, &str> = line.split_whitespace().filter_map(|w| w.split_once('=')).collect();
            let answer = match words["cmd"] {
                "initack" => "cmd=initack\ncmd=set size=2\ncmd=set rank=0\ncmd=set debug=0".to_owned(),
                "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1_0_vm".to_owned(),
                "get_maxes" => format!("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max={}", self.longest),
                "put" => {
                    assert!(words["kvsname"] == "kvs_1_0_vm" && words["value"].len() < self.longest, "{line}");
                    self.values.lock().insert(words["key"].to_owned(), words["value"].to_owned());
                    "cmd=put_result rc=0 msg=success".to_owned()
                }
                "barrier_in" => {
                    self.barrier.wait();
                    "cmd=barrier_out".to_owned()
                }
                "get" => match self.values.lock().get(words["key"]) {
                    Some(v) => format!("cmd=get_result rc=0 msg=success value={v}"),
                    None => format!("cmd=get_result rc=-1 msg=key_{}_not_found value=unknown", words["key"]),
                },
                "finalize" => "cmd=finalize_ack".to_owned(),
                other => panic!("{other}"),
            };
            asked.push(words["cmd"].to_owned());
            out.write_all(format!("{answer}\n").as_bytes()).unwrap();
        }
        asked
    }
}

/// Both kinds of streams have two ends in one.
trait Copyable: Sized {
    fn copy(&self) -> Self;
}

impl Copyable for UnixStream {
    fn copy(&self) -> Self {
        self.try_clone().unwrap()
    }
}

impl Copyable for TcpStream {
    fn copy(&self) -> Self {
        self.try_clone().unwrap()
    }
}

/// All ranks meet, rank 0 with `mine`; what each got, and what rank 0 and the last asked.
fn meet(ranks: usize, longest: usize, mine: &Result<Vec<String>>) -> (Vec<Result<Vec<String>>>, [Vec<String>; 2]) {
    let space = Space::new(ranks, longest);
    std::thread::scope(|scope| {
        let (mut clients, mut servers) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let space = Arc::clone(&space);
            servers.push(scope.spawn(move || space.serve(theirs)));
            clients.push(scope.spawn(move || {
                let mut c = client(ours, LONG);
                let met = c.meet((rank == 0).then_some(mine));
                c.goodbye();
                met
            }));
        }
        let met = clients.into_iter().map(|c| c.join().unwrap()).collect();
        let asked: Vec<_> = servers.into_iter().map(|s| s.join().unwrap()).collect();
        (met, [asked[0].clone(), asked[ranks - 1].clone()])
    })
}

#[test]
fn all_ranks_get_what_rank_0_brought() {
    let mine = vec!["192.0.2.2:4000".to_owned(), "[2001:db8::2]:4000".to_owned()];
    for ranks in [1, 2, 5] {
        let (met, asked) = meet(ranks, 1024, &Ok(mine.clone()));
        assert_eq!(met.len(), ranks);
        met.into_iter().for_each(|m| assert_eq!(m.unwrap(), mine));
        assert_eq!(asked[0], ["get_my_kvsname", "get_maxes", "put", "barrier_in", "finalize"]);
        if ranks > 1 {
            // Nothing else: what an MPI library says first and last is its own.
            assert_eq!(asked[1], ["get_my_kvsname", "barrier_in", "get", "finalize"]);
        }
    }
}

#[test]
fn only_what_the_server_takes_is_published() {
    let mine: Vec<String> = (0..50).map(|i| format!("192.0.2.{i}:4000")).collect();
    let (met, _) = meet(2, 64, &Ok(mine.clone()));
    assert_eq!(met[1].as_ref().unwrap(), &mine[..4]);
    assert_eq!(fitting(&[], 100), "-");
    assert_eq!(fitting(&["a".into(), "b".into()], 4), "a,b");
    assert_eq!(fitting(&["a".into(), "b".into()], 3), "a");
}

#[test]
fn a_rank_0_without_a_store_fails_all_at_once() {
    let (met, _) = meet(3, 1024, &Err(Error::invalid("no port")));
    let texts: Vec<String> = met.into_iter().map(|m| m.unwrap_err().to_string()).collect();
    assert!(texts[0].contains("no port"), "{texts:?}");
    assert!(texts[1..].iter().all(|t| t.contains("rank 0 could not open the store")), "{texts:?}");
}

#[test]
fn a_server_at_a_port_wants_to_know_who_calls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let space = Space::new(1, 1024);
    let server = std::thread::spawn(move || space.serve(listener.accept().unwrap().0));
    let at = PmiServer::Port { addr, id: "0".into() };
    let mut c = Client::open(&at, Instant::now() + LONG).unwrap();
    assert_eq!(c.meet(Some(&Ok(vec!["a:1".into()]))).unwrap(), ["a:1"]);
    drop(c);
    assert_eq!(server.join().unwrap(), ["initack", "get_my_kvsname", "get_maxes", "put", "barrier_in"]);
    // Nobody listens there now.
    let e = Client::open(&at, Instant::now() + LONG).unwrap_err().to_string();
    assert!(e.contains("PMI server at 127.0.0.1"), "{e}");
}

/// Answers the questions of rank 1 with these texts, one after the other, and hangs up.
fn scripted(answers: &[&[u8]], timeout: Duration) -> Error {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            for answer in answers {
                if lines.next().is_none() || theirs.write_all(answer).is_err() {
                    return;
                }
            }
            if timeout < LONG {
                // Silent, but there: until the client hangs up.
                lines.for_each(drop);
            }
        });
        client(ours, timeout).meet(None).unwrap_err()
    })
}

#[test]
fn wrong_answers_are_errors() {
    const KVS: &[u8] = b"cmd=my_kvsname kvsname=k\n";
    const OUT: &[u8] = b"cmd=barrier_out\n";
    let long = [b"cmd=my_kvsname kvsname=".to_vec(), vec![b'k'; 300], b"\n".to_vec()].concat();
    let endless = vec![b'x'; 100_000];
    let cases: Vec<(Vec<&[u8]>, &str)> = vec![
        (vec![], "closed the connection"),
        (vec![b"\n"], "answered 'cmd=get_my_kvsname' with ''"),
        (vec![b"cmd=my_kvsname\n"], "told no name"),
        (vec![&long], "told no name"),
        (vec![b"cmd=my_kvsname kvsname=k"], "closed the connection"),
        (vec![b"cmd=my_kvsname kvsname=\xff\xfe\n"], "no text"),
        (vec![&endless], "more than was asked"),
        (vec![b"cmd=my_kvsname kvsname=k\ncmd=barrier_out\n"], "more than was asked"),
        (vec![b"cmd=my_kvsname kvsname=k\ncmd"], "more than was asked"),
        (vec![b"\x00\x01\x02\n"], "answered"),
        (vec![KVS, b"cmd=get_result rc=0\n"], "answered 'cmd=barrier_in'"),
        (vec![KVS, OUT], "closed the connection"),
        (vec![KVS, OUT, b"cmd=get_result rc=-1 msg=x value=unknown\n"], "published nothing"),
        (vec![KVS, OUT, b"cmd=get_result rc=0 msg=x\n"], "published nothing"),
        (vec![KVS, OUT, b"cmd=get_result rc=0 msg=x value=\n"], "published nothing"),
        (vec![KVS, OUT, b"cmd=get_result rc=0 msg=x value=-\n"], "could not open the store"),
    ];
    for (answers, want) in cases {
        let e = scripted(&answers, LONG);
        assert!(e.to_string().contains(want) && e.to_string().len() < 1000, "{answers:?}: {e}");
        assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{e}");
    }
}

#[test]
fn silence_ends_at_the_deadline() {
    let short = Duration::from_millis(100);
    for answers in [vec![], vec![&b"cmd=my_kvsname kvsname=k\n"[..]], vec![&b"cmd=my_kvs"[..]]] {
        let e = scripted(&answers, short);
        assert!(matches!(e.kind(), ErrorKind::Timeout { .. }), "{e}");
        assert!(e.to_string().contains("PMI server"), "{e}");
    }
}

#[test]
fn only_an_inherited_local_stream_is_taken() {
    let (a, b) = UnixStream::pair().unwrap();
    let number = a.as_raw_fd();
    let open = |fd| Client::open(&PmiServer::Descriptor(fd), Instant::now() + LONG);
    // Our own, which closes on exec.
    let e = open(number).unwrap_err().to_string();
    assert!(e.contains("not the launcher's") && e.contains("MASTER_ADDR"), "{e}");
    fcntl_setfd(&a, FdFlags::empty()).unwrap();
    let c = open(number).unwrap();
    assert_ne!(c.socket.as_raw_fd(), number, "the launcher's stays open for others");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let file = tempfile();
    let others: [BorrowedFd<'_>; 2] = [std::os::fd::AsFd::as_fd(&tcp), std::os::fd::AsFd::as_fd(&file)];
    for fd in others {
        fcntl_setfd(fd, FdFlags::empty()).unwrap();
        assert!(open(fd.as_raw_fd()).unwrap_err().to_string().contains("not the launcher's"));
    }
    for number in [-1, 0, 2, i32::MIN] {
        assert!(open(number).unwrap_err().to_string().contains("no descriptor of a launcher"), "{number}");
    }
    for number in [1 << 20, i32::MAX] {
        assert!(open(number).unwrap_err().to_string().contains("was not inherited"), "{number}");
    }
    drop(b);
}

/// Any file.
fn tempfile() -> std::fs::File {
    std::fs::File::open("/dev/null").unwrap()
}
