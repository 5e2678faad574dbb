//! The node's own record of what lives and what has ended, durable before anyone is told.
//!
//! One task owns the connection. Requests that wait while it commits are taken together into the next transaction, so
//! that many creates at once share one flush.
//!
//! Cleaning up does not need the journal (everything on the host is owned by name and can be swept). It tells the next
//! start which machines are worth keeping, refuses an old generation, and tells the causes of ends to a control plane that
//! was away. Each transition is written as begun before it acts and as done afterwards, so that what a crash has cut off
//! is known, and finished or undone:
//!
//! | durable | means | the next start |
//! |---|---|---|
//! | nothing | a machine is being made, for nobody yet | sweeps it by name |
//! | creating | it has a machine; perhaps its identity, perhaps its environment | with the identity: finishes the create; without: ends it |
//! | running | usable, or being let run after a pause | lets it run, should it stand still |
//! | pausing | its machine is being stopped | undoes that: lets it run |
//! | paused | its machine stands still | keeps it so; one that runs was being resumed: lets it run |
//! | stopping | it is to end for the cause given | ends it for that cause |
//! | ended | nothing is left | nothing |
//!
//! A create is one durable write, made while the guest takes its identity. A resume is one as well, made while the machine
//! begins to run: whichever of the two is first, the table gives the same answer.

mod format;
mod rows;

use std::{
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
};

use futures_util::FutureExt as _;
use jiff::Timestamp;
use space_api::{
    id::{ProjectId, SandboxId},
    lifecycle::{EndCause, IdlePolicy},
    size::SizeClass,
};
use space_node_manager::ObjectName;
use space_vmm::MachineRecord;
use sqlx::{Connection as _, SqliteConnection};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::{fault::FaultPoints, seam::EndRecord};

/// Requests that may wait; senders wait when it is full.
const QUEUE: usize = 1024;
/// Most requests in one transaction.
const BATCH: usize = 256;
/// Writes between two prunings.
const PRUNE_EVERY: usize = 1000;

/// What can go wrong with the journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be opened or is damaged.
    #[error("cannot open the journal {path}")]
    Open {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// Written by a newer version of this program.
    #[error(
        "the journal {path} has format {found}, this program knows {}: use the newer program or move the file away",
        format::FORMAT
    )]
    TooNew {
        /// Which file.
        path: PathBuf,
        /// Its format.
        found: i64,
    },
    /// A transaction failed; nothing of it was kept.
    #[error("cannot write the journal: {what}")]
    Write {
        /// In the database's words.
        what: String,
        /// Whether the file system is full.
        full: bool,
    },
    /// A query failed.
    #[error("cannot read the journal: {what}")]
    Read {
        /// In the database's words.
        what: String,
    },
    /// A life of this id with this or a later generation is known already.
    #[error("generation {generation} of this sandbox is not newer than what is recorded")]
    Stale {
        /// As given.
        generation: u64,
    },
    /// The journal was closed.
    #[error("the journal is closed")]
    Closed,
}

/// A life that goes on: everything that another process needs to take it over.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Life {
    pub(crate) id: SandboxId,
    pub(crate) generation: u64,
    pub(crate) project: ProjectId,
    pub(crate) template: String,
    pub(crate) template_digest: String,
    pub(crate) size: SizeClass,
    pub(crate) started_at: Timestamp,
    pub(crate) deadline: Timestamp,
    pub(crate) on_idle: Option<IdlePolicy>,
    pub(crate) guest_token: String,
    /// What is still to be given to the guest; empty once it is usable.
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) machine: MachineRecord,
    pub(crate) network: Option<ObjectName>,
    pub(crate) ready_ms: Option<f64>,
    pub(crate) state: Recorded,
}

/// What was begun last; see the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Recorded {
    Creating,
    Running,
    Pausing,
    Paused(Timestamp),
    Stopping(EndCause),
}

/// A change to a life that goes on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change {
    /// It gets another machine than it was begun with, which failed before it was usable.
    Machine {
        record: Box<MachineRecord>,
        network: Option<ObjectName>,
    },
    /// It is usable, for the first time or again.
    Running { ready_ms: Option<f64> },
    /// Its machine is about to be stopped.
    Pausing,
    /// Its machine stands still.
    Paused(Timestamp),
    /// It is about to be taken apart.
    Stopping(EndCause),
    /// It has another deadline.
    Deadline(Timestamp),
}

