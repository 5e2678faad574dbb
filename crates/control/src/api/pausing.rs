//! Pausing in memory and running on; E2B's `resume` of older SDKs.

use axum::{Json, extract::State};
use http::StatusCode;
use space_api::{
    e2b::{DEFAULT_TIMEOUT_SECONDS, ResumeRequest, Sandbox},
    error::{ErrorBody, ErrorCode},
    rest::{ExtendRequest, SandboxRecord},
};

use super::{
    extract::{Caller, JsonBody, PathId},
    lifecycle::{extend, settled, wake_up},
    views,
};
use crate::{
    app::App,
    create::check::{auto_pause, timeout_within},
    error::ApiError,
    transitions,
};

/// Stops a sandbox's machine, which stays in memory and keeps its place. Its deadline goes on counting. A paused one stays as it is.
#[utoipa::path(post, path = "/v1/sandboxes/{sandboxID}/pause", tag = "platform", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, description = "Not ready yet", body = ErrorBody), (status = 503, description = "It could not be stopped and runs on", body = ErrorBody)), security(("key" = [])))]
pub(super) async fn pause(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<SandboxRecord>, ApiError> {
    let mut row = caller.live(&app, &id).await?;
    match transitions::pause(&app, &id).await {
        Ok(status) => {
            row.state = status.state;
            Ok(Json(views::record(row, Some(status))))
        }
        Err(error) => Err(settled(&app, error).await),
    }
}

/// Lets a paused sandbox run on, its clock set. A running one stays as it is.
#[utoipa::path(post, path = "/v1/sandboxes/{sandboxID}/resume", tag = "platform", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, description = "Not ready yet", body = ErrorBody), (status = 503, description = "It could not be resumed and is as it was", body = ErrorBody)), security(("key" = [])))]
pub(super) async fn resume(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<SandboxRecord>, ApiError> {
    let mut row = caller.live(&app, &id).await?;
    match transitions::resume(&app, &id).await {
        Ok(status) => {
            row.state = status.state;
            Ok(Json(views::record(row, Some(status))))
        }
        Err(error) => Err(settled(&app, error).await),
    }
}

/// Keeps a sandbox alive for at least so long from now; never shortens.
#[utoipa::path(post, path = "/v1/sandboxes/{sandboxID}/extend", tag = "platform", params(("sandboxID" = String, Path)), request_body = ExtendRequest,
    responses((status = 200, body = SandboxRecord), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn prolong(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<ExtendRequest>,
) -> Result<Json<SandboxRecord>, ApiError> {
    timeout_within(body.timeout_seconds, &caller.0.project)?;
    let mut row = caller.live(&app, &id).await?;
    row.sandbox.deadline = extend(&app, &row, body.timeout_seconds).await?;
    let status = app.node.status(&id).await.ok();
    Ok(Json(views::record(row, status)))
}

/// Lets a paused sandbox run on, with a new deadline. Kept for older SDKs; newer ones connect.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/resume", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = ResumeRequest,
    responses((status = 201, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, description = "It is not paused", body = ErrorBody), (status = 501, description = "autoPause", body = ErrorBody)), security(("key" = [])))]
pub(super) async fn resume_e2b(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<ResumeRequest>,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    if body.auto_pause == Some(true) {
        return Err(auto_pause());
    }
    let timeout = body.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    timeout_within(timeout, &caller.0.project)?;
    let row = caller.live(&app, &id).await?;
    if !wake_up(&app, &id).await? {
        return Err(ApiError::new(
            StatusCode::CONFLICT,
            ErrorCode::SandboxAlreadyRunning,
            format!("sandbox {id} is running already"),
        )
        .hint("POST /sandboxes/{id}/connect finds a running one too"));
    }
    extend(&app, &row, timeout).await?;
    Ok((StatusCode::CREATED, Json(views::sandbox(&row, &app.config))))
}
