//! The server without its sockets: what each connection has said and is owed, and the state that they share.
//!
//! Bytes go in and come out in whatever pieces. What the server is asked to hold is counted here and bounded, so that
//! tests and fuzzing can do everything to it that a network can, without one.

use std::collections::HashMap;

use comm_core::Secret;

use crate::auth::{self, Acceptor, HELLO, PROOF};
use crate::protocol::{ASKS_FOR_SECRET, HAS_NO_SECRET, Limits, Op, Parser, STOP_WAITING, Step};
use crate::state::{ConnId, State};

/// Replies that a connection may leave unread before the server stops listening to it.
pub(crate) const OUT_HIGH: usize = 256 << 10;
/// Longest piece of input that is taken at once.
pub(crate) const CHUNK: usize = 64 << 10;
/// A connection that holds no more than this may draw on the last eighth of the memory, so that a full store still
/// answers questions.
const SMALL: usize = 2 * CHUNK;
/// Why a connection is not served any longer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is closed.
    Close(String),
    /// A notice lies in its output; whatever else it says is thrown away until it hangs up.
    Tell(&'static str),
}

/// How far a connection has come.
#[derive(Debug)]
enum Gate {
    /// The server has a secret; so much has come of the first message.
    Hello { got: [u8; HELLO], have: usize },
    /// And so much of the third.
    Proof { acceptor: Acceptor, got: [u8; PROOF], have: usize },
    /// The server has no secret; so many bytes look like an offer of proof.
    First { have: usize },
    /// It is listened to.
    Open,
    /// It was told why it is not.
    Turned,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Session {
    gate: Gate,
    parser: Parser,
    /// Input behind a request whose replies have not been taken yet.
    pending: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    /// What it counts for in [`Desk::charged`].
    charge: usize,
}

impl Session {
    /// Whether it has said all that a client must say before its first request.
    pub(crate) fn introduced(&self) -> bool {
        self.parser.validated()
    }

    pub(crate) fn in_request(&self) -> bool {
        self.parser.in_request()
    }

    /// Whether it was challenged to prove that it knows the secret, and has not.
    pub(crate) fn awaits_proof(&self) -> bool {
        matches!(self.gate, Gate::Proof { .. })
    }

    /// Whether it was told that it is not served.
    pub(crate) fn turned(&self) -> bool {
        matches!(self.gate, Gate::Turned)
    }

    /// Whether input lies here that waits until its replies are taken.
    pub(crate) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether more input is wanted.
    pub(crate) fn listens(&self) -> bool {
        self.output().len() < OUT_HIGH && !self.is_pending()
    }

