//! What a refused request is answered with: one body shape and one list of codes for every API.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of every error answer; E2B's shape with a hint added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The HTTP status, repeated.
    pub code: u16,
    /// One sentence for people.
    pub message: String,
    /// For programs; not a closed set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<ErrorCode>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Why a request was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// No API key was sent.
    AuthenticationRequired,
    /// A parameter or field has a value that is not possible.
    BadRequest,
    /// The idempotency key belongs to a create that has not been answered yet.
    IdempotencyInProgress,
    /// The platform stopped in the middle of the create that this key belongs to.
    IdempotencyOutcomeUnknown,
    /// The idempotency key was used with another body.
    IdempotencyRequestMismatch,
    /// The key may not do this.
    Forbidden,
    /// A fault of the platform.
    InternalServerError,
    /// The API key is unknown or revoked.
    InvalidApiKey,
    /// The body is not JSON of the expected form.
    InvalidJson,
    /// The id in the path does not have the form of one.
    InvalidSandboxId,
    /// No such API key in this project.
    KeyNotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// Part of E2B's API, and not of this version.
    NotAvailableYet,
    /// The body is larger than this call takes.
    PayloadTooLarge,
    /// The project's own limit is reached.
    QuotaExceeded,
    /// No such path.
    RouteNotFound,
    /// E2B's `resume` on a sandbox that is not paused.
    SandboxAlreadyRunning,
    /// No node has room.
    SandboxCapacityUnavailable,
    /// A node could not create it this time; everything was undone.
    SandboxCreateFailed,
    /// The daemon inside the sandbox does not answer.
    SandboxGuestUnresponsive,
    /// No node can run sandboxes at all.
    SandboxNoCompatibleNode,
    /// No such sandbox in this project.
    SandboxNotFound,
    /// The sandbox is paused, and this request does not wake it.
    SandboxPaused,
    /// The sandbox could not be paused or resumed and is as it was before.
    SandboxTransitionFailed,
    /// The sandbox is on its way to another state.
    SandboxTransitioning,
    /// The platform is shutting down.
    ShuttingDown,
    /// No such template.
    TemplateNotFound,
    /// The platform did not answer within its own limit.
    Timeout,
    /// More of these at once than the platform serves.
    TooManyRequests,
    /// A code that this version does not know.
    #[serde(other)]
    Unknown,
}

impl fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, " ({hint})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_snake_case_and_unknown_ones_are_read() {
        let body = ErrorBody {
            code: 404,
            message: "no".into(),
            error_code: Some(ErrorCode::TemplateNotFound),
            hint: None,
        };
        let text = serde_json::to_string(&body).expect("serialises");
        assert_eq!(
            text,
            r#"{"code":404,"message":"no","error_code":"template_not_found"}"#
        );
        let later: ErrorBody =
            serde_json::from_str(r#"{"code":400,"message":"m","error_code":"of_a_later_version"}"#)
                .expect("parses");
        assert_eq!(later.error_code, Some(ErrorCode::Unknown));
    }
}
