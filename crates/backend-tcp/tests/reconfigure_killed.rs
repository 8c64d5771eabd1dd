//! Members that are processes and are killed: the rest goes on, takes in others, and needs no store and no rank 0.
//!
//! The test binary starts itself with `--exact child`. Children leave their handles in a directory.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, op};
use rustix::process::{Pid, Signal, kill_process};

const SCENE: &str = "RUSTCOMMS_RECONF_SCENE";
const DIRECTORY: &str = "RUSTCOMMS_RECONF_DIR";
const NUMBER: &str = "RUSTCOMMS_RECONF_NUMBER";
/// Nothing takes as long, even on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

type Line = (usize, String, Instant);

/// Processes; killed when dropped.
struct Crew {
    children: Vec<Child>,
    lines: Receiver<Line>,
    heard: Vec<Line>,
    tell: Sender<Line>,
    directory: tempfile::TempDir,
    scene: &'static str,
}

impl Crew {
    fn start(n: usize, scene: &'static str) -> Self {
        let (tell, lines) = channel();
        let directory = tempfile::tempdir().unwrap();
        let mut crew = Self { children: Vec::new(), lines, heard: Vec::new(), tell, directory, scene };
        (0..n).for_each(|_| crew.another());
        crew
    }

    fn another(&mut self) {
        let number = self.children.len();
        let mut c = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(SCENE, self.scene)
            .env(DIRECTORY, self.directory.path())
            .env(NUMBER, number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, tell) = (c.stdout.take().unwrap(), self.tell.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some(i) = line.find('@') {
                    let _ = tell.send((number, line[i + 1..].to_owned(), Instant::now()));
                }
            }
        });
        self.children.push(c);
    }

    /// Waits until each of `who` has said a line that begins with `word`; returns the rest of the lines, in order. What
    /// others say meanwhile is kept for later.
    fn hear(&mut self, word: &str, who: &[usize]) -> Vec<(String, Instant)> {
        let until = Instant::now() + LIMIT;
        loop {
            let said = |w: &usize| self.heard.iter().find(|(n, line, _)| n == w && line.starts_with(word));
            let got: Vec<&Line> = who.iter().filter_map(said).collect();
            if got.len() == who.len() {
                return got.into_iter().map(|(_, line, at)| (line[word.len()..].trim().to_owned(), *at)).collect();
            }
            let left = until.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("not all of {who:?} said {word}: {:?}", self.heard);
            };
            assert!(!line.1.starts_with("PANIC"), "{}: {}", line.0, line.1);
            self.heard.push(line);
        }
    }

    fn kill(&self, number: usize) -> Instant {
        kill_process(Pid::from_child(&self.children[number]), Signal::KILL).unwrap();
        Instant::now()
    }

    fn ended(&mut self, who: &[usize]) {
        let until = Instant::now() + LIMIT;
        for w in who {
            loop {
                match self.children[*w].try_wait().unwrap() {
                    Some(s) => break assert!(s.success(), "{w}: {s}"),
                    None => assert!(Instant::now() < until, "{w} does not end"),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for c in &mut self.children {
            // One that has ended already cannot be killed, which is fine.
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

/// What a child knows.
struct Member {
    number: usize,
    directory: PathBuf,
}

impl Member {
    /// Leaves the handle for phase `phase` and reads those of `who`, in that order.
    fn swap(&self, phase: u64, comm: &Communicator, who: &[usize]) -> Vec<String> {
        let at = |n: usize| self.directory.join(format!("{phase}.{n}"));
        let draft = self.directory.join(format!("draft.{}", self.number));
        std::fs::write(&draft, comm.init_handle().unwrap()).unwrap();
        std::fs::rename(&draft, at(self.number)).unwrap();
        who.iter().map(|n| await_file(&at(*n))).collect()
    }

    /// A communicator of `who`, in that order, that works.
    fn form(&self, phase: u64, comm: &Communicator, who: &[usize]) -> Communicator {
        let list = self.swap(phase, comm, who);
        let new = comm.reconfigure(phase, &list, LIMIT, &[]).unwrap();
        assert_eq!(Some(new.rank()), who.iter().position(|w| *w == self.number));
        assert_eq!(new.size(), who.len());
        let mut x = [self.number as i64];
        new.all_reduce(&mut x, op::Sum).unwrap();
        assert_eq!(x[0], who.iter().sum::<usize>() as i64);
        say(&format!("FORMED{phase} {} {}", new.rank(), new.generation()));
        new
    }
}

fn await_file(path: &Path) -> String {
    let until = Instant::now() + LIMIT;
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) => return text,
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Err(e) => panic!("{}: {e}", path.display()),
        }
    }
}

fn lost(e: &Error) -> usize {
    match e.kind() {
        ErrorKind::PeerFailed { rank, .. } => *rank,
        _ => panic!("{e}"),
    }
}

#[test]
fn child() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    std::panic::set_hook(Box::new(|p| {
        say(&format!("PANIC {p}").replace('\n', " "));
        std::process::exit(3);
    }));
    // It ends with the test.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(4);
    });
    let number = std::env::var(NUMBER).unwrap().parse().unwrap();
    let me = Member { number, directory: std::env::var_os(DIRECTORY).unwrap().into() };
    // Nothing that a launcher would say plays a part.
    let fresh = backend_tcp::connect(CommOptions::new().name("crew").dynamic().timeout(LIMIT)).unwrap();
    match scene.as_str() {
        "replaced" => replaced(&me, fresh),
        "attempt" => attempt(&me, &fresh),
        other => panic!("no scene {other}"),
    }
    std::process::exit(0);
}

