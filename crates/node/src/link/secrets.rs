//! What a new guest is told of itself, drawn for it alone.

use jiff::Timestamp;
use rand::TryRngCore as _;
use space_channel::{Identity, IdentityMode};

use super::LinkError;

/// What a new guest is told, with what only the host may know.
pub(crate) struct Secrets {
    pub(crate) guest_token: String,
    entropy: [u8; 64],
    machine_id: [u8; 16],
    boot_id: [u8; 16],
}

impl Secrets {
    /// Drawn from the operating system.
    pub(crate) fn random() -> Result<Self, LinkError> {
        let mut bytes = [0_u8; 128];
        rand::rngs::OsRng
            .try_fill_bytes(&mut bytes)
            .map_err(|_| LinkError::Random)?;
        let (entropy, rest) = bytes.split_at(64);
        let (machine_id, rest) = rest.split_at(16);
        let (boot_id, token) = rest.split_at(16);
        let guest_token = token.iter().map(|byte| format!("{byte:02x}")).collect();
        let (Ok(entropy), Ok(machine_id), Ok(boot_id)) =
            (entropy.try_into(), machine_id.try_into(), boot_id.try_into())
        else {
            return Err(LinkError::Random);
        };
        Ok(Self {
            guest_token,
            entropy,
            machine_id: version_4(machine_id),
            boot_id: version_4(boot_id),
        })
    }

    pub(super) fn identity(&self, hostname: &str, generation: u64) -> Identity {
        let now = Timestamp::now().as_nanosecond();
        Identity {
            mode: IdentityMode::New,
            realtime_ns: u64::try_from(now).unwrap_or_default(),
            entropy: self.entropy,
            generation,
            machine_id: self.machine_id,
            boot_id: self.boot_id,
            hostname: hostname.to_owned(),
            guest_token: self.guest_token.clone(),
        }
    }
}

/// Marks random bytes as a random UUID, which is what both ids are read as.
fn version_4(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    bytes
}
