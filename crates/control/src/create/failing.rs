//! What becomes of a create that does not come to be: it is undone, and its caller is told what to do.

use http::StatusCode;
use jiff::Timestamp;
use space_api::{error::ErrorCode, id::SandboxId, lifecycle::EndCause};
use space_node::NodeError;
use space_store::{End, NewSandbox, Prior, SandboxRow};

use crate::{app::App, error::ApiError};

/// Bytes of a cause in words that are kept, about.
const MOST_DETAIL: usize = 2048;

/// Whether what is undone leaves room for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Freed,
    /// The node never had any.
    AsBefore,
}

/// It failed, in words.
pub(super) fn failed(why: &str) -> EndCause {
    EndCause::CreateFailed {
        detail: why.chars().take(MOST_DETAIL).collect(),
    }
}

/// Why a create ended that the node did not finish: as the node has it, where it has an end of it.
pub(super) fn cause_of(error: &NodeError) -> EndCause {
    match error {
        NodeError::NotFound {
            end: Some(record), ..
        } => record.cause.clone(),
        error => failed(&error.to_string()),
    }
}

/// Ends what a failed create has left, in the store and on the node, and frees its idempotency key.
pub(super) async fn undo(app: &App, new: &NewSandbox, cause: EndCause, room: Room) {
    match app.node.delete(&new.id).await {
        Ok(_) | Err(NodeError::NotFound { .. }) => {}
        Err(error) => {
            tracing::warn!(%error, "the remains of a failed create stay until the controller finds them");
        }
    }
    let end = End {
        generation: new.generation,
        cause,
        ended_at: Timestamp::now(),
        cpu_micros: None,
    };
    let ended = match room {
        Room::Freed => app.end(&new.id, &end, true).await,
        Room::AsBefore => app.store.end(&new.id, &end, true).await,
    };
    if let Err(error) = ended {
        tracing::error!(error = %crate::error::chain(&error), "the end of a failed create was not recorded");
    }
}

/// The answer to a create that the node did not finish. That its sandbox is not there is no news to who asked for it.
pub(super) fn not_finished(id: &SandboxId, error: NodeError) -> ApiError {
    match error {
        NodeError::NotFound { end, .. } => match end.map(|record| record.cause) {
            // The next node makes it.
            Some(EndCause::PlatformShutdown | EndCause::PlatformRestarted) => ApiError::shutting_down(),
            cause => ended(id, cause.as_ref()),
        },
        error => error.into(),
    }
}

/// The answer where the books say that it ended while it was made.
pub(super) async fn ended_while_creating(app: &App, id: &SandboxId) -> ApiError {
    match app.store.sandbox(id).await {
        Ok(row) => ended(id, row.and_then(|row| row.end_cause).as_ref()),
        Err(error) => error.into(),
    }
}

fn ended(id: &SandboxId, cause: Option<&EndCause>) -> ApiError {
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        ErrorCode::SandboxCreateFailed,
        format!("sandbox {id} ended before its create was answered"),
    )
    .hint(cause.map_or_else(
        || "try again".to_owned(),
        |cause| format!("cause: {}", serde_json::to_string(cause).unwrap_or_default()),
    ))
}

/// What an earlier request with the same idempotency key was answered.
pub(super) fn answer_again(prior: Prior) -> Result<SandboxRow, ApiError> {
    match prior {
        Prior::Done(row) => Ok(*row),
        Prior::InProgress => Err(ApiError::new(
            StatusCode::CONFLICT,
            ErrorCode::IdempotencyInProgress,
            "a create with this idempotency key is still in progress",
        )
        .hint("repeat the request in a moment to get its answer")),
        Prior::Unknown => Err(ApiError::new(
            StatusCode::CONFLICT,
            ErrorCode::IdempotencyOutcomeUnknown,
            "the platform stopped before the create with this idempotency key was answered",
        )
        .hint("list your sandboxes, then create with a new key if it is not among them")),
        Prior::Mismatch => Err(ApiError::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            ErrorCode::IdempotencyRequestMismatch,
            "this idempotency key was used with a different request",
        )
        .hint("use a new idempotency key for each different create")),
    }
}
