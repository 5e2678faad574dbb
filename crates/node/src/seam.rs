//! What the control plane may ask of a node, and what a node answers.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use space_api::{
    id::{ProjectId, SandboxId},
    lifecycle::{EndCause, IdlePolicy, SandboxState},
    size::SizeClass,
};
use tokio::sync::broadcast;

/// A sandbox to make. Idempotent by `id`: asking again for a live id answers its status.
#[derive(Debug, Clone)]
pub struct CreateSandbox {
    /// Chosen by the control plane.
    pub id: SandboxId,
    /// Owner; for accounting only.
    pub project: ProjectId,
    /// `name`, `name:tag` or `sha256:…`.
    pub template: String,
    /// Size; `None` means the template's own default.
    pub size: Option<SizeClass>,
    /// Counts the lives of this id; raised in the metadata store before the node acts.
    pub generation: u64,
    /// Environment of every process started inside; values are bytes-exact UTF-8.
    pub environment: BTreeMap<String, String>,
    /// When the sandbox is ended by the node, as a wall-clock instant.
    pub deadline: jiff::Timestamp,
    /// What is done when it does no work for a while.
    pub on_idle: Option<IdlePolicy>,
}

/// What a node knows of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxStatus {
    /// Which.
    pub id: SandboxId,
    /// Owner.
    pub project: ProjectId,
    /// Where in its life.
    pub state: SandboxState,
    /// Name and tag it was made from, as resolved.
    pub template: String,
    /// The template's digest, `sha256:…`.
    pub template_digest: String,
    /// Its size.
    pub size: SizeClass,
    /// Generation of this life.
    pub generation: u64,
    /// When the create was accepted.
    pub started_at: jiff::Timestamp,
    /// When it will be ended.
    pub deadline: jiff::Timestamp,
    /// Milliseconds from create to ready, once ready.
    pub ready_ms: Option<f64>,
    /// Name of its machine on the host, by which its process, group and directories are found; empty while it has none.
    pub machine: String,
    /// Since when it stands still; `None` unless it is paused.
    pub paused_at: Option<jiff::Timestamp>,
    /// When work was last seen in it.
    pub last_active_at: jiff::Timestamp,
    /// Since when it does no work; `None` while it works. What it does while it is paused is nothing.
    pub idle_since: Option<jiff::Timestamp>,
}

/// Why a sandbox is woken; told in logs and counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeReason {
    /// A client connects to it.
    Connect,
    /// A request to its daemon or to a port of it has come in.
    Traffic,
}

/// The end of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct EndRecord {
    /// Which.
    pub id: SandboxId,
    /// Which life.
    pub generation: u64,
    /// Why.
    pub cause: EndCause,
    /// When.
    pub ended_at: jiff::Timestamp,
    /// CPU time of the whole machine, microseconds.
    pub cpu_micros: u64,
}

/// A change worth telling the control plane.
#[derive(Debug, Clone, PartialEq)]
pub enum SandboxEvent {
    /// Usable now.
    Ready(SandboxStatus),
    /// Its state, deadline or idleness is another.
    Changed(SandboxStatus),
    /// The guest said something by itself.
    Told(GuestNotice),
    /// Gone.
    Ended(EndRecord),
}

/// What a guest said without being asked. As true as the guest is, and bounded in number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNotice {
    /// Whose guest.
    pub id: SandboxId,
    /// When it arrived.
    pub at: jiff::Timestamp,
    /// `agent_out_of_memory`, `agent_process_limit`, `agent_thawed` or `thawed_by_watchdog`.
    pub kind: &'static str,
    /// In words, at most 256 bytes; may be empty.
    pub detail: String,
}

