//! What is stored, in types.

use std::{collections::BTreeMap, fmt, time::Duration};

use jiff::Timestamp;
use space_api::{
    id::{KeyId, ProjectId, SandboxId},
    key::ApiKey,
    lifecycle::{EndCause, IdlePolicy, SandboxState},
    rest::{KeyRole, Quotas},
    size::SizeClass,
};

/// How long the answer to a create is remembered under its idempotency key.
pub const IDEMPOTENCY_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    /// Its id.
    pub id: ProjectId,
    /// Its name, unique.
    pub name: String,
    /// What it may use at once.
    pub quotas: Quotas,
}

/// Who is asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// The tenant.
    pub project: Project,
    /// The key that was shown.
    pub key: KeyId,
    /// What it may do.
    pub role: KeyRole,
}

/// The outcome of [`Store::ensure_default_project_and_key`](crate::Store::ensure_default_project_and_key).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// The default project.
    pub project: Project,
    /// A key that opens it.
    pub key: ApiKey,
    /// Whether the key was made just now and must be kept by the caller.
    pub key_is_new: bool,
}

/// A sandbox to be written as `creating`.
#[derive(Clone, PartialEq)]
pub struct NewSandbox {
    /// Its id, fresh.
    pub id: SandboxId,
    /// Its owner.
    pub project: ProjectId,
    /// As asked for.
    pub template: String,
    /// What is reserved for it.
    pub size: SizeClass,
    /// 1 for a new id.
    pub generation: u64,
    /// The node whose room it takes; see [`NodeCapacity::name`].
    pub node: String,
    /// What its owner wrote on it, as E2B's SDKs do.
    pub metadata: BTreeMap<String, String>,
    /// What it is found by.
    pub labels: BTreeMap<String, String>,
    /// What the daemon's services ask for; `None` if they ask for nothing.
    pub access_token: Option<String>,
    /// What its ports ask for; `None` if they are public.
    pub traffic_token: Option<String>,
    /// Host header that programs inside see.
    pub mask_request_host: Option<String>,
    /// Whether traffic to its ports wakes it.
    pub wake_on_traffic: bool,
    /// What is done when it does no work for a while.
    pub on_idle: Option<IdlePolicy>,
    /// When the create was accepted.
    pub started_at: Timestamp,
    /// When it will be ended.
    pub deadline: Timestamp,
}

/// A stored sandbox.
#[derive(Clone, PartialEq)]
pub struct SandboxRow {
    /// What it was made with; `template` and `size` as resolved once it runs.
    pub sandbox: NewSandbox,
    /// Where in its life it is.
    pub state: SandboxState,
    /// `sha256:…`, empty until it runs.
    pub template_digest: String,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Why it ended.
    pub end_cause: Option<EndCause>,
    /// Milliseconds from create to ready.
    pub ready_ms: Option<f64>,
    /// CPU time of the machine, microseconds.
    pub cpu_micros: Option<u64>,
}

/// What is known once a sandbox runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Ready {
    /// `name:tag`, as resolved.
    pub template: String,
    /// `sha256:…`.
    pub template_digest: String,
    /// What it really has.
    pub size: SizeClass,
    /// Milliseconds from create to ready.
    pub ready_ms: Option<f64>,
}

/// The end of one life.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// Which life.
    pub generation: u64,
    /// Why.
    pub cause: EndCause,
    /// When.
    pub ended_at: Timestamp,
    /// CPU time of the machine, microseconds, if known.
    pub cpu_micros: Option<u64>,
}

/// An idempotency key to be claimed by a create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// As the client sent it.
    pub key: String,
    /// Hash of what was asked for.
    pub request_hash: String,
    /// Now; an older claim may have expired by it.
    pub now: Timestamp,
}

/// The outcome of [`Store::reserve`](crate::Store::reserve).
#[derive(Debug, Clone, PartialEq)]
pub enum Reservation {
    /// Written.
    Reserved,
    /// Nothing written: the project would use more than it may.
    QuotaExceeded {
        /// Of what.
        quota: Quota,
        /// How much it may.
        limit: u64,
    },
    /// Nothing written: the node has no more room.
    NodeFull {
        /// Of what.
        room: Room,
        /// How much it has.
        limit: u64,
    },
    /// Nothing written: the idempotency key was used before.
    Used(Prior),
}

