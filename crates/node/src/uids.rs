//! Ordinary user ids for machines: one for each, handed out in a round so that none is used again soon.

use std::{collections::BTreeSet, ops::Range, sync::Mutex};

use crate::locked;

#[derive(Debug)]
pub(crate) struct UidSlots {
    range: Range<u32>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    next: u32,
    used: BTreeSet<u32>,
}

impl UidSlots {
    pub(crate) fn new(range: Range<u32>) -> Self {
        let next = range.start;
        Self {
            range,
            state: Mutex::new(State {
                next,
                used: BTreeSet::new(),
            }),
        }
    }

    /// An id that nothing uses, or `None` when all are in use.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut state = locked(&self.state);
        let mut candidates = (state.next..self.range.end).chain(self.range.start..state.next);
        let uid = candidates.find(|uid| !state.used.contains(uid))?;
        state.used.insert(uid);
        state.next = if uid + 1 >= self.range.end {
            self.range.start
        } else {
            uid + 1
        };
        Some(uid)
    }

    /// Takes one id that a machine has already.
    pub(crate) fn reserve(&self, uid: u32) {
        locked(&self.state).used.insert(uid);
    }

    /// Gives an id back; only when no process of it is left.
    pub(crate) fn give_back(&self, uid: u32) {
        locked(&self.state).used.remove(&uid);
    }

    /// How many are in use.
    #[cfg(test)]
    pub(crate) fn in_use(&self) -> usize {
        locked(&self.state).used.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_bounded_and_reused_late() {
        let slots = UidSlots::new(10..13);
        assert_eq!([slots.take(), slots.take()], [Some(10), Some(11)]);
        slots.give_back(10);
        assert_eq!(
            [slots.take(), slots.take(), slots.take()],
            [Some(12), Some(10), None]
        );
        slots.give_back(11);
        assert_eq!(slots.take(), Some(11));
    }
}
