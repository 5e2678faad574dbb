//! What handlers take out of a request: who asks, ids, bodies. Each refusal is typed.

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Path, Request},
};
use http::{HeaderMap, StatusCode, header, request::Parts};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use space_api::{error::ErrorCode, id::SandboxId, key::ApiKey, rest::KeyRole};
use space_store::{Principal, SandboxRow};

use crate::{app::App, error::ApiError};

/// The authenticated caller.
pub(super) struct Caller(pub(super) Principal);

impl FromRequestParts<App> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let Some(text) = presented_key(&parts.headers) else {
            return Err(ApiError::new(
                StatusCode::UNAUTHORIZED,
                ErrorCode::AuthenticationRequired,
                "no API key was sent",
            )
            .hint(
                "send it as X-API-KEY, or set E2B_API_KEY for E2B's SDKs; `space up` prints the first one",
            ));
        };
        let key: ApiKey = text.parse().map_err(|_| ApiError::invalid_key())?;
        let principal = app
            .callers
            .find(app.store.as_ref(), &key)
            .await?
            .ok_or_else(ApiError::invalid_key)?;
        Ok(Self(principal))
    }
}

impl Caller {
    /// Refuses keys that may not do what concerns all projects. `what` goes on after "may".
    pub(super) fn admin(&self, what: &str) -> Result<(), ApiError> {
        match self.0.role {
            KeyRole::Admin => Ok(()),
            KeyRole::Project => Err(ApiError::forbidden(what)),
        }
    }

    /// The sandbox, if it is the caller's and has not ended.
    pub(super) async fn live(&self, app: &App, id: &SandboxId) -> Result<SandboxRow, ApiError> {
        let row = self.any(app, id).await?;
        if row.state == space_api::lifecycle::SandboxState::Ended {
            return Err(ApiError::sandbox_not_found(id));
        }
        Ok(row)
    }

    /// The sandbox, if it is the caller's, live or ended.
    pub(super) async fn any(&self, app: &App, id: &SandboxId) -> Result<SandboxRow, ApiError> {
        app.store
            .sandbox(id)
            .await?
            .filter(|row| row.sandbox.project == self.0.project.id)
            .ok_or_else(|| ApiError::sandbox_not_found(id))
    }
}

fn presented_key(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.to_str().unwrap_or_default());
    }
    headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
}

/// Whether an `Authorization` value carries an API key, which no guest may see.
pub(crate) fn api_key_shaped(value: &http::HeaderValue) -> bool {
    value
        .to_str()
        .ok()
        .and_then(|value| value.split_once(' '))
        .is_some_and(|(_, secret)| secret.trim().parse::<ApiKey>().is_ok())
}

/// The sandbox id in the path. Old SDKs append `-<client id>`, which is ignored.
pub(super) struct PathId(pub(super) SandboxId);

impl FromRequestParts<App> for PathId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, app)
            .await
            .map_err(|_| ApiError::bad_request("the path is not UTF-8"))?;
        sandbox_id(&text).map(Self)
    }
}

/// Parses a sandbox id, with or without a client id.
pub(super) fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    let id = text.split_once('-').map_or(text, |(id, _)| id);
    id.parse().map_err(|error: space_api::id::ParseIdError| {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            ErrorCode::InvalidSandboxId,
            error.to_string(),
        )
    })
}

/// A JSON body of at most [`Limits::api_body`](crate::Limits::api_body) bytes. An empty one stands for `{}`.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<App> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        json(request.into_body(), app.config.limits.api_body)
            .await
            .map(Self)
    }
}

/// A JSON body of at most [`Limits::create_body`](crate::Limits::create_body) bytes.
pub(super) struct CreateBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<App> for CreateBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        json(request.into_body(), app.config.limits.create_body)
            .await
            .map(Self)
    }
}

async fn json<T: DeserializeOwned>(body: Body, limit: usize) -> Result<T, ApiError> {
    let bytes = match Limited::new(body, limit).collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Err(ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                ErrorCode::PayloadTooLarge,
                format!("the body is larger than {limit} bytes"),
            )
            .hint("put large data into the sandbox's files"));
        }
        Err(_) => return Err(ApiError::bad_request("the body broke off")),
    };
    let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    serde_json::from_slice(text).map_err(|error| {
        // Values may be long and secret: only the kind of fault and its place are told.
        let why: String = error.to_string().chars().take(160).collect();
        let why = match error.classify() {
            serde_json::error::Category::Data => why,
            _ => format!("syntax error at line {} column {}", error.line(), error.column()),
        };
        ApiError::new(
            StatusCode::BAD_REQUEST,
            ErrorCode::InvalidJson,
            format!("the body is not valid: {why}"),
        )
        .hint("GET /openapi.json describes it")
    })
}

/// The query string, decoded into pairs. Every key may occur once.
pub(super) struct Query(std::collections::BTreeMap<String, String>);

impl FromRequestParts<App> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, ApiError> {
        let mut pairs = std::collections::BTreeMap::new();
        for (key, value) in url::form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            // Lists are sent as `state=running,paused` by some and as `state=running&state=paused` by others.
            pairs
                .entry(key.into_owned())
                .and_modify(|known: &mut String| {
                    known.push(',');
                    known.push_str(&value);
                })
                .or_insert_with(|| value.to_string());
        }
        Ok(Self(pairs))
    }
}

impl Query {
    /// The value of `key`, unless it is absent or empty.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.0
            .get(key)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// Whether `key` is there and does not say no.
    pub(super) fn flag(&self, key: &str) -> bool {
        self.0
            .get(key)
            .is_some_and(|value| value != "false" && value != "0")
    }

    /// The value of `key`, parsed.
    pub(super) fn parsed<T: std::str::FromStr>(
        &self,
        key: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        self.text(key)
            .map(|text| {
                text.parse()
                    .map_err(|_| ApiError::bad_request(format!("{key} must be {expected}")))
            })
            .transpose()
    }
}
