//! API keys: the text a user holds, and the hash that is stored of it.

use std::{fmt, str::FromStr};

use rand::Rng as _;
use sha2::{Digest as _, Sha256};

/// An API key as the user holds it. Never stored, never logged: `Debug` hides it and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

/// Why a text cannot be an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an API key is \"e2b_\" or \"space_\" and 40 characters of 0-9 and a-f")]
pub struct ParseKeyError;

/// SHA-256 of a key. A key holds 160 random bits, so a plain hash cannot be searched.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyHash(String);

impl ApiKey {
    const PREFIXES: [&str; 2] = ["e2b_", "space_"];
    const HEX_LENGTH: usize = 40;

    /// Draws a new key of 160 bits. It begins with `e2b_`, which some of E2B's tools check.
    pub fn random() -> Self {
        let bytes: [u8; Self::HEX_LENGTH / 2] = rand::rng().random();
        Self(format!("{}{}", Self::PREFIXES[0], hex(&bytes)))
    }

    /// The secret itself, to show once or to send.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// What is stored.
    pub fn hash(&self) -> KeyHash {
        KeyHash(hex(&Sha256::digest(self.0.as_bytes())))
    }

    /// The first eight characters, enough for people to tell their keys apart.
    pub fn shown(&self) -> String {
        self.0.chars().take(8).collect()
    }
}

impl FromStr for ApiKey {
    type Err = ParseKeyError;

    fn from_str(given: &str) -> Result<Self, ParseKeyError> {
        let digits = Self::PREFIXES
            .iter()
            .find_map(|prefix| given.strip_prefix(prefix))
            .ok_or(ParseKeyError)?;
        let valid = digits.len() == Self::HEX_LENGTH
            && digits
                .bytes()
                .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        if valid {
            Ok(Self(given.to_owned()))
        } else {
            Err(ParseKeyError)
        }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

impl KeyHash {
    /// 64 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Draws a token of 256 bits for one sandbox, as 64 hexadecimal digits.
pub fn random_token() -> String {
    let bytes: [u8; 32] = rand::rng().random();
    hex(&bytes)
}

/// Lower-case hexadecimal digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(DIGITS[usize::from(digit)]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_are_hidden() {
        let key = ApiKey::random();
        assert_eq!(key.expose().parse(), Ok(key.clone()));
        assert!(!format!("{key:?}").contains(&key.expose()[8..]));
        assert_eq!(key.hash().as_str().len(), 64);
        let ours = format!("space_{}", &key.expose()[4..]);
        assert!(ours.parse::<ApiKey>().is_ok());
        for bad in [
            "",
            "e2b_",
            "e2b_zz",
            &key.expose()[1..],
            &key.expose().to_uppercase(),
        ] {
            assert_eq!(bad.parse::<ApiKey>(), Err(ParseKeyError), "{bad}");
        }
    }
}
