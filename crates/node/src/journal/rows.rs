//! The statements, each within a transaction of the journal's task.

use jiff::Timestamp;
use space_api::{id::SandboxId, lifecycle::EndCause};
use sqlx::{Row as _, SqliteConnection, sqlite::SqliteRow};

use super::{Change, JournalError, Life, Recorded};
use crate::seam::EndRecord;

/// Ends older than this many days are forgotten.
const KEEP_DAYS: i64 = 7;
/// Most ends kept.
const KEEP_ROWS: i64 = 100_000;
/// Most ends in one answer.
pub(super) const MOST_ENDS: i64 = 10_000;

fn stored(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn json<T: serde::Serialize>(value: &T) -> Result<String, sqlx::Error> {
    serde_json::to_string(value).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// Answers whether it was new.
pub(super) async fn insert(connection: &mut SqliteConnection, life: &Life) -> Result<bool, sqlx::Error> {
    let environment = match life.environment.is_empty() {
        true => None,
        false => Some(json(&life.environment)?),
    };
    let on_idle = life.on_idle.as_ref().map(json).transpose()?;
    let done = sqlx::query(
        "INSERT INTO lives (id, generation, project, template, template_digest, size, state, worker, machine, network,
             guest_token, environment, on_idle, deadline_us, started_us)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, 'creating', ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14
         WHERE NOT EXISTS (SELECT 1 FROM lives WHERE id = ?1 AND generation >= ?2)",
    )
    .bind(life.id.as_str().to_owned())
    .bind(stored(life.generation))
    .bind(life.project.as_str().to_owned())
    .bind(life.template.clone())
    .bind(life.template_digest.clone())
    .bind(life.size.to_string())
    .bind(life.machine.name.as_str().to_owned())
    .bind(json(&life.machine)?)
    .bind(life.network.as_ref().map(|network| network.as_str().to_owned()))
    .bind(life.guest_token.clone())
    .bind(environment)
    .bind(on_idle)
    .bind(life.deadline.as_microsecond())
    .bind(life.started_at.as_microsecond())
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// A life that is being ended, or has ended, is not changed any more.
pub(super) async fn update(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    generation: u64,
    change: &Change,
) -> Result<(), sqlx::Error> {
    let text = match change {
        Change::Running { .. } => {
            "UPDATE lives SET state = 'running', paused_us = NULL, environment = NULL, ready_ms = COALESCE(?3, ready_ms)
             WHERE id = ?1 AND generation = ?2 AND state NOT IN ('stopping', 'ended')"
        }
        Change::Machine { .. } => {
            "UPDATE lives SET worker = ?3, machine = ?4, network = ?5
             WHERE id = ?1 AND generation = ?2 AND state = 'creating'"
        }
        Change::Pausing => {
            "UPDATE lives SET state = 'pausing'
             WHERE id = ?1 AND generation = ?2 AND state NOT IN ('stopping', 'ended')"
        }
        Change::Paused(_) => {
            "UPDATE lives SET state = 'paused', paused_us = ?3
             WHERE id = ?1 AND generation = ?2 AND state NOT IN ('stopping', 'ended')"
        }
        Change::Stopping(_) => {
            "UPDATE lives SET state = 'stopping', cause = ?3
             WHERE id = ?1 AND generation = ?2 AND state NOT IN ('stopping', 'ended')"
        }
        Change::Deadline(_) => {
            "UPDATE lives SET deadline_us = ?3
             WHERE id = ?1 AND generation = ?2 AND state NOT IN ('stopping', 'ended')"
        }
    };
    let query = sqlx::query(text)
        .bind(id.as_str().to_owned())
        .bind(stored(generation));
    let query = match change {
        Change::Running { ready_ms } => query.bind(*ready_ms),
        Change::Machine { record, network } => query
            .bind(record.name.as_str().to_owned())
            .bind(json(record)?)
            .bind(network.as_ref().map(|network| network.as_str().to_owned())),
        Change::Pausing => query,
        Change::Paused(at) | Change::Deadline(at) => query.bind(at.as_microsecond()),
        Change::Stopping(cause) => query.bind(json(cause)?),
    };
    query.execute(connection).await?;
    Ok(())
}

/// Ends a life once. One that was never begun, because it failed before it had a machine, is recorded as ended unless a
/// later or the same one is known.
pub(super) async fn end(connection: &mut SqliteConnection, end: &EndRecord) -> Result<(), sqlx::Error> {
    let cause = json(&end.cause)?;
    let bound = |text: &'static str| {
        sqlx::query(text)
            .bind(end.id.as_str().to_owned())
            .bind(stored(end.generation))
            .bind(end.ended_at.as_microsecond())
            .bind(cause.clone())
            .bind(stored(end.cpu_micros))
    };
    // A life that is known ends, whether or not a later one is known too.
    let known = bound(
        "UPDATE lives SET state = 'ended', ended_us = ?3, cause = ?4, cpu_us = ?5,
             machine = NULL, guest_token = NULL, environment = NULL
         WHERE id = ?1 AND generation = ?2 AND state != 'ended'",
    );
    if known.execute(&mut *connection).await?.rows_affected() > 0 {
        return Ok(());
    }
    let unknown = bound(
        "INSERT INTO lives (id, generation, state, ended_us, cause, cpu_us)
         SELECT ?1, ?2, 'ended', ?3, ?4, ?5 WHERE NOT EXISTS (SELECT 1 FROM lives WHERE id = ?1 AND generation >= ?2)",
    );
    unknown.execute(connection).await?;
    Ok(())
}

pub(super) async fn end_of(
    connection: &mut SqliteConnection,
    id: &SandboxId,
) -> Result<Option<EndRecord>, JournalError> {
    let row = sqlx::query(
        "SELECT id, generation, state, ended_us, cause, cpu_us FROM lives WHERE id = ? ORDER BY generation DESC LIMIT 1",
    )
    .bind(id.as_str().to_owned())
    .fetch_optional(connection)
    .await
    .map_err(read_error)?;
    Ok(row.as_ref().and_then(end_record))
}

pub(super) async fn ends_since(
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
        ended_at: time(row, "ended_us")?,
        cpu_micros: u64::try_from(row.try_get::<i64, _>("cpu_us").ok()?).ok()?,
    })
}