    /// What it is owed.
    pub(crate) fn output(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    fn held(&self) -> usize {
        self.parser.held() + self.out.capacity() + self.pending.capacity()
    }

    /// `n` bytes of the output are on their way.
    fn sent(&mut self, n: usize) {
        self.sent += n;
        if self.sent == self.out.len() {
            // Thousands of connections are at rest most of the time.
            (self.out, self.sent) = (Vec::new(), 0);
        } else if self.sent >= self.out.len() / 2 {
            // Otherwise a peer that always leaves a little unread would let this grow for ever.
            self.out.drain(..self.sent);
            self.out.shrink_to(2 * self.out.len());
            self.sent = 0;
        }
    }

    /// Looks at what comes before the first request, and leaves the rest in `input`.
    fn greet(&mut self, secret: Option<&Secret>, input: &mut &[u8]) -> Result<(), Refusal> {
        match &mut self.gate {
            Gate::Hello { got, have } => {
                take(input, got, have);
                let known = (*have).min(auth::MAGIC.len());
                if got[..known] != auth::MAGIC[..known] {
                    return self.turn(ASKS_FOR_SECRET, "it offers no proof that it knows the secret");
                }
                let Some(secret) = secret.filter(|_| *have == HELLO) else { return Ok(()) };
                let answer = Acceptor::new(secret, auth::STORE, got);
                let answer = answer.map_err(|e| Refusal::Close(format!("it could not be challenged: {e}")))?;
                if let Some((acceptor, challenge)) = answer {
                    self.out.extend_from_slice(&challenge);
                    self.gate = Gate::Proof { acceptor, got: [0; PROOF], have: 0 };
                }
            }
            Gate::Proof { acceptor, got, have } => {
                take(input, got, have);
                if *have == PROOF {
                    if !acceptor.accepts(got) {
                        return Err(Refusal::Close("its proof that it knows the secret is wrong".into()));
                    }
                    self.gate = Gate::Open;
                }
            }
            Gate::First { have } => {
                while let Some((byte, rest)) = input.split_first() {
                    if *byte != auth::MAGIC[*have] {
                        // What looked like an offer and was none is no request either: those begin with another byte.
                        let first = if *have > 0 { auth::MAGIC[0] } else { *byte };
                        if first != Op::Validate as u8 {
                            return Err(Refusal::Close(crate::protocol::Bad::FirstByte(first).to_string()));
                        }
                        self.gate = Gate::Open;
                        break;
                    }
                    (*input, *have) = (rest, *have + 1);
                    if *have == auth::MAGIC.len() {
                        return self.turn(HAS_NO_SECRET, "it offers proof of a secret, and this store has none");
                    }
                }
            }
            Gate::Open => {}
            Gate::Turned => *input = &[],
        }
        Ok(())
    }

    fn turn(&mut self, notice: [u8; crate::protocol::NOTICE], why: &'static str) -> Result<(), Refusal> {
        self.out.extend_from_slice(&notice);
        self.gate = Gate::Turned;
        Err(Refusal::Tell(why))
    }
}

/// Moves bytes from the input until `buf` is full.
fn take(input: &mut &[u8], buf: &mut [u8], have: &mut usize) {
    let n = input.len().min(buf.len() - *have);
    let (head, rest) = input.split_at(n);
    buf[*have..*have + n].copy_from_slice(head);
    (*input, *have) = (rest, *have + n);
}

/// All connections and what they share.
#[derive(Debug)]
pub(crate) struct Desk {
    limits: Limits,
    max_memory: usize,
    secret: Option<Secret>,
    state: State,
    sessions: HashMap<ConnId, Session>,
    /// What the connections hold.
    charged: usize,
    /// Connections that are owed something because of what others did.
    woken: Vec<ConnId>,
}

impl Desk {
    pub(crate) fn new(limits: Limits, max_memory: usize, secret: Option<Secret>) -> Self {
        Self {
            limits,
            max_memory,
            secret,
            state: State::default(),
            sessions: HashMap::new(),
            charged: 0,
            woken: Vec::new(),
        }
    }

    /// A connection is there.
    pub(crate) fn open(&mut self, id: ConnId) {
        let gate = match self.secret {
            Some(_) => Gate::Hello { got: [0; HELLO], have: 0 },
            None => Gate::First { have: 0 },
        };
        let parser = Parser::new(self.limits);
        let session = Session { gate, parser, pending: Vec::new(), out: Vec::new(), sent: 0, charge: 0 };
        self.sessions.insert(id, session);
    }

    /// A connection is gone.
    pub(crate) fn close(&mut self, id: ConnId) {
        if let Some(s) = self.sessions.remove(&id) {
            self.charged -= s.charge;
            self.state.forget(id);
        }
    }

    pub(crate) fn session(&self, id: ConnId) -> Option<&Session> {
        self.sessions.get(&id)
    }

    /// Whether a connection may stay when others want its place: it has proven that it knows the secret, or has
    /// introduced itself where there is none.
    pub(crate) fn settled(&self, id: ConnId) -> bool {
        self.sessions
            .get(&id)
            .is_some_and(|s| s.introduced() || (self.secret.is_some() && matches!(s.gate, Gate::Open)))
    }

