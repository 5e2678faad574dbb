//! Making a sandbox: the one operation whose order matters.
//!
//! 1. Refuse what this version cannot honour.
//! 2. Reserve: quotas, the node's room, idempotency key and the row `creating`, in one transaction. Where there is no room and
//!    the request says that it would wait, it waits in the [queue](crate::queue) and this is tried again.
//! 3. Start the machine on the node, which journals it durably before it answers.
//! 4. Mark it `running` (idempotency key `done`), answer.
//!
//! The rows of 2 and 4 are written so that they survive the end of any process, not a loss of power; the controller writes them
//! through within a moment. The wait for the disk that a create has is thus one, the node's: what a loss of power can take from the
//! store is the record of machines that it has ended as well, and no machine is in nobody's books while it lives.
//!
//! Whatever fails after 2 ends the row with a cause, frees the idempotency key and leaves nothing on the node. From 2 on it is
//! a task of its own: a client that goes away does not stop it half-way, but one that waits for room leaves the queue. A
//! kill at any point leaves a row `creating`, which the controller settles.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest as _, Sha256};
use space_api::{
    e2b::{DEFAULT_TIMEOUT_SECONDS, NewSandbox as Body},
    id::SandboxId,
    key::{hex, random_token},
    lifecycle::SandboxState,
    size::SizeClass,
};
use space_node::{CreateSandbox, NodeError, SandboxStatus, TemplateInfo};
use space_store::{Claim, NewSandbox, Principal, Project, Ready, Reservation, SandboxRow};
use tracing::Instrument as _;

use crate::{
    app::{App, begin_create},
    create::{
        failing::{Room, answer_again, cause_of, ended_while_creating, failed, not_finished, undo},
        room::{NoRoom, Waiting, weight},
    },
    deadlines,
    error::{ApiError, template_not_found},
    queue::Place,
};

pub(crate) mod check;
mod failing;
mod room;

/// Creates that took longer than this get their full time again from the moment they are ready.
const SLOW_CREATE: Duration = Duration::from_secs(1);

/// Which of the create calls was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// E2B's first: `secure` may be `false`.
    V1,
    /// E2B's second: always secured.
    V2,
    /// Our own: always secured.
    Own,
}

/// A create that has been checked and may be tried, several times if need be.
#[derive(Debug, Clone)]
struct Plan {
    new: NewSandbox,
    /// As asked for or as the template has it; `None` leaves it to the node.
    size: Option<SizeClass>,
    timeout: u64,
    environment: std::collections::BTreeMap<String, String>,
    claim: Option<Claim>,
}

/// How one try went.
enum Tried {
    Made(Box<SandboxRow>),
    NoRoom(NoRoom),
}

/// Makes a sandbox, or answers an earlier request with the same idempotency key again.
pub(crate) async fn create(
    app: &App,
    principal: &Principal,
    version: Version,
    mut body: Body,
    idempotency_key: Option<String>,
) -> Result<SandboxRow, ApiError> {
    let project = &principal.project;
    check::fields(&body, project)?;
    let began = Instant::now();
    let mut waiting = Waiting::new(app, principal, body.queue.take(), weight(&body));
    let claim = idempotency_key.map(|key| Claim {
        key,
        request_hash: request_hash(version, &body),
        now: Timestamp::now(),
    });
    let template = template(app, &body.template_id).await;
    let ahead = app.queue.ahead(&project.id);
    // What was answered before is answered again, whatever has become of the template, and past all who wait. A create that may
    // be tried at once learns of it as it reserves.
    if let Some(claim) = &claim
        && (template.is_err() || ahead.is_some())
        && let Some(prior) = app.store.prior(&project.id, claim).await?
    {
        return answer_again(prior);
    }
    let mut plan = plan(app, project, version, body, template?.as_ref(), claim)?;
    let mut place = waiting.before_the_first_try(ahead)?;
    loop {
        if let Some(place) = &place {
            waiting.turn(place).await?;
            plan.begin_again();
        }
        let task_app = app.clone();
        let task_plan = plan.clone();
        let span = tracing::info_span!("create", sandbox = %plan.new.id, template = %plan.new.template);
        let task = async move { attempt(&task_app, task_plan, place, began).await };
        let tried = app
            .tasks
            .spawn(task.instrument(span))
            .await
            .map_err(|error| ApiError::internal(&error))??;
        match tried {
            Tried::Made(row) => return Ok(*row),
            Tried::NoRoom(refusal) => place = Some(waiting.after(refusal)?),
        }
    }
}

fn plan(
    app: &App,
    project: &Project,
    version: Version,
    body: Body,
    template: Option<&TemplateInfo>,
    claim: Option<Claim>,
) -> Result<Plan, ApiError> {
    let now = Timestamp::now();
    let size = size(template, &body)?;
    let timeout = body.timeout.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    let secured = version != Version::V1 || body.secure.unwrap_or(true);
    let network = body.network.unwrap_or_default();
    let public = network.allow_public_traffic.unwrap_or(true);
    let new = NewSandbox {
        id: SandboxId::random(),
        project: project.id.clone(),
        template: body.template_id,
        size: size.unwrap_or(SizeClass::DEFAULT),
        generation: 1,
        node: app.config.node_name.clone(),
        metadata: body.metadata.unwrap_or_default(),
        labels: body.labels.unwrap_or_default(),
        access_token: secured.then(random_token),
        traffic_token: (!public).then(random_token),
        mask_request_host: network.mask_request_host,
        wake_on_traffic: body.auto_resume.is_some_and(|resume| resume.enabled),
        on_idle: body.on_idle,
        started_at: now,
        deadline: after(now, timeout),
    };
    Ok(Plan {
        new,
        size,
        timeout,
        environment: body.env_vars.unwrap_or_default(),
        claim,
    })
}

