//! The store in one SQLite file: write-ahead log, one writing connection, several readers.
//!
//! Commits do not wait for the disk (`synchronous=NORMAL`: they survive the process, not a loss of power);
//! [`Store::flush`] does, once for all who wait for it, by a sync of the log file beside the database: it takes no lock, so
//! that nobody else waits for the disk.
//!
//! Each trip to a connection is two hops between threads. So what a create writes is one statement each time, and
//! what belongs to it (events, idempotency keys) is done by triggers (`migrations/sqlite/0002_lifecycle.sql`).

mod bootstrap;
mod claims;
mod events;
mod lists;
mod prune;
mod rows;
mod sandboxes;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use space_api::{
    id::{KeyId, ProjectId, SandboxId},
    key::ApiKey,
    rest::{KeyRecord, KeyRole, ProjectUsage, Quotas},
};
use sqlx::{
    Sqlite, SqlitePool, Transaction,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::{Mutex, watch};

use crate::{
    Bootstrap, Claim, Edit, Edited, End, Event, EventsOf, Fit, ListFilter, Listed, NewSandbox, NodeCapacity,
    Principal, Prior, Project, Ready, Reservation, SandboxRow, Store, StoreError, error::Context as _,
};

/// Connections for reading.
const READERS: u32 = 4;
/// How long a statement waits for a lock that another process holds, for example a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// Pages in the log at which a commit folds it into the database file itself, with two waits for the disk; before that
/// [`Store::maintain`] does it beside the commits.
const LOG_PAGES: u32 = 8192;
/// How often a reservation is tried again that was refused and then found to have room. It takes ends at the very moment.
const RESERVE_TRIES: usize = 4;

/// The store in one SQLite file.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    /// The write-ahead log, for nothing but syncing it.
    log: Arc<fs_err::File>,
    writer: SqlitePool,
    readers: SqlitePool,
    changes: watch::Sender<u64>,
    /// Counts callers of flush; a flush serves all who had asked when it began.
    flushes_asked: AtomicU64,
    flushes_served: Mutex<u64>,
}

