//! The one registry of typed ids: parsed at the border, never a bare string inside.

use std::{fmt, str::FromStr};

use rand::Rng as _;
use serde::{Deserialize, Serialize};

/// Why a string is not an id of the kind asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{shown}\" is not a valid {kind} id: expected {expected}")]
pub struct ParseIdError {
    /// Which kind of id was asked for, as users call it.
    pub kind: &'static str,
    /// The form it should have had.
    pub expected: &'static str,
    /// What was given, cut to 64 characters and with control characters escaped.
    pub shown: String,
}

const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Draws `length` characters, of which the first is a letter, so that the result is a valid DNS label.
fn random_label(length: usize) -> String {
    let mut rng = rand::rng();
    (0..length)
        .map(|at| {
            let choices = if at == 0 { 26 } else { ALPHABET.len() };
            char::from(ALPHABET[rng.random_range(0..choices)])
        })
        .collect()
}

fn shown(given: &str) -> String {
    given.chars().take(64).flat_map(char::escape_default).collect()
}

macro_rules! label_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $length:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Length in characters, all of `[a-z0-9]`, the first a letter.
            pub const LENGTH: usize = $length;

            /// Draws a new one from the operating system's generator.
            pub fn random() -> Self {
                Self(random_label(Self::LENGTH))
            }

            /// The id as it appears in URLs, host names, file names and JSON.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(given: &str) -> Result<Self, ParseIdError> {
                let bytes = given.as_bytes();
                let valid = bytes.len() == Self::LENGTH
                    && bytes[0].is_ascii_lowercase()
                    && bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
                if valid {
                    Ok(Self(given.to_owned()))
                } else {
                    Err(ParseIdError {
                        kind: $kind,
                        expected: concat!(stringify!($length), " characters of a-z and 0-9, a letter first"),
                        shown: shown(given),
                    })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = ParseIdError;

            fn try_from(given: String) -> Result<Self, ParseIdError> {
                given.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

label_id! {
    /// One sandbox. 20 characters hold 103 bits, so an id cannot be guessed; it is no credential all the same.
    SandboxId, "sandbox", 20
}
label_id! {
    /// One project, the tenant that owns keys, sandboxes and templates.
    ProjectId, "project", 16
}
label_id! {
    /// One API key's public handle (never the key itself).
    KeyId, "API key", 12
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_parse_and_differ() {
        let ids: std::collections::BTreeSet<_> = (0..1000).map(|_| SandboxId::random()).collect();
        assert_eq!(ids.len(), 1000);
        for id in ids {
            assert_eq!(id.as_str().parse::<SandboxId>(), Ok(id));
        }
    }

    #[test]
    fn hostile_ids_are_refused_and_shown_escaped() {
        for bad in [
            "",
            "../../etc/passwd",
            "ABCDEFGHIJKLMNOPQRST",
            "1bcdefghijklmnopqrst",
            "a\u{1b}[31m",
            "aaaaaaaaaaaaaaaaaaa\0",
        ] {
            let error = bad.parse::<SandboxId>().unwrap_err();
            assert!(error.to_string().chars().all(|c| !c.is_control()), "{error}");
        }
    }
}
