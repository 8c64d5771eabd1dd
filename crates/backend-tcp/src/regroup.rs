//! The dynamic regime over sockets: each communicator has a *home*, a listening port at which those that were given its
//! handle find it, and a new membership is made of members that all know each other's.
//!
//! Nobody accepts at a home while its communicator is not being reconfigured: connections wait in the kernel's queue. So
//! members may come at different times, and the last one finds the others waiting. An attempt has an endpoint of its own
//! from the beginning, whose links come as they are made; so what goes wrong is told as in any other group, and an
//! attempt that fails closes what it has opened and leaves communicators and homes as they were.

use std::net::{Ipv6Addr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::{Common, EmptyBackend, Handle, Identity, Lineage, MeshBackend, MeshOptions, Regroup, Roster};
use comm_core::{BackendInfo, CommOptions, Control, Error, ErrorKind, ReconfigureRequest, Result};
use comm_transport::GroupSpec;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::address::{Addresses, InterfaceFilter, candidates, listen, published};
use crate::connector::{Gathering, Member, Members, Peer, Setup, Standing};
use crate::host::Host;
use crate::life::{Fate, Life};
use crate::records::{decode, encode, random};
use crate::wire::Greeting;

/// How much longer than an attempt its connections are being made: who waits for them should find out first, and say
/// better what is missing.
const LONGER: Duration = Duration::from_secs(2);
/// The longest time for an attempt: [`Instant`] cannot hold everything that [`Duration`] can.
const DAY: Duration = Duration::from_secs(86_400);
/// In a world with few links those who miss a neighbour give up this much earlier, or an eighth of the time that is left:
/// so that the others hear who is missing before they find out that somebody must be.
const EARLIER: Duration = Duration::from_secs(1);
/// Members that are named in an error.
const SHOWN: usize = 8;

/// Where a communicator is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    host: Host,
    life: Life,
    addrs: Addresses,
}

#[derive(Debug)]
struct Home {
    listener: TcpListener,
    /// With what is not published.
    place: Place,
    token: u64,
    handle: String,
}

impl collectives::Place for Place {
    fn host(&self) -> Option<&str> {
        Some(&self.host.name)
    }
}

/// A communicator's way to other memberships.
#[derive(Debug)]
pub(crate) struct TcpRegroup {
    lineage: Lineage<Home>,
    /// What is left of its home when nobody comes by it any more: says so to those who knock.
    notice: Mutex<Option<Gathering>>,
    /// Of the communicator; without store, rank and size.
    options: CommOptions,
}

/// What members tell each other once all are there.
#[derive(Debug, Serialize, Deserialize)]
struct Introduction {
    rank: usize,
    /// Which links there are from the start, in a word: a hint of the call that makes the communicator.
    connect: String,
}

impl TcpRegroup {
    /// The lineage of a new communicator.
    pub(crate) fn new(options: &CommOptions) -> Arc<Self> {
        Self::at(options, Identity { number: random(), generation: 0 })
    }

    fn at(options: &CommOptions, identity: Identity) -> Arc<Self> {
        let mut options = options.clone();
        (options.store, options.rank, options.size) = (None, None, None);
        Arc::new(Self { lineage: Lineage::new(identity), notice: Mutex::default(), options })
    }

    /// A communicator without members.
    pub(crate) fn empty(options: &CommOptions) -> Result<EmptyBackend> {
        EmptyBackend::new("tcp", "sockets", options, || {
            InterfaceFilter::of(options.effective_interface().as_deref())?;
            Ok(Self::new(options))
        })
    }

    fn open(&self) -> Result<Home> {
        let filter = InterfaceFilter::of(self.options.effective_interface().as_deref())?;
        let listener = listen(Ipv6Addr::UNSPECIFIED.into(), 0)?;
        let port = listener.local_addr().map_err(|e| Error::io("opening the data port", &e))?.port();
        let place = Place { host: Host::this(), life: Life::this(), addrs: published(&filter, None, port)? };
        let (identity, token) = (self.lineage.identity, random());
        let common = Common::of(&self.options)?;
        let handle = Handle { identity, token, common, place: place.clone() }.write("tcp")?;
        Ok(Home { listener, place, token, handle })
    }

