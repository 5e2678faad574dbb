//! Making sandboxes and looking at one.

use axum::{Json, extract::State};
use http::{HeaderMap, StatusCode};
use space_api::{
    e2b::{NewSandbox, Sandbox, SandboxDetail},
    error::ErrorBody,
    lifecycle::SandboxState,
};

use super::{
    extract::{Caller, CreateBody, PathId},
    views,
};
use crate::{
    app::App,
    create::{self, Version},
    error::ApiError,
};

/// Longest idempotency key, in characters of `[A-Za-z0-9_-]`.
const MAX_IDEMPOTENCY_KEY: usize = 255;

/// Makes a sandbox and answers when it is ready. Kept for older SDKs.
#[utoipa::path(
    post, path = "/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "Repeating a request with the same key gives the same answer for 24 hours")),
    responses(
        (status = 201, body = Sandbox),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, description = "No such template", body = ErrorBody),
        (status = 409, description = "The idempotency key is in use", body = ErrorBody), (status = 413, body = ErrorBody),
        (status = 422, description = "The idempotency key was used for something else", body = ErrorBody),
        (status = 429, description = "Quota reached; retry later", body = ErrorBody), (status = 500, body = ErrorBody),
        (status = 501, description = "A field that this version cannot honour", body = ErrorBody),
        (status = 503, description = "No room or no usable monitor", body = ErrorBody),
    ),
    security(("key" = [])),
)]
pub(super) async fn create_v1(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    CreateBody(body): CreateBody<NewSandbox>,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    make(&app, &caller, Version::V1, &headers, body).await
}

/// Makes a sandbox and answers when it is ready. Its daemon always asks for the access token.
#[utoipa::path(
    post, path = "/v2/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "Repeating a request with the same key gives the same answer for 24 hours")),
    responses(
        (status = 201, body = Sandbox),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, description = "No such template", body = ErrorBody),
        (status = 409, description = "The idempotency key is in use", body = ErrorBody), (status = 413, body = ErrorBody),
        (status = 422, description = "The idempotency key was used for something else", body = ErrorBody),
        (status = 429, description = "Quota reached; retry later", body = ErrorBody), (status = 500, body = ErrorBody),
        (status = 501, description = "A field that this version cannot honour", body = ErrorBody),
        (status = 503, description = "No room or no usable monitor", body = ErrorBody),
    ),
    security(("key" = [])),
)]
pub(super) async fn create_v2(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    CreateBody(body): CreateBody<NewSandbox>,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    make(&app, &caller, Version::V2, &headers, body).await
}

async fn make(
    app: &App,
    caller: &Caller,
    version: Version,
    headers: &HeaderMap,
    body: NewSandbox,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    let key = idempotency_key(headers)?;
    let row = create::create(app, &caller.0.project, version, body, key).await?;
    Ok((StatusCode::CREATED, Json(views::sandbox(&row, &app.config))))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    let key = value.to_str().unwrap_or_default();
    let usable = (1..=MAX_IDEMPOTENCY_KEY).contains(&key.len())
        && key
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if usable {
        Ok(Some(key.to_owned()))
    } else {
        Err(ApiError::bad_request(
            "Idempotency-Key must be 1 to 255 characters of a-z, A-Z, 0-9, - and _",
        ))
    }
}

/// Shows a live sandbox.
#[utoipa::path(
    get, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxDetail), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, description = "Not ready yet", body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn detail(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
) -> Result<Json<SandboxDetail>, ApiError> {
    let row = caller.live(&app, &id).await?;
    if row.state == SandboxState::Creating {
        return Err(ApiError::transitioning(format!(
            "sandbox {id} is still being created"
        )));
    }
    Ok(Json(views::detail(row, &app.config)))
}
