//! Which interfaces and networks a user allows: `RUSTCOMMS_INTERFACE`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use comm_core::{Error, Result};

/// A network in CIDR notation, such as `10.0.0.0/8` or `fd00::/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    ip: IpAddr,
    prefix: u8,
}

impl Network {
    /// The network of `prefix` bits in which `ip` is; more bits than the family has count as all of them.
    pub(crate) fn new(ip: IpAddr, prefix: u8) -> Self {
        let ip = ip.to_canonical();
        Self { ip, prefix: prefix.min(bits(ip)) }
    }

    /// Whether `ip` is in it. A network of one family contains nothing of the other.
    pub(crate) fn contains(self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let apart = match (self.ip, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => u128::from(a.to_bits() ^ b.to_bits()) << 96,
            (IpAddr::V6(a), IpAddr::V6(b)) => a.to_bits() ^ b.to_bits(),
            _ => return false,
        };
        apart.leading_zeros() >= u32::from(self.prefix)
    }

    /// Whether it has room for a neighbour: point-to-point and loopback addresses often come with a network of one.
    pub(crate) fn is_shared(self) -> bool {
        self.prefix < bits(self.ip)
    }
}

fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// Whether `ip` is valid on its own link only: `169.254.0.0/16` and `fe80::/10`.
pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    /// Exactly this interface, or all that begin so.
    Name {
        name: String,
        prefix: bool,
    },
    Network(Network),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    exclude: bool,
    what: What,
}

impl Term {
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let (exclude, rest) = text.strip_prefix('!').map_or((false, text), |r| (true, r.trim_start()));
        if rest.is_empty() {
            return Err("'!' needs a name or a network behind it".into());
        }
        let what = if let Some((ip, prefix)) = rest.split_once('/') {
            let ip: IpAddr = ip.parse().map_err(|_| format!("'{ip}' in '{text}' is not an address"))?;
            match prefix.parse::<u8>() {
                Ok(p) if p <= bits(ip) => What::Network(Network::new(ip, p)),
                _ => return Err(format!("'/{prefix}' in '{text}' is not a prefix of 0 to {} bits", bits(ip))),
            }
        } else if let Ok(ip) = rest.parse::<IpAddr>() {
            What::Network(Network::new(ip, bits(ip)))
        } else if let Some(name) = rest.strip_suffix('*') {
            What::Name { name: name.into(), prefix: true }
        } else {
            What::Name { name: rest.into(), prefix: false }
        };
        Ok(Self { exclude, what })
    }

    fn matches(&self, interface: &str, ip: IpAddr) -> bool {
        match &self.what {
            What::Network(n) => n.contains(ip),
            What::Name { name, prefix: true } => interface.starts_with(name.as_str()),
            // An alias such as `eth0:1` is an address of `eth0`.
            What::Name { name, .. } => name == interface || interface.split_once(':').is_some_and(|(i, _)| i == name),
        }
    }
}

/// Which of a host's addresses may be used. The default allows all.
///
/// The text form is a list with commas between: interface names (`eth0`), beginnings of names (`ib*`), networks
/// (`10.0.0.0/8`, `fd00::/8`) and addresses; with `!` in front what is not to be used. An address passes if one of the
/// entries without `!` names it, or there are none, and no entry with `!` names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InterfaceFilter {
    text: String,
    terms: Vec<Term>,
}