impl SqliteStore {
    /// Opens or makes the file, readable and writable by its owner only, and brings its schema up to date.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Open {
            path: path.to_owned(),
            source,
        };
        create_private(path).map_err(|error| failed(Box::new(error)))?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT);
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(
                options
                    .clone()
                    .pragma("wal_autocheckpoint", LOG_PAGES.to_string()),
            )
            .await
            .map_err(|error| failed(Box::new(error)))?;
        sqlx::migrate!("migrations/sqlite")
            .run(&writer)
            .await
            .map_err(|source| StoreError::Migrate {
                path: path.to_owned(),
                source,
            })?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            // All from the start: the first reads need not wait for one to open, and how many files are open never changes.
            .min_connections(READERS)
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options.pragma("query_only", "on"))
            .await
            .map_err(|error| failed(Box::new(error)))?;
        let log = open_log(path).map_err(|error| failed(Box::new(error)))?;
        Ok(Self {
            path: path.to_owned(),
            log: Arc::new(log),
            writer,
            readers,
            changes: watch::Sender::new(0),
            flushes_asked: AtomicU64::new(0),
            flushes_served: Mutex::new(0),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes all connections; the write-ahead log is folded into the file.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    /// A transaction that holds the write lock from its first statement on, so that it never fails half-way for want of it.
    async fn begin(&self, what: &'static str) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.writer
            .begin_with("BEGIN IMMEDIATE")
            .await
            .while_asked_to(what)
    }

    async fn write_through(&self) -> Result<(), std::io::Error> {
        let log = self.log.clone();
        tokio::task::spawn_blocking(move || log.sync_data())
            .await
            .map_err(std::io::Error::other)?
    }

    /// Tells that there is something new: an event to those who follow them, and something to write through.
    fn tell(&self, changed: bool) {
        if changed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    /// In one statement, unless an idempotency key comes with it.
    async fn try_reserve(
        &self,
        sandbox: &NewSandbox,
        claim: Option<&Claim>,
    ) -> Result<Option<Reservation>, StoreError> {
        let what = "reserve a sandbox";
        let Some(claim) = claim else {
            if sandboxes::insert(&self.writer, sandbox).await? {
                return Ok(Some(Reservation::Reserved));
            }
            let mut connection = self.writer.acquire().await.while_asked_to(what)?;
            return sandboxes::refusal(&mut connection, sandbox).await;
        };
        let mut transaction = self.begin(what).await?;
        // Where it returns early, dropping the transaction rolls it back.
        if let Some(prior) = claims::take(&mut transaction, sandbox, claim).await? {
            return Ok(Some(Reservation::Used(prior)));
        }
        if !sandboxes::insert(&mut *transaction, sandbox).await? {
            return sandboxes::refusal(&mut transaction, sandbox).await;
        }
        transaction.commit().await.while_asked_to(what)?;
        Ok(Some(Reservation::Reserved))
    }
}

/// The log that SQLite has made beside the database; its name is part of SQLite's file format. Its entry in the directory is
/// made durable, so that a sync of the file itself is enough from now on.
fn open_log(database: &Path) -> std::io::Result<fs_err::File> {
    let mut name = database.as_os_str().to_owned();
    name.push("-wal");
    let log = fs_err::File::open(PathBuf::from(name))?;
    let directory = database.parent().filter(|parent| !parent.as_os_str().is_empty());
    fs_err::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(log)
}

fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    // SQLite gives its -wal and -shm files the mode of the database file.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))
}

#[async_trait]
impl Store for SqliteStore {
    async fn ensure_default_project_and_key(
        &self,
        quotas: Quotas,
        known: Option<ApiKey>,
    ) -> Result<Bootstrap, StoreError> {
        let mut transaction = self.begin("set up the default project").await?;
        let outcome = bootstrap::ensure_default(&mut transaction, quotas, known).await?;
        transaction
            .commit()
            .await
            .while_asked_to("set up the default project")?;
        self.flush().await?;
        Ok(outcome)
    }

    async fn create_project(&self, name: &str, quotas: Quotas) -> Result<Project, StoreError> {
        let mut transaction = self.begin("make a project").await?;
        if bootstrap::project_by_name(&mut transaction, name)
            .await?
            .is_some()
        {
            return Err(StoreError::ProjectExists);
        }
        let project = bootstrap::insert_project(&mut transaction, name, quotas).await?;
        transaction.commit().await.while_asked_to("make a project")?;
        Ok(project)
    }

    async fn usage(&self, project: &ProjectId) -> Result<ProjectUsage, StoreError> {
        let mut connection = self
            .readers
            .acquire()
            .await
            .while_asked_to("count the use of a project")?;
        sandboxes::usage(&mut connection, project).await
    }

    async fn create_key(
        &self,
        project: &ProjectId,
        name: &str,
        role: KeyRole,
    ) -> Result<(KeyRecord, ApiKey), StoreError> {
        let key = ApiKey::random();
        let mut transaction = self.begin("make an API key").await?;
        let record = bootstrap::insert_key(&mut transaction, project, name, role, &key).await?;
        transaction.commit().await.while_asked_to("make an API key")?;
        self.flush().await?;
        Ok((record, key))
    }

    async fn keys(&self, project: &ProjectId) -> Result<Vec<KeyRecord>, StoreError> {
        bootstrap::keys(&self.readers, project).await
    }

    async fn revoke_key(&self, project: &ProjectId, key: &KeyId) -> Result<bool, StoreError> {
        let found = bootstrap::revoke(&self.writer, project, key).await?;
        self.flush().await?;
        Ok(found)
    }

    async fn authenticate(&self, key: &ApiKey) -> Result<Option<Principal>, StoreError> {
        bootstrap::authenticate(&self.readers, key).await
    }

    async fn register_node(&self, node: &NodeCapacity) -> Result<(), StoreError> {
        sandboxes::register_node(&self.writer, node).await
    }

    async fn reserve(&self, sandbox: &NewSandbox, claim: Option<&Claim>) -> Result<Reservation, StoreError> {
        for _ in 0..RESERVE_TRIES {
            if let Some(outcome) = self.try_reserve(sandbox, claim).await? {
                self.tell(outcome == Reservation::Reserved);
                return Ok(outcome);
            }
        }
        Err(StoreError::Unsettled)
    }

    async fn prior(&self, project: &ProjectId, claim: &Claim) -> Result<Option<Prior>, StoreError> {
        let what = "look up an idempotency key";
        let mut connection = self.readers.acquire().await.while_asked_to(what)?;
        claims::prior(&mut connection, project, claim).await
    }

    async fn flush(&self) -> Result<(), StoreError> {
        let ticket = self.flushes_asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut served = self.flushes_served.lock().await;
        if *served >= ticket {
            return Ok(());
        }
        let covered = self.flushes_asked.load(Ordering::SeqCst);
        self.write_through().await.map_err(|source| StoreError::Flush {
            path: self.path.clone(),
            source,
        })?;
        *served = covered;
        Ok(())
    }

    async fn mark_running(&self, id: &SandboxId, generation: u64, ready: &Ready) -> Result<bool, StoreError> {
        let marked = sandboxes::mark_running(&self.writer, id, generation, ready).await?;
        self.tell(marked);
        Ok(marked)
    }

    async fn set_paused(
        &self,
        id: &SandboxId,
        generation: u64,
        paused: bool,
        why: &str,
    ) -> Result<bool, StoreError> {
        let set = sandboxes::set_paused(&self.writer, id, generation, paused, why).await?;
        self.tell(set);
        Ok(set)
    }

    async fn edit(
        &self,
        project: &ProjectId,
        id: &SandboxId,
        edit: &Edit,
        fit: Fit<'_>,
    ) -> Result<Edited, StoreError> {
        let what = "change what is written on a sandbox";
        let mut transaction = self.begin(what).await?;
        let edited = sandboxes::edit(&mut transaction, project, id, edit, fit).await?;
        transaction.commit().await.while_asked_to(what)?;
        // No event, but something to be written through.
        self.tell(matches!(edited, Edited::Done(_)));
        Ok(edited)
    }

    async fn end(&self, id: &SandboxId, end: &End, release_claim: bool) -> Result<bool, StoreError> {
        let recorded = if release_claim {
            let mut transaction = self.begin("record an end").await?;
            let recorded = sandboxes::end(&mut *transaction, id, end).await?;
            claims::release(&mut transaction, id).await?;
            transaction.commit().await.while_asked_to("record an end")?;
            recorded
        } else {
            sandboxes::end(&self.writer, id, end).await?
        };
        self.tell(recorded);
        Ok(recorded)
    }

    async fn set_deadline(&self, id: &SandboxId, deadline: Timestamp) -> Result<bool, StoreError> {
        sandboxes::set_deadline(&self.writer, id, deadline).await
    }

    async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let mut connection = self.readers.acquire().await.while_asked_to("read a sandbox")?;
        sandboxes::by_id(&mut connection, id).await
    }

    async fn list(&self, project: &ProjectId, filter: &ListFilter) -> Result<Listed, StoreError> {
        let mut connection = self.readers.acquire().await.while_asked_to("list sandboxes")?;
        lists::page_of(&mut connection, project, filter).await
    }

    async fn live(&self) -> Result<Vec<SandboxRow>, StoreError> {
        sandboxes::live(&self.readers).await
    }

    async fn note(
        &self,
        id: &SandboxId,
        at: Timestamp,
        kind: &str,
        detail: &str,
    ) -> Result<bool, StoreError> {
        let noted = events::note(&self.writer, id, at, kind, detail).await?;
        self.tell(noted);
        Ok(noted)
    }

    async fn events(&self, of: EventsOf<'_>, after: u64, limit: u32) -> Result<Vec<Event>, StoreError> {
        events::after(&self.readers, of, after, limit).await
    }

    async fn last_event(&self) -> Result<u64, StoreError> {
        events::last(&self.readers).await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    async fn settle_claims(&self) -> Result<u64, StoreError> {
        claims::settle(&self.writer).await
    }

    async fn begun(&self) -> Result<Option<Timestamp>, StoreError> {
        bootstrap::begun(&self.readers).await
    }

    async fn prune(&self, ended_before: Timestamp, failed_before: Timestamp) -> Result<u64, StoreError> {
        let mut transaction = self.begin("forget old sandboxes").await?;
        let pruned = prune::prune(&mut transaction, ended_before, failed_before).await?;
        claims::expire(&mut transaction, Timestamp::now()).await?;
        transaction
            .commit()
            .await
            .while_asked_to("forget old sandboxes")?;
        Ok(pruned)
    }

    async fn maintain(&self) -> Result<(), StoreError> {
        // On a connection of its own and without waiting for anybody: commits go on meanwhile.
        sqlx::query("PRAGMA wal_checkpoint(PASSIVE)")
            .execute(&self.readers)
            .await
            .while_asked_to("fold its log into its file")?;
        Ok(())
    }
}
