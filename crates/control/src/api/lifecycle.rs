//! Changing a sandbox's life: ending it, moving its deadline, finding it again.

use axum::{Json, extract::State};
use http::StatusCode;
use jiff::Timestamp;
use space_api::{
    e2b::{ConnectRequest, DEFAULT_TIMEOUT_SECONDS, RefreshRequest, Sandbox, TimeoutRequest},
    error::ErrorBody,
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};
use space_node::NodeError;
use space_store::{End, SandboxRow};

use super::{
    extract::{Caller, JsonBody, PathId},
    views,
};
use crate::{
    app::App,
    create::{after, check::timeout_within},
    error::ApiError,
};

/// Most seconds that one refresh adds, as in E2B.
const MAX_REFRESH_SECONDS: u64 = 3600;

/// Ends a sandbox.
#[utoipa::path(
    delete, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn delete(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<StatusCode, ApiError> {
    let row = caller.live(&app, &id).await?;
    // A task of its own: a client that goes away must not leave the end unrecorded.
    let owner = app.tasks.clone();
    let task = owner.spawn(async move { end_now(&app, &row).await });
    task.await.map_err(|error| ApiError::internal(&error))??;
    Ok(StatusCode::NO_CONTENT)
}

async fn end_now(app: &App, row: &SandboxRow) -> Result<(), ApiError> {
    let id = &row.sandbox.id;
    match app.node.delete(id).await {
        Ok(record) => {
            app.record_end(&record).await?;
        }
        Err(NodeError::NotFound {
            end: Some(record), ..
        }) => {
            app.record_end(&record).await?;
        }
        Err(NodeError::NotFound { end: None, .. }) => {
            // The node has never heard of it, or has forgotten it: it is gone, and the caller wanted that.
            let end = End {
                generation: row.sandbox.generation,
                cause: EndCause::Deleted,
                ended_at: Timestamp::now(),
                cpu_micros: None,
            };
            app.store.end(id, &end, false).await?;
            app.forget_route(id);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Moves the deadline to `timeout` seconds from now, sooner or later than before.
#[utoipa::path(
    post, path = "/sandboxes/{sandboxID}/timeout", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = TimeoutRequest,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn set_timeout(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<TimeoutRequest>,
) -> Result<StatusCode, ApiError> {
    timeout_within(body.timeout, &caller.0.project)?;
    caller.live(&app, &id).await?;
    move_deadline(&app, &id, after(Timestamp::now(), body.timeout)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Keeps a sandbox alive for at least `duration` seconds from now.
#[utoipa::path(
    post, path = "/sandboxes/{sandboxID}/refreshes", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = RefreshRequest,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn refresh(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<RefreshRequest>,
) -> Result<StatusCode, ApiError> {
    let duration = body.duration.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    if duration > MAX_REFRESH_SECONDS {
        return Err(ApiError::bad_request(format!(
            "duration cannot be greater than {MAX_REFRESH_SECONDS} seconds"
        )));
    }
    timeout_within(duration, &caller.0.project)?;
    let row = caller.live(&app, &id).await?;
    extend(&app, &row, duration).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Finds a running sandbox again and keeps it alive for at least `timeout` seconds from now. Kept for older SDKs.
#[utoipa::path(
    post, path = "/sandboxes/{sandboxID}/connect", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = ConnectRequest,
    responses((status = 200, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn connect_v1(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, ApiError> {
    connect(&app, &caller, &id, body).await
}

/// Finds a running sandbox again and keeps it alive for at least `timeout` seconds from now.
#[utoipa::path(
    post, path = "/v2/sandboxes/{sandboxID}/connect", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = ConnectRequest,
    responses((status = 200, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn connect_v2(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, ApiError> {
    connect(&app, &caller, &id, body).await
}

async fn connect(
    app: &App,
    caller: &Caller,
    id: &SandboxId,
    body: ConnectRequest,
) -> Result<Json<Sandbox>, ApiError> {
    let timeout = body.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    timeout_within(timeout, &caller.0.project)?;
    let row = caller.live(app, id).await?;
    if row.state == SandboxState::Creating {
        return Err(ApiError::transitioning(format!(
            "sandbox {id} is still being created"
        )));
    }
    extend(app, &row, timeout).await?;
    Ok(Json(views::sandbox(&row, &app.config)))
}

/// Never shortens.
async fn extend(app: &App, row: &SandboxRow, seconds: u64) -> Result<(), ApiError> {
    let wanted = after(Timestamp::now(), seconds);
    let id = &row.sandbox.id;
    if wanted > row.sandbox.deadline {
        return move_deadline(app, id, wanted).await;
    }
    // Nothing to move, but what is gone must not be answered as found.
    match app.node.status(id).await {
        Ok(_) => Ok(()),
        Err(error) => Err(settled(app, error).await),
    }
}

/// The node first: it is the one that keeps the deadline.
async fn move_deadline(app: &App, id: &SandboxId, deadline: Timestamp) -> Result<(), ApiError> {
    if let Err(error) = app.node.set_deadline(id, deadline).await {
        return Err(settled(app, error).await);
    }
    app.store.set_deadline(id, deadline).await?;
    Ok(())
}

/// The answer to a node's refusal; an end that comes with it is recorded.
async fn settled(app: &App, error: NodeError) -> ApiError {
    if let NodeError::NotFound {
        end: Some(record), ..
    } = &error
        && let Err(error) = app.record_end(record).await
    {
        return error.into();
    }
    error.into()
}