    /// What is stored and in transit, in bytes, about.
    pub(crate) fn used(&self) -> usize {
        self.state.bytes() + self.charged
    }

    /// The memory up to which requests are served that need more than a little.
    fn general(&self) -> usize {
        self.max_memory - self.max_memory / 8
    }

    /// The connections to which something is owed since the last call because of what others did.
    pub(crate) fn take_woken(&mut self) -> Vec<ConnId> {
        std::mem::take(&mut self.woken)
    }

    /// Bytes of a connection, at most [`CHUNK`], which must be listening.
    ///
    /// # Errors
    ///
    /// When the connection is not served any longer.
    pub(crate) fn input(&mut self, id: ConnId, mut input: &[u8]) -> Result<(), Refusal> {
        let Some(s) = self.sessions.get_mut(&id) else { return Ok(()) };
        while !input.is_empty() && !matches!(s.gate, Gate::Open) {
            s.greet(self.secret.as_ref(), &mut input)?;
        }
        self.serve(id, input)
    }

    /// The first `n` bytes of a connection's output were sent. Input that waited for that goes on.
    ///
    /// # Errors
    ///
    /// When the connection is not served any longer.
    pub(crate) fn sent(&mut self, id: ConnId, n: usize) -> Result<(), Refusal> {
        let Some(s) = self.sessions.get_mut(&id) else { return Ok(()) };
        s.sent(n);
        if s.output().len() >= OUT_HIGH {
            return self.account(id);
        }
        let pending = std::mem::take(&mut s.pending);
        self.serve(id, &pending)
    }

    /// Carries out requests; keeps what is behind a reply that the peer does not take.
    fn serve(&mut self, id: ConnId, mut input: &[u8]) -> Result<(), Refusal> {
        let general = self.general();
        let mut ended = Vec::new();
        while let Some(s) = self.sessions.get_mut(&id) {
            let step = s.parser.next(&mut input).map_err(|b| Refusal::Close(b.to_string()))?;
            let Step::Request(request) = step else { break };
            let budget = general.saturating_sub(self.state.bytes() + self.charged);
            let applied = self.state.apply(id, request, budget, &mut s.out, &mut ended);
            // Whoever was woken is told at once: the next request may end this connection. A connection can end its
            // own wait, too, and then its replies stay in order.
            for conn in ended.drain(..) {
                if let Some(c) = self.sessions.get_mut(&conn) {
                    c.out.push(STOP_WAITING);
                }
                if conn != id {
                    self.woken.push(conn);
                }
            }
            applied.map_err(|r| Refusal::Close(r.to_string()))?;
            if let Some(s) = self.sessions.get_mut(&id).filter(|s| s.output().len() >= OUT_HIGH) {
                s.pending = input.to_vec();
                break;
            }
        }
        self.account(id)
    }

    /// Updates what a connection counts for, and refuses it if the store cannot afford it.
    fn account(&mut self, id: ConnId) -> Result<(), Refusal> {
        let Some(s) = self.sessions.get_mut(&id) else { return Ok(()) };
        self.charged -= s.charge;
        s.charge = s.held();
        self.charged += s.charge;
        let charge = s.charge;
        let limit = if charge > SMALL { self.general() } else { self.max_memory };
        if charge > 0 && self.used() > limit {
            return Err(Refusal::Close("the store's memory limit is reached".into()));
        }
        Ok(())
    }

    /// Counts everything again, for tests.
    ///
    /// # Panics
    ///
    /// When the books do not balance.
    pub(crate) fn check(&self) {
        self.state.check();
        assert_eq!(self.charged, self.sessions.values().map(|s| s.charge).sum::<usize>());
        for s in self.sessions.values() {
            // Besides the end of a wait, which is counted when it is sent, and may have doubled a buffer.
            assert!(s.held() <= 2 * s.charge + 64, "a connection holds {} bytes and counts for {}", s.held(), s.charge);
        }
    }
}
