//! Idempotency keys of creates: `in_progress`, then `done` or gone; `unknown` if the platform stopped in between.

use jiff::Timestamp;
use space_api::id::{ProjectId, SandboxId};
use sqlx::{Row as _, SqliteConnection, SqlitePool};

use super::{
    rows::{id, micros},
    sandboxes,
};
use crate::{Claim, IDEMPOTENCY_LIFETIME, NewSandbox, Prior, StoreError, error::Context as _};

/// What the key was used for, if it was.
pub(super) async fn prior(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    claim: &Claim,
) -> Result<Option<Prior>, StoreError> {
    let found = sqlx::query(
        "SELECT request_hash, state, sandbox_id, expires_at FROM idempotency_keys WHERE project_id = $1 AND key = $2",
    )
    .bind(project.as_str())
    .bind(&claim.key)
    .fetch_optional(&mut *connection)
    .await
    .while_asked_to("look up an idempotency key")?;
    let Some(row) = found.filter(|row| row.get::<i64, _>("expires_at") > micros(claim.now)) else {
        return Ok(None);
    };
    if row.get::<String, _>("request_hash") != claim.request_hash {
        return Ok(Some(Prior::Mismatch));
    }
    Ok(Some(match row.get::<String, _>("state").as_str() {
        "in_progress" => Prior::InProgress,
        "done" => {
            let made: SandboxId = id(&row, "sandbox_id")?;
            let row = sandboxes::by_id(connection, &made).await?;
            row.map_or(Prior::Unknown, |row| Prior::Done(Box::new(row)))
        }
        _ => Prior::Unknown,
    }))
}

/// Takes the key for `sandbox`, or says what it was used for.
pub(super) async fn take(
    connection: &mut SqliteConnection,
    sandbox: &NewSandbox,
    claim: &Claim,
) -> Result<Option<Prior>, StoreError> {
    if let Some(prior) = prior(connection, &sandbox.project, claim).await? {
        return Ok(Some(prior));
    }
    let expires_at =
        micros(claim.now).saturating_add(i64::try_from(IDEMPOTENCY_LIFETIME.as_micros()).unwrap_or(i64::MAX));
    sqlx::query(
        "INSERT INTO idempotency_keys (project_id, key, request_hash, state, sandbox_id, expires_at) \
         VALUES ($1, $2, $3, 'in_progress', $4, $5) \
         ON CONFLICT (project_id, key) DO UPDATE SET request_hash = excluded.request_hash, state = excluded.state, \
         sandbox_id = excluded.sandbox_id, expires_at = excluded.expires_at",
    )
    .bind(sandbox.project.as_str())
    .bind(&claim.key)
    .bind(&claim.request_hash)
    .bind(sandbox.id.as_str())
    .bind(expires_at)
    .execute(connection)
    .await
    .while_asked_to("claim an idempotency key")?;
    Ok(None)
}

pub(super) async fn release(
    connection: &mut SqliteConnection,
    sandbox: &SandboxId,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM idempotency_keys WHERE sandbox_id = $1 AND state = 'in_progress'")
        .bind(sandbox.as_str())
        .execute(connection)
        .await
        .while_asked_to("release an idempotency key")?;
    Ok(())
}

pub(super) async fn settle(pool: &SqlitePool) -> Result<u64, StoreError> {
    let done = sqlx::query(
        "UPDATE idempotency_keys SET state = CASE WHEN EXISTS (SELECT 1 FROM sandboxes s WHERE \
         s.id = idempotency_keys.sandbox_id AND s.state IN ('running', 'paused')) THEN 'done' ELSE 'unknown' END \
         WHERE state = 'in_progress'",
    )
    .execute(pool)
    .await
    .while_asked_to("settle idempotency keys")?;
    Ok(done.rows_affected())
}

pub(super) async fn expire(connection: &mut SqliteConnection, now: Timestamp) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM idempotency_keys WHERE expires_at <= $1")
        .bind(micros(now))
        .execute(connection)
        .await
        .while_asked_to("forget idempotency keys")?;
    Ok(())
}
