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
    deadlines::{self, NotMoved},
    error::ApiError,
    transitions::{self, is_asleep},
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
            app.end(id, &end, false).await?;
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
    match deadlines::set(&app, &id, after(Timestamp::now(), body.timeout)).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error) => Err(not_moved(&app, error).await),
    }
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

/// Finds a sandbox again, lets it run on if it is paused, and keeps it alive for at least `timeout` seconds from now. The path
/// without `/v2` is kept for older SDKs.
#[utoipa::path(
    post, path = "/v2/sandboxes/{sandboxID}/connect", tag = "sandboxes", params(("sandboxID" = String, Path)), request_body = ConnectRequest,
    responses(
        (status = 200, description = "It was running", body = Sandbox), (status = 201, description = "It was paused and runs on", body = Sandbox),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    ),
    security(("key" = [])),
)]
pub(super) async fn connect(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    JsonBody(body): JsonBody<ConnectRequest>,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    let timeout = body.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    timeout_within(timeout, &caller.0.project)?;
    let row = caller.live(&app, &id).await?;
    if row.state == SandboxState::Creating {
        return Err(ApiError::transitioning(format!(
            "sandbox {id} is still being created"
        )));
    }
    // The deadline first, lest it passes while the machine is being woken.
    extend(&app, &row, timeout).await?;
    let status = if wake_up(&app, &id).await? {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(views::sandbox(&row, &app.config))))
}

/// Lets it run if it does not; whether it did not.
pub(super) async fn wake_up(app: &App, id: &SandboxId) -> Result<bool, ApiError> {
    let status = match app.node.status(id).await {
        Ok(status) => status,
        Err(error) => return Err(settled(app, error).await),
    };
    let standing = NodeError::Transitioning {
        id: id.clone(),
        state: status.state,
    };
    if !is_asleep(&standing) {
        return Ok(false);
    }
    match transitions::connect(app, id).await {
        Ok(_) => Ok(true),
        Err(error) => Err(settled(app, error).await),
    }
}

/// Never shortens; the deadline it has then.
pub(super) async fn extend(app: &App, row: &SandboxRow, seconds: u64) -> Result<Timestamp, ApiError> {
    let wanted = after(Timestamp::now(), seconds);
    match deadlines::at_least(app, &row.sandbox.id, wanted).await {
        Ok(deadline) => Ok(deadline),
        Err(error) => Err(not_moved(app, error).await),
    }
}

async fn not_moved(app: &App, error: NotMoved) -> ApiError {
    match error {
        NotMoved::Node(error) => settled(app, error).await,
        NotMoved::Store(error) => error.into(),
    }
}

/// The answer to a node's refusal; an end that comes with it is recorded.
pub(super) async fn settled(app: &App, error: NodeError) -> ApiError {
    if let NodeError::NotFound {
        end: Some(record), ..
    } = &error
        && let Err(error) = app.record_end(record).await
    {
        return error.into();
    }
    error.into()
}