/// All lives that have not ended. One that cannot be read is ended as lost with the platform, for nothing can be done
/// about it but to sweep its machine.
pub(super) async fn live(connection: &mut SqliteConnection) -> Result<Vec<Life>, sqlx::Error> {
    let rows = sqlx::query("SELECT * FROM lives WHERE state != 'ended' ORDER BY seq")
        .fetch_all(&mut *connection)
        .await?;
    let mut lives = Vec::with_capacity(rows.len());
    for row in rows {
        if let Some(life) = life(&row) {
            lives.push(life);
            continue;
        }
        let seq: i64 = row.try_get("seq")?;
        tracing::error!(seq, "a life in the journal cannot be read and is ended");
        sqlx::query("UPDATE lives SET state = 'ended', ended_us = ?, cause = ? WHERE seq = ?")
            .bind(Timestamp::now().as_microsecond())
            .bind(json(&EndCause::PlatformRestarted)?)
            .bind(seq)
            .execute(&mut *connection)
            .await?;
    }
    Ok(lives)
}

fn text(row: &SqliteRow, column: &str) -> Option<String> {
    row.try_get::<Option<String>, _>(column).ok()?
}

fn time(row: &SqliteRow, column: &str) -> Option<Timestamp> {
    Timestamp::from_microsecond(row.try_get::<Option<i64>, _>(column).ok()??).ok()
}

fn life(row: &SqliteRow) -> Option<Life> {
    let paused_at = time(row, "paused_us");
    let state = match text(row, "state")?.as_str() {
        "creating" => Recorded::Creating,
        "running" => Recorded::Running,
        "pausing" => Recorded::Pausing,
        "paused" => Recorded::Paused(paused_at?),
        "stopping" => Recorded::Stopping(serde_json::from_str(&text(row, "cause")?).ok()?),
        _ => return None,
    };
    let network = text(row, "network").map(|name| space_node_manager::ObjectName::new(&name));
    Some(Life {
        id: text(row, "id")?.parse().ok()?,
        generation: u64::try_from(row.try_get::<i64, _>("generation").ok()?).ok()?,
        project: text(row, "project")?.parse().ok()?,
        template: text(row, "template")?,
        template_digest: text(row, "template_digest")?,
        size: text(row, "size")?.parse().ok()?,
        started_at: time(row, "started_us")?,
        deadline: time(row, "deadline_us")?,
        on_idle: match text(row, "on_idle") {
            Some(policy) => Some(serde_json::from_str(&policy).ok()?),
            None => None,
        },
        guest_token: text(row, "guest_token")?,
        environment: match text(row, "environment") {
            Some(environment) => serde_json::from_str(&environment).ok()?,
            None => Default::default(),
        },
        machine: serde_json::from_str(&text(row, "machine")?).ok()?,
        network: network.transpose().ok()?,
        ready_ms: row.try_get("ready_ms").ok()?,
        state,
    })
}

pub(super) async fn prune(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
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
