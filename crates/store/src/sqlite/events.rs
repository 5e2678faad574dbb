//! What happened to sandboxes, in the order in which it was written.

use jiff::Timestamp;
use space_api::id::SandboxId;
use sqlx::{Row as _, SqlitePool};

use super::rows::{id, number, time};
use crate::{Event, EventsOf, StoreError, error::Context as _};

/// Most events that one read gives.
const MAX_EVENTS: u32 = 1000;

pub(super) async fn after(
    pool: &SqlitePool,
    of: EventsOf<'_>,
    after: u64,
    limit: u32,
) -> Result<Vec<Event>, StoreError> {
    let (query, whose) = match of {
        EventsOf::Sandbox(id) => (
            "SELECT id, sandbox_id, at, kind, detail FROM events WHERE sandbox_id = $1 AND id > $2 ORDER BY id LIMIT $3",
            id.as_str(),
        ),
        EventsOf::Project(id) => (
            "SELECT id, sandbox_id, at, kind, detail FROM events WHERE project_id = $1 AND id > $2 ORDER BY id LIMIT $3",
            id.as_str(),
        ),
    };
    sqlx::query(query)
        .bind(whose)
        .bind(number(after))
        .bind(i64::from(limit.clamp(1, MAX_EVENTS)))
        .fetch_all(pool)
        .await
        .while_asked_to("read events")?
        .iter()
        .map(|row| {
            Ok(Event {
                id: u64::try_from(row.get::<i64, _>("id")).unwrap_or(0),
                sandbox: id(row, "sandbox_id")?,
                at: time(row, "at")?,
                kind: row.get("kind"),
                detail: row.get("detail"),
            })
        })
        .collect()
}

pub(super) async fn note(
    pool: &SqlitePool,
    id: &SandboxId,
    at: Timestamp,
    kind: &str,
    detail: &str,
) -> Result<bool, StoreError> {
    let noted = sqlx::query(
        "INSERT INTO events (sandbox_id, project_id, at, kind, detail)
         SELECT id, project_id, $2, $3, $4 FROM sandboxes WHERE id = $1 AND state <> 'ended'",
    )
    .bind(id.as_str())
    .bind(at.as_microsecond())
    .bind(kind)
    .bind(detail)
    .execute(pool)
    .await
    .while_asked_to("note an event")?;
    Ok(noted.rows_affected() > 0)
}

pub(super) async fn last(pool: &SqlitePool) -> Result<u64, StoreError> {
    let newest: Option<i64> = sqlx::query_scalar("SELECT MAX(id) FROM events")
        .fetch_one(pool)
        .await
        .while_asked_to("read the newest event")?;
    Ok(newest.and_then(|id| u64::try_from(id).ok()).unwrap_or(0))
}
