//! The bodies of our own API under `/v1/`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    id::SandboxId,
    lifecycle::{EndCause, IdlePolicy, SandboxState},
};

/// `POST /v1/sandboxes`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSandbox {
    /// Name, `name:tag` or digest of the template.
    pub template: String,
    /// Seconds until it is ended, counted from now; 300 if absent.
    #[serde(default, alias = "timeoutSeconds", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// vCPUs; the template's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// MiB; the template's default if absent.
    #[serde(default, alias = "memoryMib", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// MiB; the template's default if absent.
    #[serde(default, alias = "diskMib", skip_serializing_if = "Option::is_none")]
    pub disk_mib: Option<u32>,
    /// Environment of every process started inside.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Free text under names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Labels, to be found by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether its ports are reachable without the traffic token; `true` if absent.
    #[serde(default, alias = "publicPorts", skip_serializing_if = "Option::is_none")]
    pub public_ports: Option<bool>,
    /// Whether traffic to its ports wakes it when it is paused. What shows its access token to its daemon always does.
    #[serde(default, alias = "wakeOnTraffic")]
    pub wake_on_traffic: bool,
    /// What is done when it does no work for a while; nothing if absent.
    #[serde(default, alias = "onIdle", skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<IdlePolicy>,
    /// Wait for room rather than be refused at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueRequest>,
}

/// How a create waits where there is no room: in the order of arrival, each project in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QueueRequest {
    /// Seconds at most, [`QueueRequest::SECONDS`]; then it is refused as it would have been at once.
    #[serde(alias = "timeoutSeconds")]
    pub timeout_seconds: u64,
}

impl QueueRequest {
    /// What may be asked for: it must end before the call itself does.
    pub const SECONDS: std::ops::RangeInclusive<u64> = 1..=300;
}

/// The answer to `POST /v1/sandboxes`.
#[derive(Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedSandbox {
    /// What is shown of it later too.
    #[serde(flatten)]
    pub record: SandboxRecord,
    /// What the daemon's services ask for as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// What its ports ask for as `E2B-Traffic-Access-Token`, if they are not public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_token: Option<String>,
}

impl std::fmt::Debug for CreatedSandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedSandbox")
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// `PATCH /v1/sandboxes/{id}`: what is named is set, what is named as `null` is taken away, the rest stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxEdit {
    /// Of its metadata.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, Option<String>>,
    /// Of its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
}

/// `POST /v1/sandboxes/{id}/extend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtendRequest {
    /// Its deadline is at least so many seconds from now afterwards; never sooner than before.
    #[serde(alias = "timeoutSeconds")]
    pub timeout_seconds: u64,
}

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxEvent {
    /// Grows with every event of the platform; `Last-Event-ID` of a stream.
    pub id: u64,
    /// To which.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// `creating`, `running`, `paused`, `resumed`, `ended`; what the guest told: `agent_out_of_memory`,
    /// `agent_process_limit`, `agent_thawed`, `thawed_by_watchdog`; more may come.
    pub kind: String,
    /// In words; of `ended` the cause as JSON.
    pub detail: String,
}

/// A sandbox, live or ended, with everything the platform remembers of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxRecord {
    /// Its id.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// Where in its life it is.
    pub state: SandboxState,
    /// `name:tag`, as resolved.
    pub template: String,
    /// `sha256:…`; empty until known.
    pub template_digest: String,
    /// vCPUs.
    pub vcpus: u32,
    /// MiB.
    pub memory_mib: u32,
    /// MiB.
    pub disk_mib: u32,
    /// Counts the lives of this id.
    pub generation: u64,
    /// What its owner wrote on it.
    pub metadata: BTreeMap<String, String>,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether traffic to its ports wakes it when it is paused.
    #[serde(default)]
    pub wake_on_traffic: bool,
    /// What is done when it does no work for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<IdlePolicy>,
    /// Its machine's name on the host, while it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Since when it stands still, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub paused_at: Option<Timestamp>,
    /// When work was last seen in it, while it lives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_active_at: Option<Timestamp>,
    /// Since when it does no work, if it does none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub idle_since: Option<Timestamp>,
    /// Whether the daemon's services ask for a token.
    pub secured: bool,
    /// When the create was accepted.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// When it is, or would have been, ended.
    #[schema(value_type = String, format = DateTime)]
    pub deadline: Timestamp,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Timestamp>,
    /// Why it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_cause: Option<EndCause>,
    /// Milliseconds from create to ready, once ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
    /// CPU time of the whole machine in microseconds, known at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_micros: Option<u64>,
}

