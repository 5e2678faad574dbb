//! The one place where failures become HTTP answers of the API.

use std::error::Error;

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use space_api::{
    error::{ErrorBody, ErrorCode},
    id::SandboxId,
    lifecycle::SandboxState,
};
use space_node::NodeError;
use space_store::StoreError;

/// Seconds after which a refusal may be tried again, if nobody knows better.
const RETRY_AFTER: u64 = 1;
/// Most seconds that anybody is told to wait.
const MAX_RETRY_AFTER: u64 = 60;

/// When the platform may be there again after it was stopped, milliseconds: it is mostly stopped to be started anew.
const RESTART_MS: u64 = 3000;

/// A refused API request.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: Box<ErrorBody>,
    /// Whether SDKs should repeat the request by themselves; `None` leaves it to their own rules.
    retry: Option<bool>,
    /// Seconds until then.
    after: u64,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            status,
            body: Box::new(ErrorBody {
                code: status.as_u16(),
                message: message.into(),
                error_code: Some(code),
                hint: None,
            }),
            retry: None,
            after: RETRY_AFTER,
        }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }

    fn retry(mut self, retry: bool) -> Self {
        self.retry = Some(retry);
        self
    }

    /// Says when, rounded up to seconds.
    fn after(mut self, milliseconds: u64) -> Self {
        self.after = milliseconds.div_ceil(1000).clamp(RETRY_AFTER, MAX_RETRY_AFTER);
        self
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::BadRequest, message)
    }

    pub(crate) fn sandbox_not_found(id: &SandboxId) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            ErrorCode::SandboxNotFound,
            format!("sandbox \"{id}\" was not found"),
        )
        .hint(format!(
            "if it has ended, GET /v1/sandboxes/{id} tells when and why"
        ))
    }

    pub(crate) fn not_available(feature: &str) -> Self {
        Self::new(
            StatusCode::NOT_IMPLEMENTED,
            ErrorCode::NotAvailableYet,
            format!("{feature} is not available in this version"),
        )
    }

    pub(crate) fn transitioning(what: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, ErrorCode::SandboxTransitioning, what)
            .hint("wait a moment and ask again")
    }

    /// The project has no room of its own left.
    pub(crate) fn quota(message: String) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorCode::QuotaExceeded, message)
            .hint("delete sandboxes that are no longer needed, or wait for it: queue.timeout_seconds in the body or X-Queue-Timeout")
            .retry(true)
    }

    /// The installation has no room, now.
    pub(crate) fn no_room(message: String, retry_after_ms: Option<u64>) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            ErrorCode::SandboxCapacityUnavailable,
            message,
        )
        .hint("try again when other sandboxes have ended, or wait for it: queue.timeout_seconds in the body or X-Queue-Timeout")
        .retry(true)
        .after(retry_after_ms.unwrap_or_default())
    }

    pub(crate) fn too_many(what: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorCode::TooManyRequests, what).retry(true)
    }

    pub(crate) fn invalid_key() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            ErrorCode::InvalidApiKey,
            "the API key is unknown or revoked",
        )
        .hint("use a key of this installation; `space up` prints the first one")
    }

    pub(crate) fn forbidden(what: &str) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            ErrorCode::Forbidden,
            format!("only an admin key may {what}"),
        )
        .hint("`space up` keeps one in its data directory; GET /v1/keys shows each key's role")
    }

    pub(crate) fn shutting_down() -> Self {
        NodeError::ShuttingDown.into()
    }

    pub(crate) fn paused(id: &SandboxId) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            ErrorCode::SandboxPaused,
            format!("sandbox {id} is paused"),
        )
        .hint(format!(
            "POST /v1/sandboxes/{id}/resume lets it run on, and so does connect"
        ))
    }

    pub(crate) fn internal(error: &dyn Error) -> Self {
        tracing::error!(error = %chain(error), "request failed");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            ErrorCode::InternalServerError,
            "the platform failed to serve this request",
        )
        .hint("the platform's log has the cause")
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(&error)
    }
}

impl From<NodeError> for ApiError {
    fn from(error: NodeError) -> Self {
        let message = error.to_string();
        match error {
            NodeError::NotFound { id, .. } => Self::sandbox_not_found(&id),
            // One that is being ended will not be back.
            NodeError::Transitioning {
                id,
                state: SandboxState::Stopping | SandboxState::Ended,
            } => Self::sandbox_not_found(&id),
            NodeError::Transitioning { .. } => Self::transitioning(message),
            NodeError::Paused { id } => Self::paused(&id),
            NodeError::TransitionFailed { .. } => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ErrorCode::SandboxTransitionFailed,
                message,
            )
            .hint("it is as it was before; try again")
            .retry(true),
            NodeError::TemplateNotFound { name } => template_not_found(&name),
            NodeError::NoCapacity { retry_after_ms, .. } => Self::no_room(message, Some(retry_after_ms)),
            NodeError::VmmUnavailable { .. } => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ErrorCode::SandboxNoCompatibleNode,
                message,
            )
            .hint("run `space doctor` on the node")
            .retry(false),
            NodeError::GuestUnresponsive { .. } => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                ErrorCode::SandboxGuestUnresponsive,
                message,
            )
            .hint("the sandbox may be out of memory; delete it if it does not recover"),
            NodeError::CreateFailed { .. } => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                ErrorCode::SandboxCreateFailed,
                message,
            )
            .hint("everything was undone; try again, and see the platform's log if it persists")
            .retry(true),
            NodeError::ShuttingDown => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::ShuttingDown, message)
                    .hint("try again when the platform has been started again")
                    .retry(true)
                    .after(RESTART_MS)
            }
            NodeError::Internal { .. } => Self::internal(&error),
        }
    }
}

pub(crate) fn template_not_found(name: &str) -> ApiError {
    let shown: String = name.chars().take(128).flat_map(char::escape_debug).collect();
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorCode::TemplateNotFound,
        format!("template '{shown}' not found"),
    )
    .hint("GET /templates lists those there are")
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(*self.body)).into_response();
        if let Some(retry) = self.retry {
            let value = HeaderValue::from_static(if retry { "true" } else { "false" });
            response.headers_mut().insert("should-retry", value);
            if retry {
                response
                    .headers_mut()
                    .insert(header::RETRY_AFTER, HeaderValue::from(self.after));
            }
        }
        response
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