/// What a node has room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCapacity {
    /// Its name.
    pub name: String,
    /// Most sandboxes at once.
    pub max_sandboxes: u64,
    /// Most memory of them together in MiB, if it is bounded.
    pub max_memory_mib: Option<u64>,
}

/// What a node has only so much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Places for sandboxes.
    Sandboxes,
    /// Memory of them in MiB.
    Memory,
}

/// What a project has only so much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// Live sandboxes.
    Sandboxes,
    /// Their vCPUs.
    Vcpus,
    /// Their memory in MiB.
    Memory,
}

/// What the idempotency key was used for.
#[derive(Debug, Clone, PartialEq)]
pub enum Prior {
    /// The same request, answered with this sandbox.
    Done(Box<SandboxRow>),
    /// The same request, not answered yet.
    InProgress,
    /// The same request; the platform stopped before it was answered.
    Unknown,
    /// Another request.
    Mismatch,
}

/// Which sandboxes to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListFilter {
    /// Any of these states.
    pub states: Vec<SandboxState>,
    /// All of this metadata.
    pub metadata: BTreeMap<String, String>,
    /// All of these labels.
    pub labels: BTreeMap<String, String>,
    /// This template: `name:tag`, bare name, or digest.
    pub template: Option<String>,
    /// Started at or after.
    pub started_after: Option<Timestamp>,
    /// Started before.
    pub started_before: Option<Timestamp>,
    /// By start time.
    pub order: SortOrder,
    /// Start after this one.
    pub cursor: Option<Cursor>,
    /// At most so many, 1 to [`ListFilter::MAX_LIMIT`].
    pub limit: u32,
}

impl ListFilter {
    /// Most that one page holds.
    pub const MAX_LIMIT: u32 = 1000;

    /// The newest in these states, as many as one page holds.
    pub fn of_states(states: Vec<SandboxState>) -> Self {
        Self {
            states,
            metadata: BTreeMap::new(),
            labels: BTreeMap::new(),
            template: None,
            started_after: None,
            started_before: None,
            order: SortOrder::Descending,
            cursor: None,
            limit: Self::MAX_LIMIT,
        }
    }
}

/// The last entry of the page before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// Its start time.
    pub started_at: Timestamp,
    /// Its id.
    pub id: SandboxId,
}

/// By start time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortOrder {
    /// Oldest first.
    Ascending,
    /// Newest first.
    #[default]
    Descending,
}

/// One page.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// The entries.
    pub rows: Vec<SandboxRow>,
    /// Where the next page starts, if there is one.
    pub next: Option<Cursor>,
}

/// A change of what is written on a sandbox: `None` takes the key away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edit {
    /// Of its metadata.
    pub metadata: BTreeMap<String, Option<String>>,
    /// Of its labels.
    pub labels: BTreeMap<String, Option<String>>,
}

/// Whether a sandbox may be as it would become by an edit.
pub type Fit<'a> = &'a (dyn Fn(&NewSandbox) -> bool + Send + Sync);

/// The outcome of [`Store::edit`](crate::Store::edit).
#[derive(Debug, Clone, PartialEq)]
pub enum Edited {
    /// Written; as it is now.
    Done(Box<SandboxRow>),
    /// Nothing written: as it would have become.
    Unfit(Box<SandboxRow>),
    /// Nothing written: there is no such sandbox in the project.
    NotFound,
}

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Grows with every event of the store.
    pub id: u64,
    /// To which.
    pub sandbox: SandboxId,
    /// When.
    pub at: Timestamp,
    /// `creating`, `running`, `paused`, `resumed`, `ended`, or what the guest told.
    pub kind: String,
    /// In words.
    pub detail: String,
}

/// Whose events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventsOf<'a> {
    /// Of one sandbox, live or ended.
    Sandbox(&'a SandboxId),
    /// Of all sandboxes of a project.
    Project(&'a ProjectId),
}

// The tokens must not reach a log by way of `Debug`.
impl fmt::Debug for NewSandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewSandbox")
            .field("id", &self.id)
            .field("project", &self.project)
            .field("template", &self.template)
            .field("size", &self.size)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SandboxRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxRow")
            .field("sandbox", &self.sandbox)
            .field("state", &self.state)
            .field("ended_at", &self.ended_at)
            .field("end_cause", &self.end_cause)
            .finish_non_exhaustive()
    }
}
