//! Two hosts that are network namespaces, and ranks as processes in them.
//!
//! A host is what `unshare` makes: network, mounts and host name of its own, inside a user namespace where the kernel
//! lets anybody have one, else as root. It lasts as long as a `cat` whose standard input the test holds, so nothing is
//! left behind, however the test ends. Interfaces are made by `ip` of iproute2.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where namespaces are not permitted the tests do not run, and pass; with this set to 1 they fail.
const REQUIRE: &str = "RUSTCOMMS_REQUIRE_NAMESPACES";
/// Tells a process what it is to play.
pub const SCENE: &str = "RUSTCOMMS_NETNS_SCENE";
/// Of the store, on every host.
pub const PORT: u16 = 29_500;
/// Nothing that ends well takes as long, even on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// A host; it is gone when this is dropped.
pub struct Host {
    holder: Child,
    user: bool,
}

impl Host {
    /// A host of its own, in the user namespace of `beside` if there is one.
    fn new(beside: Option<&Self>, user: bool) -> Result<Self, String> {
        let mut c = match beside {
            Some(h) if user => h.enter(&["--user", "--preserve-credentials"], "unshare"),
            _ => Command::new("unshare"),
        };
        if user && beside.is_none() {
            c.args(["--user", "--map-root-user"]);
        }
        c.args(["--net", "--mount", "--uts", "sh", "-c", "echo ready; exec cat >/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut holder = c.spawn().map_err(|e| format!("unshare of util-linux: {e}"))?;
        let mut line = String::new();
        // Ends with the process, if that cannot have what it wants.
        let _ = BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line);
        let mut host = Self { holder, user };
        if line.trim() != "ready" {
            let mut why = String::new();
            drop(host.holder.stdin.take());
            let _ = host.holder.stderr.take().unwrap().read_to_string(&mut why);
            return Err(why.trim().to_owned());
        }
        Ok(host)
    }

    fn pid(&self) -> String {
        self.holder.id().to_string()
    }

    /// `program` in those of the host's namespaces that `what` lists.
    fn enter(&self, what: &[&str], program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.args(["--target", &self.pid()]).args(what).arg("--").arg(program);
        c
    }

    /// `program` on this host.
    pub fn command(&self, program: &str) -> Command {
        const OWN: [&str; 3] = ["--net", "--mount", "--uts"];
        let user: &[&str] = if self.user { &["--user", "--preserve-credentials"] } else { &[] };
        self.enter(&[user, &OWN].concat(), program)
    }

    /// Runs a shell script as the host's root.
    fn try_sh(&self, script: &str) -> Result<(), String> {
        let out = self.command("sh").args(["-ec", script]).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
        if out.status.success() {
            return Ok(());
        }
        Err(format!("{script}: {} {}", out.status, String::from_utf8_lossy(&out.stderr).trim()))
    }

    pub fn sh(&self, script: &str) {
        self.try_sh(script).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Gives the host a name, and a hosts file of its own as the only source of names.
    pub fn name(&self, name: &str, hosts: &str) {
        let dir = Scratch::new();
        let path = |file: &str| dir.0.join(file).to_str().unwrap().to_owned();
        std::fs::write(path("hosts"), format!("127.0.0.1 localhost\n{hosts}\n")).unwrap();
        std::fs::write(path("nsswitch"), "hosts: files\n").unwrap();
        self.sh(&format!(
            "hostname {name}; mount --bind {} /etc/hosts; test ! -e /etc/nsswitch.conf || mount --bind {} /etc/nsswitch.conf",
            path("hosts"),
            path("nsswitch")
        ));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A folder that goes with the value. What is mounted from it stays readable.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let k = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("rustcomms-netns-{}-{k}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Hosts without any connection but loopback.
fn hosts(n: usize) -> Result<Vec<Host>, String> {
    let mut why = Vec::new();
    for user in [true, false] {
        let make = || -> Result<Vec<Host>, String> {
            let mut all = vec![Host::new(None, user)?];
            while all.len() < n {
                all.push(Host::new(Some(&all[0]), user)?);
            }
            for h in &all {
                h.try_sh("command -v ip >/dev/null || { echo 'ip of iproute2 is not installed' >&2; false; }")?;
                h.try_sh("ip link set lo up")?;
            }
            // Whether the kernel has such interfaces at all.
            let there = all[1].pid();
            all[0].try_sh(&format!("ip link add try0 type veth peer name try0 netns {there}; ip link del try0"))?;
            Ok(all)
        };
        match make() {
            Ok(hosts) => return Ok(hosts),
            Err(e) => why.push(format!("{}: {e}", if user { "with a user namespace" } else { "as root" })),
        }
    }
    Err(why.join("; "))
}

fn or_not_run<T>(test: &str, made: Result<T, String>) -> Option<T> {
    match made {
        Ok(t) => Some(t),
        Err(why) => {
            assert!(std::env::var_os(REQUIRE).is_none_or(|v| v != "1"), "{REQUIRE} is set, but {why}");
            // Not through the macro, which the test harness keeps to itself; in one piece, beside other tests.
            let line = format!("\nNOT RUN: {test}: no network namespaces here ({why})\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            None
        }
    }
}

/// Two hosts, unless they cannot be had here.
pub fn two_hosts(test: &str) -> Option<[Host; 2]> {
    let pair = or_not_run(test, hosts(2))?;
    Some(pair.try_into().unwrap_or_else(|_| panic!("two were asked for")))
}

/// Hosts that are joined by a switch: host `k` has the address `10.1.0.{k + 1}` on its interface `e0`.
pub struct Lan {
    pub hosts: Vec<Host>,
    switch: Host,
}

impl Lan {
    /// With `n` hosts, unless they cannot be had here.
    pub fn new(test: &str, n: usize) -> Option<Self> {
        let make = || -> Result<Self, String> {
            let mut all = hosts(n + 1)?;
            let lan = Self { switch: all.pop().unwrap(), hosts: all };
            lan.switch.try_sh("ip link add br0 type bridge; ip link set br0 addrgenmode none up")?;
            // The kernel has queues of that kind.
            lan.switch.try_sh(
                "tc qdisc add dev br0 root tbf rate 20mbit burst 32kbit latency 400ms; tc qdisc del dev br0 root",
            )?;
            Ok(lan)
        };
        let lan = or_not_run(test, make())?;
        for (k, h) in lan.hosts.iter().enumerate() {
            h.sh(&format!("ip link add e0 type veth peer name h{k} netns {}", lan.switch.pid()));
            lan.switch.sh(&format!("ip link set h{k} addrgenmode none up; ip link set h{k} master br0"));
            up(h, "e0", &[&format!("10.1.0.{}/24", k + 1)]);
        }
        Some(lan)
    }

    /// From now on nothing gets to this host or from it, and nobody is told.
    pub fn unplug(&self, k: usize) {
        self.switch.sh(&format!("ip link set h{k} nomaster"));
    }

    pub fn plug(&self, k: usize) {
        self.switch.sh(&format!("ip link set h{k} master br0"));
    }

    /// To this host and from it goes so much in a second, the rest waits up to 400 ms, and what waits longer is lost.
    pub fn slow(&self, k: usize, rate: &str) {
        let queue = format!("root tbf rate {rate} burst 32kbit latency 400ms");
        self.hosts[k].sh(&format!("tc qdisc replace dev e0 {queue}"));
        self.switch.sh(&format!("tc qdisc replace dev h{k} {queue}"));
    }
}

/// Joins the hosts by a cable between interface `va{k}` of the first and `vb{k}` of the second; `a` and `b` are what
/// `ip address add` is told about them. The numbers of the two ends differ.
pub fn cable([a, b]: &[Host; 2], k: usize, addrs_a: &[&str], addrs_b: &[&str]) {
    let (number_a, number_b) = (10 + k, 40 + k);
    a.sh(&format!("ip link add va{k} index {number_a} type veth peer name vb{k} index {number_b} netns {}", b.pid()));
    up(a, &format!("va{k}"), addrs_a);
    up(b, &format!("vb{k}"), addrs_b);
}

/// Gives `host` an interface whose cable leads nowhere, on which `peers` seem to be.
pub fn dead_end(host: &Host, name: &str, addrs: &[&str], peers: &[&str]) {
    host.sh(&format!("ip link add {name} type veth peer name {name}x; ip link set {name}x addrgenmode none up"));
    up(host, name, addrs);
    for p in peers {
        // Without asking who has it, which nobody would answer: what is sent is just lost.
        host.sh(&format!("ip neigh add {p} lladdr 02:00:00:00:00:99 dev {name}"));
    }
}

/// No address but those given: the kernel's own link-local ones would take their time.
fn up(host: &Host, name: &str, addrs: &[&str]) {
    host.sh(&format!("ip link set {name} addrgenmode none; ip link set {name} up"));
    for a in addrs {
        let nodad = if a.contains(':') { "nodad" } else { "" };
        host.sh(&format!("ip address add {a} dev {name} {nodad}"));
    }
}

/// What a rank did.
#[derive(Debug, Default)]
pub struct Report {
    /// Ranks on its host, by its own account.
    pub local_size: usize,
    /// How long it took to connect.
    pub joined: Duration,
    /// Its established connections beside those of the store: own and peer's address.
    pub data: Vec<(String, String)>,
    /// Where the store listens on its host, if it does.
    pub store: Option<String>,
}

struct Running {
    child: Child,
    out: File,
    err: File,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(host: &Host, scene: &str, env: &[(&str, String)]) -> Self {
        let exe = std::env::current_exe().unwrap();
        let mut c = host.command(exe.to_str().unwrap());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("RUSTCOMMS_") {
                c.env_remove(name);
            }
        }
        let (out, err) = (file(), file());
        c.args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(SCENE, scene)
            .envs(env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(out.try_clone().unwrap())
            .stderr(err.try_clone().unwrap());
        Self { child: c.spawn().unwrap(), out, err }
    }

    fn said(&mut self) -> String {
        format!("{}{}", text(&mut self.out), text(&mut self.err))
    }
}

fn file() -> File {
    let dir = Scratch::new();
    File::options().read(true).write(true).create_new(true).open(dir.0.join("f")).unwrap()
}

fn text(f: &mut File) -> String {
    let mut s = Vec::new();
    // The child writes at the same offset.
    let at = f.stream_position().unwrap();
    f.rewind().unwrap();
    f.read_to_end(&mut s).unwrap();
    let _ = f.seek(std::io::SeekFrom::Start(at.max(s.len() as u64)));
    String::from_utf8_lossy(&s).into_owned()
}

/// A server of the store alone, on all addresses of `host`.
pub struct Store(Running);

impl Store {
    pub fn start(host: &Host) -> Self {
        let mut s = Self(Running::start(host, "store", &[]));
        let until = Instant::now() + DEADLINE;
        while !text(&mut s.0.out).contains("@READY") {
            assert!(s.0.child.try_wait().unwrap().is_none() && Instant::now() < until, "{}", s.0.said());
            std::thread::sleep(Duration::from_millis(5));
        }
        s
    }
}

/// Runs one rank per entry: on which host, and what its environment has beside rank and size. All must end well.
pub fn world(test: &str, ranks: &[(&Host, &[(&str, &str)])]) -> Vec<Report> {
    let n = ranks.len();
    let mut running: Vec<Running> = ranks
        .iter()
        .enumerate()
        .map(|(rank, (host, env))| {
            let mut all = vec![
                ("RUSTCOMMS_RANK", rank.to_string()),
                ("RUSTCOMMS_WORLD_SIZE", n.to_string()),
                ("MASTER_PORT", PORT.to_string()),
            ];
            all.extend(env.iter().map(|(k, v)| (*k, (*v).to_owned())));
            Running::start(host, "rank", &all)
        })
        .collect();
    let until = Instant::now() + DEADLINE;
    let mut done = vec![false; n];
    while done.contains(&false) {
        for rank in 0..n {
            let status = if done[rank] { continue } else { running[rank].child.try_wait().unwrap() };
            done[rank] = status.is_some_and(|s| s.success()) && text(&mut running[rank].out).contains("@DONE");
            if !done[rank] && (status.is_some() || Instant::now() > until) {
                // The first to fail may only be the first to notice: show what all have said.
                std::thread::sleep(Duration::from_millis(300));
                let all: Vec<String> =
                    running.iter_mut().enumerate().map(|(r, p)| format!("--- rank {r}\n{}", p.said())).collect();
                let how = status.map_or_else(|| format!("did not end within {DEADLINE:?}"), |s| format!("ended: {s}"));
                panic!("{test}: rank {rank} of {n} {how}\n{}", all.join("\n"));
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    running.iter_mut().map(|r| read_report(&text(&mut r.out))).collect()
}

fn read_report(out: &str) -> Report {
    let mut r = Report::default();
    for line in out.lines().filter_map(|l| l.split_once('@').map(|l| l.1)) {
        match *line.split_whitespace().collect::<Vec<_>>() {
            ["LOCAL", n] => r.local_size = n.parse().unwrap(),
            ["JOINED", ms] => r.joined = Duration::from_millis(ms.parse().unwrap()),
            ["LISTEN", at] => r.store = Some(at.into()),
            ["DATA", own, peer] => r.data.push((own.into(), peer.into())),
            _ => {}
        }
    }
    r
}