/// An API key without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyRecord {
    /// Its handle.
    pub id: String,
    /// What its owner calls it.
    pub name: String,
    /// What it may do.
    #[serde(default)]
    pub role: KeyRole,
    /// Its first eight characters.
    pub shown: String,
    /// When it was made.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub revoked_at: Option<Timestamp>,
}

/// `POST /v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewKey {
    /// What its owner calls it, 1 to 64 characters.
    pub name: String,
    /// What it may do; `project` if absent. Only an `admin` key makes another one.
    #[serde(default)]
    pub role: KeyRole,
}

/// What a key may do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeyRole {
    /// Everything within its project: sandboxes, and keys of this role.
    #[default]
    Project,
    /// Also what all projects share: it may remove templates and make keys of this role.
    Admin,
}

impl KeyRole {
    /// The word used for it in JSON and databases.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Admin => "admin",
        }
    }

    /// The role of that word.
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Project, Self::Admin]
            .into_iter()
            .find(|role| role.as_str() == word)
    }
}

/// The answer to `POST /v1/keys`; the only time the secret is shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreatedKey {
    /// Everything but the secret.
    #[serde(flatten)]
    pub record: KeyRecord,
    /// The secret. It cannot be read again.
    pub key: String,
}

impl std::fmt::Debug for CreatedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedKey")
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// What a project may use at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Quotas {
    /// Live sandboxes.
    pub max_sandboxes: u32,
    /// vCPUs of all live sandboxes together.
    pub max_vcpus: u32,
    /// MiB of memory of all live sandboxes together.
    pub max_memory_mib: u64,
    /// Seconds a sandbox may be given at a time.
    pub max_timeout_seconds: u64,
}

impl Quotas {
    /// Those of a project that may fill a node of so many sandboxes: the defaults, or more where the node holds more.
    pub fn for_capacity(sandboxes: usize) -> Self {
        let sandboxes = u32::try_from(sandboxes).unwrap_or(u32::MAX);
        let least = Self::default();
        Self {
            max_sandboxes: least.max_sandboxes.max(sandboxes),
            max_vcpus: least.max_vcpus.max(sandboxes.saturating_mul(4)),
            max_memory_mib: least.max_memory_mib.max(u64::from(sandboxes) * 4096),
            ..least
        }
    }
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            max_sandboxes: 100,
            max_vcpus: 400,
            max_memory_mib: 262_144,
            max_timeout_seconds: 24 * 3600,
        }
    }
}

/// `GET /v1/projects/me`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProjectRecord {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it may use.
    pub quotas: Quotas,
    /// What it uses now.
    pub usage: ProjectUsage,
}

/// What a project uses now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProjectUsage {
    /// Live sandboxes.
    pub sandboxes: u32,
    /// vCPUs of them.
    pub vcpus: u32,
    /// MiB of memory of them.
    pub memory_mib: u64,
}

/// `GET /v1/node`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRecord {
    /// Driver, version, accelerator.
    pub vmm: String,
    /// Whether machines are behind a boundary meant for hostile code.
    pub isolates_hostile_code: bool,
    /// Live sandboxes.
    pub sandboxes: usize,
    /// Most it takes at once.
    pub capacity: usize,
    /// Version of the platform.
    pub version: String,
    /// Machines kept ready, by template and size.
    #[serde(default)]
    pub pool: Vec<PoolRecord>,
}

/// Machines of one template and size that are kept ready, within `GET /v1/node`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolRecord {
    /// `name:tag`.
    pub template: String,
    /// vCPUs, memory and disk in MiB, as in `1x512x4096`.
    pub size: String,
    /// Ready to be taken.
    pub ready: usize,
    /// Being made.
    pub warming: usize,
    /// How many there should be.
    pub target: usize,
    /// Creates that took one, since the platform started.
    pub hits: u64,
    /// Creates that found none.
    pub misses: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quotas_of_a_project_that_has_a_node_for_itself_never_bind_first() {
        assert_eq!(Quotas::for_capacity(64), Quotas::default());
        let large = Quotas::for_capacity(1000);
        assert_eq!((large.max_sandboxes, large.max_vcpus), (1000, 4000));
        assert!(large.max_memory_mib > Quotas::default().max_memory_mib);
        assert_eq!(Quotas::for_capacity(usize::MAX).max_sandboxes, u32::MAX);
    }
}
