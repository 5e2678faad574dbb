//! What a create does where there is no room: be refused so that it may be tried again, or wait.

use std::time::Duration;

use space_api::{id::ProjectId, rest::QueueRequest};
use space_store::{Quota, Room};
use tokio::time::Instant;

use crate::{
    app::App,
    error::ApiError,
    queue::{Hold, Place},
};

/// How long at least and at most nobody tries after the node itself had no room: the store thought it had, so that only the
/// node knows when.
const NODE_RETRY: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(1);

/// There was no room.
#[derive(Debug)]
pub(super) struct NoRoom {
    error: ApiError,
    by: By,
}

#[derive(Debug)]
enum By {
    /// The store's count: of the node or of the project. The place it was tried from, if it was in the queue.
    Count { node: bool, place: Option<Place> },
    /// The node's own measure.
    Node {
        after: Duration,
        ticket: Option<u64>,
        hold: Hold,
    },
}

impl NoRoom {
    pub(super) fn quota(quota: Quota, limit: u64, place: Option<Place>) -> Self {
        let what = match quota {
            Quota::Sandboxes => "concurrent sandboxes",
            Quota::Vcpus => "vCPUs in use",
            Quota::Memory => "MiB of memory in use",
        };
        Self {
            error: ApiError::quota(what, limit),
            by: By::Count { node: false, place },
        }
    }

    pub(super) fn node_full(room: Room, limit: u64, place: Option<Place>) -> Self {
        let what = match room {
            Room::Sandboxes => format!("all {limit} places are taken"),
            Room::Memory => format!("its {limit} MiB of memory for sandboxes are taken"),
        };
        Self {
            error: ApiError::no_room(format!("the node has no room for another sandbox: {what}"), None),
            by: By::Count { node: true, place },
        }
    }

    pub(super) fn by_node(error: ApiError, after: Duration, ticket: Option<u64>, hold: Hold) -> Self {
        Self {
            error,
            by: By::Node { after, ticket, hold },
        }
    }
}

/// The waiting of one create.
pub(super) struct Waiting<'a> {
    app: &'a App,
    project: &'a ProjectId,
    until: Option<Instant>,
    /// Why it was refused last.
    refusal: Option<ApiError>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(app: &'a App, project: &'a ProjectId, asked: Option<QueueRequest>) -> Self {
        let until =
            asked.and_then(|asked| Instant::now().checked_add(Duration::from_secs(asked.timeout_seconds)));
        Self {
            app,
            project,
            until,
            refusal: None,
        }
    }

    /// A place at the end if others wait already, past whom it must not go.
    pub(super) fn before_the_first_try(&mut self) -> Result<Option<Place>, ApiError> {
        if !self.app.queue.must_wait(self.project) {
            return Ok(None);
        }
        self.refusal = Some(ApiError::no_room(
            "the node has no room for another sandbox: others wait for it already".to_owned(),
            None,
        ));
        self.join(true, None).map(Some)
    }

    /// Waits for its turn.
    pub(super) async fn turn(&mut self, place: &Place) -> Result<(), ApiError> {
        let Some(until) = self.until else {
            return Ok(());
        };
        tokio::select! {
            () = place.turn() => Ok(()),
            () = tokio::time::sleep_until(until) => Err(self.refused()),
            () = self.app.closing.cancelled() => Err(ApiError::shutting_down()),
        }
    }

    /// A place to wait at after a refusal, or the refusal if it does not wait.
    pub(super) async fn after(&mut self, refusal: NoRoom) -> Result<Place, ApiError> {
        self.refusal = Some(refusal.error);
        match refusal.by {
            By::Count {
                node,
                place: Some(place),
            } => {
                place.refused(node);
                Ok(place)
            }
            By::Count { node, place: None } => self.join(node, None),
            By::Node { after, ticket, hold } => {
                let Some(until) = self.until else {
                    return Err(self.refused());
                };
                let after = after.clamp(*NODE_RETRY.start(), *NODE_RETRY.end());
                let again = Instant::now() + after;
                if again >= until {
                    return Err(self.refused());
                }
                tokio::time::sleep_until(again).await;
                let place = self.join(true, ticket);
                drop(hold);
                place
            }
        }
    }

    fn join(&mut self, for_node: bool, ticket: Option<u64>) -> Result<Place, ApiError> {
        if self.until.is_none() {
            return Err(self.refused());
        }
        self.app
            .queue
            .join(self.project, for_node, ticket)
            .map_err(|_| self.refused())
    }

    fn refused(&mut self) -> ApiError {
        self.refusal
            .take()
            .unwrap_or_else(|| ApiError::no_room("there is no room for another sandbox".to_owned(), None))
    }
}
