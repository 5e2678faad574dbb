//! Sandboxes: what is written of them, one statement for each change of state. Their events are written by triggers.

use std::collections::BTreeMap;

use jiff::Timestamp;
use space_api::{
    id::{ProjectId, SandboxId},
    lifecycle::SandboxState,
    rest::ProjectUsage,
};
use sqlx::{Row as _, SqliteConnection, SqliteExecutor, SqlitePool};

use super::rows::{SANDBOX_COLUMNS, map_text, micros, number, sandbox, state_name};
use crate::{
    Edit, Edited, End, Fit, NewSandbox, NodeCapacity, Quota, Ready, Reservation, Room, SandboxRow,
    StoreError, error::Context as _,
};

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

/// Writes the sandbox if the project may have it and the node has room for it; `false` if not. One statement, so that
/// nothing can come between the count and the row.
pub(super) async fn insert<'c>(
    connection: impl SqliteExecutor<'c>,
    new: &NewSandbox,
) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "INSERT INTO sandboxes (id, project_id, template, template_digest, vcpus, memory_mib, disk_mib, generation, \
         state, metadata, access_token, traffic_token, mask_request_host, started_at, deadline, labels, node_id, \
         wake_on_traffic, idle_pause_seconds, changed_at, change_detail) \
         SELECT $1, p.id, $3, '', $4, $5, $6, $7, 'creating', $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $12, $18 \
         FROM (SELECT q.*, \
             (SELECT COUNT(*) FROM sandboxes WHERE project_id = $2 AND state <> 'ended') AS used_sandboxes, \
             (SELECT COALESCE(SUM(vcpus), 0) FROM sandboxes WHERE project_id = $2 AND state <> 'ended') AS used_vcpus, \
             (SELECT COALESCE(SUM(memory_mib), 0) FROM sandboxes WHERE project_id = $2 AND state <> 'ended') AS used_memory \
             FROM projects q WHERE q.id = $2) p \
         LEFT JOIN nodes n ON n.id = $15 \
         WHERE p.used_sandboxes < p.max_sandboxes AND p.used_vcpus + $4 <= p.max_vcpus \
         AND p.used_memory + $5 <= p.max_memory_mib AND (n.id IS NULL OR ( \
             (SELECT COUNT(*) FROM sandboxes WHERE node_id = $15 AND state <> 'ended') < n.max_sandboxes \
             AND (n.max_memory_mib IS NULL OR $5 + (SELECT COALESCE(SUM(memory_mib), 0) FROM sandboxes \
                 WHERE node_id = $15 AND state <> 'ended') <= n.max_memory_mib)))",
    )
    .bind(new.id.as_str())
    .bind(new.project.as_str())
    .bind(&new.template)
    .bind(i64::from(new.size.vcpus))
    .bind(i64::from(new.size.memory_mib))
    .bind(i64::from(new.size.disk_mib))
    .bind(number(new.generation))
    .bind(map_text(&new.metadata))
    .bind(new.access_token.as_deref())
    .bind(new.traffic_token.as_deref())
    .bind(new.mask_request_host.as_deref())
    .bind(micros(new.started_at))
    .bind(micros(new.deadline))
    .bind(map_text(&new.labels))
    .bind(&new.node)
    .bind(i64::from(new.wake_on_traffic))
    .bind(new.on_idle.map(|policy| i64::from(policy.after_seconds)))
    .bind(format!("create accepted, template {}", new.template))
    .execute(connection)
    .await
    .while_asked_to("reserve a sandbox")?;
    Ok(done.rows_affected() > 0)
}

