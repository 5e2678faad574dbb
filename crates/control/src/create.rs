//! Making a sandbox: the one operation whose order matters.
//!
//! 1. Refuse what this version cannot honour.
//! 2. Reserve: quotas, idempotency key and the row `creating`, in one transaction.
//! 3. Start the machine on the node, and meanwhile write the reservation through to the disk.
//! 4. Mark it `running` (idempotency key `done`), answer.
//!
//! Whatever fails after 2 ends the row with a cause, frees the idempotency key and leaves nothing on the node. The whole is a
//! task of its own: a client that goes away does not stop it half-way. A kill at any point leaves a row `creating`,
//! which the controller settles.

use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest as _, Sha256};
use space_api::{
    e2b::{DEFAULT_TIMEOUT_SECONDS, NewSandbox as Body},
    error::ErrorCode,
    id::SandboxId,
    key::{hex, random_token},
    lifecycle::EndCause,
    size::SizeClass,
};
use space_node::{CreateSandbox, NodeError, SandboxStatus, TemplateInfo};
use space_store::{Claim, End, NewSandbox, Prior, Project, Quota, Ready, Reservation, SandboxRow};
use tracing::Instrument as _;

use crate::{
    app::{App, begin_create},
    error::ApiError,
};
use http::StatusCode;

pub(crate) mod check;

/// Creates that took longer than this get their full time again from the moment they are ready.
const SLOW_CREATE: std::time::Duration = std::time::Duration::from_secs(1);

/// Which of E2B's two create calls was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// `secure` may be `false`.
    V1,
    /// Always secured.
    V2,
}

/// Makes a sandbox, or answers an earlier request with the same idempotency key again.
pub(crate) async fn create(
    app: &App,
    project: &Project,
    version: Version,
    body: Body,
    idempotency_key: Option<String>,
) -> Result<SandboxRow, ApiError> {
    check::fields(&body, project)?;
    let app = app.clone();
    let project = project.clone();
    let span = tracing::info_span!("create", sandbox = tracing::field::Empty, template = %body.template_id);
    let owner = app.tasks.clone();
    let task = owner
        .spawn(async move { run(&app, &project, version, body, idempotency_key).await }.instrument(span));
    task.await.map_err(|error| ApiError::internal(&error))?
}

async fn run(
    app: &App,
    project: &Project,
    version: Version,
    body: Body,
    idempotency_key: Option<String>,
) -> Result<SandboxRow, ApiError> {
    let began = Instant::now();
    let now = Timestamp::now();
    let request_hash = request_hash(version, &body);
    let size = size(app, &body).await?;
    let timeout = body.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    let secured = version == Version::V2 || body.secure.unwrap_or(true);
    let network = body.network.unwrap_or_default();
    let public = network.allow_public_traffic.unwrap_or(true);
    let new = NewSandbox {
        id: SandboxId::random(),
        project: project.id.clone(),
        template: body.template_id,
        size: size.unwrap_or(SizeClass::DEFAULT),
        generation: 1,
        metadata: body.metadata.unwrap_or_default(),
        access_token: secured.then(random_token),
        traffic_token: (!public).then(random_token),
        mask_request_host: network.mask_request_host,
        started_at: now,
        deadline: after(now, timeout),
    };
    tracing::Span::current().record("sandbox", tracing::field::display(&new.id));

    let claim = idempotency_key.map(|key| Claim {
        key,
        request_hash,
        now,
    });
    let _in_flight = begin_create(app, &new.id);
    match app.store.reserve(&new, claim.as_ref()).await? {
        Reservation::Reserved => {}
        Reservation::QuotaExceeded { quota, limit } => return Err(quota_error(quota, limit)),
        Reservation::Used(prior) => return answer_again(prior),
    }
    let reserved = began.elapsed();

    let request = CreateSandbox {
        id: new.id.clone(),
        project: project.id.clone(),
        template: new.template.clone(),
        size,
        generation: new.generation,
        environment: body.env_vars.unwrap_or_default(),
        deadline: new.deadline,
        on_idle: None,
    };
    let (made, flushed) = tokio::join!(app.node.create(request), app.store.flush());
    let status = match made {
        Ok(status) => status,
        Err(error) => {
            undo(app, &new, &error.to_string()).await;
            return Err(error.into());
        }
    };
    if let Err(error) = flushed {
        undo(app, &new, "its record could not be made durable").await;
        return Err(error.into());
    }
    let started = began.elapsed();
    let row = finish(app, new, timeout, status, started > SLOW_CREATE).await?;
    tracing::info!(
        reserved_us = micros(reserved),
        node_us = micros(started.saturating_sub(reserved)),
        total_us = micros(began.elapsed()),
        "sandbox created"
    );
    Ok(row)
}