    fn make(&self, request: &ReconfigureRequest, home: Option<&Home>) -> Result<(MeshBackend, u32)> {
        let until = Instant::now() + request.timeout.min(DAY);
        let roster = Roster::<Place>::read(request, "tcp", self.lineage.identity, home.map(|h| h.token))?;
        let mesh = MeshOptions::of(&request.options)?;
        let attempt = Attempt { roster: Arc::new(roster), options: &request.options, until };
        let next = Identity { generation: attempt.roster.generation, ..self.lineage.identity };
        let made = match home {
            Some(home) if attempt.roster.size() > 1 => attempt.join(home, mesh),
            _ => attempt.alone(mesh),
        };
        let made = made.map_err(|e| attempt.roster.in_call(e, &request.options))?;
        if let Some(home) = home.filter(|_| attempt.roster.size() == 1) {
            self.leave_notice(home, Standing::Settled(next.generation));
        }
        Ok((made.with_regroup(Self::at(&request.options, next)), next.generation))
    }

    /// As long as this communicator lives, those who look for it hear what has become of it, if there are means for that: a
    /// port that is closed says less, and not at once to other machines, where a firewall may have answered.
    fn leave_notice(&self, home: &Home, standing: Standing) {
        let Identity { number, generation } = self.lineage.identity;
        let opened =
            home.listener.try_clone().map_err(|e| Error::io("preparing the data port", &e)).and_then(|listener| {
                Gathering::open(Setup {
                    me: Greeting { who: number, generation, ..Greeting::default() },
                    size: 1,
                    secret: self.options.effective_secret()?,
                    listener,
                    heartbeat: Duration::MAX,
                    until: Instant::now(),
                    members: Some(Members {
                        list: vec![Member { number, generation, token: home.token }],
                        // Nobody is waited for.
                        refused: Box::new(|_, _| ErrorKind::Finalized.into()),
                    }),
                })
            });
        match opened {
            Ok(notice) => {
                notice.settle(standing);
                *self.notice.lock() = Some(notice);
            }
            Err(e) => tracing::warn!(error = %e, "a home is closed without a notice"),
        }
    }
}

impl Regroup for TcpRegroup {
    fn handle(&self) -> Result<String> {
        Ok(self.lineage.home(|| self.open())?.handle.clone())
    }

    fn gather(&self, request: &ReconfigureRequest) -> Result<MeshBackend> {
        self.lineage.attempt(request.uuid, |home| self.make(request, home))
    }

    fn branch(&self, name: &str, generation: u32) -> Arc<dyn Regroup> {
        Self::at(&self.options.clone().name(name), Identity { number: random(), generation })
    }

    fn close(&self) {
        if let Some(home) = self.lineage.close() {
            self.leave_notice(&home, Standing::Finalized);
        }
    }
}

/// An attempt to bring all members together.
struct Attempt<'a> {
    roster: Arc<Roster<Place>>,
    options: &'a CommOptions,
    until: Instant,
}

