//! The bodies of E2B's REST API, as its SDKs send and read them. Names on the wire are E2B's.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{lifecycle::IdlePolicy, rest::QueueRequest};

/// The daemon protocol version announced to SDKs, which switch features by it.
pub const ENVD_VERSION: &str = "0.6.13";

/// The port behind which the space daemon's services are found.
pub const ENVD_PORT: u16 = 49983;

/// Seconds a sandbox lives when the request names no `timeout`.
pub const DEFAULT_TIMEOUT_SECONDS: u64 = 300;

/// `POST /sandboxes` and `POST /v2/sandboxes`.
///
/// Fields that this version cannot honour are refused unless they ask for nothing; see the module of the create call.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Name, `name:tag` or digest of the template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds until it is ended, counted from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
    /// Free text under names, to be found again by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process started inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// v1 only: whether the daemon asks for an access token. v2 always does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Extension: vCPUs; the template's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Extension: memory in MiB; the template's default if absent.
    #[serde(default, rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// Extension: writable disk in MiB; the template's default if absent.
    #[serde(default, rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
    /// Extension: labels, to be found by and changed with `PATCH /v1/sandboxes/{id}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Extension: what is done when it does no work for a while; nothing if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<IdlePolicy>,
    /// Extension: wait for room rather than be refused at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueRequest>,
    /// Suspend instead of ending at the deadline. Not available in this version: only `false` is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Only meaningful together with `autoPause`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic to its ports wakes it when it is paused in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// Accepted and without effect: in this version no sandbox has a way out.
    #[serde(
        default,
        rename = "allow_internet_access",
        skip_serializing_if = "Option::is_none"
    )]
    pub allow_internet_access: Option<bool>,
    /// Traffic rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub mcp: Option<Value>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub iam: Option<Value>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub volume_mounts: Option<Vec<Value>>,
}

/// Whether traffic to its ports wakes a paused sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AutoResume {
    /// Whether it does.
    #[serde(default)]
    pub enabled: bool,
}

/// Rules for traffic into and out of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Whether ports are reachable without the traffic token; `true` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// Host header that programs inside see; `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Accepted: without a way out everything is denied already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub egress_proxy: Option<Value>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Not available in this version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub rules: Option<Value>,
}

/// A sandbox as create and connect answer it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// The template as resolved, `name:tag`.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Kept for old SDKs; the node's name.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// See [`ENVD_VERSION`].
    pub envd_version: String,
    /// The template's bare name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// What the daemon's services ask for as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// What ports ask for as `E2B-Traffic-Access-Token`, if they are not public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// The domain under which it is found, if it is not the client's own setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// E2B's two states of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Usable.
    Running,
    /// Standing still, in memory.
    Paused,
}

/// A sandbox as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// The template as resolved.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Kept for old SDKs.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it was created.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// When it will be ended.
    #[schema(value_type = String, format = DateTime)]
    pub end_at: Timestamp,
    /// vCPUs.
    pub cpu_count: u32,
    /// MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Running or paused.
    pub state: RunState,
    /// See [`ENVD_VERSION`].
    pub envd_version: String,
    /// The template's bare name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// What its owner wrote on it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Extension: its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// A sandbox in full.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What lists show too.
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// What the daemon's services ask for as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Rules for traffic, where they differ from the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// What happens at the deadline.
    pub lifecycle: Lifecycle,
    /// Always `false`: in this version no sandbox has a way out.
    pub allow_internet_access: bool,
    /// Extension: its machine's name on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Extension: when work was last seen in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_active_at: Option<Timestamp>,
    /// Extension: since when it does no work, if it does none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub idle_since: Option<Timestamp>,
}

/// What happens at the deadline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Whether traffic wakes it.
    pub auto_resume: bool,
    /// `kill` in this version.
    pub on_timeout: String,
}

/// `POST /sandboxes/{id}/timeout`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TimeoutRequest {
    /// Seconds from now; 0 ends it now.
    pub timeout: u64,
}

/// `POST /sandboxes/{id}/connect`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectRequest {
    /// Seconds from now; never shortens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
}

/// `POST /sandboxes/{id}/resume`, of older SDKs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResumeRequest {
    /// Seconds from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
    /// See [`NewSandbox::auto_pause`]: only `false` is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
}

/// `POST /sandboxes/{id}/refreshes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefreshRequest {
    /// Seconds from now; never shortens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<u64>,
}

/// One sample of use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When it was taken.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// The same in seconds since 1970.
    pub timestamp_unix: i64,
    /// vCPUs.
    pub cpu_count: u32,
    /// Percent of one CPU.
    pub cpu_used_pct: f64,
    /// Bytes.
    pub mem_used: u64,
    /// Bytes.
    pub mem_total: u64,
    /// Bytes.
    pub mem_cache: u64,
    /// Bytes.
    pub disk_used: u64,
    /// Bytes.
    pub disk_total: u64,
}

/// `GET /sandboxes/metrics`: the newest sample of each sandbox asked for.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxesWithMetrics {
    /// By sandbox id.
    pub sandboxes: BTreeMap<String, SandboxMetric>,
}

/// A template as E2B lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// `name:tag`.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The digest's first 128 bits in the form of a UUID.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// vCPUs if none are asked for.
    pub cpu_count: u32,
    /// MiB if none are asked for.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// MiB if none are asked for.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Templates of this version belong to the installation, so all are public.
    pub public: bool,
    /// Bare names.
    pub aliases: Vec<String>,
    /// Full names.
    pub names: Vec<String>,
    /// When it was built.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it was built.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    /// Always `null`.
    #[schema(value_type = Option<Object>)]
    pub created_by: Option<Value>,
    /// Always `null`; not counted in this version.
    #[schema(value_type = Option<String>)]
    pub last_spawned_at: Option<Timestamp>,
    /// Always 0; not counted in this version.
    pub spawn_count: i64,
    /// Always 1.
    pub build_count: i32,
    /// See [`ENVD_VERSION`].
    pub envd_version: String,
    /// Always `ready`.
    pub build_status: String,
    /// Extension: the template's digest.
    pub digest: String,
    /// Extension: sizes whose machine snapshot exists already, such as `1x512x4096`.
    pub ready_sizes: Vec<String>,
}

/// A template with its builds: the one there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TemplateWithBuilds {
    /// What lists show too.
    #[serde(flatten)]
    pub template: Template,
    /// One entry.
    pub builds: Vec<TemplateBuild>,
}

/// One build of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    /// A UUID.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// `ready`.
    pub status: String,
    /// When it was built.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it was built.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    /// vCPUs.
    pub cpu_count: u32,
    /// MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
}

/// `GET /templates/aliases/{alias}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TemplateAlias {
    /// The template it stands for.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// See [`Template::public`].
    pub public: bool,
}

/// One line of a sandbox's record. In this version these are the platform's own events, not output from inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogEntry {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// `info` or `error`.
    pub level: String,
    /// What happened.
    pub message: String,
    /// Where it comes from.
    pub fields: BTreeMap<String, String>,
}

/// `GET /v2/sandboxes/{id}/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogsV2 {
    /// Oldest first unless asked otherwise.
    pub logs: Vec<LogEntry>,
}

/// `GET /sandboxes/{id}/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LogsV1 {
    /// Plain lines.
    pub logs: Vec<LogLine>,
    /// The same with levels.
    pub log_entries: Vec<LogEntry>,
}

/// One plain line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// What happened.
    pub line: String,
}
