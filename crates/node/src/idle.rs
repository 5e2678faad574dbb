//! Whether a sandbox does work, told from what it uses.
//!
//! Each answer to a health question is compared with the one before:
//!
//! | counts as work | because |
//! |---|---|
//! | a request or tunnel open now | somebody waits for it |
//! | a request or tunnel let in since the last look | somebody uses it, however short |
//! | the agent's processors beyond [`AGENT_CPU`] | programs run |
//! | the agent's disk traffic beyond [`AGENT_IO`] | programs read or write |
//! | the agent's number of tasks changed | programs begin or end |
//! | the machine's processor time, as the host counts it, beyond [`HOST_CPU`] | what the guest does not tell |
//!
//! A process that only sleeps is no work, and neither is a client that is merely connected to the platform. There is no
//! network traffic to count: what comes in comes by requests and tunnels, and nothing goes out.
//!
//! The guest's figures are its own word. They decide only whether its own sandbox is paused, so that a lie gains what
//! working would have gained, or costs the liar its own time.

use std::{sync::Mutex, time::Duration};

use space_channel::{Activity, HealthReport};
use tokio::time::Instant;

use crate::locked;

/// Processor time of the agent's processes that is no work, of one second: a sleeping server's timers.
const AGENT_CPU: f64 = 0.02;
/// Disk traffic of the agent's processes that is no work, bytes in one second: a line in a log now and then.
const AGENT_IO: f64 = 8192.0;
/// Processor time of the whole machine that is no work, of one second: an idle guest costs the host 0.015 when its
/// instructions are translated, and the daemon's own answers come on top.
const HOST_CPU: f64 = 0.15;
/// The same for a daemon that does not tell what its agent does: then it is all there is to go by.
const HOST_CPU_ALONE: f64 = 0.05;
/// Comparisons over less than this say nothing.
const SHORTEST: Duration = Duration::from_millis(1);

/// What is known of a sandbox at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) at: Instant,
    /// Commands that were started and have not ended.
    pub(crate) processes: u32,
    pub(crate) activity: Option<Activity>,
    /// As the host counts it; `None` if it could not be read.
    pub(crate) host_cpu_micros: Option<u64>,
}

impl Figures {
    pub(crate) fn new(report: &HealthReport, host_cpu_micros: Option<u64>) -> Self {
        Self {
            at: Instant::now(),
            processes: report.processes,
            activity: report.activity,
            host_cpu_micros,
        }
    }
}

/// Whether somebody waits for an answer of the sandbox right now.
pub(crate) fn is_waited_for(report: &HealthReport) -> bool {
    match report.activity {
        Some(activity) => activity.requests > 0 || activity.tunnels > 0,
        None => report.processes > 0,
    }
}

/// Compares figures.
#[derive(Debug, Default)]
pub(crate) struct Meter(Option<Figures>);

impl Meter {
    /// Takes the next figures; answers what work there was since the last ones, if any. The first figures, and those
    /// after a pause, have nothing to be compared with and count as work.
    pub(crate) fn work(&mut self, now: Figures) -> Option<&'static str> {
        let Some(before) = self.0.replace(now) else {
            return Some("it has just begun to run");
        };
        let passed = now.at.duration_since(before.at);
        if passed < SHORTEST {
            return Some("too little time has passed");
        }
        let seconds = passed.as_secs_f64();
        // Counters that went back are a guest that lies; nothing is subtracted from them.
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let host_cpu = now
            .host_cpu_micros
            .zip(before.host_cpu_micros)
            .map_or(0.0, |(now, before)| rate(now, before) / 1e6);
        let Some(activity) = now.activity else {
            return if now.processes > 0 {
                Some("commands run")
            } else {
                (host_cpu > HOST_CPU_ALONE).then_some("processor")
            };
        };
        let before = before.activity.unwrap_or_default();
        if activity.requests > 0 || activity.tunnels > 0 {
            Some("streams are open")
        } else if rate(activity.cpu_micros, before.cpu_micros) / 1e6 > AGENT_CPU {
            Some("processor of the agent")
        } else if rate(activity.io_bytes, before.io_bytes) > AGENT_IO {
            Some("disk traffic of the agent")
        } else if activity.tasks != before.tasks {
            Some("processes of the agent begin or end")
        } else {
            (host_cpu > HOST_CPU).then_some("processor")
        }
    }

    /// Forgets: what comes next is not compared with what was.
    pub(crate) fn reset(&mut self) {
        self.0 = None;
    }
}

