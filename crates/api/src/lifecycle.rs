//! The states of a sandbox and the typed causes of its end, shared by node, control plane and clients.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a sandbox is in its life.
///
/// ```text
///                       ┌──────── resuming ◄───────┐
///                       ▼                          │
/// creating ────────► running ────► pausing ────► paused
///     │                 │ ▲           │            │
///     │                 │ └───────────┤ (it could not be stopped: it runs on)
///     ▼                 ▼             ▼            ▼
///     └──────────────► stopping ◄─────┴────────────┘      delete, deadline, failure: from every state
///                          │
///                          ▼
///                        ended    with a cause
/// ```
///
/// `paused` is *resident*: the machine stands still but keeps its memory and its place. Its deadline goes on counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Its machine is being started; not usable yet.
    Creating,
    /// Usable.
    Running,
    /// Its machine is being stopped; a request that needs the machine is refused as for a paused one.
    Pausing,
    /// Its machine stands still, in memory.
    Paused,
    /// Its machine is being let run again.
    Resuming,
    /// Being taken apart; takes no new requests.
    Stopping,
    /// Gone, with a cause; kept as a record only.
    Ended,
}

impl SandboxState {
    /// Every state, in the order of a life.
    pub const ALL: [Self; 7] = [
        Self::Creating,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopping,
        Self::Ended,
    ];

    /// The word used for it in JSON, databases and messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Stopping => "stopping",
            Self::Ended => "ended",
        }
    }

    /// The state of that word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// What is done with a sandbox that does no work for a while. It never destroys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IdlePolicy {
    /// Seconds without work, [`IdlePolicy::SECONDS`]. No work means: next to no CPU, disk or network traffic, no command
    /// that was started and has not ended, no stream open. A client that is away is not idleness.
    #[serde(alias = "afterSeconds")]
    pub after_seconds: u32,
    /// What happens then.
    #[serde(default)]
    pub action: IdleAction,
}

impl IdlePolicy {
    /// Shortest and longest idleness that may be asked for: work is looked for every few seconds.
    pub const SECONDS: std::ops::RangeInclusive<u32> = 30..=86_400;
}

/// See [`IdlePolicy`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IdleAction {
    /// Its machine is stopped and stays in memory; `resume`, `connect` and traffic let it run again.
    #[default]
    Pause,
}

/// Why a sandbox ended. Readable after the sandbox is gone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EndCause {
    /// Someone deleted it.
    Deleted,
    /// Its deadline (E2B: `timeout`) passed.
    Deadline,
    /// The machine powered itself off from inside.
    GuestShutdown,
    /// The guest's kernel or the space daemon failed; `detail` is the last of its console, bounded to 2 KiB.
    GuestFailed {
        /// What was seen.
        detail: String,
    },
    /// The VMM process ended although nobody asked it to.
    VmmFailed {
        /// Exit code or signal, in words.
        detail: String,
    },
    /// The host killed the machine because it outgrew its memory limit.
    OutOfMemory,
    /// The platform was shut down in order.
    PlatformShutdown,
    /// The platform died or was killed, and the machine with it.
    PlatformRestarted,
    /// It never became usable.
    CreateFailed {
        /// The step that failed and why.
        detail: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_one_word_everywhere() {
        for state in SandboxState::ALL {
            assert_eq!(SandboxState::from_word(state.as_str()), Some(state));
            let json = serde_json::to_string(&state).expect("serialises");
            assert_eq!(json, format!("\"{}\"", state.as_str()));
        }
        assert_eq!(SandboxState::from_word("Running"), None);
    }
}
