//! Whether tests can have network namespaces for hosts here. Where they can, they must: no test is skipped silently.

use std::process::{Command, Stdio};

/// Tells the tests that they fail where they would otherwise say `NOT RUN`.
const REQUIRE: &str = "RUSTCOMMS_REQUIRE_NAMESPACES";

/// All that the tests' hosts consist of: see `crates/backend-tcp/tests/netns`.
const SCRIPT: &str = "command -v nsenter >/dev/null || { echo 'nsenter of util-linux is not installed' >&2; false; }
command -v ip >/dev/null || { echo 'ip of iproute2 is not installed' >&2; false; }
ip link set lo up
ip link add try0 type veth peer name try1
ip link add try2 type bridge
tc qdisc add dev try2 root tbf rate 20mbit burst 32kbit latency 400ms
unshare --net --mount --uts true";

/// The two ways of getting a namespace, in the tests' order.
const WAYS: [(&str, &[&str]); 2] = [
    ("with a user namespace", &["--user", "--map-root-user", "--net", "--mount", "--uts"]),
    ("as root", &["--net", "--mount", "--uts"]),
];

/// Tries it out: how it works, or why it does not.
fn probe(script: &str) -> Result<&'static str, String> {
    let mut why = Vec::new();
    for (name, arguments) in WAYS {
        let made = Command::new("unshare").args(arguments).args(["sh", "-ec", script]).stdin(Stdio::null()).output();
        match made {
            Ok(out) if out.status.success() => return Ok(name),
            Ok(out) => {
                let said = String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; ");
                why.push(format!("{name}: {}", if said.is_empty() { out.status.to_string() } else { said }));
            }
            Err(e) => why.push(format!("{name}: unshare of util-linux: {e}")),
        }
    }
    Err(why.join("; "))
}

/// What the tests are told, and what is printed about it. `set` is what the variable holds already.
fn decide(set: Option<&str>, probed: Result<&str, String>) -> (Option<&'static str>, String) {
    let said = set.map_or_else(String::new, |v| format!(" ({REQUIRE}={v} in the environment)"));
    match (set, probed) {
        (Some("1"), Err(why)) => {
            (Some("1"), format!("required{said}, yet not to be had here, so they will FAIL: {why}"))
        }
        (Some(v), _) if v != "1" => (None, format!("not required{said}; those that cannot run say NOT RUN")),
        (_, Ok(how)) => (Some("1"), format!("run here, {how}: none may be skipped{said}")),
        (_, Err(why)) => (None, format!("NOT RUN here: {why}")),
    }
}

/// Looks once, says what it means, and gives the variable for `cargo test`.
pub(crate) fn requirement() -> Option<(&'static str, &'static str)> {
    let set = std::env::var(REQUIRE).ok();
    let (value, said) = decide(set.as_deref(), probe(SCRIPT));
    println!("    tests over network namespaces: {said}");
    value.map(|v| (REQUIRE, v))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_they_can_run_they_must() {
        let no = || Err("not permitted".to_owned());
        assert_eq!(decide(None, Ok("as root")).0, Some("1"));
        assert!(decide(None, Ok("as root")).1.contains("none may be skipped"));
        let (value, said) = decide(None, no());
        assert!(value.is_none() && said.contains("NOT RUN") && said.contains("not permitted"), "{said}");
        // Who asks for it gets the failure, who declines it gets that.
        let (value, said) = decide(Some("1"), no());
        assert!(value == Some("1") && said.contains("FAIL") && said.contains("not permitted"), "{said}");
        assert_eq!(decide(Some("0"), Ok("as root")).0, None);
    }

    #[test]
    fn what_does_not_work_says_why_for_each_way() {
        let why = probe("echo no such thing >&2; exit 3").unwrap_err();
        assert!(WAYS.iter().all(|(name, _)| why.contains(name)), "{why}");
    }
}
