//! The file: its permissions, its format, and how older formats become the present one.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path};

use fs_err::{self as fs, os::unix::fs::OpenOptionsExt as _};
use jiff::Timestamp;
use space_api::lifecycle::EndCause;
use sqlx::{
    ConnectOptions as _, Connection as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};

use super::JournalError;

/// The format that this program writes.
pub(super) const FORMAT: i64 = 2;
/// Only the node reads what was told to guests.
const MODE: u32 = 0o600;

/// `state` is what was begun last and is durable; the table in `journal.rs` says what the next start makes of it.
/// `machine` is a machine record as JSON. `environment` is kept only until the guest has it.
const SCHEMA: &str = "
CREATE TABLE lives (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    project TEXT NOT NULL DEFAULT '',
    template TEXT NOT NULL DEFAULT '',
    template_digest TEXT NOT NULL DEFAULT '',
    size TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL CHECK (state IN ('creating', 'running', 'pausing', 'paused', 'stopping', 'ended')),
    worker TEXT,
    machine TEXT,
    network TEXT,
    guest_token TEXT,
    environment TEXT,
    on_idle TEXT,
    deadline_us INTEGER,
    ready_ms REAL,
    paused_us INTEGER,
    started_us INTEGER,
    ended_us INTEGER,
    cause TEXT,
    cpu_us INTEGER NOT NULL DEFAULT 0,
    UNIQUE (id, generation)
) STRICT;
CREATE INDEX lives_ended ON lives (ended_us, seq) WHERE ended_us IS NOT NULL;
CREATE INDEX lives_live ON lives (state) WHERE state != 'ended';
";

/// Machines of the time of format 1 carry no record by which they could be taken over: they are swept, and their lives
/// end here.
const FROM_1: &str = "
INSERT INTO lives (seq, id, generation, project, template, size, state, started_us, ended_us, cause, cpu_us)
SELECT seq, id, generation, project, template, size, 'ended', started_us,
       COALESCE(ended_us, ?1), COALESCE(cause, ?2), cpu_us
FROM lives_1;
";

/// [`FORMAT`] once more, for a pragma takes no parameters.
const SET_FORMAT: &str = "PRAGMA user_version = 2";

/// Opens or makes the file and brings it to the present format, whole or not at all.
pub(super) async fn open(path: &Path) -> Result<SqliteConnection, JournalError> {
    let failed = |source| JournalError::Open {
        path: path.to_owned(),
        source,
    };
    private(path).map_err(|error| failed(sqlx::Error::Io(error)))?;
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .connect()
        .await
        .map_err(failed)?;
    let found: i64 = sqlx::query_scalar("PRAGMA user_version")
        .fetch_one(&mut connection)
        .await
        .map_err(failed)?;
    if !(0..=FORMAT).contains(&found) {
        return Err(JournalError::TooNew {
            path: path.to_owned(),
            found,
        });
    }
    if found < FORMAT {
        migrate(&mut connection, found).await.map_err(failed)?;
    }
    Ok(connection)
}

async fn migrate(connection: &mut SqliteConnection, found: i64) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    if found == 1 {
        let aside = "ALTER TABLE lives RENAME TO lives_1; DROP INDEX lives_ended; DROP INDEX lives_live;";
        sqlx::raw_sql(aside).execute(&mut *transaction).await?;
    }
    sqlx::raw_sql(SCHEMA).execute(&mut *transaction).await?;
    if found == 1 {
        sqlx::query(FROM_1)
            .bind(Timestamp::now().as_microsecond())
            .bind(serde_json::to_string(&EndCause::PlatformRestarted).unwrap_or_default())
            .execute(&mut *transaction)
            .await?;
        sqlx::raw_sql("DROP TABLE lives_1")
            .execute(&mut *transaction)
            .await?;
    }
    sqlx::raw_sql(SET_FORMAT).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// Makes the file for its owner only; the database gives the files beside it the same rights.
fn private(path: &Path) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options.mode(MODE);
    let file = options.open(path)?;
    if file.metadata()?.permissions().mode() & 0o777 != MODE {
        file.set_permissions(std::fs::Permissions::from_mode(MODE))?;
    }
    Ok(())
}
