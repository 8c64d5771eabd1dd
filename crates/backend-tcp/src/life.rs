//! Whether a process that has put its card into the store still lives, as far as this one can see: on its own machine.

use std::os::fd::OwnedFd;
use std::sync::{Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::host::Host;

/// What tells a process from others of its machine, and when it wrote this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Life {
    pub(crate) pid: u32,
    /// The namespace in which the number means something.
    space: String,
    /// When the process was started, in hundredths of a second since the machine was; 0 if unknown. Numbers are used
    /// again.
    started: u64,
    /// When this was written, in the same unit.
    at: u64,
}

/// The two clocks that are compared run in steps, and not in the same.
const SLACK: u64 = 5;

/// What is known of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It lives, or nobody can tell from here.
    Alive,
    /// It is dead, and wrote its card before this process was there: what it belonged to is over.
    Past,
    /// It is dead, and wrote its card while this process was there.
    Died,
}

impl Life {
    pub(crate) fn this() -> Self {
        let pid = std::process::id();
        Self { pid, space: space(), started: started(pid).unwrap_or(0), at: now() }
    }

    /// Whether the number means the same process here.
    fn is_visible(&self, theirs: &Host, own: &Self, ours: &Host) -> bool {
        ours.same(theirs) && !self.space.is_empty() && self.space == own.space && self.started != 0
    }

    /// The process that wrote this on `theirs`, if it can be seen from here and is another than this.
    pub(crate) fn process(&self, theirs: &Host, own: &Self, ours: &Host) -> Option<Process> {
        let seen = self.is_visible(theirs, own, ours) && self.pid != own.pid;
        seen.then_some(Process { pid: self.pid, started: self.started })
    }

    /// What has become of the process that wrote this on `theirs`.
    pub(crate) fn fate(&self, theirs: &Host, own: &Self, ours: &Host) -> Fate {
        if !self.is_visible(theirs, own, ours) || started(self.pid) == Some(self.started) {
            return Fate::Alive;
        }
        if self.at <= own.started + SLACK { Fate::Past } else { Fate::Died }
    }
}

/// Another process of this machine and namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pid: u32,
    started: u64,
}

/// What comes of watching a process.
#[derive(Debug)]
pub(crate) enum Watched {
    /// The descriptor becomes readable when it ends.
    Running(OwnedFd),
    Ended,
    /// The system does not let this process watch it.
    Unknown,
}

impl Process {
    pub(crate) fn watch(&self) -> Watched {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Watched::Unknown };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // From here on the number cannot be given to another any more; it may have been before.
            Ok(fd) => match stat(self.pid) {
                Some((_, started)) if started == self.started => Watched::Running(fd),
                Some(_) => Watched::Ended,
                None => Watched::Unknown,
            },
            Err(rustix::io::Errno::SRCH) => Watched::Ended,
            Err(e) => {
                static TOLD: Once = Once::new();
                TOLD.call_once(
                    || tracing::debug!(error = %e, "processes cannot be watched: only their connections are"),
                );
                Watched::Unknown
            }
        }
    }

    /// Whether some thread of it runs, or waits for nothing but a core.
    pub(crate) fn wants_to_run(&self) -> bool {
        if started(self.pid) != Some(self.started) {
            return false;
        }
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return false };
        let text = |t: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(t.ok()?.path().join("stat")).ok();
        threads.filter_map(text).any(|t| parse(&t).is_some_and(|(state, _)| state == 'R'))
    }
}

/// Milliseconds since 1970, by this machine's clock.
pub(crate) fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// When this process was started, by this machine's clock; as far back as can be told.
pub(crate) fn began() -> u64 {
    static BEGAN: OnceLock<u64> = OnceLock::new();
    *BEGAN.get_or_init(|| {
        let age = started(std::process::id()).map_or(0, |s| now().saturating_sub(s));
        wall().saturating_sub(age * 10)
    })
}

fn space() -> String {
    std::fs::read_link("/proc/self/ns/pid").map(|p| p.to_string_lossy().into_owned()).unwrap_or_default()
}

fn now() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    text.split_whitespace().next().and_then(|t| t.parse::<f64>().ok()).map_or(0, |t| (t * 100.0) as u64)
}

/// When a living process was started; one that has ended, and whose parent has not asked for it yet, does not live.
fn started(pid: u32) -> Option<u64> {
    stat(pid).filter(|(state, _)| !matches!(state, 'Z' | 'X' | 'x')).map(|(_, started)| started)
}

/// State and start of a process, one that has ended and was not asked for included.
fn stat(pid: u32) -> Option<(char, u64)> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(text: &str) -> Option<(char, u64)> {
    // The second field is the program's name in parentheses, which may contain anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_live_until_they_end() {
        let (own, host) = (Life::this(), Host::this());
        assert_eq!(own.fate(&host, &own, &host), Fate::Alive);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        // Written a second after this process was started.
        let at = own.started + 100;
        let other = Life { pid: child.id(), started: started(child.id()).unwrap(), at, ..Life::this() };
        assert_eq!(other.fate(&host, &own, &host), Fate::Alive);
        let process = other.process(&host, &own, &host).unwrap();
        let Watched::Running(watch) = process.watch() else { panic!("it cannot be watched") };
        let ended = |ms: i64| {
            let spec = rustix::event::Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
            let mut fds = [rustix::event::PollFd::new(&watch, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&spec)).unwrap() == 1
        };
        assert!(!ended(20) && !process.wants_to_run());
        assert!(matches!(Process { started: 1, ..process }.watch(), Watched::Ended), "the number is another's");
        assert!(own.process(&host, &own, &host).is_none());
        let this = Process { pid: own.pid, started: own.started };
        assert!(this.wants_to_run() && !Process { started: 1, ..this }.wants_to_run());
        child.kill().unwrap();
        assert!(ended(900));
        // Dead at once, though nobody has asked for it: give the signal a moment.
        for _ in 0..1000 {
            if started(other.pid).is_none() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(other.fate(&host, &own, &host), Fate::Died);
        assert_eq!(Life { at: 0, ..other.clone() }.fate(&host, &own, &host), Fate::Past);
        assert!(matches!(process.watch(), Watched::Running(_)), "dead, but the number is still its own");
        child.wait().unwrap();
        assert!(matches!(process.watch(), Watched::Ended));
        assert_eq!(other.fate(&host, &own, &host), Fate::Died);
        // The number is another's by now.
        assert_eq!(Life { started: 1, at: own.started + 100, ..own.clone() }.fate(&host, &own, &host), Fate::Died);
        // Elsewhere nobody can tell.
        let far = Host { name: "far".into(), id: "elsewhere".into() };
        assert_eq!(other.fate(&far, &own, &host), Fate::Alive);
        assert_eq!(Life { space: "pid:[1]".into(), ..other.clone() }.fate(&host, &own, &host), Fate::Alive);
        assert_eq!(Life { started: 0, ..other }.fate(&host, &own, &host), Fate::Alive);
    }
}
