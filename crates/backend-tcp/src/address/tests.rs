use super::*;
use proptest::prelude::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// `name#index address/prefix`, several with spaces between; `*` behind the one toward the store.
fn host(text: &str) -> Addresses {
    let mut all = Vec::new();
    let mut source = None;
    let mut words = text.split_whitespace();
    while let (Some(interface), Some(a)) = (words.next(), words.next()) {
        let (name, index) = interface.split_once('#').unwrap();
        let (bare, toward) = a.strip_suffix('*').map_or((a, false), |b| (b, true));
        let (addr, prefix) = bare.split_once('/').unwrap();
        if toward {
            source = Some((ip(addr), if is_link_local(ip(addr)) { index.parse().unwrap() } else { 0 }));
        }
        all.push(Address {
            ip: ip(addr),
            prefix: prefix.parse().unwrap(),
            interface: name.into(),
            index: index.parse().unwrap(),
            toward_store: false,
        });
    }
    select(&InterfaceFilter::default(), all, source, 5000).unwrap()
}

fn ips(a: &Addresses) -> Vec<String> {
    a.entries.iter().map(|a| a.ip.to_string()).collect()
}

/// What `mine` tries, without the port.
fn tries(mine: &str, theirs: &str, same: bool, filter: &str) -> String {
    let filter = InterfaceFilter::parse(filter).unwrap();
    let list = candidates(&host(mine), &host(theirs), same, &filter);
    assert!(list.iter().all(|a| a.port() == 5000));
    let show = |a: &SocketAddr| match a {
        SocketAddr::V6(a) if a.scope_id() != 0 => format!("{}%{}", a.ip(), a.scope_id()),
        a => a.ip().to_string(),
    };
    list.iter().map(show).collect::<Vec<_>>().join(" ")
}

const LO: &str = "lo#1 127.0.0.1/8 lo#1 ::1/128";

#[test]
fn the_address_toward_the_store_is_first_and_loopback_last() {
    let a = host(&format!(
        "{LO} docker0#2 172.17.0.1/16 eth0#3 192.168.0.4/24 eth0#3 fe80::4/64 ib0#4 fd00::4/64 ib0#4 10.0.0.4/8* \
         ib0#4 fe80::5/64 br-12ab#5 172.18.0.1/16"
    ));
    let want = "10.0.0.4 fd00::4 192.168.0.4 172.17.0.1 172.18.0.1 fe80::5 fe80::4 127.0.0.1 ::1";
    assert_eq!(ips(&a).join(" "), want);
    assert_eq!(a.entries.iter().filter(|a| a.toward_store).count(), 1);
    assert!(a.to_string().contains("port 5000 of ib0 (10.0.0.4/8, "), "{a}");
}

#[test]
fn a_store_on_loopback_changes_nothing_for_other_hosts() {
    let a = host("lo#1 127.0.0.1/8* eth0#2 10.0.0.4/8");
    assert_eq!(ips(&a), ["10.0.0.4", "127.0.0.1"]);
}

#[test]
fn what_the_kernel_uses_is_published_even_if_no_interface_has_it() {
    let a = select(&InterfaceFilter::default(), Vec::new(), Some((ip("10.0.0.9"), 0)), 1).unwrap();
    assert_eq!(ips(&a), ["10.0.0.9"]);
}

#[test]
fn a_filter_drops_addresses_but_not_loopback() {
    let all = host(&format!("{LO} eth0#2 192.168.0.4/24* eth0#2 fd00::4/64 ib0#3 10.0.0.4/8")).entries;
    for (filter, want) in [
        ("ib0", "10.0.0.4 127.0.0.1 ::1"),
        ("i*", "10.0.0.4 127.0.0.1 ::1"),
        ("!eth0", "10.0.0.4 127.0.0.1 ::1"),
        ("fd00::/8,10.0.0.0/8", "fd00::4 10.0.0.4 127.0.0.1 ::1"),
        ("lo", "127.0.0.1 ::1"),
    ] {
        let f = InterfaceFilter::parse(filter).unwrap();
        assert_eq!(ips(&select(&f, all.clone(), Some((ip("192.168.0.4"), 0)), 1).unwrap()).join(" "), want, "{filter}");
    }
    for filter in ["eth1", "11.0.0.0/8", "!*"] {
        let f = InterfaceFilter::parse(filter).unwrap();
        let e = select(&f, all.clone(), None, 1).unwrap_err().to_string();
        for part in [filter, "RUSTCOMMS_INTERFACE", "eth0 (192.168.0.4/24, fd00::4/64)", "ib0 (10.0.0.4/8)", "lo (127"]
        {
            assert!(e.contains(part), "{part} in {e}");
        }
    }
    let e = select(&InterfaceFilter::parse("eth0").unwrap(), Vec::new(), None, 1).unwrap_err().to_string();
    assert!(e.contains("no address at all"), "{e}");
}

