//! Ranks on two hosts, which are network namespaces joined by pairs of virtual interfaces.
//!
//! Where namespaces are not permitted each test says `NOT RUN` and passes; with `RUSTCOMMS_REQUIRE_NAMESPACES=1` it
//! fails.
#![cfg(target_os = "linux")]

#[path = "netns/child.rs"]
mod child_process;
mod netns;

use std::time::Duration;

use netns::{Host, PORT, Report, Store, cable, dead_end, two_hosts, world};

#[test]
fn child() {
    child_process::play();
}

/// One rank on each host; the environment is that of both.
fn one_each(test: &str, [a, b]: &[Host; 2], env: &[(&str, &str)]) -> [Report; 2] {
    let both = <[Report; 2]>::try_from(world(test, &[(a, env), (b, env)])).unwrap();
    // The kernel has booted once for both, but loopback does not lead from one to the other.
    assert!(both.iter().all(|r| r.local_size == 1), "{test}: {both:?}");
    both
}

/// All data connections of both are between these addresses.
fn between(test: &str, [a, b]: &[Report; 2], own: &str, peer: &str) {
    assert!(!a.data.is_empty() && !b.data.is_empty(), "{test}: {a:?} {b:?}");
    assert!(a.data.iter().all(|(x, y)| (x.as_str(), y.as_str()) == (own, peer)), "{test}: {a:?}");
    assert!(b.data.iter().all(|(x, y)| (x.as_str(), y.as_str()) == (peer, own)), "{test}: {b:?}");
}

#[test]
fn ipv4_only() {
    let Some(hosts) = two_hosts("ipv4_only") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    let r = one_each("ipv4", &hosts, &[("MASTER_ADDR", "10.1.0.1")]);
    between("ipv4", &r, "10.1.0.1", "10.1.0.2");
}

#[test]
fn ipv6_only() {
    let Some(hosts) = two_hosts("ipv6_only") else { return };
    cable(&hosts, 0, &["fd00:1::1/64"], &["fd00:1::2/64"]);
    for addr in ["fd00:1::1", "[fd00:1::1]"] {
        let r = one_each(addr, &hosts, &[("MASTER_ADDR", addr)]);
        between(addr, &r, "fd00:1::1", "fd00:1::2");
    }
}

/// The scope of a link-local address is the name of an interface on the host that uses it.
#[test]
fn ipv6_link_local_only() {
    let Some(hosts) = two_hosts("ipv6_link_local_only") else { return };
    cable(&hosts, 0, &["fe80::1/64"], &["fe80::2/64"]);
    // Another link with link-local addresses, through which the peer is not.
    dead_end(&hosts[1], "down0", &["fe80::7/64"], &["fe80::1"]);
    let [a, b] = &hosts;
    for (own, theirs) in
        [("fe80::1%va0", "fe80::1%vb0"), ("[fe80::1%va0]", "[fe80::1%vb0]"), ("fe80::1%10", "fe80::1%40")]
    {
        let r = world(theirs, &[(a, &[("MASTER_ADDR", own)]), (b, &[("MASTER_ADDR", theirs)])]);
        between(theirs, &r.try_into().unwrap(), "fe80::1", "fe80::2");
    }
    // A store by itself, named in full.
    let _store = Store::start(a);
    let [own, theirs] = ["va0", "vb0"].map(|i| format!("[fe80::1%{i}]:{PORT}"));
    let r = world("store", &[(a, &[("RUSTCOMMS_STORE", &own)]), (b, &[("RUSTCOMMS_STORE", &theirs)])]);
    between("store", &r.try_into().unwrap(), "fe80::1", "fe80::2");
}

/// Networks that both hosts seem to share and that lead nowhere look better than the route that works.
#[test]
fn dead_addresses_cost_little() {
    let Some(hosts) = two_hosts("dead_addresses_cost_little") else { return };
    cable(&hosts, 0, &["10.1.0.1/32"], &["10.1.0.2/32"]);
    hosts[0].sh("ip route add 10.1.0.2 dev va0");
    hosts[1].sh("ip route add 10.1.0.1 dev vb0");
    let nets = ["10.2.0", "10.3.0", "10.4.0", "10.5.0", "10.6.0", "fd00:2:"];
    for (host, own, peer) in [(&hosts[0], 1, 2), (&hosts[1], 2, 1)] {
        for (k, net) in nets.into_iter().enumerate() {
            let at = |n: i32| if net.ends_with(':') { format!("{net}:{n}") } else { format!("{net}.{n}") };
            let bits = if net.ends_with(':') { 64 } else { 24 };
            dead_end(host, &format!("dead{k}"), &[&format!("{}/{bits}", at(own))], &[&at(peer)]);
        }
    }
    let r = one_each("dead", &hosts, &[("MASTER_ADDR", "10.1.0.1")]);
    between("dead", &r, "10.1.0.1", "10.1.0.2");
    // One after the other, each with a few seconds, would be far more.
    assert!(r.iter().all(|r| r.joined < Duration::from_secs(8)), "{r:?}");
}

