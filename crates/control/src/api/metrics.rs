//! How much sandboxes use.

use axum::{Json, extract::State};
use futures_util::{StreamExt as _, stream};
use space_api::{
    e2b::{SandboxMetric, SandboxesWithMetrics},
    error::ErrorBody,
};
use space_node::Usage;

use super::extract::{Caller, PathId, Query, sandbox_id};
use crate::{app::App, error::ApiError};

/// Most sandboxes asked for at once.
const MAX_SANDBOXES: usize = 100;
/// How many of them are asked of the node at a time.
const AT_ONCE: usize = 8;

/// Samples of use within the last hour, oldest first.
#[utoipa::path(
    get, path = "/sandboxes/{sandboxID}/metrics", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("start" = Option<i64>, Query, description = "Seconds since 1970"), ("end" = Option<i64>, Query, description = "Seconds since 1970")),
    responses((status = 200, body = Vec<SandboxMetric>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn of_one(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    query: Query,
) -> Result<Json<Vec<SandboxMetric>>, ApiError> {
    let start = query.parsed::<i64>("start", "seconds since 1970")?;
    let end = query.parsed::<i64>("end", "seconds since 1970")?;
    caller.live(&app, &id).await?;
    let samples = app.node.usage(&id).await?;
    Ok(Json(
        samples
            .iter()
            .map(metric)
            .filter(|sample| {
                start.is_none_or(|start| sample.timestamp_unix >= start)
                    && end.is_none_or(|end| sample.timestamp_unix <= end)
            })
            .collect(),
    ))
}

/// The newest sample of each sandbox; those that are not live are left out.
#[utoipa::path(
    get, path = "/sandboxes/metrics", tag = "sandboxes",
    params(("sandbox_ids" = String, Query, description = "At most 100, separated by commas")),
    responses((status = 200, body = SandboxesWithMetrics), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn of_many(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<SandboxesWithMetrics>, ApiError> {
    let ids = query
        .text("sandbox_ids")
        .unwrap_or_default()
        .split(',')
        .filter(|id| !id.is_empty())
        .map(sandbox_id)
        .collect::<Result<Vec<_>, _>>()?;
    if ids.len() > MAX_SANDBOXES {
        return Err(ApiError::bad_request(format!(
            "at most {MAX_SANDBOXES} sandbox_ids"
        )));
    }
    let (app, caller) = (&app, &caller);
    let sandboxes = stream::iter(ids)
        .map(|id| async move {
            caller.live(app, &id).await.ok()?;
            let newest = metric(app.node.usage(&id).await.ok()?.last()?);
            Some((id.to_string(), newest))
        })
        .buffer_unordered(AT_ONCE)
        .filter_map(std::future::ready)
        .collect()
        .await;
    Ok(Json(SandboxesWithMetrics { sandboxes }))
}

fn metric(sample: &Usage) -> SandboxMetric {
    SandboxMetric {
        timestamp: sample.at,
        timestamp_unix: sample.at.as_second(),
        cpu_count: sample.cpu_count,
        cpu_used_pct: sample.cpu_used_pct,
        mem_used: sample.mem_used,
        mem_total: sample.mem_total,
        mem_cache: sample.mem_cache,
        disk_used: sample.disk_used,
        disk_total: sample.disk_total,
    }
}
