//! The node's own record of what lives and what has ended, durable before anyone is told.
//!
//! One task owns the connection. Requests that wait while it commits are taken together into the next transaction, so
//! that many creates at once share one flush.
//!
//! The journal is not needed to clean up (everything on the host is owned by name and can be swept); it is what tells
//! the causes of ends to a control plane that was away, and what refuses an old generation.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use space_api::{
    id::{ProjectId, SandboxId},
    lifecycle::EndCause,
};
use sqlx::{
    ConnectOptions as _, Connection as _, Row as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous},
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::seam::EndRecord;

/// Requests that may wait; senders wait when it is full.
const QUEUE: usize = 1024;
/// Most requests in one transaction.
const BATCH: usize = 256;
/// Ends older than this many days are forgotten.
const KEEP_DAYS: i64 = 7;
/// Most ends kept.
const KEEP_ROWS: i64 = 100_000;
/// Most ends in one answer.
const MOST_ENDS: i64 = 10_000;
/// Ends between two prunings.
const PRUNE_EVERY: u32 = 1000;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS lives (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    project TEXT NOT NULL,
    template TEXT NOT NULL,
    size TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('creating', 'running', 'ended')),
    process TEXT,
    started_us INTEGER NOT NULL,
    ended_us INTEGER,
    cause TEXT,
    cpu_us INTEGER NOT NULL DEFAULT 0,
    UNIQUE (id, generation)
) STRICT;
CREATE INDEX IF NOT EXISTS lives_ended ON lives (ended_us, seq) WHERE ended_us IS NOT NULL;
CREATE INDEX IF NOT EXISTS lives_live ON lives (state) WHERE state != 'ended';
PRAGMA user_version = 1;
";

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
        "the journal {path} has format {found}, this program knows 1: use the newer program or move the file away"
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

/// A life that begins.
#[derive(Debug, Clone)]
pub(crate) struct Beginning {
    pub(crate) id: SandboxId,
    pub(crate) generation: u64,
    pub(crate) project: ProjectId,
    pub(crate) template: String,
    pub(crate) size: String,
    pub(crate) at: Timestamp,
}

#[derive(Debug)]
enum Request {
    Begin(Beginning, oneshot::Sender<Result<(), JournalError>>),
    Run {
        id: SandboxId,
        generation: u64,
        process: String,
    },
    End(EndRecord, oneshot::Sender<Result<(), JournalError>>),
    EndOf(
        SandboxId,
        oneshot::Sender<Result<Option<EndRecord>, JournalError>>,
    ),
    EndsSince(Timestamp, oneshot::Sender<Result<Vec<EndRecord>, JournalError>>),
    Close,
}

/// Speaks to the journal's task. The task ends when it is closed or all clones are gone.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    requests: mpsc::Sender<Request>,
}

impl Journal {
    /// Opens or makes the journal, marks every life that was going on as ended by the platform's restart, and says how
    /// many these were.
    pub(crate) async fn open(path: &Path, tracker: &TaskTracker) -> Result<(Self, u64), JournalError> {
        let failed = |source| JournalError::Open {
            path: path.to_owned(),
            source,
        };
        let mut connection = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .connect()
            .await
            .map_err(failed)?;
        let found: i64 = sqlx::query_scalar("PRAGMA user_version")
            .fetch_one(&mut connection)
            .await
            .map_err(failed)?;
        if found > 1 {
            return Err(JournalError::TooNew {
                path: path.to_owned(),
                found,
            });
        }
        sqlx::raw_sql(SCHEMA)
            .execute(&mut connection)
            .await
            .map_err(failed)?;
        let restarted = serde_json::to_string(&EndCause::PlatformRestarted).unwrap_or_default();
        let ended =
            sqlx::query("UPDATE lives SET state = 'ended', ended_us = ?, cause = ? WHERE state != 'ended'")
                .bind(Timestamp::now().as_microsecond())
                .bind(restarted)
                .execute(&mut connection)
                .await
                .map_err(failed)?
                .rows_affected();
        prune(&mut connection).await.map_err(failed)?;
        let (requests, queue) = mpsc::channel(QUEUE);
        tracker.spawn(serve(connection, queue));
        Ok((Self { requests }, ended))
    }