#[test]
fn a_host_of_very_many_addresses_publishes_the_best() {
    let many: String = (0..200).map(|i| format!("eth0#3 10.0.{i}.1/24 ")).collect();
    let a = host(&format!("{many} {LO} lo#1 127.0.1.1/8 lo#1 127.0.2.1/8 lo#1 127.0.3.1/8 ib0#4 10.1.0.1/16*"));
    assert_eq!(a.entries.len(), MAX_ADDRESSES);
    assert_eq!(a.entries[0].ip, ip("10.1.0.1"));
    assert!(LOOPBACKS.iter().all(|l| a.entries.iter().any(|a| a.ip == *l)));
}

#[test]
fn this_host_has_addresses() {
    let a = published(&InterfaceFilter::default(), Some("127.0.0.1:9".parse().unwrap()), 77).unwrap();
    assert!(a.port == 77 && !a.entries.is_empty(), "{a}");
    assert!(a.entries.iter().all(|e| !e.ip.is_unspecified() && !e.interface.is_empty() && e.index != 0), "{a}");
    assert!(a.entries.iter().any(Address::is_loopback), "{a}");
    let e = published(&InterfaceFilter::parse("no-such-interface").unwrap(), None, 1).unwrap_err().to_string();
    assert!(e.contains("lo"), "{e}");
}

#[test]
fn the_order_of_candidates() {
    let eth = |n: u8| format!("{LO} eth0#2 192.168.0.{n}/24* eth0#2 fd00::{n}/64 ib0#3 10.0.0.{n}/8");
    for (what, mine, theirs, want) in [
        ("one network", "eth0#2 10.0.0.1/8*".into(), "eth0#2 10.0.0.2/8*".into(), "10.0.0.2"),
        ("interface by interface", eth(1), eth(2), "192.168.0.2 fd00::2 10.0.0.2"),
        (
            "the own order of interfaces counts",
            "ib0#3 10.0.0.1/8* eth0#2 192.168.0.1/24".into(),
            "eth0#2 192.168.0.2/24* ib0#3 10.0.0.2/8".into(),
            "10.0.0.2 192.168.0.2",
        ),
        (
            "a shared network before the one toward the store",
            "eth0#2 172.20.0.1/24* ib0#3 10.0.0.1/8".into(),
            "eth0#2 192.168.0.2/24* eth1#4 192.168.9.2/24 ib0#3 10.0.0.2/8".into(),
            "10.0.0.2 192.168.0.2 192.168.9.2",
        ),
        (
            "nothing shared",
            "eth0#2 172.20.0.1/24*".into(),
            "eth0#2 192.168.0.2/24 eth1#3 192.168.9.2/24*".into(),
            "192.168.9.2 192.168.0.2",
        ),
        (
            "networks of different sizes",
            "e#2 10.0.0.1/24*".into(),
            "e#2 10.0.9.2/8 f#3 10.0.8.2/8*".into(),
            "10.0.8.2 10.0.9.2",
        ),
        ("a network of one is shared with nobody", "e#2 10.0.0.1/32".into(), "e#2 10.0.0.2/32".into(), "10.0.0.2"),
        ("loopback stays here", LO.into(), format!("{LO} lo#1 127.0.1.1/8"), ""),
        (
            "bridges last",
            "docker0#2 172.17.0.9/16 eth0#3 10.0.0.1/8*".into(),
            "docker0#2 172.17.0.1/16 eth0#3 10.0.0.2/8* eth1#4 11.0.0.2/8".into(),
            "10.0.0.2 11.0.0.2 172.17.0.1",
        ),
        (
            "an address that is mine too",
            "docker0#2 172.17.0.1/16 eth0#3 10.0.0.1/8*".into(),
            "docker0#2 172.17.0.1/16 eth0#3 10.0.0.2/8*".into(),
            "10.0.0.2",
        ),
        (
            "a bridge that the store is reached through",
            "virbr0#2 172.17.0.9/16*".into(),
            "virbr0#2 172.17.0.1/16* eth1#4 11.0.0.2/8".into(),
            "172.17.0.1 11.0.0.2",
        ),
        (
            "link-local with each own scope",
            "eth0#2 fe80::1/64 eth0#2 fe80::8/64 eth1#7 fe80::1/64* eth2#8 10.0.0.1/8".into(),
            "eth0#4 fe80::2/64* eth0#4 169.254.0.2/16 eth9#5 10.1.0.2/16".into(),
            "10.1.0.2 169.254.0.2 fe80::2%7 fe80::2%2",
        ),
        ("link-local without an own one", "eth0#2 10.0.0.1/8".into(), "eth0#4 fe80::2/64*".into(), ""),
        ("link-local that is the same here", "eth0#2 fe80::1/64*".into(), "eth0#4 fe80::1/64*".into(), "fe80::1%2"),
    ] {
        assert_eq!(tries(&mine, &theirs, false, ""), want, "{what}");
    }
}