type Reply<T = ()> = oneshot::Sender<Result<T, JournalError>>;

#[derive(Debug)]
enum Request {
    Begin(Box<Life>, Reply),
    Change {
        id: SandboxId,
        generation: u64,
        change: Change,
        reply: Reply,
    },
    End(EndRecord, Reply),
    EndOf(SandboxId, Reply<Option<EndRecord>>),
    EndsSince(Timestamp, Reply<Vec<EndRecord>>),
    Close,
}

impl Request {
    /// Names the write in fault points.
    fn kind(&self) -> &'static str {
        match self {
            Self::Begin(..) => "begin",
            Self::Change { change, .. } => match change {
                Change::Machine { .. } => "machine",
                Change::Running { .. } => "running",
                Change::Pausing => "pausing",
                Change::Paused(_) => "paused",
                Change::Stopping(_) => "stopping",
                Change::Deadline(_) => "deadline",
            },
            Self::End(..) => "end",
            Self::EndOf(..) | Self::EndsSince(..) => "read",
            Self::Close => "close",
        }
    }
}

/// Speaks to the journal's task. The task ends when it is closed or all clones are gone.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    requests: mpsc::Sender<Request>,
}

impl Journal {
    /// Opens or makes the journal and reads the lives that were going on.
    pub(crate) async fn open(
        path: &Path,
        tracker: &TaskTracker,
        faults: FaultPoints,
    ) -> Result<(Self, Vec<Life>), JournalError> {
        let failed = |source| JournalError::Open {
            path: path.to_owned(),
            source,
        };
        let mut connection = format::open(path).await?;
        let lives = rows::live(&mut connection).await.map_err(failed)?;
        rows::prune(&mut connection).await.map_err(failed)?;
        let (requests, queue) = mpsc::channel(QUEUE);
        tracker.spawn(serve(connection, queue, faults));
        Ok((Self { requests }, lives))
    }

    /// Records a life with its machine, as being created. The answer says that the record is durable.
    pub(crate) async fn begin(&self, life: Life) -> Result<(), JournalError> {
        self.ask(|reply| Request::Begin(Box::new(life), reply)).await
    }

    /// Records a change. The answer says that it is durable.
    pub(crate) async fn change(
        &self,
        id: SandboxId,
        generation: u64,
        change: Change,
    ) -> Result<(), JournalError> {
        self.note(id, generation, change).await.durable().await
    }

    /// Records a change without waiting until it is durable. Whoever wants to know may ask the answer, or drop it.
    pub(crate) async fn note(&self, id: SandboxId, generation: u64, change: Change) -> Recording {
        let (reply, recording) = oneshot::channel();
        let request = Request::Change {
            id,
            generation,
            change,
            reply,
        };
        // When it is closed the answer's other end is gone with the request.
        drop(self.requests.send(request).await);
        Recording(recording)
    }

    /// Records an end.
    pub(crate) async fn end(&self, end: EndRecord) -> Result<(), JournalError> {
        self.ask(|reply| Request::End(end, reply)).await
    }

    /// The latest end of an id, if its latest life has ended.
    pub(crate) async fn end_of(&self, id: SandboxId) -> Result<Option<EndRecord>, JournalError> {
        self.ask(|reply| Request::EndOf(id, reply)).await
    }

    /// Ends at or after a time, oldest first, at most [`rows::MOST_ENDS`].
    pub(crate) async fn ends_since(&self, since: Timestamp) -> Result<Vec<EndRecord>, JournalError> {
        self.ask(|reply| Request::EndsSince(since, reply)).await
    }

    /// Ends the journal's task once it has served what came before. Later requests are refused.
    pub(crate) async fn close(&self) {
        if self.requests.send(Request::Close).await.is_ok() {
            self.requests.closed().await;
        }
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            .map_err(|_| JournalError::Closed)?;
        answer.await.map_err(|_| JournalError::Closed)?
    }
}

/// Tells when something written is durable.
#[derive(Debug)]
pub(crate) struct Recording(oneshot::Receiver<Result<(), JournalError>>);

impl Recording {
    /// Waits until it is.
    pub(crate) async fn durable(self) -> Result<(), JournalError> {
        self.0.await.map_err(|_| JournalError::Closed)?
    }
}

/// What is told once the transaction is committed, or not at all.
struct Pending {
    reply: Reply,
    outcome: Result<(), JournalError>,
}

