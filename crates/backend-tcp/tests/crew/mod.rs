//! Members of the dynamic regime that are processes. The test binary starts itself with `--exact child`; children
//! leave their handles in a directory.
#![allow(dead_code, missing_docs, unreachable_pub, missing_debug_implementations)]

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
pub const LIMIT: Duration = Duration::from_secs(60);

type Line = (usize, String, Instant);

/// Processes; killed when dropped.
pub struct Crew {
    children: Vec<Child>,
    lines: Receiver<Line>,
    heard: Vec<Line>,
    tell: Sender<Line>,
    directory: tempfile::TempDir,
    scene: &'static str,
}

/// This test binary.
fn here() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

impl Crew {
    pub fn start(n: usize, scene: &'static str) -> Self {
        let mut crew = Self::empty(scene);
        (0..n).for_each(|_| crew.another());
        crew
    }

    pub fn empty(scene: &'static str) -> Self {
        let (tell, lines) = channel();
        let directory = tempfile::tempdir().unwrap();
        Self { children: Vec::new(), lines, heard: Vec::new(), tell, directory, scene }
    }

    pub fn another(&mut self) {
        self.another_at(here());
    }

    /// One more, started by a command that runs this test binary.
    pub fn another_at(&mut self, mut place: Command) {
        let number = self.children.len();
        let mut c = place
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
    pub fn hear(&mut self, word: &str, who: &[usize]) -> Vec<(String, Instant)> {
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

    pub fn kill(&self, number: usize) -> Instant {
        kill_process(Pid::from_child(&self.children[number]), Signal::KILL).unwrap();
        Instant::now()
    }

    /// Leaves a file that children can see.
    pub fn mark(&self, name: &str) {
        std::fs::write(self.directory.path().join(name), "").unwrap();
    }

    pub fn ended(&mut self, who: &[usize]) {
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

pub fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

/// What a child knows.
pub struct Member {
    pub number: usize,
    pub directory: PathBuf,
}

impl Member {
    /// Leaves the handle for phase `phase` and reads those of `who`, in that order.
    pub fn swap(&self, phase: u64, comm: &Communicator, who: &[usize]) -> Vec<String> {
        let at = |n: usize| self.directory.join(format!("{phase}.{n}"));
        let draft = self.directory.join(format!("draft.{}", self.number));
        std::fs::write(&draft, comm.init_handle().unwrap()).unwrap();
        std::fs::rename(&draft, at(self.number)).unwrap();
        who.iter().map(|n| await_file(&at(*n))).collect()
    }

    /// Waits, by files, until all of `who` have got here: one that goes on to another membership ends the calls of those
    /// whom it leaves behind.
    pub fn together(&self, phase: u64, who: &[usize]) {
        let at = |n: &usize| self.directory.join(format!("here.{phase}.{n}"));
        std::fs::write(at(&self.number), "").unwrap();
        who.iter().for_each(|n| drop(await_file(&at(n))));
    }

    /// As [`swap`](Self::swap); `None` when somebody's handle does not come and the test has said that some are gone.
    pub fn swap_until_gone(&self, phase: u64, comm: &Communicator, who: &[usize]) -> Option<Vec<String>> {
        let own = [self.number];
        self.swap(phase, comm, &own);
        let gone = self.directory.join("gone");
        let mut list = Vec::new();
        for n in who {
            let file = self.directory.join(format!("{phase}.{n}"));
            let mut late = 0;
            list.push(loop {
                match std::fs::read_to_string(&file) {
                    Ok(text) => break text,
                    // It may have been about to write it.
                    Err(_) if gone.exists() && late > 100 => return None,
                    Err(_) => late += usize::from(gone.exists()),
                }
                std::thread::sleep(Duration::from_millis(2));
            });
        }
        Some(list)
    }

    /// A communicator of `who`, in that order, that works.
    pub fn form(&self, phase: u64, comm: &Communicator, who: &[usize]) -> Communicator {
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

pub fn await_file(path: &Path) -> String {
    let until = Instant::now() + LIMIT;
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) => return text,
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Err(e) => panic!("{}: {e}", path.display()),
        }
    }
}

pub fn lost(e: &Error) -> usize {
    match e.kind() {
        ErrorKind::PeerFailed { rank, .. } => *rank,
        _ => panic!("{e}"),
    }
}

/// Plays the child's part, if this process is one; it does not return then.
pub fn child(play: impl FnOnce(&str, &Member, Communicator)) {
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
    play(&scene, &me, fresh);
    std::process::exit(0);
}