    /// Records a life before anything is made for it. The answer says that the record is durable.
    pub(crate) async fn begin(&self, beginning: Beginning) -> Result<(), JournalError> {
        self.ask(|reply| Request::Begin(beginning, reply)).await
    }

    /// Notes that a life is usable, and the monitor's process. Not awaited until durable: only the record matters.
    pub(crate) async fn run(&self, id: SandboxId, generation: u64, process: String) {
        if self
            .requests
            .send(Request::Run {
                id,
                generation,
                process,
            })
            .await
            .is_err()
        {
            tracing::debug!("the journal is closed");
        }
    }

    /// Records an end.
    pub(crate) async fn end(&self, end: EndRecord) -> Result<(), JournalError> {
        self.ask(|reply| Request::End(end, reply)).await
    }

    /// The latest end of an id, if its latest life has ended.
    pub(crate) async fn end_of(&self, id: SandboxId) -> Result<Option<EndRecord>, JournalError> {
        self.ask(|reply| Request::EndOf(id, reply)).await
    }

    /// Ends at or after a time, oldest first, at most [`MOST_ENDS`].
    pub(crate) async fn ends_since(&self, since: Timestamp) -> Result<Vec<EndRecord>, JournalError> {
        self.ask(|reply| Request::EndsSince(since, reply)).await
    }

    /// Ends the journal's task once it has served what came before. Later requests are refused.
    pub(crate) async fn close(&self) {
        if self.requests.send(Request::Close).await.is_ok() {
            self.requests.closed().await;
        }
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, JournalError>>) -> Request,
    ) -> Result<T, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            .map_err(|_| JournalError::Closed)?;
        answer.await.map_err(|_| JournalError::Closed)?
    }
}

/// What is told once the transaction is committed, or not at all.
struct Pending {
    reply: oneshot::Sender<Result<(), JournalError>>,
    outcome: Result<(), JournalError>,
}

