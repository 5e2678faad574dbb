//! The metadata store: what should be. Nodes say what is; the controller makes them agree.
//!
//! [`Store`] is the seam; [`sqlite::SqliteStore`] is its first implementation. The suite in `tests/contract` is
//! written against the trait, so that the next implementation joins by adding one constructor to it.
//!
//! Who may change a sandbox's state:
//!
//! ```text
//!  reserve ──► creating ──mark_running──► running ◄──set_paused──► paused
//!                  │                         │                       │
//!                  └────────── end ──────────┴───────────────────────┴──► ended   (the first end wins)
//! ```

pub mod error;
pub mod model;
pub mod sqlite;

use async_trait::async_trait;
use jiff::Timestamp;
use space_api::{
    id::{KeyId, ProjectId, SandboxId},
    key::ApiKey,
    rest::{KeyRecord, KeyRole, ProjectUsage, Quotas},
};
use tokio::sync::watch;

pub use error::StoreError;
pub use model::{
    Bootstrap, Claim, Cursor, Edit, Edited, End, Event, EventsOf, Fit, IDEMPOTENCY_LIFETIME, ListFilter,
    Listed, NewSandbox, NodeCapacity, Principal, Prior, Project, Quota, Ready, Reservation, Room, SandboxRow,
    SortOrder,
};
pub use sqlite::SqliteStore;

/// Most creates that failed of which a record is kept.
pub const MAX_FAILED: u32 = 1000;

/// The seam. Each call is one transaction. What it has written survives the end of the process; it survives the loss of
/// power once a later [`Store::flush`] has answered.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Makes sure that there is a project `default` and a key to it. `known` is the key of an earlier run: it is kept
    /// (also when the store is new), unless it was revoked. Without one, a new key is made.
    async fn ensure_default_project_and_key(
        &self,
        quotas: Quotas,
        known: Option<ApiKey>,
    ) -> Result<Bootstrap, StoreError>;

    /// Makes a project. Fails if the name is taken.
    async fn create_project(&self, name: &str, quotas: Quotas) -> Result<Project, StoreError>;

    /// What a project uses now.
    async fn usage(&self, project: &ProjectId) -> Result<ProjectUsage, StoreError>;

    /// Makes a key; the only time its secret is seen.
    async fn create_key(
        &self,
        project: &ProjectId,
        name: &str,
        role: KeyRole,
    ) -> Result<(KeyRecord, ApiKey), StoreError>;

    /// Keys of a project, oldest first, revoked ones too.
    async fn keys(&self, project: &ProjectId) -> Result<Vec<KeyRecord>, StoreError>;

    /// Revokes a key; `false` if the project has no such key. Revoking twice changes nothing.
    async fn revoke_key(&self, project: &ProjectId, key: &KeyId) -> Result<bool, StoreError>;

    /// Who holds this key; `None` if nobody does or it was revoked.
    async fn authenticate(&self, key: &ApiKey) -> Result<Option<Principal>, StoreError>;

    /// Writes down what a node has room for, anew if it is known already.
    async fn register_node(&self, node: &NodeCapacity) -> Result<(), StoreError>;

    /// Checks quotas, the node's room and the idempotency key and writes the sandbox as `creating`, all or nothing. A
    /// node that was never registered has no bounds.
    async fn reserve(&self, sandbox: &NewSandbox, claim: Option<&Claim>) -> Result<Reservation, StoreError>;

    /// What a create with this idempotency key was answered before, if it was used; reserves nothing.
    async fn prior(&self, project: &ProjectId, claim: &Claim) -> Result<Option<Prior>, StoreError>;

    /// Makes everything written so far survive a loss of power. Concurrent calls share one disk write.
    async fn flush(&self) -> Result<(), StoreError>;

    /// `creating` to `running`; `false` if it has ended meanwhile.
    async fn mark_running(&self, id: &SandboxId, generation: u64, ready: &Ready) -> Result<bool, StoreError>;

    /// `running` to `paused`, or back; `false` if it is neither, is so already, or there is no such life. `why` goes into the
    /// event.
    async fn set_paused(
        &self,
        id: &SandboxId,
        generation: u64,
        paused: bool,
        why: &str,
    ) -> Result<bool, StoreError>;

    /// Changes what is written on a sandbox, live or ended, if it is `fit` with all changes of others too.
    async fn edit(
        &self,
        project: &ProjectId,
        id: &SandboxId,
        edit: &Edit,
        fit: Fit<'_>,
    ) -> Result<Edited, StoreError>;

    /// Records an end; `false` if it had ended before or there is no such life. `release_claim` frees the idempotency key of
    /// a create that was undone, so that the client may try again.
    async fn end(&self, id: &SandboxId, end: &End, release_claim: bool) -> Result<bool, StoreError>;

    /// Records a new deadline; `false` if it is not live.
    async fn set_deadline(&self, id: &SandboxId, deadline: Timestamp) -> Result<bool, StoreError>;

    /// A sandbox by id, of whichever project, live or ended. The caller checks whose it is.
    async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError>;

    /// One page of a project's sandboxes.
    async fn list(&self, project: &ProjectId, filter: &ListFilter) -> Result<Listed, StoreError>;

    /// All that have not ended, of all projects.
    async fn live(&self) -> Result<Vec<SandboxRow>, StoreError>;

    /// Writes down something that happened to a sandbox beside its changes of state; `false` if it is not live.
    async fn note(&self, id: &SandboxId, at: Timestamp, kind: &str, detail: &str)
    -> Result<bool, StoreError>;

    /// Events with ids above `after`, oldest first, at most `limit`.
    async fn events(&self, of: EventsOf<'_>, after: u64, limit: u32) -> Result<Vec<Event>, StoreError>;

    /// The id of the newest event; 0 if there is none.
    async fn last_event(&self) -> Result<u64, StoreError>;

    /// Changes with every event that is written from now on: what those who follow them wait for.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Settles claims that an earlier run of the platform left open: `done` where the sandbox runs, `unknown` elsewhere.
    async fn settle_claims(&self) -> Result<u64, StoreError>;

    /// When the store was begun, which is before anything that it could know of; `None` if that is still to come.
    async fn begun(&self) -> Result<Option<Timestamp>, StoreError>;

    /// Forgets sandboxes that ended before `ended_before`, with their events, and claims that have expired. Creates that failed
    /// are forgotten if they did so before `failed_before`, and but for the last [`MAX_FAILED`] of them.
    async fn prune(&self, ended_before: Timestamp, failed_before: Timestamp) -> Result<u64, StoreError>;

    /// Upkeep that would otherwise fall to some write: called now and then, beside everything else.
    async fn maintain(&self) -> Result<(), StoreError>;
}