impl InterfaceFilter {
    /// Reads the text form. Empty entries are skipped, so an empty text allows everything.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an entry that is none.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let terms = text.split(',').map(str::trim).filter(|t| !t.is_empty()).map(Term::parse).collect::<Result<_, _>>();
        let terms = terms.map_err(|why| {
            Error::invalid(format!(
                "the interfaces '{}': {why}; they are a list such as 'eth0,ib*,10.0.0.0/8,!docker0'",
                text.chars().take(200).collect::<String>()
            ))
        })?;
        Ok(Self { text: text.into(), terms })
    }

    /// The filter that the option gives, else that of `RUSTCOMMS_INTERFACE`, else the one that allows everything.
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse).
    pub(crate) fn of(option: Option<&str>) -> Result<Self> {
        match option {
            Some(text) => Self::parse(text),
            None => Self::parse(&std::env::var_os(comm_store::env::INTERFACE).unwrap_or_default().to_string_lossy()),
        }
    }

    /// Whether it allows everything.
    pub(crate) fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Whether an own address on that interface may be used.
    pub(crate) fn admits(&self, interface: &str, ip: IpAddr) -> bool {
        let named = |exclude: bool| self.terms.iter().any(|t| t.exclude == exclude && t.matches(interface, ip));
        (named(false) || self.terms.iter().all(|t| t.exclude)) && !named(true)
    }

    /// Whether its networks allow a peer's address. Names say nothing about peers: theirs may differ.
    pub(crate) fn admits_peer(&self, ip: IpAddr) -> bool {
        let is_network = |t: &Term| matches!(t.what, What::Network(_));
        let named = |exclude| self.terms.iter().any(|t| t.exclude == exclude && is_network(t) && t.matches("", ip));
        // With names beside the networks, an address outside may be the one on a named interface.
        let mut included = self.terms.iter().filter(|t| !t.exclude).peekable();
        let restricts = included.peek().is_some() && included.all(is_network);
        (!restricts || named(false)) && !named(true)
    }
}

