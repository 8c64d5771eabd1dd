//! Connections that others have made and that have not said everything yet.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use collectives::Refusal;
use comm_core::Secret;
use comm_store::auth;

use super::stream::Stream;
use crate::wire::{CONFIRM, GREETING, Greeting};

/// Time that a stranger gets to say who he is.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Guest {
    pub(super) serial: u64,
    pub(super) stream: Stream,
    pub(super) from: SocketAddr,
    /// When it is dropped if it has not been accepted.
    pub(super) until: Instant,
    step: Step,
}

enum Step {
    Hello(Secret),
    Proof(auth::Acceptor),
    Greeting,
    /// The answer is being composed.
    Judged,
    /// Accepted; the peer has not confirmed.
    Reserved {
        peer: usize,
        attempt: u32,
    },
    /// It was told that its handles are others, and has not confirmed that it has heard so.
    Told {
        peer: usize,
        why: Refusal,
    },
}

/// What a guest has said.
pub(super) enum Said {
    /// Nothing more for now.
    Nothing,
    /// Who it is.
    Greeting(Greeting),
    /// That it takes the connection.
    Confirmed(usize),
    /// That it has heard that it passes other handles.
    Heard(usize, Refusal),
}

impl Guest {
    pub(super) fn new(serial: u64, stream: Stream, from: SocketAddr, secret: Option<&Secret>) -> Self {
        let step = secret.map_or(Step::Greeting, |s| Step::Hello(s.clone()));
        Self { serial, stream, from, until: Instant::now() + PATIENCE, step }
    }

    /// The rank and attempt for which the connection is kept.
    pub(super) const fn reserved(&self) -> Option<(usize, u32)> {
        match self.step {
            Step::Reserved { peer, attempt } => Some((peer, attempt)),
            _ => None,
        }
    }

    /// The connection is kept until the peer confirms it, replaces it or closes it. There is no time limit: a peer that
    /// was told `Accepted` may confirm at any time, and must find somebody then.
    pub(super) fn reserve(&mut self, peer: usize, attempt: u32) {
        self.step = Step::Reserved { peer, attempt };
    }

    /// The peer was told that it passes other handles: it shows that it is still there.
    pub(super) fn tell(&mut self, peer: usize, why: Refusal) {
        self.step = Step::Told { peer, why };
    }

    /// Whether it is no stranger.
    pub(super) const fn is_known(&self) -> bool {
        matches!(self.step, Step::Reserved { .. } | Step::Told { .. })
    }

    /// Reads on; an error says why the guest has to go.
    pub(super) fn hear(&mut self) -> Result<Said, String> {
        loop {
            match &self.step {
                Step::Hello(secret) => {
                    let Some(hello) = self.stream.read::<{ auth::HELLO }>()? else { return Ok(Said::Nothing) };
                    let begun = auth::Acceptor::new(secret, auth::DATA, &hello).map_err(|e| e.brief())?;
                    let Some((acceptor, challenge)) = begun else {
                        return Err("it does not begin with a proof that it knows the secret".into());
                    };
                    self.stream.write(&challenge)?;
                    self.step = Step::Proof(acceptor);
                }
                Step::Proof(acceptor) => {
                    let Some(proof) = self.stream.read::<{ auth::PROOF }>().map_err(|e| {
                        format!("{e} after the challenge; perhaps its secret (RUSTCOMMS_SECRET) is another")
                    })?
                    else {
                        return Ok(Said::Nothing);
                    };
                    if !acceptor.accepts(&proof) {
                        return Err("it does not know the secret".into());
                    }
                    self.step = Step::Greeting;
                }
                Step::Greeting => {
                    let Some(bytes) = self.stream.read::<GREETING>()? else { return Ok(Said::Nothing) };
                    self.step = Step::Judged;
                    return Greeting::decode(&bytes).map(Said::Greeting);
                }
                Step::Judged => return Ok(Said::Nothing),
                Step::Reserved { .. } | Step::Told { .. } => {
                    let said = match self.step {
                        Step::Reserved { peer, .. } => Said::Confirmed(peer),
                        Step::Told { peer, why } => Said::Heard(peer, why),
                        _ => Said::Nothing,
                    };
                    return match self.stream.read::<1>()? {
                        None => Ok(Said::Nothing),
                        Some([CONFIRM]) => Ok(said),
                        Some(_) => Err("it says something else than that it takes the connection".into()),
                    };
                }
            }
        }
    }
}
