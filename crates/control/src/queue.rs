//! Creates that wait for room: in the order of arrival, each project in turn, and nobody past those who wait.
//!
//! ```text
//!  join ──► waiting ──turn──► trying ──reserved──► out (the place is dropped)
//!              ▲                 │
//!              └────refused──────┘
//! ```
//!
//! At most one tries at a time. Whenever room may have come ([`Queue::freed`]) a round begins: the first of each project tries, until
//! the node is full or every project is at its own limit. Whoever is dropped, waiting or trying, leaves and passes the turn on.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use space_api::id::ProjectId;
use tokio::sync::Notify;

use crate::app::lock;

/// Most that wait at once: with ten ends a second the last of them waits for as long as anybody may.
const MAX_WAITING: usize = 3000;

/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Queue {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next_ticket: u64,
    waiting: BTreeMap<u64, Waiter>,
    trying: Option<u64>,
    /// Room has come while somebody tried: the round begins anew after that.
    again: bool,
    /// The node is full; nobody need try before something ends.
    node_full: bool,
    /// The node itself had no room where the store thought it had: until a create succeeds again, one at a time asks it.
    cautious: bool,
    /// Projects that are at their own limit in this round.
    at_limit: HashSet<ProjectId>,
    /// The project that tried last; the next one in order is next.
    last: Option<ProjectId>,
}

#[derive(Debug)]
struct Waiter {
    project: ProjectId,
    turn: Arc<Notify>,
    /// It waits for the node rather than for its own project.
    for_node: bool,
}

/// A place in the queue; dropping it leaves.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Queue,
    ticket: u64,
    turn: Arc<Notify>,
}

/// Too many wait already.
#[derive(Debug)]
pub(crate) struct QueueFull;

/// While it is held nobody is asked to try; dropping it begins a round.
#[derive(Debug)]
pub(crate) struct Hold(Queue);

impl Queue {
    /// Whether a create of this project must not go past others.
    pub(crate) fn must_wait(&self, project: &ProjectId) -> bool {
        lock(&self.state)
            .waiting
            .values()
            .any(|waiter| waiter.for_node || waiter.project == *project)
    }

    /// Waits at the end, or again at the place of an earlier `ticket`.
    pub(crate) fn join(
        &self,
        project: &ProjectId,
        for_node: bool,
        ticket: Option<u64>,
    ) -> Result<Place, QueueFull> {
        let mut state = lock(&self.state);
        if state.waiting.len() >= MAX_WAITING {
            return Err(QueueFull);
        }
        let ticket = ticket.unwrap_or_else(|| {
            state.next_ticket += 1;
            state.next_ticket
        });
        let turn = Arc::new(Notify::new());
        let waiter = Waiter {
            project: project.clone(),
            turn: turn.clone(),
            for_node,
        };
        state.waiting.insert(ticket, waiter);
        // Room may have come between the refusal and this, when nobody waited who could have been told. While somebody tries,
        // whatever came is seen by them, or has been noted.
        if state.trying.is_none() {
            state.begin_round();
        }
        drop(state);
        Ok(Place {
            queue: self.clone(),
            ticket,
            turn,
        })
    }

    /// Something has ended, or more may be used than before.
    pub(crate) fn freed(&self) {
        lock(&self.state).begin_round();
    }

    /// The node itself had no room: nobody tries for as long as the answer is held, unless something ends.
    pub(crate) fn hold(&self) -> Hold {
        let mut state = lock(&self.state);
        state.node_full = true;
        state.cautious = true;
        Hold(self.clone())
    }

    /// A create has succeeded.
    pub(crate) fn made(&self) {
        lock(&self.state).cautious = false;
    }

    /// Whether a place is to be kept until the node has answered.
    pub(crate) fn is_cautious(&self) -> bool {
        lock(&self.state).cautious
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.state).waiting.len()
    }
}

impl State {
    fn begin_round(&mut self) {
        self.node_full = false;
        self.at_limit.clear();
        if self.trying.is_some() {
            self.again = true;
        } else {
            self.next_turn();
        }
    }

    /// Gives the turn to the first of the next project in order, if anybody need try.
    fn next_turn(&mut self) {
        if std::mem::take(&mut self.again) {
            self.node_full = false;
            self.at_limit.clear();
        }
        if self.trying.is_some() || self.node_full {
            return;
        }
        let mut first_of = BTreeMap::new();
        for (ticket, waiter) in &self.waiting {
            if !self.at_limit.contains(&waiter.project) {
                first_of.entry(&waiter.project).or_insert(*ticket);
            }
        }
        let after_last = first_of
            .iter()
            .find(|(project, _)| self.last.as_ref().is_none_or(|last| **project > last));
        let Some(ticket) = after_last
            .or_else(|| first_of.iter().next())
            .map(|(_, ticket)| *ticket)
        else {
            return;
        };
        if let Some(waiter) = self.waiting.get(&ticket) {
            self.last = Some(waiter.project.clone());
            self.trying = Some(ticket);
            waiter.turn.notify_one();
        }
    }
}