async fn serve(mut connection: SqliteConnection, mut queue: mpsc::Receiver<Request>) {
    let mut since_prune = 0;
    let mut batch = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let mut writes = Vec::new();
        for request in batch.drain(..) {
            match request {
                // A reader that went away needs no answer: hence the ignored results here and below.
                Request::EndOf(id, reply) => drop(reply.send(end_of(&mut connection, &id).await)),
                Request::EndsSince(since, reply) => {
                    drop(reply.send(ends_since(&mut connection, since).await));
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
        let outcome = write(&mut connection, writes, &mut pending).await;
        for Pending { reply, outcome: own } in pending {
            let answer = match &outcome {
                Ok(()) => own,
                Err(error) => Err(write_error(error)),
            };
            drop(reply.send(answer));
        }
        if let Err(error) = outcome {
            tracing::error!(%error, "a journal transaction failed");
        } else if since_prune >= PRUNE_EVERY as usize {
            since_prune = 0;
            if let Err(error) = prune(&mut connection).await {
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
) -> Result<(), sqlx::Error> {
    let mut transaction = None;
    let mut first_error = None;
    match connection.begin().await {
        Ok(begun) => transaction = Some(begun),
        Err(error) => first_error = Some(error),
    }
    for request in requests {
        let (reply, result) = match (request, &mut transaction) {
            (Request::Begin(beginning, reply), Some(transaction)) => {
                let generation = beginning.generation;
                let result = insert(transaction, beginning).await;
                (
                    Some(reply),
                    result.map(|new| {
                        if new {
                            Ok(())
                        } else {
                            Err(JournalError::Stale { generation })
                        }
                    }),
                )
            }
            (Request::End(end, reply), Some(transaction)) => {
                (Some(reply), update_end(transaction, &end).await.map(Ok))
            }
            (
                Request::Run {
                    id,
                    generation,
                    process,
                },
                Some(transaction),
            ) => (
                None,
                update_run(transaction, &id, generation, process).await.map(Ok),
            ),
            (Request::Begin(_, reply) | Request::End(_, reply), None) => (Some(reply), Ok(Ok(()))),
            _ => (None, Ok(Ok(()))),
        };
        let outcome = result.unwrap_or_else(|error| {
            let outcome = Err(write_error(&error));
            first_error.get_or_insert(error);
            outcome
        });
        if let Some(reply) = reply {
            pending.push(Pending { reply, outcome });
        }
    }
    match (first_error, transaction) {
        (Some(error), _) => Err(error),
        (None, Some(transaction)) => transaction.commit().await,
        (None, None) => Ok(()),
    }
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

fn stored(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

async fn insert(connection: &mut SqliteConnection, beginning: Beginning) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(
        "INSERT INTO lives (id, generation, project, template, size, state, started_us)
         SELECT ?1, ?2, ?3, ?4, ?5, 'creating', ?6
         WHERE NOT EXISTS (SELECT 1 FROM lives WHERE id = ?1 AND generation >= ?2)",
    )
    .bind(beginning.id.as_str().to_owned())
    .bind(stored(beginning.generation))
    .bind(beginning.project.as_str().to_owned())
    .bind(beginning.template)
    .bind(beginning.size)
    .bind(beginning.at.as_microsecond())
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

async fn update_run(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    generation: u64,
    process: String,
) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE lives SET state = 'running', process = ? WHERE id = ? AND generation = ? AND state = 'creating'")
        .bind(process)
        .bind(id.as_str().to_owned())
        .bind(stored(generation))
        .execute(connection)
        .await?;
    Ok(())
}

async fn update_end(connection: &mut SqliteConnection, end: &EndRecord) -> Result<(), sqlx::Error> {
    let cause = serde_json::to_string(&end.cause).map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
    sqlx::query(
        "UPDATE lives SET state = 'ended', ended_us = ?, cause = ?, cpu_us = ?
         WHERE id = ? AND generation = ? AND state != 'ended'",
    )
    .bind(end.ended_at.as_microsecond())
    .bind(cause)
    .bind(stored(end.cpu_micros))
    .bind(end.id.as_str().to_owned())
    .bind(stored(end.generation))
    .execute(connection)
    .await?;
    Ok(())
}

async fn end_of(
    connection: &mut SqliteConnection,
    id: &SandboxId,
) -> Result<Option<EndRecord>, JournalError> {
    let row = sqlx::query(
        "SELECT id, generation, ended_us, cause, cpu_us FROM lives WHERE id = ? ORDER BY generation DESC LIMIT 1",
    )
    .bind(id.as_str().to_owned())
    .fetch_optional(connection)
    .await
    .map_err(read_error)?;
    Ok(row.as_ref().and_then(end_record))
}

async fn ends_since(
    connection: &mut SqliteConnection,
    since: Timestamp,
) -> Result<Vec<EndRecord>, JournalError> {
    let rows = sqlx::query(
        "SELECT id, generation, ended_us, cause, cpu_us FROM lives
         WHERE ended_us >= ? ORDER BY ended_us, seq LIMIT ?",
    )
    .bind(since.as_microsecond())
    .bind(MOST_ENDS)
    .fetch_all(connection)
    .await
    .map_err(read_error)?;
    Ok(rows.iter().filter_map(end_record).collect())
}

#[expect(clippy::needless_pass_by_value, reason = "used as a function in map_err")]
fn read_error(error: sqlx::Error) -> JournalError {
    JournalError::Read {
        what: error.to_string(),
    }
}

/// Reads one row; a row that is not ended, or that another program has damaged, is none.
fn end_record(row: &SqliteRow) -> Option<EndRecord> {
    let id: String = row.try_get("id").ok()?;
    let cause: String = row.try_get::<Option<String>, _>("cause").ok()??;
    Some(EndRecord {
        id: id.parse().ok()?,
        generation: u64::try_from(row.try_get::<i64, _>("generation").ok()?).ok()?,
        cause: serde_json::from_str(&cause).ok()?,
        ended_at: Timestamp::from_microsecond(row.try_get::<Option<i64>, _>("ended_us").ok()??).ok()?,
        cpu_micros: u64::try_from(row.try_get::<i64, _>("cpu_us").ok()?).ok()?,
    })
}

async fn prune(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    let oldest = Timestamp::now().as_microsecond() - KEEP_DAYS * 24 * 3600 * 1_000_000;
    sqlx::query("DELETE FROM lives WHERE ended_us < ?")
        .bind(oldest)
        .execute(&mut *connection)
        .await?;
    sqlx::query(
        "DELETE FROM lives WHERE state = 'ended' AND seq <=
         (SELECT seq FROM lives ORDER BY seq DESC LIMIT 1 OFFSET ?)",
    )
    .bind(KEEP_ROWS)
    .execute(connection)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests;