impl Plan {
    /// Under a new id, because the old one may have an end already, and with its full time.
    fn begin_again(&mut self) {
        let now = Timestamp::now();
        self.new.id = SandboxId::random();
        self.new.started_at = now;
        self.new.deadline = after(now, self.timeout);
        if let Some(claim) = &mut self.claim {
            claim.now = now;
        }
    }
}

/// Reserves and makes it, or says why there is no room.
async fn attempt(app: &App, plan: Plan, place: Option<Place>, began: Instant) -> Result<Tried, ApiError> {
    let Plan {
        new,
        size,
        timeout,
        environment,
        claim,
    } = plan;
    let _in_flight = begin_create(app, &new.id);
    match app.store.reserve(&new, claim.as_ref()).await? {
        Reservation::Reserved => {}
        Reservation::QuotaExceeded { quota, limit } => {
            return Ok(Tried::NoRoom(NoRoom::quota(quota, limit, place)));
        }
        Reservation::NodeFull { room, limit } => {
            return Ok(Tried::NoRoom(NoRoom::node_full(room, limit, place)));
        }
        Reservation::Used(prior) => return answer_again(prior).map(|row| Tried::Made(Box::new(row))),
    }
    // The next one may try while this one's machine is made, unless the node has shown that it is fuller than the store knows.
    if let Some(place) = &place
        && !app.queue.is_cautious()
    {
        place.making();
    }
    let reserved = began.elapsed();

    let request = CreateSandbox {
        id: new.id.clone(),
        project: new.project.clone(),
        template: new.template.clone(),
        size,
        generation: new.generation,
        environment,
        deadline: new.deadline,
        on_idle: new.on_idle,
    };
    let status = match app.node.create(request).await {
        Ok(status) => status,
        Err(error) => {
            let NodeError::NoCapacity { retry_after_ms, .. } = &error else {
                undo(app, &new, cause_of(&error), Room::Freed).await;
                return Err(not_finished(&new.id, error));
            };
            let after = Duration::from_millis(*retry_after_ms);
            let hold = app.queue.hold();
            undo(app, &new, cause_of(&error), Room::AsBefore).await;
            return Ok(Tried::NoRoom(NoRoom::by_node(error.into(), after, place, hold)));
        }
    };
    app.queue.made();
    drop(place);
    let started = began.elapsed();
    let row = finish(
        app,
        new,
        timeout,
        status,
        started.saturating_sub(reserved) > SLOW_CREATE,
    )
    .await?;
    tracing::info!(
        reserved_us = micros(reserved),
        node_us = micros(started.saturating_sub(reserved)),
        total_us = micros(began.elapsed()),
        "sandbox created"
    );
    Ok(Tried::Made(Box::new(row)))
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
            undo(app, &new, failed("its record could not be written"), Room::Freed).await;
            return Err(error.into());
        }
    };
    if !marked {
        // Somebody has ended it in the books only: the machine goes, and its idempotency key is free.
        undo(app, &new, failed("it had ended before it ran"), Room::Freed).await;
        return Err(ended_while_creating(app, &new.id).await);
    }
    if slow {
        // An answer that fails here would hide a sandbox that runs; the controller writes the deadline down later.
        match deadlines::at_least(app, &new.id, after(Timestamp::now(), timeout)).await {
            Ok(deadline) => new.deadline = deadline,
            Err(error) => {
                tracing::warn!(sandbox = %new.id, ?error, "a slow create did not get its full time");
            }
        }
    }
    new.template = status.template;
    new.size = status.size;
    let row = SandboxRow {
        sandbox: new,
        state: SandboxState::Running,
        template_digest: status.template_digest,
        ended_at: None,
        end_cause: None,
        ready_ms: status.ready_ms,
        cpu_micros: None,
    };
    app.learn_route(&row);
    Ok(row)
}

/// The template that is meant, as the node lists it. `None`: only the node can tell, for it lists no digests without a name.
/// One that is not there is refused here, so that no record of it is made.
async fn template(app: &App, asked: &str) -> Result<Option<TemplateInfo>, ApiError> {
    let find = |known: &[TemplateInfo]| known.iter().find(|template| names(template, asked)).cloned();
    if let Some(found) = find(&app.templates().await?) {
        return Ok(Some(found));
    }
    if asked.starts_with(DIGEST) {
        return Ok(None);
    }
    // It may have been built a moment ago.
    app.forget_templates();
    find(&app.templates().await?)
        .map(Some)
        .ok_or_else(|| template_not_found(asked))
}

/// What was asked for, or `None` for the template's own default. What is not named is the template's.
fn size(template: Option<&TemplateInfo>, body: &Body) -> Result<Option<SizeClass>, ApiError> {
    let default = template.map(|template| template.default_size);
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

/// How a digest begins.
const DIGEST: &str = "sha256:";
/// The tag that a bare name stands for.
const DEFAULT_TAG: &str = ":latest";

/// Whether `asked` (bare name, `name:tag` or digest) means this template, as the node understands it: a bare name is that of
/// the tag `latest` and of no other.
pub(crate) fn names(template: &TemplateInfo, asked: &str) -> bool {
    template.name == asked
        || template.digest == asked
        || (!asked.contains(':') && template.name.strip_suffix(DEFAULT_TAG) == Some(asked))
}

fn request_hash(version: Version, body: &Body) -> String {
    let mut hasher = Sha256::new();
    hasher.update(match version {
        Version::V1 => b"v1",
        Version::V2 => b"v2",
        Version::Own => b"us",
    });
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