/// Four; one is killed in mid all_reduce; three go on; number 4 comes.
fn replaced(me: &Member, fresh: Communicator) {
    let three = if me.number < 4 {
        let four = me.form(1, &fresh, &[0, 1, 2, 3]);
        say("READY");
        let mut x = vec![1f32; 1 << 20];
        let e = loop {
            if let Err(e) = four.all_reduce(&mut x, op::Max) {
                break e;
            }
        };
        let gone = lost(&e);
        say(&format!("LOST {gone}"));
        let rest: Vec<usize> = (0..4).filter(|n| *n != gone).collect();
        me.form(2, &four, &rest)
    } else {
        fresh
    };
    // Who is left can be seen from what they have left.
    let rest: Vec<usize> = (0..4).filter(|n| me.directory.join(format!("2.{n}")).exists()).collect();
    let mut all = vec![4];
    all.extend(rest);
    let last = me.form(3, &three, &all);
    last.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn one_of_four_is_killed_three_go_on_and_another_joins() {
    for victim in [2, 0] {
        let mut crew = Crew::start(4, "replaced");
        crew.hear("READY", &[0, 1, 2, 3]);
        std::thread::sleep(Duration::from_millis(30));
        let killed = crew.kill(victim);
        let rest: Vec<usize> = (0..4).filter(|n| *n != victim).collect();
        for (who, at) in crew.hear("LOST", &rest) {
            assert_eq!(who, victim.to_string());
            println!("known {:.1?} after the kill", at.saturating_duration_since(killed));
        }
        for (rank, (line, at)) in crew.hear("FORMED2", &rest).into_iter().enumerate() {
            assert_eq!(line, format!("{rank} 2"));
            println!("going on {:.1?} after the kill", at.saturating_duration_since(killed));
        }
        crew.another();
        let all: Vec<usize> = std::iter::once(4).chain(rest).collect();
        for (rank, (line, _)) in crew.hear("FORMED3", &all).into_iter().enumerate() {
            assert_eq!(line, format!("{rank} 3"));
        }
        crew.hear("DONE", &all);
        crew.ended(&all);
    }
}

/// Five have exchanged handles; 1 and 4 are killed while the others wait for them.
fn attempt(me: &Member, fresh: &Communicator) {
    let list = me.swap(1, fresh, &[0, 1, 2, 3, 4]);
    say("READY");
    if [1, 4].contains(&me.number) {
        std::thread::sleep(LIMIT);
    }
    let e = fresh.reconfigure(7, &list, LIMIT, &[]).unwrap_err();
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => say(&format!("FAILED {missing:?} {e}")),
        _ => panic!("{e}"),
    }
    // The dead are known: on this machine everybody can see it.
    let e = fresh.reconfigure(8, &list, LIMIT, &[]).unwrap_err();
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } => say(&format!("AGAIN {missing:?}")),
        _ => panic!("{e}"),
    }
    let last = me.form(2, fresh, &[3, 0, 2]);
    last.finalize(LIMIT).unwrap();
    say("DONE");
}

#[test]
fn two_are_killed_during_an_attempt_and_the_rest_goes_on() {
    let mut crew = Crew::start(5, "attempt");
    crew.hear("READY", &[0, 1, 2, 3, 4]);
    // Long enough for the others to wait, most of the time; if not, they find out otherwise.
    std::thread::sleep(Duration::from_millis(300));
    let killed = crew.kill(1);
    crew.kill(4);
    let rest = [0, 2, 3];
    for (line, at) in crew.hear("FAILED", &rest) {
        let took = at.saturating_duration_since(killed);
        println!("{took:.1?} after the kill: {line}");
        assert!(["[1]", "[4]", "[1, 4]"].iter().any(|m| line.starts_with(m)), "{line}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
    for (line, _) in crew.hear("AGAIN", &rest) {
        assert_eq!(line, "[1, 4]");
    }
    for (rank, (line, _)) in crew.hear("FORMED2", &[3, 0, 2]).into_iter().enumerate() {
        assert_eq!(line, format!("{rank} 1"));
    }
    crew.hear("DONE", &rest);
    crew.ended(&rest);
}