impl Attempt<'_> {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn generation(&self) -> u32 {
        self.roster.generation
    }

    fn hosts(&self) -> Vec<Host> {
        self.roster.members.iter().map(|m| m.place.host.clone()).collect()
    }

    fn spec(&self) -> GroupSpec {
        let rest = crate::spec(self.options, "", self.roster.size());
        GroupSpec { id: self.roster.key, generation: self.generation(), ..rest }
    }

    fn info(&self) -> BackendInfo {
        let mut info = crate::info(self.roster.rank, &self.hosts());
        info.generation = self.generation();
        info
    }

    fn alone(&self, mesh: MeshOptions) -> Result<MeshBackend> {
        let endpoint = crate::endpoint(self.options, 0, vec![None], None, None, mesh.connect)?;
        MeshBackend::new(endpoint, self.spec(), self.info(), mesh)
    }

    fn join(&self, home: &Home, mesh: MeshOptions) -> Result<MeshBackend> {
        self.look_for_the_dead(home)?;
        let (rank, size) = (self.roster.rank, self.roster.size());
        let listener = home.listener.try_clone().map_err(|e| Error::io("preparing the data port", &e))?;
        let Identity { number: who, generation } = self.roster.members[rank].identity;
        let (key, nonce) = (self.roster.attempt, self.roster.key);
        let me = Greeting { key, nonce, from: rank as u32, who, generation, ..Greeting::default() };
        let secret = self.options.effective_secret()?;
        let until = self.until + LONGER;
        let heartbeat = self.options.heartbeat_timeout;
        let member = |h: &Handle<Place>| {
            let Identity { number, generation } = h.identity;
            Member { number, generation, token: h.token }
        };
        let roster = Arc::clone(&self.roster);
        let refused = Box::new(move |rank, refusal| roster.refused(rank, refusal));
        let members = Some(Members { list: self.roster.members.iter().map(member).collect(), refused });
        let setup = Setup { me, size, secret, listener, heartbeat, until, members };
        let mut gathering = Gathering::open(setup)?;
        let filter = InterfaceFilter::of(self.options.effective_interface().as_deref())?;
        let peer = |p: &Place| {
            let same_host = home.place.host.same(&p.host);
            let process = p.life.process(&p.host, &home.place.life, &home.place.host);
            Peer { addrs: candidates(&home.place.addrs, &p.addrs, same_host, &filter), same_host, process }
        };
        let others = self.roster.members.iter().enumerate().filter(|(r, _)| *r != rank);
        gathering.learn(others.map(|(r, m)| (r, peer(&m.place))).collect());
        let none = (0..size).map(|_| None).collect();
        let (dialer, prober) = (Some(gathering.dialer()), Some(gathering.prober()));
        let endpoint = crate::endpoint(self.options, rank, none, dialer, prober, mesh.connect)?;
        let connect = mesh.connect;
        MeshBackend::introduced(Arc::clone(&endpoint), self.spec(), rank, mesh, |control| {
            // Not before the group exists: what comes for it finds it.
            gathering.hand_over(&endpoint);
            let first = connect.neighbours(rank, size);
            let left = self.left();
            let sparse = first.len() + 1 < size;
            let came = control.await_links(&first, if sparse { left - EARLIER.min(left / 8) } else { left });
            came.and_then(|()| self.introduce(control, &connect.to_string())).map_err(|e| {
                let e = self.explain(&e, &control.linked(), &gathering);
                // The others need not wait for this rank, and hear what it knows.
                Control::abort(control, &e);
                e
            })?;
            let info = self.info();
            endpoint.set_patience(crate::patience(info.local_size));
            // Who comes now by this rank's handle comes too late.
            gathering.settle(Standing::Settled(self.generation()));
            Ok(info)
        })
    }

    /// Members on this machine whose processes have ended need not be waited for, whoever has their ports now.
    fn look_for_the_dead(&self, home: &Home) -> Result<()> {
        let own = &home.place;
        let dead = |p: &Place| p.life.fate(&p.host, &own.life, &own.host) != Fate::Alive;
        let dead: Vec<usize> = (0..self.roster.size()).filter(|r| dead(&self.roster.members[*r].place)).collect();
        if dead.is_empty() {
            return Ok(());
        }
        let ended = if dead.len() == 1 { "its process has ended" } else { "their processes have ended" };
        Err(self.roster.failed(&format!("{} cannot come: {ended}", self.roster.names(&dead)), &[], dead))
    }

    /// All are there: shows it to each, and that they want the same.
    fn introduce(&self, control: &dyn Control, connect: &str) -> Result<()> {
        let own = Introduction { rank: self.roster.rank, connect: connect.into() };
        let all = control.exchange(&encode(&own)?, self.left())?;
        for (r, bytes) in all.iter().enumerate() {
            let theirs: Introduction = decode(bytes, Some(r), "its introduction")?;
            if theirs.rank != r {
                let what = format!("it introduces itself as rank {}", theirs.rank);
                return Err(Error::new(ErrorKind::Corrupt { rank: Some(r), what }));
            }
            if theirs.connect != connect {
                let own = self.roster.rank;
                let what = format!("rank {own} says connect={connect}, rank {r} says connect={}", theirs.connect);
                return Err(self.roster.failed(&format!("members do not fit together: {what}"), &[], Vec::new()));
            }
        }
        Ok(())
    }

    /// An error of the new group, as one of coming together; `here` are the members that are connected.
    fn explain(&self, e: &Error, here: &[usize], gathering: &Gathering) -> Error {
        match e.kind() {
            ErrorKind::PeerFailed { rank, .. } => {
                let why = gathering.lost(*rank).unwrap_or_else(|| e.kind().to_string());
                let what = format!("{} is gone, or has given up: {why}", self.roster.names(&[*rank]));
                self.roster.failed(&what, here, vec![*rank])
            }
            ErrorKind::Timeout { missing, .. } => {
                let missing: Vec<usize> = missing.iter().copied().filter(|r| !here.contains(r)).collect();
                if missing.is_empty() {
                    let what = "time was up while those who had come waited for others, or for news of each other";
                    return self.roster.failed(what, here, missing);
                }
                let why = |r: &usize| gathering.trouble(*r).map_or_else(String::new, |w| format!(" ({w})"));
                let mut who: Vec<String> =
                    missing.iter().take(SHOWN).map(|r| self.roster.names(&[*r]) + &why(r)).collect();
                if missing.len() > SHOWN {
                    who.push(format!("{} more", missing.len() - SHOWN));
                }
                self.roster.late(&who.join(", "), here, missing)
            }
            _ => e.clone(),
        }
    }
}
