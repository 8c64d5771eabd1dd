//! A test program that runs itself again, as the program that starts ranks.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Much longer than anything takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// Ends with the test; ranks end with the process that started them.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // One that has ended cannot be killed, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the test `entry` of the program that `c` starts, as no rank of anything; `change` comes last. How it ended, and
/// what it and its ranks said. One that hangs is `what`.
pub(crate) fn entry(mut c: Command, what: &str, change: impl FnOnce(&mut Command)) -> (Option<i32>, String) {
    // A file, not a pipe: nobody reads while it runs.
    let file = tempfile::NamedTempFile::new().unwrap();
    c.args(["entry", "--exact", "--nocapture"]).stdin(Stdio::null());
    for v in ["RUSTCOMMS_RANK", "RUSTCOMMS_WORLD_SIZE", "RUSTCOMMS_ALGO", "RANK", "WORLD_SIZE"] {
        c.env_remove(v);
    }
    // One offset for both, so that they do not write over each other.
    let out = file.reopen().unwrap();
    c.stderr(out.try_clone().unwrap()).stdout(out);
    change(&mut c);
    let mut child = Guard(c.spawn().unwrap());
    let start = Instant::now();
    let text = || std::fs::read_to_string(file.path()).unwrap();
    loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            return (status.code(), text());
        }
        assert!(start.elapsed() < DEADLINE, "{what} hangs: {}", text());
        std::thread::sleep(Duration::from_millis(5));
    }
}
