//! Which sandboxes live here, and whether one more is admitted: one lock, so that exactly as many get in as fit.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use space_api::{id::SandboxId, lifecycle::SandboxState};
use tokio::sync::{mpsc, watch};

use crate::{
    config::NodeConfig,
    idle::LastUse,
    locked,
    sandbox::{Input, View},
    seam::{EndRecord, NodeError},
    usage::History,
};

/// Ends kept in memory, for when the journal cannot be written or is not yet.
const RECENT_ENDS: usize = 1024;

/// When to try again if a sandbox must end first, milliseconds: a place is free within a second or two on a busy node.
const RETRY_PLACE_MS: u64 = 1000;
/// When to try again if others are being created, milliseconds: a create takes some ten to some hundred.
const RETRY_CREATING_MS: u64 = 200;

/// How everyone but its own task reaches a sandbox.
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    pub(crate) inputs: mpsc::Sender<Input>,
    pub(crate) view: watch::Receiver<View>,
    pub(crate) history: Arc<History>,
    pub(crate) guest_token: Arc<str>,
    pub(crate) last_use: Arc<LastUse>,
}

#[derive(Debug)]
struct Entry {
    handle: Arc<Handle>,
    /// Bytes of memory it is counted with.
    committed: u64,
    creating: bool,
}

#[derive(Debug, Default)]
struct State {
    live: HashMap<SandboxId, Entry>,
    committed: u64,
    creating: usize,
    closed: bool,
    recent: VecDeque<EndRecord>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Registry {
    capacity: usize,
    max_creating: usize,
    memory_budget: u64,
    state: Mutex<State>,
}

/// The answer to a wish to get in.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It is in; its task is to be started.
    New(Arc<Handle>),
    /// One of this id is in already.
    Existing(Arc<Handle>),
}

impl Registry {
    pub(crate) fn new(config: &NodeConfig, memory_budget: u64) -> Self {
        Self {
            capacity: config.capacity,
            max_creating: config.max_creating,
            memory_budget,
            state: Mutex::default(),
        }
    }

    /// Lets a sandbox in that is counted with `committed` bytes, or says what has run out.
    pub(crate) fn admit(
        &self,
        id: &SandboxId,
        committed: u64,
        make: impl FnOnce() -> Handle,
    ) -> Result<Admission, NodeError> {
        let mut state = locked(&self.state);
        if state.closed {
            return Err(NodeError::ShuttingDown);
        }
        if let Some(entry) = state.live.get(id) {
            return Ok(Admission::Existing(entry.handle.clone()));
        }
        let full = |what: String, retry_after_ms: u64| Err(NodeError::NoCapacity { what, retry_after_ms });
        if state.live.len() >= self.capacity {
            return full(format!("all {} places are taken", self.capacity), RETRY_PLACE_MS);
        }
        if state.creating >= self.max_creating {
            let what = format!("{} sandboxes are being created already", state.creating);
            return full(what, RETRY_CREATING_MS);
        }
        if state.committed.saturating_add(committed) > self.memory_budget {
            let what = format!(
                "memory: {} of {} MiB are spoken for, this one counts {} MiB",
                state.committed >> 20,
                self.memory_budget >> 20,
                committed >> 20
            );
            return full(what, RETRY_PLACE_MS);
        }
        let handle = Arc::new(make());
        state.committed += committed;
        state.creating += 1;
        let entry = Entry {
            handle: handle.clone(),
            committed,
            creating: true,
        };
        state.live.insert(id.clone(), entry);
        Ok(Admission::New(handle))
    }

    /// Lets a sandbox in that lived here before, whatever the bounds are now.
    pub(crate) fn readmit(&self, committed: u64, handle: Handle) -> Arc<Handle> {
        let mut state = locked(&self.state);
        let handle = Arc::new(handle);
        state.committed += committed;
        let entry = Entry {
            handle: handle.clone(),
            committed,
            creating: false,
        };
        state.live.insert(handle.id.clone(), entry);
        handle
    }

    /// The sandbox is no longer being created.
    pub(crate) fn settled(&self, id: &SandboxId) {
        let mut state = locked(&self.state);
        if let Some(entry) = state.live.get_mut(id)
            && std::mem::take(&mut entry.creating)
        {
            state.creating -= 1;
        }
    }

    /// The sandbox is gone; `end` is remembered if given.
    pub(crate) fn remove(&self, id: &SandboxId, end: Option<EndRecord>) {
        let mut state = locked(&self.state);
        if let Some(entry) = state.live.remove(id) {
            state.committed -= entry.committed;
            state.creating -= usize::from(entry.creating);
        }
        if let Some(end) = end {
            if state.recent.len() >= RECENT_ENDS {
                state.recent.pop_front();
            }
            state.recent.push_back(end);
        }
    }

    pub(crate) fn find(&self, id: &SandboxId) -> Option<Arc<Handle>> {
        locked(&self.state).live.get(id).map(|entry| entry.handle.clone())
    }

    pub(crate) fn recent_end(&self, id: &SandboxId) -> Option<EndRecord> {
        locked(&self.state)
            .recent
            .iter()
            .rev()
            .find(|end| end.id == *id)
            .cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        locked(&self.state)
            .live
            .values()
            .map(|entry| entry.handle.clone())
            .collect()
    }

    /// Memory that nobody has been promised, bytes.
    pub(crate) fn room(&self) -> u64 {
        self.memory_budget.saturating_sub(locked(&self.state).committed)
    }

    pub(crate) fn len(&self) -> usize {
        locked(&self.state).live.len()
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&self) {
        locked(&self.state).closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        locked(&self.state).closed
    }

    /// Memory, creating and live counts; all zero when nothing lives.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (u64, usize, usize) {
        let state = locked(&self.state);
        (state.committed, state.creating, state.live.len())
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not its token.
        f.debug_struct("Handle")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Handle {
    pub(crate) fn state(&self) -> SandboxState {
        self.view.borrow().status.state
    }
}
