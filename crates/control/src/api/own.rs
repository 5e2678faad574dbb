//! Our own API under `/v1/`: what E2B's has no place for.

use axum::{Json, extract::State, response::Response};
use http::StatusCode;
use space_api::{
    error::ErrorBody,
    lifecycle::SandboxState,
    rest::{NodeRecord, ProjectRecord, SandboxRecord},
};
use space_store::{ListFilter, SortOrder};

use super::{
    extract::{Caller, PathId, Query},
    listing::{cursor, limit, paged},
    views,
};
use crate::{app::App, error::ApiError};

/// Answers while the server serves. Needs no key.
#[utoipa::path(get, path = "/health", tag = "platform", responses((status = 200, description = "Serving")))]
pub(super) async fn health() -> (StatusCode, &'static str) {
    (StatusCode::OK, "OK")
}

/// Shows a sandbox, also after its end: cause, size, times.
#[utoipa::path(get, path = "/v1/sandboxes/{sandboxID}", tag = "platform", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn sandbox(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<SandboxRecord>, ApiError> {
    let row = app
        .store
        .sandbox(&id)
        .await?
        .filter(|row| row.sandbox.project == caller.0.project.id)
        .ok_or_else(|| {
            ApiError::new(
                StatusCode::NOT_FOUND,
                space_api::error::ErrorCode::SandboxNotFound,
                format!("sandbox \"{id}\" was not found"),
            )
            .hint("GET /v1/sandboxes lists those there are and were")
        })?;
    Ok(Json(views::record(row)))
}

/// Lists sandboxes by page, newest first, ended ones among them.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "platform",
    params(
        ("ended" = Option<bool>, Query, description = "`true`: only ended ones; `false`: only live ones"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent"),
        ("nextToken" = Option<String>, Query, description = "Header `x-next-token` of the page before"),
    ),
    responses((status = 200, body = Vec<SandboxRecord>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn sandboxes(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let ended = query.parsed::<bool>("ended", "true or false")?;
    let live = [
        SandboxState::Creating,
        SandboxState::Running,
        SandboxState::Stopping,
    ];
    let mut states = Vec::new();
    if ended != Some(true) {
        states.extend(live);
    }
    if ended != Some(false) {
        states.push(SandboxState::Ended);
    }
    let filter = ListFilter {
        states,
        metadata: std::collections::BTreeMap::new(),
        template: None,
        started_after: None,
        order: SortOrder::Descending,
        cursor: cursor(&query)?,
        limit: limit(&query)?,
    };
    let page = app.store.list(&caller.0.project.id, &filter).await?;
    let rows: Vec<_> = page.rows.into_iter().map(views::record).collect();
    Ok(paged(&rows, page.next.as_ref()))
}

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
    })
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
