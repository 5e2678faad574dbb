//! The states of a sandbox and the typed causes of its end, shared by node, control plane and clients.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a sandbox is in its life.
///
/// ```text
/// creating ──► running ──► stopping ──► ended
///     └───────────┴──────────────────────▲   (failure: straight to ended, with a cause)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Its machine is being started; not usable yet.
    Creating,
    /// Usable.
    Running,
    /// Being taken apart; takes no new requests.
    Stopping,
    /// Gone, with a cause; kept as a record only.
    Ended,
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
