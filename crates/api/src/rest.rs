//! The bodies of our own API under `/v1/`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};

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
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
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
}