#[test]
fn the_same_host_is_reached_over_loopback() {
    let h = format!("{LO} lo#1 127.0.1.1/8 eth0#2 10.0.0.1/8*");
    assert_eq!(tries(&h, &h, true, ""), "127.0.0.1 ::1 127.0.1.1");
    assert_eq!(tries(&h, "lo#1 ::1/128 eth0#2 10.0.0.1/8", true, ""), "::1");
    assert_eq!(tries(&h, "eth0#2 10.0.0.1/8", true, ""), "127.0.0.1");
    // Copies of a virtual machine say that they are one host.
    assert_eq!(tries(&h, "eth0#2 10.0.0.2/8", true, ""), "127.0.0.1 10.0.0.2");
    // A filter is about what leaves the host.
    assert_eq!(tries(&h, &h, true, "eth0,10.0.0.0/8"), "127.0.0.1 ::1 127.0.1.1");
}

#[test]
fn networks_of_the_filter_come_before_others() {
    let (mine, theirs) = ("e#2 192.168.0.1/24* f#3 10.0.0.1/8", "e#2 192.168.0.2/24* f#3 10.0.0.2/8 g#4 10.2.0.2/16");
    assert_eq!(tries(mine, theirs, false, ""), "192.168.0.2 10.0.0.2 10.2.0.2");
    assert_eq!(tries(mine, theirs, false, "10.0.0.0/8"), "10.0.0.2 10.2.0.2 192.168.0.2");
    assert_eq!(tries(mine, theirs, false, "!192.168.0.0/16"), "10.0.0.2 10.2.0.2 192.168.0.2");
}

/// What is encoded may be longer than what is decoded.
#[derive(Serialize)]
struct Wire {
    port: u16,
    entries: Vec<Address>,
}

fn wire(n: usize, name: usize) -> Vec<u8> {
    let a = Address { ip: ip("10.0.0.1"), prefix: 255, interface: "e".repeat(name), index: 1, toward_store: true };
    postcard::to_allocvec(&Wire { port: 9, entries: vec![a; n] }).unwrap()
}

#[test]
fn decoding_is_bounded() {
    let read = |b: &[u8]| postcard::from_bytes::<Addresses>(b);
    assert_eq!(read(&wire(MAX_ADDRESSES, MAX_NAME)).unwrap().entries.len(), MAX_ADDRESSES);
    assert!(read(&wire(MAX_ADDRESSES + 1, 4)).is_err());
    assert!(read(&wire(1, MAX_NAME + 1)).is_err());
    // A length of 2^63 and nothing behind it.
    assert!(read(&[9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]).is_err());
}

