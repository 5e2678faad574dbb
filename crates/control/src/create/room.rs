//! What a create does where there is no room: be refused so that it may be tried again, or wait.

use std::time::Duration;

use space_api::{e2b::NewSandbox, rest::QueueRequest};
use space_store::{Principal, Quota, Room};
use tokio::time::Instant;

use crate::{
    app::App,
    callers::Standing,
    error::ApiError,
    queue::{Ahead, Hold, Place},
};

/// How long at least and at most nobody tries after the node itself had no room: the store thought it had, so that only the
/// node knows when.
const NODE_RETRY: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(1);
/// What one text takes in memory beside its bytes, about.
const TEXT: usize = 64;

/// There was no room.
#[derive(Debug)]
pub(super) struct NoRoom {
    error: ApiError,
    /// From where it was tried, if it was in the queue.
    place: Option<Place>,
    by: By,
}

#[derive(Debug)]
enum By {
    /// The store's count: of the node or of the project.
    Count { node: bool },
    /// The node's own measure.
    Node { after: Duration, hold: Hold },
}

impl NoRoom {
    pub(super) fn quota(quota: Quota, limit: u64, place: Option<Place>) -> Self {
        let what = match quota {
            Quota::Sandboxes => "concurrent sandboxes",
            Quota::Vcpus => "vCPUs in use",
            Quota::Memory => "MiB of memory in use",
        };
        Self {
            error: ApiError::quota(format!("the project has reached its limit of {limit} {what}")),
            place,
            by: By::Count { node: false },
        }
    }

    pub(super) fn node_full(room: Room, limit: u64, place: Option<Place>) -> Self {
        let what = match room {
            Room::Sandboxes => format!("all {limit} places are taken"),
            Room::Memory => format!("its {limit} MiB of memory for sandboxes are taken"),
        };
        Self {
            error: ApiError::no_room(format!("the node has no room for another sandbox: {what}"), None),
            place,
            by: By::Count { node: true },
        }
    }

    pub(super) fn by_node(error: ApiError, after: Duration, place: Option<Place>, hold: Hold) -> Self {
        Self {
            error,
            place,
            by: By::Node { after, hold },
        }
    }
}

/// The waiting of one create.
pub(super) struct Waiting<'a> {
    app: &'a App,
    principal: &'a Principal,
    /// Ends the waiting if the key is revoked meanwhile.
    standing: Standing,
    until: Option<Instant>,
    /// What it keeps in memory.
    bytes: usize,
    /// Why it was refused last.
    refusal: Option<ApiError>,
    /// Its node's own refusal and when that is to be asked again.
    held: Option<(Hold, Instant)>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(
        app: &'a App,
        principal: &'a Principal,
        asked: Option<QueueRequest>,
        bytes: usize,
    ) -> Self {
        let until =
            asked.and_then(|asked| Instant::now().checked_add(Duration::from_secs(asked.timeout_seconds)));
        Self {
            app,
            principal,
            standing: app.callers.standing(principal),
            until,
            bytes,
            refusal: None,
            held: None,
        }
    }

    /// A place at the end if others wait already, past whom it must not go.
    pub(super) fn before_the_first_try(&mut self, ahead: Option<Ahead>) -> Result<Option<Place>, ApiError> {
        let Some(ahead) = ahead else {
            return Ok(None);
        };
        self.refusal = Some(match ahead {
            Ahead::Node => ApiError::no_room(
                "the node has no room for another sandbox: others wait for it already".to_owned(),
                None,
            ),
            Ahead::Project => {
                ApiError::quota("the project is at its own limit, and others wait there already".to_owned())
            }
        });
        self.join(ahead == Ahead::Node).map(Some)
    }

    /// Waits for its turn.
    pub(super) async fn turn(&mut self, place: &Place) -> Result<(), ApiError> {
        let Some(until) = self.until else {
            return Ok(());
        };
        loop {
            let again = self.held.as_ref().map(|(_, at)| *at);
            tokio::select! {
                () = place.turn() => {
                    if let Some((hold, _)) = self.held.take() {
                        hold.spent();
                    }
                    return Ok(());
                }
                () = self.standing.lost(self.app.store.as_ref()) => return Err(ApiError::invalid_key()),
                () = self.app.closing.cancelled() => return Err(ApiError::shutting_down()),
                () = tokio::time::sleep_until(until) => return Err(self.refused()),
                // Dropped, it lets the first in order ask the node again.
                () = tokio::time::sleep_until(again.unwrap_or(until)), if again.is_some() => self.held = None,
            }
        }
    }

    /// A place to wait at after a refusal, or the refusal if it does not wait.
    pub(super) fn after(&mut self, refusal: NoRoom) -> Result<Place, ApiError> {
        let NoRoom { error, place, by } = refusal;
        self.refusal = Some(error);
        let by_node = !matches!(by, By::Count { node: false });
        let held = match by {
            By::Count { .. } => None,
            By::Node { after, hold } => {
                let again = Instant::now() + after.clamp(*NODE_RETRY.start(), *NODE_RETRY.end());
                if self.until.is_none_or(|until| again >= until) {
                    return Err(self.refused());
                }
                Some((hold, again))
            }
        };
        let place = match place {
            Some(place) => {
                place.refused(by_node);
                place
            }
            None => self.join(by_node)?,
        };
        self.held = held;
        Ok(place)
    }

    fn join(&mut self, for_node: bool) -> Result<Place, ApiError> {
        if self.until.is_none() {
            return Err(self.refused());
        }
        self.app
            .queue
            .join(&self.principal.project.id, for_node, self.bytes)
            .map_err(|_| self.refused())
    }

    fn refused(&mut self) -> ApiError {
        self.refusal
            .take()
            .unwrap_or_else(|| ApiError::no_room("there is no room for another sandbox".to_owned(), None))
    }
}

/// About how many bytes of memory a request keeps while it waits.
pub(super) fn weight(body: &NewSandbox) -> usize {
    let maps = [&body.env_vars, &body.metadata, &body.labels];
    let texts = maps
        .into_iter()
        .flatten()
        .flatten()
        .map(|(name, value)| name.len() + value.len() + 2 * TEXT);
    // A create has a handful of tasks and buffers of its own.
    texts.sum::<usize>() + body.template_id.len() + 16 * TEXT
}