/// As Debian's installer writes it: the host's own name is 127.0.1.1.
#[test]
fn a_hosts_file_that_maps_the_own_name_to_loopback() {
    let Some(hosts) = two_hosts("a_hosts_file_that_maps_the_own_name_to_loopback") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    hosts[0].name("alpha", "127.0.1.1 alpha\n10.1.0.2 beta");
    hosts[1].name("beta", "127.0.1.1 beta\n10.1.0.1 alpha");
    let r = one_each("own name", &hosts, &[("MASTER_ADDR", "alpha")]);
    between("own name", &r, "10.1.0.1", "10.1.0.2");
}

/// The host of the store is known under several addresses of which one works.
#[test]
fn a_name_with_dead_addresses() {
    let Some(hosts) = two_hosts("a_name_with_dead_addresses") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    dead_end(&hosts[1], "dead0", &["10.2.0.2/24", "fd00:2::2/64"], &["10.2.0.1", "fd00:2::1"]);
    hosts[0].name("alpha", "127.0.1.1 alpha");
    // The resolver sorts them as it likes, so the one that works is in the middle of the text.
    hosts[1].name("beta", "127.0.1.1 beta\nfd00:2::1 alpha\n10.2.0.1 alpha\n10.1.0.1 alpha\n10.2.0.1 alpha");
    let r = one_each("names", &hosts, &[("MASTER_ADDR", "alpha")]);
    between("names", &r, "10.1.0.1", "10.1.0.2");
    assert!(r.iter().all(|r| r.joined < Duration::from_secs(20)), "{r:?}");
}

/// The store is reached through the first pair of interfaces, the peers through the second, as the user wants it.
#[test]
fn an_interface_can_be_chosen() {
    let Some(hosts) = two_hosts("an_interface_can_be_chosen") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    cable(&hosts, 1, &["10.2.0.1/24", "fd00:2::1/64"], &["10.2.0.2/24", "fd00:2::2/64"]);
    let [a, b] = &hosts;
    let master = ("MASTER_ADDR", "10.1.0.1");
    for (own, theirs, want) in [
        ("va1", "vb1", ["10.2.0.1", "10.2.0.2"]),
        ("va1,!10.0.0.0/8", "vb1,!10.0.0.0/8", ["fd00:2::1", "fd00:2::2"]),
        ("!va0", "!vb0", ["10.2.0.1", "10.2.0.2"]),
        ("10.2.0.0/16", "10.2.0.0/16", ["10.2.0.1", "10.2.0.2"]),
        ("fd00::/8", "fd00::/8", ["fd00:2::1", "fd00:2::2"]),
        // One of the two alone is enough, where its addresses are the ones that are connected to, or it connects.
        ("va1", "", ["10.2.0.1", "10.2.0.2"]),
        ("", "10.2.0.0/16", ["10.2.0.1", "10.2.0.2"]),
    ] {
        let name = |i| ("RUSTCOMMS_INTERFACE", i);
        let r = world(own, &[(a, &[master, name(own)]), (b, &[master, name(theirs)])]);
        between(&format!("'{own}' '{theirs}'"), &r.try_into().unwrap(), want[0], want[1]);
    }
}

#[test]
fn two_ranks_on_each_of_two_hosts() {
    let Some(hosts) = two_hosts("two_ranks_on_each_of_two_hosts") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    let [a, b] = &hosts;
    let env: &[(&str, &str)] = &[("MASTER_ADDR", "10.1.0.1")];
    for order in [[a, a, b, b], [a, b, a, b]] {
        let reports = world("two and two", &order.map(|h| (h, env)));
        for r in &reports {
            assert_eq!(r.local_size, 2, "{reports:?}");
            let (local, remote): (Vec<_>, Vec<_>) = r.data.iter().partition(|(own, _)| own.starts_with("127."));
            assert!(!local.is_empty() && !remote.is_empty(), "{reports:?}");
            assert!(local.iter().all(|(_, peer)| peer.starts_with("127.")), "{reports:?}");
            assert!(remote.iter().all(|(own, peer)| own != peer && peer.starts_with("10.1.0.")), "{reports:?}");
        }
    }
}

/// A store that is only for this host is open to no other one.
#[test]
fn a_store_on_loopback_stays_there() {
    let Some(hosts) = two_hosts("a_store_on_loopback_stays_there") else { return };
    cable(&hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    let a = &hosts[0];
    for (addr, want) in [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("10.1.0.1", "::")] {
        let env: &[(&str, &str)] = &[("MASTER_ADDR", addr)];
        let r = world(addr, &[(a, env), (a, env)]);
        assert_eq!(r[0].store.as_deref(), Some(want), "{addr}: {r:?}");
        assert!(r.iter().all(|r| r.local_size == 2), "{addr}: {r:?}");
    }
}
