//! Sandboxes and their events.

use jiff::Timestamp;
use space_api::{
    id::{ProjectId, SandboxId},
    rest::ProjectUsage,
};
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection, SqlitePool};

use super::{
    claims,
    rows::{SANDBOX_COLUMNS, micros, number, sandbox, state_name, time},
};
use crate::{
    Cursor, End, Event, ListFilter, Listed, NewSandbox, Quota, Ready, SandboxRow, SortOrder, StoreError,
    error::Context as _,
};

/// Most events shown of one sandbox.
const MAX_EVENTS: i64 = 1000;

pub(super) async fn usage(
    connection: &mut SqliteConnection,
    project: &ProjectId,
) -> Result<ProjectUsage, StoreError> {
    let row = sqlx::query(
        "SELECT COUNT(*) AS sandboxes, COALESCE(SUM(vcpus), 0) AS vcpus, COALESCE(SUM(memory_mib), 0) AS memory_mib \
         FROM sandboxes WHERE project_id = $1 AND state <> 'ended'",
    )
    .bind(project.as_str())
    .fetch_one(connection)
    .await
    .while_asked_to("count the use of a project")?;
    let count = |column: &'static str| row.get::<i64, _>(column);
    Ok(ProjectUsage {
        sandboxes: u32::try_from(count("sandboxes")).unwrap_or(u32::MAX),
        vcpus: u32::try_from(count("vcpus")).unwrap_or(u32::MAX),
        memory_mib: u64::try_from(count("memory_mib")).unwrap_or(0),
    })
}

/// Which quota one more sandbox would exceed. Must run in the transaction that inserts it.
pub(super) async fn exceeded_quota(
    connection: &mut SqliteConnection,
    new: &NewSandbox,
) -> Result<Option<(Quota, u64)>, StoreError> {
    let used = usage(connection, &new.project).await?;
    let row = sqlx::query("SELECT max_sandboxes, max_vcpus, max_memory_mib FROM projects WHERE id = $1")
        .bind(new.project.as_str())
        .fetch_one(connection)
        .await
        .while_asked_to("read quotas")?;
    let limit = |column: &'static str| u64::try_from(row.get::<i64, _>(column)).unwrap_or(0);
    let wanted = [
        (
            Quota::Sandboxes,
            u64::from(used.sandboxes) + 1,
            limit("max_sandboxes"),
        ),
        (
            Quota::Vcpus,
            u64::from(used.vcpus) + u64::from(new.size.vcpus),
            limit("max_vcpus"),
        ),
        (
            Quota::Memory,
            used.memory_mib + u64::from(new.size.memory_mib),
            limit("max_memory_mib"),
        ),
    ];
    Ok(wanted
        .into_iter()
        .find(|(_, wanted, limit)| wanted > limit)
        .map(|(quota, _, limit)| (quota, limit)))
}

pub(super) async fn insert(connection: &mut SqliteConnection, new: &NewSandbox) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO sandboxes (id, project_id, template, template_digest, vcpus, memory_mib, disk_mib, generation, \
         state, metadata, access_token, traffic_token, mask_request_host, started_at, deadline) \
         VALUES ($1, $2, $3, '', $4, $5, $6, $7, 'creating', $8, $9, $10, $11, $12, $13)",
    )
    .bind(new.id.as_str())
    .bind(new.project.as_str())
    .bind(&new.template)
    .bind(i64::from(new.size.vcpus))
    .bind(i64::from(new.size.memory_mib))
    .bind(i64::from(new.size.disk_mib))
    .bind(number(new.generation))
    .bind(serde_json::to_string(&new.metadata).unwrap_or_else(|_| "{}".to_owned()))
    .bind(new.access_token.as_deref())
    .bind(new.traffic_token.as_deref())
    .bind(new.mask_request_host.as_deref())
    .bind(micros(new.started_at))
    .bind(micros(new.deadline))
    .execute(&mut *connection)
    .await
    .while_asked_to("reserve a sandbox")?;
    let detail = format!("create accepted, template {}", new.template);
    add_event(connection, &new.id, new.started_at, "creating", &detail).await
}