/// Why there is no room for one more; `None` if there is, for example because something has ended meanwhile.
pub(super) async fn refusal(
    connection: &mut SqliteConnection,
    new: &NewSandbox,
) -> Result<Option<Reservation>, StoreError> {
    let what = "read quotas";
    let used = usage(connection, &new.project).await?;
    let limits = sqlx::query("SELECT max_sandboxes, max_vcpus, max_memory_mib FROM projects WHERE id = $1")
        .bind(new.project.as_str())
        .fetch_one(&mut *connection)
        .await
        .while_asked_to(what)?;
    let node = sqlx::query(
        "SELECT n.max_sandboxes, n.max_memory_mib, COUNT(s.id) AS used_sandboxes, \
         COALESCE(SUM(s.memory_mib), 0) AS used_memory FROM nodes n \
         LEFT JOIN sandboxes s ON s.node_id = n.id AND s.state <> 'ended' WHERE n.id = $1 GROUP BY n.id",
    )
    .bind(&new.node)
    .fetch_optional(connection)
    .await
    .while_asked_to(what)?;
    let unsigned = |value: i64| u64::try_from(value).unwrap_or(0);
    let limit = |column: &'static str| unsigned(limits.get(column));
    let (vcpus, memory) = (u64::from(new.size.vcpus), u64::from(new.size.memory_mib));
    let quotas = [
        (
            Quota::Sandboxes,
            u64::from(used.sandboxes) + 1,
            limit("max_sandboxes"),
        ),
        (Quota::Vcpus, u64::from(used.vcpus) + vcpus, limit("max_vcpus")),
        (Quota::Memory, used.memory_mib + memory, limit("max_memory_mib")),
    ];
    if let Some((quota, _, limit)) = quotas.into_iter().find(|(_, wanted, limit)| wanted > limit) {
        return Ok(Some(Reservation::QuotaExceeded { quota, limit }));
    }
    let Some(node) = node else {
        return Ok(None);
    };
    let rooms = [
        (
            Room::Sandboxes,
            unsigned(node.get("used_sandboxes")) + 1,
            Some(unsigned(node.get("max_sandboxes"))),
        ),
        (
            Room::Memory,
            unsigned(node.get("used_memory")) + memory,
            node.get::<Option<i64>, _>("max_memory_mib").map(unsigned),
        ),
    ];
    Ok(rooms.into_iter().find_map(|(room, wanted, limit)| {
        let limit = limit.filter(|limit| wanted > *limit)?;
        Some(Reservation::NodeFull { room, limit })
    }))
}

pub(super) async fn register_node(pool: &SqlitePool, node: &NodeCapacity) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO nodes (id, max_sandboxes, max_memory_mib) VALUES ($1, $2, $3) \
         ON CONFLICT (id) DO UPDATE SET max_sandboxes = excluded.max_sandboxes, max_memory_mib = excluded.max_memory_mib",
    )
    .bind(&node.name)
    .bind(number(node.max_sandboxes))
    .bind(node.max_memory_mib.map(number))
    .execute(pool)
    .await
    .while_asked_to("register a node")?;
    Ok(())
}

