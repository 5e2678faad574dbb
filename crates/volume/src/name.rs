//! Names of templates: `name`, `name:tag` or `sha256:…`, parsed once.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::VolumeError;

/// Longest name or tag, in bytes.
const MAX_LABEL: usize = 63;

const EXPECTED: &str =
    "name, name:tag (each 1 to 63 of a-z 0-9 . _ -, a letter or digit first) or sha256:<64 hex digits>";

/// SHA-256 of some content, written `sha256:<64 lower-case hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub(crate) fn from_hasher(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// The 64 hex digits alone.
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// The form that file names use.
    pub(crate) fn file_name(&self) -> String {
        format!("sha256-{}", self.hex())
    }

    pub(crate) fn from_file_name(name: &str) -> Option<Self> {
        Self::from_hex(name.strip_prefix("sha256-")?)
    }

    fn from_hex(hex: &str) -> Option<Self> {
        let bytes = hex.as_bytes();
        if bytes.len() != 64 {
            return None;
        }
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut out = [0; 32];
        for (slot, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *slot = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(out))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = VolumeError;

    fn from_str(given: &str) -> Result<Self, VolumeError> {
        given
            .strip_prefix("sha256:")
            .and_then(Self::from_hex)
            .ok_or_else(|| bad(given))
    }
}

impl TryFrom<String> for Digest {
    type Error = VolumeError;

    fn try_from(given: String) -> Result<Self, VolumeError> {
        given.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// One checked part of a template's name; safe as a file name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(String);

impl Label {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Label {
    type Err = VolumeError;

    fn from_str(given: &str) -> Result<Self, VolumeError> {
        let bytes = given.as_bytes();
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let valid = (1..=MAX_LABEL).contains(&bytes.len())
            && plain(bytes[0])
            && bytes
                .iter()
                .all(|&byte| plain(byte) || matches!(byte, b'.' | b'_' | b'-'));
        if valid {
            Ok(Self(given.to_owned()))
        } else {
            Err(bad(given))
        }
    }
}

impl TryFrom<String> for Label {
    type Error = VolumeError;

    fn try_from(given: String) -> Result<Self, VolumeError> {
        given.parse()
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a user may write where a template is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// By name; the tag defaults to `latest`.
    Named {
        /// Name.
        name: Label,
        /// Tag.
        tag: Label,
    },
    /// By content.
    Digest(Digest),
}

impl FromStr for Reference {
    type Err = VolumeError;

    fn from_str(given: &str) -> Result<Self, VolumeError> {
        // A 64-digit tag is impossible (the limit is 63), so `sha256:…` is never a name.
        if let Ok(digest) = given.parse() {
            return Ok(Self::Digest(digest));
        }
        let (name, tag) = given.split_once(':').unwrap_or((given, "latest"));
        match (name.parse(), tag.parse()) {
            (Ok(name), Ok(tag)) => Ok(Self::Named { name, tag }),
            _ => Err(bad(given)),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named { name, tag } => write!(f, "{name}:{tag}"),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

fn bad(given: &str) -> VolumeError {
    VolumeError::BadName {
        shown: given.chars().take(64).flat_map(char::escape_default).collect(),
        expected: EXPECTED,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_tags_and_digests_are_told_apart() {
        let named = |name: &str, tag: &str| Reference::Named {
            name: name.parse().unwrap(),
            tag: tag.parse().unwrap(),
        };
        assert_eq!("base".parse::<Reference>().unwrap(), named("base", "latest"));
        assert_eq!(
            "my.app_2:v1-3".parse::<Reference>().unwrap(),
            named("my.app_2", "v1-3")
        );
        let digest = Digest::of(b"x");
        assert_eq!(
            digest.to_string().parse::<Reference>().unwrap(),
            Reference::Digest(digest)
        );
    }

    #[test]
    fn hostile_names_are_refused_and_shown_escaped() {
        for bad in [
            "",
            ":",
            "base:",
            ":latest",
            "../etc",
            "a/b",
            ".hidden",
            "-x",
            "Base",
            "a:b:c",
            "a\0",
            "a\n",
            "a b",
            "\u{1b}[31m",
            &"a".repeat(64),
            &format!("sha256:{}", "G".repeat(64)),
        ] {
            let error = bad.parse::<Reference>().unwrap_err();
            assert!(matches!(error, VolumeError::BadName { .. }), "{bad:?}");
            assert!(error.to_string().chars().all(|c| !c.is_control()), "{error}");
        }
    }

    proptest! {
        #[test]
        fn whatever_parses_is_a_safe_file_name_and_round_trips(given in "\\PC{0,70}") {
            if let Ok(label) = given.parse::<Label>() {
                prop_assert!(!label.as_str().contains('/') && !label.as_str().starts_with('.'));
                prop_assert_eq!(label.as_str(), given.as_str());
            }
            if let Ok(reference) = given.parse::<Reference>() {
                prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
            }
        }

        #[test]
        fn digests_round_trip(content in proptest::collection::vec(any::<u8>(), 0..64)) {
            let digest = Digest::of(&content);
            prop_assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
            prop_assert_eq!(Digest::from_file_name(&digest.file_name()), Some(digest));
        }
    }
}