pub(super) async fn mark_running(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    generation: u64,
    ready: &Ready,
) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "UPDATE sandboxes SET state = 'running', template = $3, template_digest = $4, vcpus = $5, memory_mib = $6, \
         disk_mib = $7, ready_ms = $8 WHERE id = $1 AND generation = $2 AND state = 'creating'",
    )
    .bind(id.as_str())
    .bind(number(generation))
    .bind(&ready.template)
    .bind(&ready.template_digest)
    .bind(i64::from(ready.size.vcpus))
    .bind(i64::from(ready.size.memory_mib))
    .bind(i64::from(ready.size.disk_mib))
    .bind(ready.ready_ms)
    .execute(&mut *connection)
    .await
    .while_asked_to("mark a sandbox as running")?;
    if done.rows_affected() == 0 {
        return Ok(false);
    }
    claims::complete(connection, id).await?;
    let detail = ready
        .ready_ms
        .map_or_else(|| "ready".to_owned(), |ms| format!("ready after {ms:.1} ms"));
    add_event(connection, id, Timestamp::now(), "running", &detail).await?;
    Ok(true)
}

pub(super) async fn end(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    end: &End,
) -> Result<bool, StoreError> {
    let cause = serde_json::to_string(&end.cause).unwrap_or_else(|_| "null".to_owned());
    let done = sqlx::query(
        "UPDATE sandboxes SET state = 'ended', ended_at = $3, end_cause = $4, cpu_micros = $5 \
         WHERE id = $1 AND generation = $2 AND state <> 'ended'",
    )
    .bind(id.as_str())
    .bind(number(end.generation))
    .bind(micros(end.ended_at))
    .bind(&cause)
    .bind(end.cpu_micros.map(number))
    .execute(&mut *connection)
    .await
    .while_asked_to("record an end")?;
    if done.rows_affected() == 0 {
        return Ok(false);
    }
    add_event(connection, id, end.ended_at, "ended", &cause).await?;
    Ok(true)
}