/// One sample of use. Guest figures come from the guest and are only as true as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Usage {
    /// When it was taken.
    pub at: jiff::Timestamp,
    /// vCPUs.
    pub cpu_count: u32,
    /// CPU use in percent of one CPU, as the guest sees it.
    pub cpu_used_pct: f64,
    /// Bytes.
    pub mem_total: u64,
    /// Bytes.
    pub mem_used: u64,
    /// Bytes.
    pub mem_cache: u64,
    /// Bytes.
    pub disk_total: u64,
    /// Bytes.
    pub disk_used: u64,
    /// CPU time of the machine as the host counts it, microseconds.
    pub host_cpu_micros: u64,
    /// Memory of the machine as the host counts it, bytes.
    pub host_memory_bytes: u64,
}

/// A template as the node has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateInfo {
    /// `name:tag`.
    pub name: String,
    /// `sha256:…`.
    pub digest: String,
    /// Size if none is asked for.
    pub default_size: SizeClass,
    /// Sizes whose snapshot exists already.
    pub ready_sizes: Vec<SizeClass>,
    /// Bytes on disk, holes not counted.
    pub disk_bytes: u64,
    /// When it was built.
    pub created_at: jiff::Timestamp,
}

/// What a node has to offer.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeInfo {
    /// Driver, version, accelerator.
    pub vmm: String,
    /// Whether machines are behind a boundary meant for hostile code.
    pub isolates_hostile_code: bool,
    /// Live sandboxes.
    pub sandboxes: usize,
    /// Most it takes at once.
    pub capacity: usize,
    /// Data directory.
    pub data_directory: PathBuf,
    /// Machines kept ready, by template and size.
    pub pool: Vec<PoolStatus>,
}

/// Machines of one template and size that are kept ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStatus {
    /// `name:tag`.
    pub template: String,
    /// Size.
    pub size: SizeClass,
    /// Ready to be taken.
    pub ready: usize,
    /// Being made.
    pub warming: usize,
    /// How many there should be.
    pub target: usize,
    /// Creates that took one, since the node was opened.
    pub hits: u64,
    /// Creates that found none.
    pub misses: u64,
}

/// Why a node did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No such sandbox here (any more).
    #[error("sandbox {id} was not found")]
    NotFound {
        /// Which.
        id: SandboxId,
        /// Its end, if it is known.
        end: Option<Box<EndRecord>>,
    },
    /// The sandbox is on its way to another state.
    #[error("sandbox {id} is {state:?}")]
    Transitioning {
        /// Which.
        id: SandboxId,
        /// Where it is.
        state: SandboxState,
    },
    /// The sandbox is paused: [`Node::wake`] it first.
    #[error("sandbox {id} is paused")]
    Paused {
        /// Which.
        id: SandboxId,
    },
    /// A pause or resume did not come to be, and the sandbox is in the state it was in. May be tried again.
    #[error("sandbox {id} could not be brought to {wanted:?}: {what}")]
    TransitionFailed {
        /// Which.
        id: SandboxId,
        /// Where it should have gone.
        wanted: SandboxState,
        /// Why not, in one line.
        what: String,
    },
    /// No such template.
    #[error("template \"{name}\" was not found")]
    TemplateNotFound {
        /// As asked, cut to 128 characters.
        name: String,
    },
    /// The node is full: memory, disk, pids or its configured capacity. May be tried again later.
    #[error("the node has no room for another sandbox: {what}")]
    NoCapacity {
        /// What has run out.
        what: String,
        /// When to try again, milliseconds: an estimate.
        retry_after_ms: u64,
    },
    /// No usable monitor.
    #[error("no sandbox can run here: {what}")]
    VmmUnavailable {
        /// What is missing and how to mend it.
        what: String,
    },
    /// The guest's daemon does not answer.
    #[error("the daemon of sandbox {id} does not answer: {what}")]
    GuestUnresponsive {
        /// Which.
        id: SandboxId,
        /// What was attempted.
        what: String,
    },
    /// A step of creating it failed; everything was undone.
    #[error("sandbox {id} could not be created: {step}")]
    CreateFailed {
        /// Which.
        id: SandboxId,
        /// The failed step with its causes in one line.
        step: String,
    },
    /// The node is shutting down.
    #[error("the node is shutting down")]
    ShuttingDown,
    /// Anything that should not happen.
    #[error("{what}")]
    Internal {
        /// With causes, in one line.
        what: String,
    },
}