/// When a way into the sandbox was last given out, which its guest may not have noticed yet.
#[derive(Debug)]
pub(crate) struct LastUse(Mutex<Option<Instant>>);

impl LastUse {
    /// A request on its way is in the guest, and counted there, within this time.
    const ON_ITS_WAY: Duration = Duration::from_secs(1);

    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn note(&self) {
        *locked(&self.0) = Some(Instant::now());
    }

    /// Whether there was one since the last time this was asked with the same `seen`, which remembers.
    pub(crate) fn is_newer_than(&self, seen: &mut Option<Instant>) -> bool {
        let last = *locked(&self.0);
        std::mem::replace(seen, last) != last
    }

    pub(crate) fn is_recent(&self) -> bool {
        locked(&self.0).is_some_and(|last| last.elapsed() < Self::ON_ITS_WAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(seconds: u64, activity: Activity, host_cpu_micros: u64) -> Figures {
        Figures {
            at: *START + Duration::from_secs(seconds),
            processes: 0,
            activity: Some(activity),
            host_cpu_micros: Some(host_cpu_micros),
        }
    }

    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

    fn compared(before: Figures, now: Figures) -> Option<&'static str> {
        let mut meter = Meter::default();
        assert!(meter.work(before).is_some(), "the first says nothing");
        meter.work(now)
    }

    #[test]
    fn each_kind_of_work_is_seen_and_a_sleeping_agent_is_idle() {
        let resting = Activity {
            cpu_micros: 1_000_000,
            io_bytes: 1 << 20,
            tasks: 3,
            tunnels: 0,
            requests: 0,
        };
        let before = figures(0, resting, 0);
        // An idle guest under translation, with a server that wakes up now and then.
        let rest = Activity {
            cpu_micros: 1_100_000,
            ..resting
        };
        assert_eq!(compared(before, figures(10, rest, 400_000)), None);
        for (work, host) in [
            (
                Activity {
                    cpu_micros: 1_300_000,
                    ..resting
                },
                0,
            ),
            (
                Activity {
                    io_bytes: 2 << 20,
                    ..resting
                },
                0,
            ),
            (Activity { tasks: 2, ..resting }, 0),
            (
                Activity {
                    tunnels: 1,
                    ..resting
                },
                0,
            ),
            (
                Activity {
                    requests: 1,
                    ..resting
                },
                0,
            ),
            (resting, 2_000_000),
        ] {
            assert!(compared(before, figures(10, work, host)).is_some(), "{work:?}");
        }
    }

    #[test]
    fn a_guest_whose_counters_go_back_or_overflow_breaks_nothing() {
        let most = Activity {
            cpu_micros: u64::MAX,
            io_bytes: u64::MAX,
            tasks: 0,
            tunnels: 0,
            requests: 0,
        };
        let (high, low) = (figures(0, most, u64::MAX), figures(10, Activity::default(), 0));
        assert_eq!(compared(high, low), None);
        assert!(compared(figures(0, Activity::default(), 0), figures(10, most, u64::MAX)).is_some());
    }

    #[test]
    fn an_old_daemon_is_judged_by_its_commands_and_the_hosts_count() {
        let old = |seconds, processes, host| Figures {
            processes,
            activity: None,
            ..figures(seconds, Activity::default(), host)
        };
        assert_eq!(compared(old(0, 0, 0), old(10, 0, 200_000)), None);
        assert!(compared(old(0, 0, 0), old(10, 1, 0)).is_some());
        assert!(compared(old(0, 0, 0), old(10, 0, 1_000_000)).is_some());
    }

    #[test]
    fn after_a_reset_nothing_is_compared() {
        let mut meter = Meter::default();
        meter.work(figures(0, Activity::default(), 0));
        meter.reset();
        assert!(meter.work(figures(10, Activity::default(), 0)).is_some());
    }
}
