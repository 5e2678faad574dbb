//! What the edge itself answers, in E2B's shapes: JSON for programs, a page for browsers.
//!
//! SDKs look for the words "was not found" and "port is not open".

use std::fmt;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use serde_json::{Value, json};
use space_api::{error::ErrorCode, id::SandboxId, lifecycle::SandboxState};

use super::target::{BadTarget, Routing, Target};

/// A request that goes no further.
#[derive(Debug)]
pub(crate) enum Answer {
    /// No such sandbox, or it has ended.
    NotFound { id: String },
    /// Not a port.
    BadPort { shown: String },
    /// Nothing listens there.
    PortClosed { id: SandboxId, port: u16 },
    /// On its way to another state.
    Transitioning { id: SandboxId, state: SandboxState },
    /// It is paused, and this request does not wake it. `health`: it asked whether it runs; `again`: it would, in a moment.
    Paused {
        id: SandboxId,
        health: bool,
        again: bool,
    },
    /// The access token or signature is missing or wrong.
    Unauthorized { id: SandboxId, why: &'static str },
    /// The traffic token is missing or wrong.
    TrafficToken { id: SandboxId, present: bool },
    /// A path that is not for the public.
    NoSuchPath { id: SandboxId },
    /// A request that means different things to different readers.
    Ambiguous { id: SandboxId, what: &'static str },
    /// Not possible by this address.
    Forbidden { id: SandboxId, why: &'static str },
    /// The daemon does not answer.
    Unresponsive { id: SandboxId, what: String },
    /// The connection to the sandbox broke before it answered.
    Broken { id: SandboxId, what: String },
    /// The program did not answer in time.
    Silent { id: SandboxId, port: u16 },
    /// The platform is shutting down.
    ShuttingDown { id: SandboxId },
    /// A fault of the platform.
    Failed { id: SandboxId, what: String },
}

impl Answer {
    fn parts(&self) -> (StatusCode, Value) {
        let plain = |status: StatusCode, id: &dyn fmt::Display, message: &str| {
            (
                status,
                json!({"sandboxId": id.to_string(), "message": message, "code": status.as_u16()}),
            )
        };
        match self {
            Self::NotFound { id } => plain(StatusCode::BAD_GATEWAY, id, "The sandbox was not found"),
            Self::BadPort { shown } => {
                let message = format!("\"{shown}\" is not a port");
                (
                    StatusCode::BAD_REQUEST,
                    json!({"message": message, "code": StatusCode::BAD_REQUEST.as_u16()}),
                )
            }
            Self::PortClosed { id, port } => (
                StatusCode::BAD_GATEWAY,
                json!({
                    "sandboxId": id.as_str(), "message": "The sandbox is running but port is not open",
                    "port": port, "code": StatusCode::BAD_GATEWAY.as_u16(),
                }),
            ),
            Self::Transitioning { id, state } => {
                let message = match state {
                    SandboxState::Creating => "The sandbox is still being created",
                    _ => "The sandbox is on its way to another state",
                };
                plain(StatusCode::CONFLICT, id, message)
            }
            Self::Paused { id, health, again } => {
                // SDKs take 502 for "it does not run", and anything else for a failure of the question.
                let status = if *health {
                    StatusCode::BAD_GATEWAY
                } else {
                    StatusCode::CONFLICT
                };
                let message = if *again {
                    "The sandbox was paused again a moment ago"
                } else {
                    "The sandbox is paused"
                };
                (
                    status,
                    json!({
                        "sandboxId": id.as_str(), "message": message, "code": status.as_u16(),
                        "error_code": ErrorCode::SandboxPaused,
                        "hint": format!("connect to it, or POST /v1/sandboxes/{id}/resume; created with autoResume, traffic to its ports wakes it"),
                    }),
                )
            }
            Self::Unauthorized { id, why } => plain(StatusCode::UNAUTHORIZED, id, why),
            Self::TrafficToken { id, present } => {
                let message = if *present {
                    "The traffic access token is invalid"
                } else {
                    "The traffic access token is missing: send it as E2B-Traffic-Access-Token"
                };
                plain(StatusCode::FORBIDDEN, id, message)
            }
            Self::NoSuchPath { id } => plain(StatusCode::NOT_FOUND, id, "There is no such path"),
            Self::Ambiguous { id, what } => plain(StatusCode::BAD_REQUEST, id, what),
            Self::Forbidden { id, why } => plain(StatusCode::FORBIDDEN, id, why),
            Self::Unresponsive { id, .. } => plain(
                StatusCode::GATEWAY_TIMEOUT,
                id,
                "The sandbox is running but its daemon does not answer",
            ),
            Self::Broken { id, .. } => plain(
                StatusCode::SERVICE_UNAVAILABLE,
                id,
                "The connection to the sandbox ended before it answered",
            ),
            Self::Silent { id, .. } => plain(
                StatusCode::GATEWAY_TIMEOUT,
                id,
                "The sandbox is running but what listens on the port did not answer",
            ),
            Self::ShuttingDown { id } => plain(
                StatusCode::SERVICE_UNAVAILABLE,
                id,
                "The platform is shutting down",
            ),
            Self::Failed { id, .. } => plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                id,
                "The platform failed to reach the sandbox",
            ),
        }
    }

    /// As JSON, or as a page if `page`.
    pub(crate) fn into_response(self, page: bool) -> Response {
        if let Self::Failed { id, what } = &self {
            tracing::error!(sandbox = %id, error = what, "edge failed");
        }
        let (status, body) = self.parts();
        let mut response = if page {
            html(status, &body)
        } else {
            (status, axum::Json(body)).into_response()
        };
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        let again = matches!(
            self,
            Self::Paused { again: true, .. } | Self::Transitioning { .. }
        );
        if status == StatusCode::SERVICE_UNAVAILABLE || again {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (status, body) = self.parts();
        write!(
            f,
            "{} {}",
            status.as_u16(),
            body["message"].as_str().unwrap_or_default()
        )?;
        match self {
            Self::Unresponsive { what, .. } | Self::Broken { what, .. } | Self::Failed { what, .. } => {
                write!(f, ": {what}")
            }
            Self::Silent { port, .. } => write!(f, " ({port})"),
            _ => Ok(()),
        }
    }
}

/// The answer to a request that names no possible sandbox.
pub(crate) fn bad_target(bad: &BadTarget, headers: &HeaderMap) -> Response {
    let answer = match bad {
        BadTarget::Id { shown } => Answer::NotFound { id: shown.clone() },
        BadTarget::Port { shown } => Answer::BadPort { shown: shown.clone() },
    };
    answer.into_response(wants_page(headers))
}

/// Whether the client is a browser that shows a page.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/html"))
}

/// `/sandbox/<id>/<port>` to the same with a slash, without which relative links would miss.
pub(super) fn add_slash(target: &Target, uri: &Uri) -> Response {
    let Routing::Path { prefix, .. } = &target.routing else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let location = uri
        .query()
        .map_or_else(|| format!("{prefix}/"), |query| format!("{prefix}/?{query}"));
    let Ok(location) = HeaderValue::from_str(&location) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    (
        StatusCode::TEMPORARY_REDIRECT,
        [(header::LOCATION, location)],
        Body::empty(),
    )
        .into_response()
}

fn html(status: StatusCode, body: &Value) -> Response {
    let message = escape(body["message"].as_str().unwrap_or_default());
    let id = escape(body["sandboxId"].as_str().unwrap_or_default());
    let port = body["port"]
        .as_u64()
        .map_or_else(String::new, |port| format!("<dt>port</dt><dd>{port}</dd>"));
    let code = status.as_u16();
    let page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{code} {message}</title>\
         <style>body{{font-family:sans-serif;max-width:40em;margin:4em auto;padding:0 1em}}dd{{font-family:monospace}}</style>\
         </head><body><h1>{message}</h1><dl><dt>sandbox</dt><dd>{id}</dd>{port}</dl></body></html>"
    );
    let mut response = (status, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response();
    response.headers_mut().insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; sandbox"),
    );
    response
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}