impl Place {
    /// Waits for its turn to try.
    pub(crate) async fn turn(&self) {
        self.turn.notified().await;
    }

    /// It has tried in vain: because of the node, or of its own project.
    pub(crate) fn refused(&self, by_node: bool) {
        let mut state = self.state();
        let Some(waiter) = state.waiting.get_mut(&self.ticket) else {
            return;
        };
        waiter.for_node = by_node;
        let project = waiter.project.clone();
        if by_node {
            state.node_full = true;
        } else {
            state.at_limit.insert(project);
        }
        self.pass_on(state);
    }

    /// By which it may come back to the same place.
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    fn pass_on(&self, mut state: MutexGuard<'_, State>) {
        if state.trying == Some(self.ticket) {
            state.trying = None;
            state.next_turn();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.queue.state)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.state();
        state.waiting.remove(&self.ticket);
        self.pass_on(state);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.freed();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn has_turn(place: &Place) -> bool {
        place.turn().now_or_never().is_some()
    }

    fn projects() -> (ProjectId, ProjectId) {
        let mut both = [ProjectId::random(), ProjectId::random()];
        both.sort();
        let [a, b] = both;
        (a, b)
    }

    #[test]
    fn those_of_one_project_are_served_in_the_order_of_their_arrival() {
        let queue = Queue::default();
        let (project, _) = projects();
        let places: Vec<_> = (0..3)
            .map(|_| queue.join(&project, true, None).expect("room"))
            .collect();
        assert!(has_turn(&places[0]), "it may try at once, lest room was missed");
        places[0].refused(true);
        assert!(!places.iter().any(has_turn), "the node is full");
        let mut places = places.into_iter();
        for _ in 0..3 {
            queue.freed();
            let first = places.next().expect("one is left");
            assert!(has_turn(&first));
            assert!(
                places.as_slice().first().is_none_or(|next| !has_turn(next)),
                "one at a time"
            );
            drop(first);
            // The next one tries whether there is more.
            if let Some(next) = places.as_slice().first() {
                assert!(has_turn(next));
                next.refused(true);
            }
        }
        assert!(!queue.must_wait(&project));
    }

    #[test]
    fn projects_take_turns_and_one_at_its_limit_holds_nobody_up() {
        let queue = Queue::default();
        let (a, b) = projects();
        let first = queue.join(&a, true, None).expect("room");
        assert!(has_turn(&first));
        first.refused(true);
        let second = queue.join(&a, true, None).expect("room");
        assert!(has_turn(&first));
        first.refused(true);
        let other = queue.join(&b, true, None).expect("room");
        assert!(has_turn(&other), "its project is next");
        other.refused(true);
        queue.freed();
        assert!(has_turn(&first));
        first.refused(false);
        assert!(has_turn(&other), "the first project is at its own limit");
        drop(other);
        assert!(!has_turn(&first) && !has_turn(&second));
        queue.freed();
        assert!(has_turn(&first));
    }

    #[test]
    fn who_leaves_passes_the_turn_on() {
        let queue = Queue::default();
        let (project, _) = projects();
        let first = queue.join(&project, true, None).expect("room");
        let second = queue.join(&project, true, None).expect("room");
        assert!(has_turn(&first));
        drop(first);
        assert!(has_turn(&second));
        drop(second);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn room_that_comes_during_a_try_is_not_missed() {
        let queue = Queue::default();
        let (project, _) = projects();
        let place = queue.join(&project, true, None).expect("room");
        assert!(has_turn(&place));
        queue.freed();
        place.refused(true);
        assert!(has_turn(&place), "it tries again");
    }

    #[test]
    fn who_was_refused_by_the_node_itself_comes_back_to_its_place() {
        let queue = Queue::default();
        let (project, _) = projects();
        let first = queue.join(&project, true, None).expect("room");
        let second = queue.join(&project, true, None).expect("room");
        assert!(has_turn(&first));
        let ticket = first.ticket();
        let hold = queue.hold();
        drop(first);
        assert!(!has_turn(&second), "held");
        let first = queue.join(&project, true, Some(ticket)).expect("room");
        assert!(has_turn(&first) && !has_turn(&second));
        drop(hold);
    }

    #[test]
    fn only_so_many_may_wait() {
        let queue = Queue::default();
        let (project, _) = projects();
        let places: Vec<_> = (0..MAX_WAITING)
            .map(|_| queue.join(&project, true, None))
            .collect();
        assert!(places.iter().all(Result::is_ok));
        assert!(queue.join(&project, true, None).is_err());
        drop(places);
        assert!(queue.join(&project, true, None).is_ok());
    }
}
