//! The store in one SQLite file: write-ahead log, one writing connection, several readers.
//!
//! Commits do not wait for the disk (`synchronous=NORMAL`: they survive the process, not a loss of power);
//! [`Store::flush`] does, once for all who wait for it. A create reserves, starts its machine, and flushes meanwhile.

mod bootstrap;
mod claims;
mod rows;
mod sandboxes;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use space_api::{
    id::{KeyId, ProjectId, SandboxId},
    key::ApiKey,
    rest::{KeyRecord, ProjectUsage, Quotas},
};
use sqlx::{
    Sqlite, SqlitePool, Transaction,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::Mutex;

use crate::{
    Bootstrap, Claim, End, Event, ListFilter, Listed, NewSandbox, Principal, Project, Ready, Reservation,
    SandboxRow, Store, StoreError, error::Context as _,
};

/// Connections for reading.
const READERS: u32 = 4;
/// How long a statement waits for a lock that another process holds, for example a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The store in one SQLite file.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    writer: SqlitePool,
    readers: SqlitePool,
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
            .connect_with(options.clone())
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
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options.pragma("query_only", "on"))
            .await
            .map_err(|error| failed(Box::new(error)))?;
        Ok(Self {
            path: path.to_owned(),
            writer,
            readers,
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

    async fn write_through(&self) -> Result<(), sqlx::Error> {
        let mut connection = self.writer.acquire().await?;
        sqlx::query("PRAGMA synchronous = FULL")
            .execute(&mut *connection)
            .await?;
        let written = sqlx::query("UPDATE flushes SET count = count + 1 WHERE id = 1")
            .execute(&mut *connection)
            .await;
        sqlx::query("PRAGMA synchronous = NORMAL")
            .execute(&mut *connection)
            .await?;
        written.map(drop)
    }
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

    async fn create_key(&self, project: &ProjectId, name: &str) -> Result<(KeyRecord, ApiKey), StoreError> {
        let key = ApiKey::random();
        let mut transaction = self.begin("make an API key").await?;
        let record = bootstrap::insert_key(&mut transaction, project, name, &key).await?;
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

    async fn reserve(&self, sandbox: &NewSandbox, claim: Option<&Claim>) -> Result<Reservation, StoreError> {
        let what = "reserve a sandbox";
        let mut transaction = self.begin(what).await?;
        if let Some(claim) = claim
            && let Some(prior) = claims::take(&mut transaction, sandbox, claim).await?
        {
            // Dropping the transaction rolls it back; it has written nothing of worth.
            return Ok(Reservation::Used(prior));
        }
        if let Some((quota, limit)) = sandboxes::exceeded_quota(&mut transaction, sandbox).await? {
            return Ok(Reservation::QuotaExceeded { quota, limit });
        }
        sandboxes::insert(&mut transaction, sandbox).await?;
        transaction.commit().await.while_asked_to(what)?;
        Ok(Reservation::Reserved)
    }

    async fn flush(&self) -> Result<(), StoreError> {
        let ticket = self.flushes_asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut served = self.flushes_served.lock().await;
        if *served >= ticket {
            return Ok(());
        }
        let covered = self.flushes_asked.load(Ordering::SeqCst);
        self.write_through()
            .await
            .while_asked_to("write through to the disk")?;
        *served = covered;
        Ok(())
    }

    async fn mark_running(&self, id: &SandboxId, generation: u64, ready: &Ready) -> Result<bool, StoreError> {
        let mut transaction = self.begin("mark a sandbox as running").await?;
        let marked = sandboxes::mark_running(&mut transaction, id, generation, ready).await?;
        transaction
            .commit()
            .await
            .while_asked_to("mark a sandbox as running")?;
        Ok(marked)
    }

    async fn end(&self, id: &SandboxId, end: &End, release_claim: bool) -> Result<bool, StoreError> {
        let mut transaction = self.begin("record an end").await?;
        let recorded = sandboxes::end(&mut transaction, id, end).await?;
        if release_claim {
            claims::release(&mut transaction, id).await?;
        }
        transaction.commit().await.while_asked_to("record an end")?;
        Ok(recorded)
    }

    async fn set_deadline(&self, id: &SandboxId, deadline: Timestamp) -> Result<bool, StoreError> {
        let mut transaction = self.begin("set a deadline").await?;
        let set = sandboxes::set_deadline(&mut transaction, id, deadline).await?;
        transaction.commit().await.while_asked_to("set a deadline")?;
        Ok(set)
    }

    async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let mut connection = self.readers.acquire().await.while_asked_to("read a sandbox")?;
        sandboxes::by_id(&mut connection, id).await
    }

    async fn list(&self, project: &ProjectId, filter: &ListFilter) -> Result<Listed, StoreError> {
        let mut connection = self.readers.acquire().await.while_asked_to("list sandboxes")?;
        sandboxes::list(&mut connection, project, filter).await
    }

    async fn live(&self) -> Result<Vec<SandboxRow>, StoreError> {
        sandboxes::live(&self.readers).await
    }

    async fn events(&self, id: &SandboxId) -> Result<Vec<Event>, StoreError> {
        sandboxes::events(&self.readers, id).await
    }

    async fn settle_claims(&self) -> Result<u64, StoreError> {
        claims::settle(&self.writer).await
    }

    async fn prune(&self, ended_before: Timestamp) -> Result<u64, StoreError> {
        let mut transaction = self.begin("forget old sandboxes").await?;
        let pruned = sandboxes::prune(&mut transaction, ended_before).await?;
        claims::expire(&mut transaction, Timestamp::now()).await?;
        transaction
            .commit()
            .await
            .while_asked_to("forget old sandboxes")?;
        Ok(pruned)
    }
}