pub(super) async fn mark_running(
    pool: &SqlitePool,
    id: &SandboxId,
    generation: u64,
    ready: &Ready,
) -> Result<bool, StoreError> {
    let detail = ready
        .ready_ms
        .map_or_else(|| "ready".to_owned(), |ms| format!("ready after {ms:.1} ms"));
    let done = sqlx::query(
        "UPDATE sandboxes SET state = 'running', template = $3, template_digest = $4, vcpus = $5, memory_mib = $6, \
         disk_mib = $7, ready_ms = $8, changed_at = $9, change_detail = $10 \
         WHERE id = $1 AND generation = $2 AND state = 'creating'",
    )
    .bind(id.as_str())
    .bind(number(generation))
    .bind(&ready.template)
    .bind(&ready.template_digest)
    .bind(i64::from(ready.size.vcpus))
    .bind(i64::from(ready.size.memory_mib))
    .bind(i64::from(ready.size.disk_mib))
    .bind(ready.ready_ms)
    .bind(micros(Timestamp::now()))
    .bind(detail)
    .execute(pool)
    .await
    .while_asked_to("mark a sandbox as running")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn set_paused(
    pool: &SqlitePool,
    id: &SandboxId,
    generation: u64,
    paused: bool,
    why: &str,
) -> Result<bool, StoreError> {
    let (from, to) = if paused {
        (SandboxState::Running, SandboxState::Paused)
    } else {
        (SandboxState::Paused, SandboxState::Running)
    };
    let done = sqlx::query(
        "UPDATE sandboxes SET state = $4, changed_at = $5, change_detail = $6 \
         WHERE id = $1 AND generation = $2 AND state = $3",
    )
    .bind(id.as_str())
    .bind(number(generation))
    .bind(state_name(from))
    .bind(state_name(to))
    .bind(micros(Timestamp::now()))
    .bind(why)
    .execute(pool)
    .await
    .while_asked_to("record a pause or resume")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn edit(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    id: &SandboxId,
    edit: &Edit,
    fit: Fit<'_>,
) -> Result<Edited, StoreError> {
    let found = by_id(connection, id).await?;
    let Some(mut row) = found.filter(|row| row.sandbox.project == *project) else {
        return Ok(Edited::NotFound);
    };
    let merge = |map: &mut BTreeMap<String, String>, changes: &BTreeMap<String, Option<String>>| {
        for (key, value) in changes {
            match value {
                Some(value) => map.insert(key.clone(), value.clone()),
                None => map.remove(key),
            };
        }
    };
    merge(&mut row.sandbox.metadata, &edit.metadata);
    merge(&mut row.sandbox.labels, &edit.labels);
    if !fit(&row.sandbox) {
        return Ok(Edited::Unfit(Box::new(row)));
    }
    sqlx::query("UPDATE sandboxes SET metadata = $2, labels = $3 WHERE id = $1")
        .bind(id.as_str())
        .bind(map_text(&row.sandbox.metadata))
        .bind(map_text(&row.sandbox.labels))
        .execute(connection)
        .await
        .while_asked_to("change what is written on a sandbox")?;
    Ok(Edited::Done(Box::new(row)))
}

pub(super) async fn end<'c>(
    connection: impl SqliteExecutor<'c>,
    id: &SandboxId,
    end: &End,
) -> Result<bool, StoreError> {
    let cause = serde_json::to_string(&end.cause).unwrap_or_else(|_| "null".to_owned());
    let done = sqlx::query(
        "UPDATE sandboxes SET state = 'ended', ended_at = $3, end_cause = $4, cpu_micros = $5, changed_at = $3, \
         change_detail = $4 WHERE id = $1 AND generation = $2 AND state <> 'ended'",
    )
    .bind(id.as_str())
    .bind(number(end.generation))
    .bind(micros(end.ended_at))
    .bind(&cause)
    .bind(end.cpu_micros.map(number))
    .execute(connection)
    .await
    .while_asked_to("record an end")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn set_deadline(
    pool: &SqlitePool,
    id: &SandboxId,
    deadline: Timestamp,
) -> Result<bool, StoreError> {
    // No event: clients that keep a sandbox alive would write one every few seconds.
    let done = sqlx::query("UPDATE sandboxes SET deadline = $2 WHERE id = $1 AND state <> 'ended'")
        .bind(id.as_str())
        .bind(micros(deadline))
        .execute(pool)
        .await
        .while_asked_to("set a deadline")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn by_id(
    connection: &mut SqliteConnection,
    id: &SandboxId,
) -> Result<Option<SandboxRow>, StoreError> {
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "SELECT {SANDBOX_COLUMNS} FROM sandboxes WHERE id = $1"
    )))
    .bind(id.as_str())
    .fetch_optional(connection)
    .await
    .while_asked_to("read a sandbox")?
    .map(|row| sandbox(&row))
    .transpose()
}

pub(super) async fn live(pool: &SqlitePool) -> Result<Vec<SandboxRow>, StoreError> {
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "SELECT {SANDBOX_COLUMNS} FROM sandboxes WHERE state <> 'ended' ORDER BY started_at, id"
    )))
    .fetch_all(pool)
    .await
    .while_asked_to("list live sandboxes")?
    .iter()
    .map(sandbox)
    .collect()
}
