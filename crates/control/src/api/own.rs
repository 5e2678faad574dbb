//! Our own API under `/v1/`: what E2B's has no place for.

use axum::{Json, extract::State, response::Response};
use http::StatusCode;
use space_api::{
    error::{ErrorBody, ErrorCode},
    id::SandboxId,
    lifecycle::SandboxState,
    rest::{NodeRecord, PoolRecord, ProjectRecord, SandboxEdit, SandboxRecord},
};
use space_node::PoolStatus;
use space_store::{Edit, Edited, NewSandbox, SandboxRow};

use super::{
    extract::{Caller, JsonBody, PathId, Query},
    listing::{filter, paged, states},
    views,
};
use crate::{app::App, create::check, error::ApiError};

/// Answers while the server serves. Needs no key.
#[utoipa::path(get, path = "/health", tag = "platform", responses((status = 200, description = "Serving")))]
pub(super) async fn health() -> (StatusCode, &'static str) {
    (StatusCode::OK, "OK")
}

/// Shows a sandbox, also after its end: cause, size, times; while it lives its machine and its idleness.
#[utoipa::path(get, path = "/v1/sandboxes/{sandboxID}", tag = "platform", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn sandbox(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<SandboxRecord>, ApiError> {
    let row = of_caller(&app, &caller, &id).await?;
    let status = app.node.status(&id).await.ok();
    Ok(Json(views::record(row, status)))
}

/// Changes metadata and labels, also after its end: names with values are set, names with `null` are taken away, others stay.
#[utoipa::path(patch, path = "/v1/sandboxes/{sandboxID}", tag = "platform", params(("sandboxID" = String, Path)), request_body = SandboxEdit,
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn edit(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<SandboxEdit>,
) -> Result<Json<SandboxRecord>, ApiError> {
    let edit = Edit {
        metadata: body.metadata,
        labels: body.labels,
    };
    // Looked at as it would be, together with what others have changed meanwhile.
    let fits = |new: &NewSandbox| check::metadata(&new.metadata).and_then(|()| check::labels(&new.labels));
    let edited = app
        .store
        .edit(&caller.0.project.id, &id, &edit, &|new| fits(new).is_ok())
        .await?;
    let row = match edited {
        Edited::Done(row) => *row,
        Edited::Unfit(row) => return Err(fits(&row.sandbox).err().unwrap_or_else(unfit)),
        Edited::NotFound => return Err(not_there(ApiError::sandbox_not_found(&id))),
    };
    let status = app.node.status(&id).await.ok();
    Ok(Json(views::record(row, status)))
}

fn unfit() -> ApiError {
    ApiError::bad_request("metadata or labels cannot be like that")
}

async fn of_caller(app: &App, caller: &Caller, id: &SandboxId) -> Result<SandboxRow, ApiError> {
    caller.any(app, id).await.map_err(not_there)
}

/// Here ended ones are found too, so what is not found never was.
fn not_there(error: ApiError) -> ApiError {
    match error.body.error_code {
        Some(ErrorCode::SandboxNotFound) => error.hint("GET /v1/sandboxes lists those there are and were"),
        _ => error,
    }
}

/// Lists sandboxes by page, newest first unless asked otherwise, ended ones among them.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "platform",
    params(
        ("state" = Option<String>, Query, description = "`creating`, `running`, `paused`, `ended`, several with a comma; all if absent"),
        ("ended" = Option<bool>, Query, description = "`true`: only ended ones; `false`: only live ones; not together with `state`"),
        ("label" = Option<String>, Query, description = "`key=value`, several with a comma or by repeating it: all must be there"),
        ("metadata" = Option<String>, Query, description = "URL-encoded `key=value` pairs: all must be there"),
        ("template" = Option<String>, Query, description = "Name, name:tag or digest"),
        ("createdAfter" = Option<String>, Query, description = "RFC 3339; at or after"),
        ("createdBefore" = Option<String>, Query, description = "RFC 3339; before"),
        ("order" = Option<String>, Query, description = "`asc` or `desc` by time of creation; `desc` if absent"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent"),
        ("nextToken" = Option<String>, Query, description = "Header `x-next-token` of the page before"),
    ),
    responses((status = 200, body = Vec<SandboxRecord>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn sandboxes(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let mut filter = filter(&query, "createdAfter", "createdBefore")?;
    let ended = query.parsed::<bool>("ended", "true or false")?;
    filter.states = match (query.text("state"), ended) {
        (Some(_), Some(_)) => return Err(ApiError::bad_request("state and ended exclude each other")),
        (Some(words), None) => states(words, &STATES)?,
        (None, Some(true)) => vec![SandboxState::Ended],
        (None, Some(false)) => STATES
            .into_iter()
            .filter(|state| *state != SandboxState::Ended)
            .collect(),
        (None, None) => STATES.to_vec(),
    };
    let page = app.store.list(&caller.0.project.id, &filter).await?;
    let rows: Vec<_> = page
        .rows
        .into_iter()
        .map(|row| views::record(row, None))
        .collect();
    Ok(paged(&rows, page.next.as_ref()))
}

/// The states that the store keeps.
const STATES: [SandboxState; 4] = [
    SandboxState::Creating,
    SandboxState::Running,
    SandboxState::Paused,
    SandboxState::Ended,
];

/// What the node has to offer.
#[utoipa::path(get, path = "/v1/node", tag = "platform",
    responses((status = 200, body = NodeRecord), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn node(State(app): State<App>, _: Caller) -> Json<NodeRecord> {
    let info = app.node.info().await;
    Json(NodeRecord {
        vmm: info.vmm,
        isolates_hostile_code: info.isolates_hostile_code,
        sandboxes: info.sandboxes,
        capacity: info.capacity,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pool: info.pool.into_iter().map(pool).collect(),
    })
}

fn pool(status: PoolStatus) -> PoolRecord {
    PoolRecord {
        template: status.template,
        size: status.size.to_string(),
        ready: status.ready,
        warming: status.warming,
        target: status.target,
        hits: status.hits,
        misses: status.misses,
    }
}

/// The project that the key belongs to, what it may use and what it uses.
#[utoipa::path(get, path = "/v1/projects/me", tag = "platform",
    responses((status = 200, body = ProjectRecord), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn project(State(app): State<App>, caller: Caller) -> Result<Json<ProjectRecord>, ApiError> {
    let project = caller.0.project;
    let usage = app.store.usage(&project.id).await?;
    Ok(Json(ProjectRecord {
        id: project.id.into(),
        name: project.name,
        quotas: project.quotas,
        usage,
    }))
}
