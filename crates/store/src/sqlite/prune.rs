//! Forgetting what ended long ago.

use jiff::Timestamp;
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::rows::micros;
use crate::{MAX_FAILED, StoreError, error::Context as _};

/// Sandboxes that have ended.
const ENDED: &str = "state = 'ended'";
/// Those of them that never ran, by the beginning of their cause: word for word as in the index `sandboxes_failed`.
const FAILED: &str =
    r#"state = 'ended' AND end_cause >= '{"kind":"create_failed"' AND end_cause < '{"kind":"create_failee"'"#;

/// What ended before the one time, and what failed before the other or has too many like it after it.
pub(super) async fn prune(
    connection: &mut SqliteConnection,
    ended_before: Timestamp,
    failed_before: Timestamp,
) -> Result<u64, StoreError> {
    let first_too_many: Option<i64> = sqlx::query_scalar(AssertSqlSafe(format!(
        "SELECT ended_at FROM sandboxes WHERE {FAILED} ORDER BY ended_at DESC LIMIT 1 OFFSET $1"
    )))
    .bind(i64::from(MAX_FAILED))
    .fetch_optional(&mut *connection)
    .await
    .while_asked_to("count failed creates")?;
    let failed_before = first_too_many.map_or(micros(failed_before), |at| {
        micros(failed_before).max(at.saturating_add(1))
    });
    Ok(forget(connection, ENDED, micros(ended_before)).await?
        + forget(connection, FAILED, failed_before).await?)
}

async fn forget(
    connection: &mut SqliteConnection,
    which: &'static str,
    before: i64,
) -> Result<u64, StoreError> {
    let events = format!(
        "DELETE FROM events WHERE sandbox_id IN (SELECT id FROM sandboxes WHERE {which} AND ended_at < $1)"
    );
    sqlx::query(AssertSqlSafe(events))
        .bind(before)
        .execute(&mut *connection)
        .await
        .while_asked_to("forget old events")?;
    let rows = format!("DELETE FROM sandboxes WHERE {which} AND ended_at < $1");
    let done = sqlx::query(AssertSqlSafe(rows))
        .bind(before)
        .execute(connection)
        .await
        .while_asked_to("forget old sandboxes")?;
    Ok(done.rows_affected())
}