/// Records that it runs.
async fn finish(
    app: &App,
    mut new: NewSandbox,
    timeout: u64,
    status: SandboxStatus,
    slow: bool,
) -> Result<SandboxRow, ApiError> {
    let ready = Ready {
        template: status.template.clone(),
        template_digest: status.template_digest.clone(),
        size: status.size,
        ready_ms: status.ready_ms,
    };
    let marked = match app.store.mark_running(&new.id, new.generation, &ready).await {
        Ok(marked) => marked,
        Err(error) => {
            undo(app, &new, "its record could not be written").await;
            return Err(error.into());
        }
    };
    if !marked {
        return Err(ended_while_creating(app, &new.id).await);
    }
    if slow {
        let deadline = after(Timestamp::now(), timeout);
        if app.node.set_deadline(&new.id, deadline).await.is_ok() {
            app.store.set_deadline(&new.id, deadline).await?;
            new.deadline = deadline;
        }
    }
    new.template = status.template;
    new.size = status.size;
    let row = SandboxRow {
        sandbox: new,
        state: space_api::lifecycle::SandboxState::Running,
        template_digest: status.template_digest,
        ended_at: None,
        end_cause: None,
        ready_ms: status.ready_ms,
        cpu_micros: None,
    };
    app.learn_route(&row);
    Ok(row)
}

/// Ends what a failed create has left, in the store and on the node.
async fn undo(app: &App, new: &NewSandbox, why: &str) {
    match app.node.delete(&new.id).await {
        Ok(_) | Err(NodeError::NotFound { .. }) => {}
        Err(error) => {
            tracing::warn!(%error, "the remains of a failed create stay until the controller finds them");
        }
    }
    let end = End {
        generation: new.generation,
        cause: EndCause::CreateFailed {
            detail: why.chars().take(2048).collect(),
        },
        ended_at: Timestamp::now(),
        cpu_micros: None,
    };
    if let Err(error) = app.store.end(&new.id, &end, true).await {
        tracing::error!(error = %crate::error::chain(&error), "the end of a failed create was not recorded");
    }
}

async fn ended_while_creating(app: &App, id: &SandboxId) -> ApiError {
    let cause = match app.store.sandbox(id).await {
        Ok(row) => row.and_then(|row| row.end_cause),
        Err(error) => return error.into(),
    };
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        ErrorCode::SandboxCreateFailed,
        format!("sandbox {id} ended before its create was answered"),
    )
    .hint(cause.map_or_else(
        || "try again".to_owned(),
        |cause| format!("cause: {}", serde_json::to_string(&cause).unwrap_or_default()),
    ))
}

fn answer_again(prior: Prior) -> Result<SandboxRow, ApiError> {
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

fn quota_error(quota: Quota, limit: u64) -> ApiError {
    let what = match quota {
        Quota::Sandboxes => "concurrent sandboxes",
        Quota::Vcpus => "vCPUs in use",
        Quota::Memory => "MiB of memory in use",
    };
    ApiError::quota(what, limit)
}

/// What was asked for, or `None` for the template's own default. What is not named is the template's.
async fn size(app: &App, body: &Body) -> Result<Option<SizeClass>, ApiError> {
    let default = app
        .templates()
        .await?
        .iter()
        .find(|template| names(template, &body.template_id))
        .map(|template| template.default_size);
    if body.cpu_count.is_none() && body.memory_mb.is_none() && body.disk_size_mb.is_none() {
        return Ok(default);
    }
    let default = default.unwrap_or(SizeClass::DEFAULT);
    SizeClass::new(
        body.cpu_count.unwrap_or(default.vcpus),
        body.memory_mb.unwrap_or(default.memory_mib),
        body.disk_size_mb.unwrap_or(default.disk_mib),
    )
    .map(Some)
    .map_err(|error| ApiError::bad_request(error.to_string()))
}

/// Whether `asked` (bare name, `name:tag` or digest) means this template.
pub(crate) fn names(template: &TemplateInfo, asked: &str) -> bool {
    template.name == asked
        || template.digest == asked
        || template
            .name
            .split_once(':')
            .is_some_and(|(bare, _)| bare == asked)
}

fn request_hash(version: Version, body: &Body) -> String {
    let mut hasher = Sha256::new();
    hasher.update(if version == Version::V1 { b"v1" } else { b"v2" });
    // Maps are ordered, so equal requests have equal text.
    hasher.update(serde_json::to_vec(body).unwrap_or_default());
    hex(&hasher.finalize())
}

/// `seconds` after `from`, or the last instant there is.
pub(crate) fn after(from: Timestamp, seconds: u64) -> Timestamp {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    from.checked_add(SignedDuration::from_secs(seconds))
        .unwrap_or(Timestamp::MAX)
}

fn micros(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
