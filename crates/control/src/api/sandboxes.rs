//! Making sandboxes and looking at one.

use axum::{
    Json,
    extract::{MatchedPath, State},
};
use http::{HeaderMap, StatusCode};
use space_api::{
    e2b::{AutoResume, NetworkConfig, NewSandbox, Sandbox, SandboxDetail},
    error::ErrorBody,
    lifecycle::SandboxState,
    rest::{self, CreatedSandbox, QueueRequest},
};
use space_store::SandboxRow;

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

/// Makes a sandbox and answers when it is ready. Its daemon asks for the access token; under the path without `/v2`, which is kept
/// for older SDKs, only unless `secure` is `false`.
#[utoipa::path(
    post, path = "/v2/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Repeating a request with the same key gives the same answer for 24 hours"),
        ("X-Queue-Timeout" = Option<u64>, Header, description = "Seconds to wait for room, as `queue.timeout_seconds`"),
    ),
    responses(
        (status = 201, body = Sandbox),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, description = "No such template", body = ErrorBody),
        (status = 409, description = "The idempotency key is in use", body = ErrorBody), (status = 413, body = ErrorBody),
        (status = 422, description = "The idempotency key was used for something else", body = ErrorBody),
        (status = 429, description = "Quota reached or no room; retry later", body = ErrorBody), (status = 500, body = ErrorBody),
        (status = 501, description = "A field that this version cannot honour", body = ErrorBody),
        (status = 503, description = "No usable monitor", body = ErrorBody),
    ),
    security(("key" = [])),
)]
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    path: MatchedPath,
    headers: HeaderMap,
    CreateBody(body): CreateBody<NewSandbox>,
) -> Result<(StatusCode, Json<Sandbox>), ApiError> {
    let version = if path.as_str().starts_with("/v2/") {
        Version::V2
    } else {
        Version::V1
    };
    let row = make(&app, &caller, version, &headers, body).await?;
    Ok((StatusCode::CREATED, Json(views::sandbox(&row, &app.config))))
}

/// Makes a sandbox and answers when it is ready. Its daemon always asks for the access token.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "platform", request_body = rest::NewSandbox,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Repeating a request with the same key gives the same answer for 24 hours"),
        ("X-Queue-Timeout" = Option<u64>, Header, description = "Seconds to wait for room, as `queue.timeout_seconds`"),
    ),
    responses(
        (status = 201, body = CreatedSandbox),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, description = "No such template", body = ErrorBody),
        (status = 409, description = "The idempotency key is in use", body = ErrorBody), (status = 413, body = ErrorBody),
        (status = 422, description = "The idempotency key was used for something else", body = ErrorBody),
        (status = 429, description = "Quota reached or no room; retry later", body = ErrorBody), (status = 500, body = ErrorBody),
        (status = 503, description = "No usable monitor", body = ErrorBody),
    ),
    security(("key" = [])),
)]
pub(super) async fn create_own(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    CreateBody(body): CreateBody<rest::NewSandbox>,
) -> Result<(StatusCode, Json<CreatedSandbox>), ApiError> {
    let body = NewSandbox {
        template_id: body.template,
        timeout: body.timeout_seconds,
        metadata: Some(body.metadata),
        labels: Some(body.labels),
        env_vars: Some(body.environment),
        cpu_count: body.vcpus,
        memory_mb: body.memory_mib,
        disk_size_mb: body.disk_mib,
        on_idle: body.on_idle,
        queue: body.queue,
        auto_resume: Some(AutoResume {
            enabled: body.wake_on_traffic,
        }),
        network: Some(NetworkConfig {
            allow_public_traffic: body.public_ports,
            ..NetworkConfig::default()
        }),
        ..NewSandbox::default()
    };
    let row = make(&app, &caller, Version::Own, &headers, body).await?;
    let (access_token, traffic_token) = (
        row.sandbox.access_token.clone(),
        row.sandbox.traffic_token.clone(),
    );
    let status = app.node.status(&row.sandbox.id).await.ok();
    let created = CreatedSandbox {
        record: views::record(row, status),
        access_token,
        traffic_token,
    };
    Ok((StatusCode::CREATED, Json(created)))
}

async fn make(
    app: &App,
    caller: &Caller,
    version: Version,
    headers: &HeaderMap,
    mut body: NewSandbox,
) -> Result<SandboxRow, ApiError> {
    let key = idempotency_key(headers)?;
    if let Some(value) = headers.get("x-queue-timeout") {
        let timeout_seconds = value
            .to_str()
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| ApiError::bad_request("X-Queue-Timeout must be a number of seconds"))?;
        body.queue = Some(QueueRequest { timeout_seconds });
    }
    create::create(app, &caller.0, version, body, key).await
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
    let status = app.node.status(&id).await.ok();
    Ok(Json(views::detail(row, status, &app.config)))
}