async fn serve(mut connection: SqliteConnection, mut queue: mpsc::Receiver<Request>, faults: FaultPoints) {
    let mut since_prune = 0;
    let mut batch = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let mut writes = Vec::new();
        for request in batch.drain(..) {
            match request {
                // A reader that went away needs no answer: hence the ignored results here and below.
                Request::EndOf(id, reply) => drop(reply.send(rows::end_of(&mut connection, &id).await)),
                Request::EndsSince(since, reply) => {
                    drop(reply.send(rows::ends_since(&mut connection, since).await));
                }
                Request::Close => queue.close(),
                write => writes.push(write),
            }
        }
        if writes.is_empty() {
            continue;
        }
        since_prune += writes.len();
        let mut pending = Vec::with_capacity(writes.len());
        // A panic loses its transaction and nothing else.
        let outcome = AssertUnwindSafe(write(&mut connection, writes, &mut pending, &faults))
            .catch_unwind()
            .await
            .unwrap_or_else(|_| Err(sqlx::Error::WorkerCrashed));
        for Pending { reply, outcome: own } in pending {
            let answer = match &outcome {
                Ok(()) => own,
                Err(error) => Err(write_error(error)),
            };
            drop(reply.send(answer));
        }
        if let Err(error) = outcome {
            tracing::error!(%error, "a journal transaction failed");
        } else if since_prune >= PRUNE_EVERY {
            since_prune = 0;
            if let Err(error) = rows::prune(&mut connection).await {
                tracing::warn!(%error, "the journal could not be pruned");
            }
        }
    }
    if let Err(error) = connection.close().await {
        tracing::warn!(%error, "the journal was not closed in order");
    }
}

/// Carries out one transaction. Every request gets into `pending`, also when it fails.
async fn write(
    connection: &mut SqliteConnection,
    requests: Vec<Request>,
    pending: &mut Vec<Pending>,
    faults: &FaultPoints,
) -> Result<(), sqlx::Error> {
    let mut kinds: Vec<_> = requests.iter().map(Request::kind).collect();
    kinds.dedup();
    let mut replies = Vec::with_capacity(requests.len());
    let mut acts = Vec::with_capacity(requests.len());
    for request in requests {
        let (reply, act) = match request {
            Request::Begin(life, reply) => (reply, Act::Begin(life)),
            Request::End(end, reply) => (reply, Act::End(end)),
            Request::Change {
                id,
                generation,
                change,
                reply,
            } => (reply, Act::Change(id, generation, change)),
            Request::EndOf(..) | Request::EndsSince(..) | Request::Close => continue,
        };
        replies.push(reply);
        acts.push(act);
    }
    // Before anything can fail, so that whoever waits is told.
    pending.extend(replies.into_iter().map(|reply| Pending {
        reply,
        outcome: Ok(()),
    }));
    pass(faults, &kinds, "before").await?;
    let mut transaction = connection.begin().await?;
    for (act, pending) in acts.into_iter().zip(pending) {
        match act {
            Act::Begin(life) => {
                let generation = life.generation;
                if !rows::insert(&mut transaction, &life).await? {
                    pending.outcome = Err(JournalError::Stale { generation });
                }
            }
            Act::Change(id, generation, change) => {
                rows::update(&mut transaction, &id, generation, &change).await?;
            }
            Act::End(end) => rows::end(&mut transaction, &end).await?,
        }
    }
    transaction.commit().await?;
    pass(faults, &kinds, "after").await
}

enum Act {
    Begin(Box<Life>),
    Change(SandboxId, u64, Change),
    End(EndRecord),
}

async fn pass(faults: &FaultPoints, kinds: &[&'static str], when: &str) -> Result<(), sqlx::Error> {
    if faults.is_empty() {
        return Ok(());
    }
    for kind in kinds {
        faults
            .pass(&format!("journal.{kind}.{when}"))
            .await
            .map_err(sqlx::Error::Io)?;
    }
    Ok(())
}

fn write_error(error: &sqlx::Error) -> JournalError {
    // SQLITE_FULL is 13; an I/O error on a full disk is reported as 778 (SQLITE_IOERR_WRITE).
    let full = error
        .as_database_error()
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| code == "13" || code == "778");
    JournalError::Write {
        what: error.to_string(),
        full,
    }
}

#[cfg(test)]
mod tests;
