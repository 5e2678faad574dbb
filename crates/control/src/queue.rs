//! Creates that wait for room: in the order of arrival, each project in turn, and nobody past those who wait.
//!
//! ```text
//!  join ──► waiting ──turn──► trying ──reserved──► making ──► out (the place is dropped)
//!              ▲                 │                    │
//!              └────refused──────┴──refused by node───┘
//! ```
//!
//! At most one tries at a time. Whenever room may have come ([`Queue::freed`]) a round begins: the first of each project tries, until
//! the node is full or every project is at its own limit. Whoever is dropped, waiting or trying, leaves and passes the turn on.
//!
//! A place is kept until the sandbox is there, so that whoever the node itself refuses stands where it stood, before those who
//! came later. While its machine is made it holds nobody up.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use space_api::id::ProjectId;
use tokio::sync::Notify;

use crate::app::lock;

/// Most that wait at once: with ten ends a second the last of them waits for as long as anybody may.
const MAX_WAITING: usize = 3000;
/// Most bytes that those who wait keep in memory together, for each brings what its sandbox is to be made with.
const MAX_BYTES: usize = 64 << 20;

/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Queue {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next_ticket: u64,
    waiting: BTreeMap<u64, Waiter>,
    /// What all of them keep.
    bytes: usize,
    trying: Option<u64>,
    /// Room has come while somebody tried: the round begins anew after that.
    again: bool,
    /// The node is full; nobody need try before something ends.
    node_full: bool,
    /// Refusals of the node itself that are being waited out.
    holds: usize,
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
    bytes: usize,
    /// It waits for the node rather than for its own project.
    for_node: bool,
    /// It has a place reserved and waits for its machine, not for a turn.
    making: bool,
}

/// What those wait for past whom a create must not go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// Room on the node, which is for all.
    Node,
    /// The limit of this very project.
    Project,
}

/// A place in the queue; dropping it leaves.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Queue,
    ticket: u64,
    turn: Arc<Notify>,
}

/// Too many wait already, or they keep too much.
#[derive(Debug)]
pub(crate) struct QueueFull;

/// While it is held nobody is asked to try; dropping the last one begins a round.
#[derive(Debug)]
pub(crate) struct Hold {
    queue: Queue,
    spent: bool,
}

impl Queue {
    /// What others wait for already, if a create of this project must not go past them.
    pub(crate) fn ahead(&self, project: &ProjectId) -> Option<Ahead> {
        let mut own = false;
        for waiter in lock(&self.state).waiting.values().filter(|waiter| !waiter.making) {
            if waiter.for_node {
                return Some(Ahead::Node);
            }
            own |= waiter.project == *project;
        }
        own.then_some(Ahead::Project)
    }

    /// Waits at the end, keeping so many bytes.
    pub(crate) fn join(&self, project: &ProjectId, for_node: bool, bytes: usize) -> Result<Place, QueueFull> {
        let mut state = lock(&self.state);
        if state.waiting.len() >= MAX_WAITING || state.bytes.saturating_add(bytes) > MAX_BYTES {
            return Err(QueueFull);
        }
        state.next_ticket += 1;
        let ticket = state.next_ticket;
        let turn = Arc::new(Notify::new());
        let waiter = Waiter {
            project: project.clone(),
            turn: turn.clone(),
            bytes,
            for_node,
            making: false,
        };
        state.bytes += bytes;
        state.waiting.insert(ticket, waiter);
        // Room may have come between the refusal and this, when nobody waited who could have been told. While somebody tries,
        // whatever came is seen by them, or has been noted; while the node is left alone, a round begins after that anyway.
        if state.trying.is_none() && state.holds == 0 {
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
        state.holds += 1;
        Hold {
            queue: self.clone(),
            spent: false,
        }
    }

    /// A create has succeeded.
    pub(crate) fn made(&self) {
        lock(&self.state).cautious = false;
    }

    /// Whether a turn is to be kept until the node has answered.
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
            if !waiter.making && !self.at_limit.contains(&waiter.project) {
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

    /// It has tried in vain: because of the node, or of its own project. It stays where it stands.
    pub(crate) fn refused(&self, by_node: bool) {
        let mut state = self.state();
        let Some(waiter) = state.waiting.get_mut(&self.ticket) else {
            return;
        };
        waiter.making = false;
        waiter.for_node = by_node;
        if by_node {
            state.node_full = true;
        } else {
            let project = waiter.project.clone();
            // None of that project waits for the node now, so none of them holds others up.
            for other in state.waiting.values_mut() {
                other.for_node &= other.project != project;
            }
            state.at_limit.insert(project);
        }
        self.pass_on(state);
    }

    /// Room is reserved for it, and its machine is being made: the next one may try.
    pub(crate) fn making(&self) {
        let mut state = self.state();
        if let Some(waiter) = state.waiting.get_mut(&self.ticket) {
            waiter.making = true;
        }
        self.pass_on(state);
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
        if let Some(waiter) = state.waiting.remove(&self.ticket) {
            state.bytes = state.bytes.saturating_sub(waiter.bytes);
        }
        self.pass_on(state);
    }
}

impl Hold {
    /// Room has come before it was over: a round is under way already.
    pub(crate) fn spent(mut self) {
        self.spent = true;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.holds = state.holds.saturating_sub(1);
        if state.holds == 0 && !self.spent {
            state.begin_round();
        }
    }
}

#[cfg(test)]
mod tests;