/// Why a port of a sandbox cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// Nothing listens there.
    #[error("the sandbox is running but port is not open")]
    PortClosed {
        /// The port.
        port: u16,
    },
    /// Anything about the sandbox itself.
    #[error(transparent)]
    Node(#[from] NodeError),
}

/// Sends requests to the daemon over the sandbox's HTTP/2 data channel. Cheap to clone.
pub type DataStream =
    hyper::client::conn::http2::SendRequest<BoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>>;

/// A byte stream to a port on the guest's loopback.
pub type TunnelStream = hyper_util::rt::TokioIo<hyper::upgrade::Upgraded>;

/// The seam. Every method is idempotent and has its own deadline.
#[async_trait]
pub trait Node: Send + Sync + fmt::Debug {
    /// What it has.
    async fn info(&self) -> NodeInfo;

    /// Makes a sandbox; answers when its daemon has acknowledged its identity.
    async fn create(&self, request: CreateSandbox) -> Result<SandboxStatus, NodeError>;

    /// Ends a sandbox, in whichever state, and answers when nothing of it is left. `NotFound` carries the end of one
    /// that is gone already.
    async fn delete(&self, id: &SandboxId) -> Result<EndRecord, NodeError>;

    /// What is known of a live sandbox.
    async fn status(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError>;

    /// All live ones.
    async fn list(&self) -> Vec<SandboxStatus>;

    /// Sets when it will be ended. A time in the past ends it now.
    async fn set_deadline(&self, id: &SandboxId, deadline: jiff::Timestamp) -> Result<(), NodeError>;

    /// Stops its machine, which stays in memory, and answers when it stands still and that is recorded. A paused one
    /// stays as it is. Open streams stay open and go on after [`Node::resume`]; its deadline goes on counting.
    async fn pause(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError>;

    /// Lets a paused sandbox run again, its clock set. A running one stays as it is.
    async fn resume(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError>;

    /// Makes a sandbox usable, whatever that takes: for one that is in memory, a resume. One that is not in memory would
    /// need a saved machine; there is none, and `NotFound` with its end says so.
    async fn wake(&self, id: &SandboxId, reason: WakeReason) -> Result<SandboxStatus, NodeError>;

    /// Samples of use within the last hour, oldest first; at least one fresh sample for a running sandbox.
    async fn usage(&self, id: &SandboxId) -> Result<Vec<Usage>, NodeError>;

    /// The data channel to the daemon (opened on first use, reopened when broken).
    async fn data(&self, id: &SandboxId) -> Result<DataStream, NodeError>;

    /// A tunnel to `port` on the guest's loopback.
    async fn tunnel(&self, id: &SandboxId, port: u16) -> Result<TunnelStream, TunnelError>;

    /// The secret that programs inside the guest present to its loopback service; `X-Access-Token` of what the edge
    /// forwards to a guest port.
    async fn guest_token(&self, id: &SandboxId) -> Result<String, NodeError>;

    /// Ends since a time, from the journal, oldest first; what a control plane that was away has missed.
    async fn ends_since(&self, since: jiff::Timestamp) -> Result<Vec<EndRecord>, NodeError>;

    /// Templates it can start.
    async fn templates(&self) -> Result<Vec<TemplateInfo>, NodeError>;

    /// Removes a template's name and, when nothing uses it, its files.
    async fn delete_template(&self, name: &str) -> Result<(), NodeError>;

    /// Changes from now on. A receiver that lags must call [`Node::list`] and [`Node::ends_since`].
    fn events(&self) -> broadcast::Receiver<SandboxEvent>;

    /// Ends all sandboxes in order and releases everything.
    async fn shutdown(&self);
}