pub(super) async fn set_deadline(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    deadline: Timestamp,
) -> Result<bool, StoreError> {
    // No event: clients that keep a sandbox alive would write one every few seconds.
    let done = sqlx::query("UPDATE sandboxes SET deadline = $2 WHERE id = $1 AND state <> 'ended'")
        .bind(id.as_str())
        .bind(micros(deadline))
        .execute(connection)
        .await
        .while_asked_to("set a deadline")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn by_id(
    connection: &mut SqliteConnection,
    id: &SandboxId,
) -> Result<Option<SandboxRow>, StoreError> {
    select()
        .push("id = ")
        .push_bind(id.as_str().to_owned())
        .build()
        .fetch_optional(connection)
        .await
        .while_asked_to("read a sandbox")?
        .map(|row| sandbox(&row))
        .transpose()
}

pub(super) async fn live(pool: &SqlitePool) -> Result<Vec<SandboxRow>, StoreError> {
    select()
        .push("state <> 'ended' ORDER BY started_at, id")
        .build()
        .fetch_all(pool)
        .await
        .while_asked_to("list live sandboxes")?
        .iter()
        .map(sandbox)
        .collect()
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    filter: &ListFilter,
) -> Result<Listed, StoreError> {
    let limit = filter.limit.clamp(1, ListFilter::MAX_LIMIT);
    let mut rows = Vec::new();
    let mut cursor = filter.cursor.clone();
    // Labels are compared here, not in SQL, so that both databases agree; pages are read until one is full.
    loop {
        let page = page(connection, project, filter, cursor.as_ref(), i64::from(limit) + 1).await?;
        let more = page.len() > usize::try_from(limit).unwrap_or(usize::MAX);
        for row in page {
            let row = sandbox(&row)?;
            cursor = Some(Cursor {
                started_at: row.sandbox.started_at,
                id: row.sandbox.id.clone(),
            });
            let matches = filter
                .metadata
                .iter()
                .all(|(key, value)| row.sandbox.metadata.get(key) == Some(value));
            if matches {
                rows.push(row);
            }
            if rows.len() > usize::try_from(limit).unwrap_or(usize::MAX) {
                break;
            }
        }
        let full = rows.len() > usize::try_from(limit).unwrap_or(usize::MAX);
        if full || !more {
            if full {
                rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
            }
            let next = rows.last().filter(|_| full).map(|last| Cursor {
                started_at: last.sandbox.started_at,
                id: last.sandbox.id.clone(),
            });
            return Ok(Listed { rows, next });
        }
    }
}

async fn page(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    filter: &ListFilter,
    cursor: Option<&Cursor>,
    limit: i64,
) -> Result<Vec<sqlx::sqlite::SqliteRow>, StoreError> {
    let mut query = select();
    query.push("project_id = ").push_bind(project.as_str().to_owned());
    query.push(" AND state IN (");
    let mut states = query.separated(", ");
    for state in &filter.states {
        states.push_bind(state_name(*state));
    }
    query.push(")");
    if let Some(template) = &filter.template {
        query.push(" AND (template = ").push_bind(template.clone());
        query.push(" OR template_digest = ").push_bind(template.clone());
        // `name` stands for all its tags: between "name:" and "name;", the character after the colon.
        query.push(" OR (template >= ").push_bind(format!("{template}:"));
        query
            .push(" AND template < ")
            .push_bind(format!("{template};"))
            .push("))");
    }
    if let Some(after) = filter.started_after {
        query.push(" AND started_at >= ").push_bind(micros(after));
    }
    let (comparison, direction) = match filter.order {
        SortOrder::Ascending => (">", "ASC"),
        SortOrder::Descending => ("<", "DESC"),
    };
    if let Some(cursor) = cursor {
        query
            .push(" AND (started_at ")
            .push(comparison)
            .push(" ")
            .push_bind(micros(cursor.started_at));
        query
            .push(" OR (started_at = ")
            .push_bind(micros(cursor.started_at));
        query
            .push(" AND id ")
            .push(comparison)
            .push(" ")
            .push_bind(cursor.id.as_str().to_owned())
            .push("))");
    }
    query
        .push(" ORDER BY started_at ")
        .push(direction)
        .push(", id ")
        .push(direction);
    query.push(" LIMIT ").push_bind(limit);
    query
        .build()
        .fetch_all(connection)
        .await
        .while_asked_to("list sandboxes")
}

fn select() -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(SANDBOX_COLUMNS).push(" FROM sandboxes WHERE ");
    query
}

async fn add_event(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    at: Timestamp,
    kind: &str,
    detail: &str,
) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO events (sandbox_id, at, kind, detail) VALUES ($1, $2, $3, $4)")
        .bind(id.as_str())
        .bind(micros(at))
        .bind(kind)
        .bind(detail)
        .execute(connection)
        .await
        .while_asked_to("record an event")?;
    Ok(())
}

pub(super) async fn events(pool: &SqlitePool, id: &SandboxId) -> Result<Vec<Event>, StoreError> {
    sqlx::query("SELECT at, kind, detail FROM events WHERE sandbox_id = $1 ORDER BY id LIMIT $2")
        .bind(id.as_str())
        .bind(MAX_EVENTS)
        .fetch_all(pool)
        .await
        .while_asked_to("read events")?
        .iter()
        .map(|row| {
            Ok(Event {
                at: time(row, "at")?,
                kind: row.get("kind"),
                detail: row.get("detail"),
            })
        })
        .collect()
}

pub(super) async fn prune(
    connection: &mut SqliteConnection,
    ended_before: Timestamp,
) -> Result<u64, StoreError> {
    sqlx::query(
        "DELETE FROM events WHERE sandbox_id IN (SELECT id FROM sandboxes WHERE state = 'ended' AND ended_at < $1)",
    )
    .bind(micros(ended_before))
    .execute(&mut *connection)
    .await
    .while_asked_to("forget old events")?;
    let done = sqlx::query("DELETE FROM sandboxes WHERE state = 'ended' AND ended_at < $1")
        .bind(micros(ended_before))
        .execute(connection)
        .await
        .while_asked_to("forget old sandboxes")?;
    Ok(done.rows_affected())
}
