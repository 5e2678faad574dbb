//! Nonces, and finding one in a byte stream.

use std::fmt;

use crate::ChannelError;

/// Bytes of a nonce.
pub const NONCE_LENGTH: usize = 32;

/// Secret random bytes that name one host connection. Never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nonce([u8; NONCE_LENGTH]);

impl Nonce {
    /// A fresh one from the operating system's generator.
    pub fn random() -> Result<Self, ChannelError> {
        let mut bytes = [0; NONCE_LENGTH];
        getrandom::fill(&mut bytes).map_err(|error| ChannelError::Random {
            reason: error.to_string(),
        })?;
        Ok(Self(bytes))
    }

    /// From its bytes.
    pub const fn from_bytes(bytes: [u8; NONCE_LENGTH]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; NONCE_LENGTH] {
        &self.0
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// Finds the first occurrence of a nonce in a stream that comes in pieces; keeps no input.
#[derive(Debug, Clone)]
pub struct NonceSearch {
    nonce: Nonce,
    /// `fallback[n]`: length of the longest proper prefix of the nonce that also ends its first `n + 1` bytes.
    fallback: [u8; NONCE_LENGTH],
    matched: usize,
}

impl NonceSearch {
    /// A search at the beginning of a stream.
    pub fn new(nonce: &Nonce) -> Self {
        let bytes = nonce.as_bytes();
        let mut fallback = [0_u8; NONCE_LENGTH];
        let mut prefix = 0;
        for at in 1..NONCE_LENGTH {
            while prefix > 0 && bytes[at] != bytes[prefix] {
                prefix = usize::from(fallback[prefix - 1]);
            }
            if bytes[at] == bytes[prefix] {
                prefix += 1;
            }
            fallback[at] = u8::try_from(prefix).unwrap_or_default();
        }
        Self {
            nonce: *nonce,
            fallback,
            matched: 0,
        }
    }

    /// Looks through the next piece. `Some(n)`: the nonce ends right before byte `n` of it; do not feed on.
    pub fn feed(&mut self, piece: &[u8]) -> Option<usize> {
        let bytes = self.nonce.as_bytes();
        for (at, &byte) in piece.iter().enumerate() {
            while self.matched > 0 && byte != bytes[self.matched] {
                self.matched = usize::from(self.fallback[self.matched - 1]);
            }
            if byte == bytes[self.matched] {
                self.matched += 1;
            }
            if self.matched == NONCE_LENGTH {
                self.matched = 0;
                return Some(at + 1);
            }
        }
        None
    }
}