fn any_address() -> impl Strategy<Value = Address> {
    let ip = prop_oneof![
        any::<u32>().prop_map(|b| IpAddr::V4(b.into())),
        (0u32..256).prop_map(|b| IpAddr::V4((0x7f00_0000 | b).into())),
        (0u32..64).prop_map(|b| IpAddr::V4((0x0a00_0000 | b).into())),
        any::<u128>().prop_map(|b| IpAddr::V6(b.into())),
        (0u128..64).prop_map(|b| IpAddr::V6(b.into())),
        (0u128..64).prop_map(|b| IpAddr::V6(((0xfe80 << 112) | b).into())),
        (0u128..8).prop_map(|b| IpAddr::V6(((0xffff << 32) | 0x7f00_0000 | b).into())),
    ];
    let name = prop::sample::select(vec!["lo", "eth0", "eth1", "docker0", "veth9"]);
    (ip, any::<u8>(), name, 0u32..6, any::<bool>()).prop_map(|(ip, prefix, name, index, toward_store)| Address {
        ip,
        prefix,
        interface: name.into(),
        index,
        toward_store,
    })
}

fn any_addresses() -> impl Strategy<Value = Addresses> {
    (any::<u16>(), prop::collection::vec(any_address(), 0..=MAX_ADDRESSES), any::<bool>()).prop_map(
        |(port, entries, knows)| {
            let local = if knows { entries.iter().map(|a| a.ip).collect() } else { Vec::new() };
            Addresses { port, entries, local }
        },
    )
}

proptest! {
    #[test]
    fn addresses_round_trip(a in any_addresses()) {
        let b = postcard::to_allocvec(&a).unwrap();
        prop_assert_eq!(postcard::from_bytes::<Addresses>(&b).unwrap(), Addresses { local: Vec::new(), ..a });
    }

    #[test]
    fn any_bytes_are_addresses_or_an_error(b in prop::collection::vec(any::<u8>(), 0..600)) {
        if let Ok(a) = postcard::from_bytes::<Addresses>(&b) {
            prop_assert!(a.entries.len() <= MAX_ADDRESSES && a.entries.iter().all(|e| e.interface.len() <= MAX_NAME));
        }
    }

    /// Whatever a peer publishes: loopback leads no connector elsewhere, nothing comes twice, no own address.
    #[test]
    fn candidates_are_what_they_may_be(mine in any_addresses(), theirs in any_addresses(), same in any::<bool>()) {
        let list = candidates(&mine, &theirs, same, &InterfaceFilter::default());
        prop_assert!(list.len() <= MAX_CANDIDATES);
        let distinct: HashSet<_> = list.iter().collect();
        prop_assert_eq!(distinct.len(), list.len());
        for (at, a) in list.iter().enumerate() {
            prop_assert_eq!(a.port(), theirs.port);
            let first = list[..at].iter().all(|b| b.ip().is_loopback());
            prop_assert!(!a.ip().to_canonical().is_loopback() || (same && first), "{}", a);
            prop_assert!(is_link_local(a.ip()) || a.ip().is_loopback() || !mine.local.contains(&a.ip()), "{}", a);
            if let SocketAddr::V6(v6) = a {
                prop_assert_eq!(v6.scope_id() != 0, is_link_local(a.ip()), "{}", a);
            }
        }
        // All that may be tried is tried.
        for e in &theirs.entries {
            let ip = e.ip.to_canonical();
            let may = !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast() && !mine.has(ip);
            let reachable = ip.is_ipv4() || !is_link_local(ip) || !mine.scopes().is_empty();
            prop_assert!(!may || !reachable || list.len() == MAX_CANDIDATES || list.iter().any(|a| a.ip() == ip), "{}", ip);
        }
    }

    #[test]
    fn what_is_published_stays_within_its_bounds(
        found in prop::collection::vec(any_address(), 0..150), source in prop::option::of(any_address()),
    ) {
        let source = source.map(|a| (a.ip, if is_link_local(a.ip) { a.index } else { 0 }));
        let a = select(&InterfaceFilter::default(), found.clone(), source, 1).unwrap();
        prop_assert!(a.entries.len() <= MAX_ADDRESSES);
        prop_assert!(a.entries.is_sorted_by_key(Address::is_loopback));
        if let Some(s) = source.filter(|s| !s.0.is_loopback()) {
            prop_assert_eq!(a.entries[0].ip, s.0);
        }
        let b = postcard::to_allocvec(&a).unwrap();
        prop_assert!(postcard::from_bytes::<Addresses>(&b).is_ok());
    }
}
