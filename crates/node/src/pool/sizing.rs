//! How many machines are kept ready, and of what: arithmetic over what was asked for, without a clock or a host.
//!
//! One key (a template's digest and a size) wants the **largest backlog** that its recent demand would have made: each
//! take adds one, and every refill time takes one away. A lone take wants one machine, a burst of eight wants eight, a
//! steady rate wants what piles up while one is being made, and a rate that refilling cannot follow wants all it can get.
//!
//! What all keys want together is shared out by highest averages over their recent takes, so that a key that is used three
//! times as much gets about three times as many, and none starves while there is room.

use std::{collections::VecDeque, time::Duration};

/// Takes further back are forgotten.
pub(crate) const WINDOW: Duration = Duration::from_secs(300);
/// Most takes remembered for one key; more say nothing new.
const MOST_TAKES: usize = 512;

/// When machines of one key were asked for.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// Since the pool's beginning, ascending.
    takes: VecDeque<Duration>,
}

impl Demand {
    /// One was asked for.
    pub(crate) fn note(&mut self, now: Duration) {
        if self.takes.len() >= MOST_TAKES {
            self.takes.pop_front();
        }
        self.takes.push_back(now);
    }

    /// Forgets what is too old.
    pub(crate) fn forget(&mut self, now: Duration) {
        while self.takes.front().is_some_and(|take| *take + WINDOW < now) {
            self.takes.pop_front();
        }
    }

    /// Takes within the window.
    pub(crate) fn recent(&self) -> usize {
        self.takes.len()
    }

    /// The largest backlog, if making one machine takes `refill`.
    pub(crate) fn backlog(&self, refill: Duration) -> usize {
        let refill = refill.as_secs_f64().max(1e-3);
        let (mut level, mut most, mut before) = (0.0_f64, 0.0_f64, Duration::ZERO);
        for take in &self.takes {
            let passed = take.saturating_sub(before).as_secs_f64();
            level = (level - passed / refill).max(0.0) + 1.0;
            most = most.max(level);
            before = *take;
        }
        // At most as many as there are takes, each counting one.
        (1..=self.takes.len())
            .find(|&count| most <= as_f64(count) + 1e-9)
            .unwrap_or(self.takes.len())
    }
}

/// What one key wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Want {
    /// By its demand, with the least that is kept for it.
    pub(crate) machines: usize,
    /// Takes within the window.
    pub(crate) takes: usize,
    /// Real memory of one machine, bytes.
    pub(crate) bytes: u64,
}

/// Shares machines out. No key gets more than it wants, and all together neither more than `machines` nor, by what each
/// one takes, more than `bytes`.
pub(crate) fn share(wants: &[Want], machines: usize, bytes: u64) -> Vec<usize> {
    let mut given = vec![0; wants.len()];
    let (mut machines, mut bytes) = (machines, bytes);
    while machines > 0 {
        let next = wants
            .iter()
            .enumerate()
            .filter(|(at, want)| given[*at] < want.machines && want.bytes <= bytes)
            .max_by(|(a, first), (b, second)| {
                let average = |at: usize, want: &Want| as_f64(want.takes + 1) / as_f64(given[at] + 1);
                // Of equals the earlier one, which is the one used last.
                average(*a, first).total_cmp(&average(*b, second)).then(b.cmp(a))
            });
        let Some((at, want)) = next else { break };
        given[at] += 1;
        machines -= 1;
        bytes -= want.bytes;
    }
    given
}

/// Counts here are far below the limit of exact numbers.
fn as_f64(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn demand(takes: &[u64]) -> Demand {
        let mut demand = Demand::default();
        for take in takes {
            demand.note(Duration::from_millis(*take));
        }
        demand
    }

    #[test]
    fn demand_wants_what_piles_up_while_one_is_made() {
        let second = Duration::from_secs(1);
        assert_eq!(demand(&[]).backlog(second), 0);
        assert_eq!(demand(&[500]).backlog(second), 1);
        // A burst.
        assert_eq!(demand(&[5000; 8]).backlog(second), 8);
        // Slower than refilling: one is always there again.
        let slow: Vec<_> = (0..50).map(|at| at * 1500).collect();
        assert_eq!(demand(&slow).backlog(second), 1);
        // A burst each ten seconds, refilled in between.
        let bursts: Vec<_> = (0..60).map(|at| at / 6 * 10_000).collect();
        assert_eq!(demand(&bursts).backlog(second), 6);
        // Faster than refilling: it piles up.
        let fast: Vec<_> = (0..40).map(|at| at * 500).collect();
        assert_eq!(demand(&fast).backlog(second), 21);
    }

    #[test]
    fn old_demand_is_forgotten() {
        let mut demand = demand(&[0, 1000, 400_000]);
        demand.forget(Duration::from_secs(401));
        assert_eq!((demand.recent(), demand.backlog(Duration::from_secs(1))), (1, 1));
        for _ in 0..2 * MOST_TAKES {
            demand.note(Duration::from_secs(401));
        }
        assert_eq!(demand.recent(), MOST_TAKES);
    }

    #[test]
    fn what_is_short_goes_to_who_uses_it() {
        let want = |machines, takes| Want {
            machines,
            takes,
            bytes: 10,
        };
        assert_eq!(share(&[want(8, 30), want(8, 10)], 8, 1000), [6, 2]);
        assert_eq!(share(&[want(2, 0), want(2, 0)], 3, 1000), [2, 1]);
        assert_eq!(share(&[want(2, 9), want(2, 9)], 8, 35), [2, 1]);
        assert_eq!(share(&[], 8, 35), [0; 0]);
    }

    proptest! {
        #[test]
        fn shares_keep_every_bound_and_leave_no_room_unused(
            wants in prop::collection::vec((0_usize..12, 0_usize..60, 1_u64..50), 0..8),
            machines in 0_usize..20,
            bytes in 0_u64..400,
        ) {
            let wants: Vec<_> = wants
                .into_iter()
                .map(|(machines, takes, bytes)| Want { machines, takes, bytes })
                .collect();
            let given = share(&wants, machines, bytes);
            prop_assert_eq!(given.len(), wants.len());
            let count: usize = given.iter().sum();
            let used: u64 = given.iter().zip(&wants).map(|(given, want)| *given as u64 * want.bytes).sum();
            prop_assert!(count <= machines && used <= bytes);
            for (given, want) in given.iter().zip(&wants) {
                prop_assert!(*given <= want.machines);
                let fits = count < machines && used + want.bytes <= bytes;
                prop_assert!(*given == want.machines || !fits, "room was left unused");
            }
        }

        #[test]
        fn a_backlog_is_at_least_one_and_at_most_all(
            mut takes in prop::collection::vec(0_u64..100_000, 1..100), refill in 1_u64..5000
        ) {
            takes.sort_unstable();
            let demand = demand(&takes);
            let short = demand.backlog(Duration::from_millis(refill));
            let long = demand.backlog(Duration::from_millis(refill * 2));
            prop_assert!((1..=takes.len()).contains(&short));
            prop_assert!(short <= long, "slower refilling never wants fewer");
        }
    }
}