impl fmt::Display for InterfaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The loopback addresses that every host has.
pub(crate) const LOOPBACKS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn net(text: &str) -> Network {
        match Term::parse(text).unwrap().what {
            What::Network(n) => n,
            w => panic!("{text} is {w:?}"),
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_contain_what_they_should() {
        for (n, inside, outside) in [
            ("10.0.0.0/8", "10.255.255.255", "11.0.0.0"),
            ("10.0.0.0/8", "10.0.0.0", "9.255.255.255"),
            ("10.1.2.3/24", "10.1.2.254", "10.1.3.1"),
            ("10.1.2.3/25", "10.1.2.127", "10.1.2.128"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.2"),
            ("0.0.0.0/0", "255.255.255.255", "::1"),
            ("::/0", "ffff::1", "1.2.3.4"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("fd00:1::/65", "fd00:1::7fff:ffff:ffff:ffff", "fd00:1::8000:0:0:0"),
            ("fd00::5", "fd00::5", "fd00::4"),
            ("fe80::/10", "febf::1", "fec0::1"),
        ] {
            assert!(net(n).contains(ip(inside)), "{n} {inside}");
            assert!(!net(n).contains(ip(outside)), "{n} {outside}");
        }
        // An IPv4 address that came through an IPv6 socket is still one.
        assert!(net("10.0.0.0/8").contains(ip("::ffff:10.1.2.3")));
    }

    #[test]
    fn filters() {
        let eth = ("eth0", "10.1.0.5");
        for (filter, admitted, refused) in [
            ("", vec![eth, ("lo", "127.0.0.1"), ("docker0", "172.17.0.1")], vec![]),
            (" , ,", vec![eth], vec![]),
            (
                "eth0",
                vec![eth, ("eth0", "fd00::1"), ("eth0:1", "10.1.0.6")],
                vec![("eth01", "10.1.0.5"), ("eth", "::2")],
            ),
            ("eth*", vec![eth, ("eth17", "10.1.0.5")], vec![("et", "10.1.0.5"), ("ib0", "10.1.0.5")]),
            ("*", vec![eth, ("ib0", "::2")], vec![]),
            ("ib0, eth0", vec![eth, ("ib0", "::2")], vec![("ib1", "::2")]),
            ("10.0.0.0/8", vec![eth], vec![("eth0", "fd00::1"), ("eth0", "11.0.0.1")]),
            ("!docker0", vec![eth], vec![("docker0", "172.17.0.1")]),
            ("!docker*,!172.16.0.0/12", vec![eth], vec![("docker1", "10.0.0.1"), ("br0", "172.31.0.1")]),
            ("eth*,!eth1", vec![eth], vec![("eth1", "10.1.0.5"), ("ib0", "10.1.0.5")]),
            ("! eth0", vec![("ib0", "::2")], vec![eth]),
            ("10.1.0.5", vec![eth], vec![("eth0", "10.1.0.6")]),
        ] {
            let f = InterfaceFilter::parse(filter).unwrap();
            for (i, a) in admitted {
                assert!(f.admits(i, ip(a)), "'{filter}' {i} {a}");
            }
            for (i, a) in refused {
                assert!(!f.admits(i, ip(a)), "'{filter}' {i} {a}");
            }
        }
    }

    #[test]
    fn filters_on_peers_look_at_networks_only() {
        for (filter, admitted, refused) in [
            ("eth0,!docker0", vec!["10.0.0.1", "fd00::1"], vec![]),
            ("10.0.0.0/8", vec!["10.0.0.1"], vec!["11.0.0.1", "fd00::1"]),
            ("10.0.0.0/8,fd00::/8", vec!["10.0.0.1", "fd00::1"], vec!["11.0.0.1"]),
            ("10.0.0.0/8,ib0", vec!["10.0.0.1", "11.0.0.1"], vec![]),
            ("!10.0.0.0/8", vec!["11.0.0.1"], vec!["10.0.0.1"]),
            ("10.0.0.0/8,!10.9.0.0/16,!docker0", vec!["10.0.0.1"], vec!["10.9.0.1", "12.0.0.1"]),
        ] {
            let f = InterfaceFilter::parse(filter).unwrap();
            assert!(admitted.iter().all(|a| f.admits_peer(ip(a))), "{filter}");
            assert!(!refused.iter().any(|a| f.admits_peer(ip(a))), "{filter}");
        }
    }

    #[test]
    fn entries_that_are_none_are_named() {
        for (filter, part) in [
            ("eth0,!", "'!' needs"),
            ("10.0.0.0/33", "0 to 32 bits"),
            ("fd00::/129", "0 to 128 bits"),
            ("10.0.0.0/", "'/'"),
            ("10.0.0/8", "'10.0.0' in"),
            ("eth0/8", "'eth0' in"),
            ("!fd00::/x", "'/x'"),
        ] {
            let e = InterfaceFilter::parse(filter).unwrap_err().to_string();
            assert!(e.contains(part) && e.contains("eth0,ib*"), "{filter}: {e}");
        }
    }

    fn any_ip() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|b| IpAddr::V4(b.into())),
            any::<u128>().prop_map(|b| IpAddr::V6(b.into())).prop_filter("mapped", |i| i.to_canonical() == *i),
        ]
    }

    proptest! {
        /// Flipping a bit within the prefix leaves the network, one behind it does not.
        #[test]
        fn a_prefix_is_that_many_bits(ip in any_ip(), prefix in 0u8..=128, bit in 0u32..128) {
            let width = u32::from(bits(ip));
            let (prefix, bit) = (prefix.min(bits(ip)), bit % width);
            let n = Network::new(ip, prefix);
            prop_assert!(n.contains(ip));
            let flipped: IpAddr = match ip {
                IpAddr::V4(a) => IpAddr::V4((a.to_bits() ^ (1 << (31 - bit))).into()),
                IpAddr::V6(a) => IpAddr::V6((a.to_bits() ^ (1 << (127 - bit))).into()),
            };
            prop_assume!(flipped.to_canonical() == flipped);
            prop_assert_eq!(n.contains(flipped), bit >= u32::from(prefix));
        }

        #[test]
        fn any_text_is_a_filter_or_an_error(text in ".{0,80}", name in "[a-z0-9:.*]{0,16}", ip in any_ip()) {
            if let Ok(f) = InterfaceFilter::parse(&text) {
                let _ = (f.admits(&name, ip), f.admits_peer(ip));
            }
        }

        #[test]
        fn a_filter_and_its_opposite_part_the_addresses(name in "[a-z]{1,8}[0-9]?", other in "[a-z]{1,8}", ip in any_ip()) {
            let (f, not) = (InterfaceFilter::parse(&name).unwrap(), InterfaceFilter::parse(&format!("!{name}")).unwrap());
            prop_assert!(f.admits(&name, ip) && !not.admits(&name, ip));
            prop_assert_ne!(f.admits(&other, ip), not.admits(&other, ip));
        }
    }
}
