//! A secret that the ranks of a run share.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// The variable that names the secret for ranks that are not told otherwise.
pub const SECRET_VARIABLE: &str = "RUSTCOMMS_SECRET";

/// A secret that all ranks of a run know and nobody else does. Ranks prove to each other, and to the store, that they
/// know it; it never travels. Nothing is encrypted: who can read or alter the network's packets can read or alter
/// messages, but who can merely connect gets nowhere.
///
/// Its bytes are not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// Longest secret in bytes.
    pub const MAX: usize = 4096;

    /// A secret of 1 to [`MAX`](Self::MAX) bytes. Use 32 random ones, in any writing: a word that can be guessed can
    /// be found out from one recorded handshake.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when it is empty or too long.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() {
            return Err(Error::invalid("an empty secret protects nothing: give it 32 random bytes, or leave it unset"));
        }
        if bytes.len() > Self::MAX {
            return Err(Error::invalid(format!("a secret has at most {} bytes, this one {}", Self::MAX, bytes.len())));
        }
        Ok(Self(bytes.into()))
    }

    /// What `RUSTCOMMS_SECRET` says; `None` when it is not set.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when it is set but empty, so that a variable that failed to expand does not leave the ranks
    /// unprotected, or too long.
    pub fn from_environment() -> Result<Option<Self>> {
        use std::os::unix::ffi::OsStrExt;
        let Some(text) = std::env::var_os(SECRET_VARIABLE) else { return Ok(None) };
        let told = |e: Error| match e.kind() {
            ErrorKind::InvalidArgument { what } => Error::invalid(format!("{SECRET_VARIABLE}: {what}")),
            _ => e,
        };
        Self::new(text.as_bytes()).map(Some).map_err(told)
    }

    /// The bytes, for the handshake.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_bounded_and_not_shown() {
        assert!(Secret::new("").unwrap_err().to_string().contains("protects nothing"));
        assert!(Secret::new([0; Secret::MAX + 1]).is_err());
        let s = Secret::new("hunter2").unwrap();
        assert!(!format!("{s:?}").contains("hunter"));
        assert_eq!(s.bytes(), b"hunter2");
    }
}
