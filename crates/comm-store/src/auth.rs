//! Proof that two ends of a connection know the same secret, before either reads anything else.
//!
//! Three messages of fixed length, so that nothing of an unproven peer is parsed:
//!
//! 1. initiator: [`MAGIC`] and a random number;
//! 2. acceptor: a random number, and an HMAC-SHA-256 over its role, the purpose and both numbers;
//! 3. initiator: an HMAC over its own role, the purpose and both numbers.
//!
//! Each end contributes a fresh number, so a recorded handshake proves nothing later; the roles differ, so an end's own
//! proof cannot be sent back to it; the purposes differ, so a proof to a store is none to a rank. What follows is neither
//! encrypted nor signed: whoever can alter the packets of a proven connection can alter what it carries.

use comm_core::{Error, Result, Secret};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// First bytes of a connection whose initiator wants proof.
pub const MAGIC: [u8; 8] = *b"RCAUTH1\n";
/// Length of the first message.
pub const HELLO: usize = 40;
/// Length of the second message.
pub const CHALLENGE: usize = 64;
/// Length of the third message.
pub const PROOF: usize = 32;

/// The purpose of connections to a store.
pub const STORE: &str = "store";
/// The purpose of connections between ranks.
pub const DATA: &str = "data";

/// The end that has made the connection.
#[derive(Debug)]
pub struct Initiator {
    secret: Secret,
    purpose: &'static str,
    number: [u8; 32],
}

impl Initiator {
    /// A fresh handshake, and its first message.
    ///
    /// # Errors
    ///
    /// `Io` when the system has no random numbers.
    pub fn new(secret: &Secret, purpose: &'static str) -> Result<(Self, [u8; HELLO])> {
        let number = random()?;
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..].copy_from_slice(&number);
        Ok((Self { secret: secret.clone(), purpose, number }, hello))
    }

    /// Checks the second message and makes the third; `None` when the acceptor does not know the secret.
    #[must_use]
    pub fn answer(&self, challenge: &[u8; CHALLENGE]) -> Option<[u8; PROOF]> {
        let (theirs, proof) = challenge.split_at(32);
        let expected = prove(&self.secret, "acceptor", self.purpose, &self.number, theirs);
        // In constant time: how far a guess was right must not show.
        bool::from(expected.ct_eq(proof)).then(|| prove(&self.secret, "initiator", self.purpose, &self.number, theirs))
    }
}

/// The end that has accepted the connection.
#[derive(Debug)]
pub struct Acceptor {
    expected: [u8; PROOF],
}

impl Acceptor {
    /// Reads the first message and makes the second; `None` when the first does not begin with [`MAGIC`].
    ///
    /// # Errors
    ///
    /// `Io` when the system has no random numbers.
    pub fn new(secret: &Secret, purpose: &str, hello: &[u8; HELLO]) -> Result<Option<(Self, [u8; CHALLENGE])>> {
        if hello[..8] != MAGIC {
            return Ok(None);
        }
        let (theirs, own) = (&hello[8..], random()?);
        let mut challenge = [0; CHALLENGE];
        challenge[..32].copy_from_slice(&own);
        challenge[32..].copy_from_slice(&prove(secret, "acceptor", purpose, theirs, &own));
        Ok(Some((Self { expected: prove(secret, "initiator", purpose, theirs, &own) }, challenge)))
    }

    /// Whether the third message proves that the initiator knows the secret.
    #[must_use]
    pub fn accepts(&self, proof: &[u8; PROOF]) -> bool {
        self.expected.ct_eq(proof).into()
    }
}

fn prove(secret: &Secret, role: &str, purpose: &str, initiator: &[u8], acceptor: &[u8]) -> [u8; PROOF] {
    let mut mac = match Hmac::<Sha256>::new_from_slice(secret.bytes()) {
        Ok(mac) => mac,
        // HMAC takes keys of every length.
        Err(_) => unreachable!("HMAC has refused a key of {} bytes", secret.bytes().len()),
    };
    // Lengths go first, so that no two inputs read the same.
    for part in [b"rustcomms 1".as_slice(), role.as_bytes(), purpose.as_bytes(), initiator, acceptor] {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// 32 bytes from the operating system.
fn random() -> Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                return Err(Error::io("asking the system for random numbers", &e.into()));
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text).unwrap()
    }

    #[test]
    fn ends_with_one_secret_accept_each_other() {
        let (a, hello) = Initiator::new(&secret("x"), DATA).unwrap();
        let (b, challenge) = Acceptor::new(&secret("x"), DATA, &hello).unwrap().unwrap();
        assert!(b.accepts(&a.answer(&challenge).unwrap()));
    }

    #[test]
    fn other_secrets_purposes_and_replays_are_refused() {
        let (a, hello) = Initiator::new(&secret("x"), DATA).unwrap();
        for (s, purpose) in [("y", DATA), ("x", STORE), ("xx", DATA)] {
            let (_, challenge) = Acceptor::new(&secret(s), purpose, &hello).unwrap().unwrap();
            assert!(a.answer(&challenge).is_none(), "{s} {purpose}");
        }
        let (b, challenge) = Acceptor::new(&secret("x"), DATA, &hello).unwrap().unwrap();
        let proof = a.answer(&challenge).unwrap();
        // The same hello and proof again, to an acceptor that has chosen another number.
        let (again, other) = Acceptor::new(&secret("x"), DATA, &hello).unwrap().unwrap();
        assert!(b.accepts(&proof) && !again.accepts(&proof) && other != challenge);
        // The acceptor's own proof sent back to it.
        assert!(!b.accepts(challenge[32..].try_into().unwrap()));
        // A recorded challenge, to a new initiator.
        let (fresh, _) = Initiator::new(&secret("x"), DATA).unwrap();
        assert!(fresh.answer(&challenge).is_none());
        // Every single bit counts.
        for bit in 0..PROOF * 8 {
            let mut bent = proof;
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(!b.accepts(&bent));
        }
    }

    #[test]
    fn what_is_no_hello_gets_no_challenge() {
        assert!(Acceptor::new(&secret("x"), STORE, &[0; HELLO]).unwrap().is_none());
    }
}
