//! A sandbox's record as E2B's log calls. In this version it holds the platform's own events, no output from inside.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use space_api::{
    e2b::{LogEntry, LogLine, LogsV1, LogsV2},
    error::ErrorBody,
    id::SandboxId,
};

use space_store::EventsOf;

use super::extract::{Caller, PathId, Query};
use crate::{app::App, error::ApiError};

/// Most events of one sandbox that are shown as its log; `GET /v1/sandboxes/{id}/events` has pages.
const MAX_EVENTS: u32 = 1000;

/// The platform's events of a sandbox, live or ended, oldest first.
#[utoipa::path(
    get, path = "/sandboxes/{sandboxID}/logs", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 200, body = LogsV1), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn v1(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<LogsV1>, ApiError> {
    let log_entries = entries(&app, &caller, &id).await?;
    let logs = log_entries
        .iter()
        .map(|entry| LogLine {
            timestamp: entry.timestamp,
            line: entry.message.clone(),
        })
        .collect();
    Ok(Json(LogsV1 { logs, log_entries }))
}

/// The platform's events of a sandbox, live or ended.
#[utoipa::path(
    get, path = "/v2/sandboxes/{sandboxID}/logs", tag = "sandboxes",
    params(
        ("sandboxID" = String, Path),
        ("cursor" = Option<i64>, Query, description = "Milliseconds since 1970"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 1000 if absent"),
        ("direction" = Option<String>, Query, description = "`forward` or `backward` from the cursor"),
        ("search" = Option<String>, Query, description = "Only entries that contain it"),
    ),
    responses((status = 200, body = LogsV2), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn v2(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    query: Query,
) -> Result<Json<LogsV2>, ApiError> {
    let mut logs = entries(&app, &caller, &id).await?;
    let cursor = query.parsed::<i64>("cursor", "milliseconds since 1970")?;
    let limit = query
        .parsed::<usize>("limit", "a number from 1 to 1000")?
        .unwrap_or(1000);
    let backward = match query.text("direction") {
        None | Some("forward") => false,
        Some("backward") => true,
        Some(_) => return Err(ApiError::bad_request("direction must be forward or backward")),
    };
    if backward {
        logs.reverse();
    }
    logs.retain(|entry| {
        let at = entry.timestamp.as_millisecond();
        let wanted = cursor.is_none_or(|cursor| if backward { at <= cursor } else { at >= cursor });
        wanted
            && query
                .text("search")
                .is_none_or(|search| entry.message.contains(search))
    });
    logs.truncate(limit);
    Ok(Json(LogsV2 { logs }))
}

async fn entries(app: &App, caller: &Caller, id: &SandboxId) -> Result<Vec<LogEntry>, ApiError> {
    caller.any(app, id).await?;
    let events = app.store.events(EventsOf::Sandbox(id), 0, MAX_EVENTS).await?;
    Ok(events
        .into_iter()
        .map(|event| LogEntry {
            timestamp: event.at,
            level: "info".to_owned(),
            message: format!("{}: {}", event.kind, event.detail),
            fields: BTreeMap::from([("source".to_owned(), "platform".to_owned())]),
        })
        .collect())
}
