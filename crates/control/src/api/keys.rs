//! API keys of the caller's project.

use axum::{
    Json,
    extract::{Path, State},
};
use http::StatusCode;
use space_api::{
    error::{ErrorBody, ErrorCode},
    id::KeyId,
    rest::{CreatedKey, KeyRecord, KeyRole, NewKey},
};

use super::extract::{Caller, JsonBody};
use crate::{app::App, error::ApiError};

/// Characters of a key's name.
const MAX_NAME: usize = 64;

/// Lists keys, oldest first, revoked ones too, without their secrets.
#[utoipa::path(get, path = "/v1/keys", tag = "keys",
    responses((status = 200, body = Vec<KeyRecord>), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn list(State(app): State<App>, caller: Caller) -> Result<Json<Vec<KeyRecord>>, ApiError> {
    Ok(Json(app.store.keys(&caller.0.project.id).await?))
}

/// Makes a key. Its secret is in this answer and nowhere else.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", request_body = NewKey,
    responses((status = 201, body = CreatedKey), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    JsonBody(body): JsonBody<NewKey>,
) -> Result<(StatusCode, Json<CreatedKey>), ApiError> {
    let length = body.name.chars().count();
    if !(1..=MAX_NAME).contains(&length) || body.name.chars().any(char::is_control) {
        return Err(ApiError::bad_request(format!(
            "name must be 1 to {MAX_NAME} printable characters"
        )));
    }
    if body.role == KeyRole::Admin {
        caller.admin("make another admin key")?;
    }
    let (record, key) = app
        .store
        .create_key(&caller.0.project.id, &body.name, body.role)
        .await?;
    let created = CreatedKey {
        record,
        key: key.expose().to_owned(),
    };
    Ok((StatusCode::CREATED, Json(created)))
}

/// Revokes a key at once. A key may revoke itself.
#[utoipa::path(delete, path = "/v1/keys/{keyID}", tag = "keys", params(("keyID" = String, Path)),
    responses((status = 204), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn revoke(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let missing = || {
        ApiError::new(
            StatusCode::NOT_FOUND,
            ErrorCode::KeyNotFound,
            "there is no such API key",
        )
        .hint("GET /v1/keys lists those there are")
    };
    let id: KeyId = id.parse().map_err(|_| missing())?;
    let known = app.store.keys(&caller.0.project.id).await?;
    let Some(record) = known.iter().find(|record| record.id == id.as_str()) else {
        return Err(missing());
    };
    if record.role == KeyRole::Admin {
        caller.admin("revoke an admin key")?;
    }
    let revoked = app.store.revoke_key(&caller.0.project.id, &id).await;
    app.callers.forget();
    if revoked? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(missing())
    }
}
