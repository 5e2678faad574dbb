//! What happened to sandboxes: in pages, also after their end, and as a stream that can be taken up where it broke off.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{
        IntoResponse as _, Response,
        sse::{Event as Message, KeepAlive, Sse},
    },
};
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue};
use space_api::{error::ErrorBody, id::ProjectId, rest::SandboxEvent};
use space_store::{Event, EventsOf};
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{
    extract::{Caller, PathId, Query},
    listing::limit,
    views,
};
use crate::{
    app::App,
    callers::Standing,
    error::{ApiError, chain},
};

/// Events read at a time for a stream; the next ones are read when these are sent.
const BATCH: u32 = 100;
/// How often a silent stream shows that it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What happened to a sandbox, live or ended, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes/{sandboxID}/events", tag = "platform",
    params(
        ("sandboxID" = String, Path),
        ("after" = Option<u64>, Query, description = "Only events with greater ids; `nextToken` is another name for it"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent"),
    ),
    responses((status = 200, body = Vec<SandboxEvent>, description = "With x-next-token if there may be more"), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn of_sandbox(
    State(app): State<App>,
    caller: Caller,
    PathId(id): PathId,
    query: Query,
) -> Result<Response, ApiError> {
    caller.any(&app, &id).await?;
    page(&app, EventsOf::Sandbox(&id), &query).await
}

/// What happened to the project's sandboxes, oldest first. With `follow` a stream of server-sent events that does not end: each has the
/// event's id, kind and JSON, and `Last-Event-ID` takes it up where it broke off; without that or `after` it begins now. The answer's
/// own `Last-Event-ID` says after which event it begins, for who has to take it up before there was one. It ends when the key is
/// revoked.
#[utoipa::path(get, path = "/v1/events", tag = "platform",
    params(
        ("follow" = Option<bool>, Query),
        ("after" = Option<u64>, Query, description = "Only events with greater ids; `nextToken` is another name for it"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent; not for streams"),
        ("Last-Event-ID" = Option<u64>, Header, description = "As `after`, for streams"),
    ),
    responses((status = 200, body = Vec<SandboxEvent>, description = "With x-next-token if there may be more; text/event-stream with `follow`"), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 429, description = "Too many streams", body = ErrorBody)), security(("key" = [])))]
pub(super) async fn of_project(
    State(app): State<App>,
    caller: Caller,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let project = caller.0.project.id.clone();
    if !query.flag("follow") {
        return page(&app, EventsOf::Project(&project), &query).await;
    }
    let permit = app
        .followers
        .clone()
        .try_acquire_owned()
        .map_err(|_| ApiError::too_many("too many streams of events are open"))?;
    let changes = app.store.changes();
    let after = match last_event_id(&headers)?.or(after(&query)?) {
        Some(after) => after,
        None => app.store.last_event().await?,
    };
    let standing = app.callers.standing(&caller.0);
    let follower = Follower {
        app,
        project,
        after,
        changes,
        ready: VecDeque::new(),
        _permit: permit,
    };
    let stream = Sse::new(follower.stream(standing)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = stream.into_response();
    response
        .headers_mut()
        .insert("last-event-id", HeaderValue::from(after));
    Ok(response)
}

async fn page(app: &App, of: EventsOf<'_>, query: &Query) -> Result<Response, ApiError> {
    let limit = limit(query)?;
    let events = app.store.events(of, after(query)?.unwrap_or(0), limit).await?;
    let next = (events.len() >= usize::try_from(limit).unwrap_or(usize::MAX))
        .then(|| events.last().map(|event| event.id))
        .flatten();
    let events: Vec<_> = events.into_iter().map(views::event).collect();
    let mut response = Json(events).into_response();
    if let Some(next) = next {
        response
            .headers_mut()
            .insert("x-next-token", HeaderValue::from(next));
    }
    Ok(response)
}

fn after(query: &Query) -> Result<Option<u64>, ApiError> {
    let expected = "the id of an event";
    Ok(query
        .parsed("after", expected)?
        .or(query.parsed("nextToken", expected)?))
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    headers
        .get("last-event-id")
        .map(|value| {
            value
                .to_str()
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| ApiError::bad_request("Last-Event-ID must be the id of an event"))
        })
        .transpose()
}

/// One stream: it reads from the store at its reader's pace, so that nothing piles up and nothing is left out.
struct Follower {
    app: App,
    project: ProjectId,
    after: u64,
    changes: watch::Receiver<u64>,
    ready: VecDeque<Event>,
    _permit: OwnedSemaphorePermit,
}

impl Follower {
    fn stream(self, standing: Standing) -> impl Stream<Item = Result<Message, Infallible>> {
        stream::unfold((self, standing), |(mut follower, mut standing)| async move {
            let store = follower.app.store.clone();
            let event = tokio::select! {
                biased;
                () = standing.lost(store.as_ref()) => None,
                event = follower.next() => event,
            }?;
            follower.after = event.id;
            let message = Message::default()
                .id(event.id.to_string())
                .event(event.kind.clone());
            let data: SandboxEvent = views::event(event);
            let text = serde_json::to_string(&data).unwrap_or_default();
            Some((Ok(message.data(text)), (follower, standing)))
        })
    }

    /// The next event, however long that takes; `None` when the server stops or the store fails.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            self.changes.mark_unchanged();
            let of = EventsOf::Project(&self.project);
            match self.app.store.events(of, self.after, BATCH).await {
                Ok(events) => self.ready = events.into(),
                Err(error) => {
                    tracing::error!(error = %chain(&error), "a stream of events ends");
                    return None;
                }
            }
            if self.ready.is_empty() {
                tokio::select! {
                    changed = self.changes.changed() => changed.ok()?,
                    () = self.app.closing.cancelled() => return None,
                }
            }
        }
    }
}
