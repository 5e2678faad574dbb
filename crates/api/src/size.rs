//! Size classes: how big a sandbox is. A template has one machine snapshot per class, made on demand.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// vCPUs, memory and writable disk of a sandbox; written `1x512x4096` (vCPUs x MiB x MiB).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SizeClass {
    /// Number of virtual CPUs, 1 to [`SizeClass::MAX_VCPUS`].
    pub vcpus: u32,
    /// Memory in MiB, a multiple of 64.
    pub memory_mib: u32,
    /// Writable disk in MiB, a multiple of 64.
    pub disk_mib: u32,
}

/// Why a size is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox cannot have {what} {given}: expected {expected}")]
pub struct SizeError {
    /// Which dimension.
    pub what: &'static str,
    /// What was asked for.
    pub given: String,
    /// What is possible.
    pub expected: &'static str,
}

impl SizeClass {
    /// Upper bound of `vcpus`.
    pub const MAX_VCPUS: u32 = 16;

    /// What a sandbox gets when nobody says otherwise.
    pub const DEFAULT: Self = Self {
        vcpus: 1,
        memory_mib: 512,
        disk_mib: 4096,
    };

    /// Checks each dimension against its bounds.
    pub fn new(vcpus: u32, memory_mib: u32, disk_mib: u32) -> Result<Self, SizeError> {
        let refuse = |what, given: u32, expected| {
            Err(SizeError {
                what,
                given: given.to_string(),
                expected,
            })
        };
        if !(1..=Self::MAX_VCPUS).contains(&vcpus) {
            return refuse("a CPU count of", vcpus, "1 to 16");
        }
        if !(128..=65_536).contains(&memory_mib) || !memory_mib.is_multiple_of(64) {
            return refuse("memory (MiB) of", memory_mib, "128 to 65536, a multiple of 64");
        }
        if !(256..=262_144).contains(&disk_mib) || !disk_mib.is_multiple_of(64) {
            return refuse("a disk (MiB) of", disk_mib, "256 to 262144, a multiple of 64");
        }
        Ok(Self {
            vcpus,
            memory_mib,
            disk_mib,
        })
    }
}

impl fmt::Display for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.vcpus, self.memory_mib, self.disk_mib)
    }
}

impl FromStr for SizeClass {
    type Err = SizeError;

    fn from_str(given: &str) -> Result<Self, SizeError> {
        let bad = || SizeError {
            what: "the size class",
            given: given.chars().take(32).flat_map(char::escape_default).collect(),
            expected: "VCPUSxMEMORY_MIBxDISK_MIB, for example 1x512x4096",
        };
        let parts = given
            .split('x')
            .map(|part| part.parse::<u32>().map_err(|_| bad()))
            .collect::<Result<Vec<_>, _>>()?;
        let [vcpus, memory_mib, disk_mib] = parts[..] else {
            return Err(bad());
        };
        Self::new(vcpus, memory_mib, disk_mib)
    }
}

impl TryFrom<String> for SizeClass {
    type Error = SizeError;

    fn try_from(given: String) -> Result<Self, SizeError> {
        given.parse()
    }
}

impl From<SizeClass> for String {
    fn from(class: SizeClass) -> String {
        class.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_trip_and_bounds_hold() {
        assert_eq!("1x512x4096".parse(), Ok(SizeClass::DEFAULT));
        for bad in [
            "",
            "0x512x4096",
            "1x100x4096",
            "1x512",
            "1x512x4096x1",
            "99x512x4096",
            "1x-5x4096",
            "1x129x4096",
        ] {
            assert!(bad.parse::<SizeClass>().is_err(), "{bad}");
        }
    }
}
