//! Samples of use: what the guest says of itself beside what the host counts, kept for an hour.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use jiff::Timestamp;
use serde::Deserialize;
use space_node_manager::GroupUsage;

use crate::{locked, seam::Usage};

/// How long samples are kept.
const KEEP: Duration = Duration::from_secs(3600);
/// Most samples kept, whoever asks for how many.
const MOST: usize = 720;

/// The daemon's answer to `GET /metrics`. Unknown fields are let pass, missing ones are zero.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct GuestFigures {
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    disk_total: u64,
    disk_used: u64,
}

impl GuestFigures {
    /// Reads what the guest wrote.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, serde_json::Error> {
        let mut figures: Self = serde_json::from_slice(body)?;
        // A figure that is no number would break every reader's arithmetic.
        if !figures.cpu_used_pct.is_finite() || figures.cpu_used_pct < 0.0 {
            figures.cpu_used_pct = 0.0;
        }
        Ok(figures)
    }

    pub(crate) fn sample(self, at: Timestamp, host: &GroupUsage) -> Usage {
        Usage {
            at,
            cpu_count: self.cpu_count,
            cpu_used_pct: self.cpu_used_pct,
            mem_total: self.mem_total,
            mem_used: self.mem_used,
            mem_cache: self.mem_cache,
            disk_total: self.disk_total,
            disk_used: self.disk_used,
            host_cpu_micros: host.cpu_micros,
            host_memory_bytes: host.memory_bytes,
        }
    }
}

/// The last hour of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct History(Mutex<VecDeque<Usage>>);

impl History {
    pub(crate) fn add(&self, sample: Usage) {
        let mut samples = locked(&self.0);
        let oldest = sample.at.checked_sub(KEEP).unwrap_or(Timestamp::MIN);
        while samples.front().is_some_and(|first| first.at < oldest) || samples.len() >= MOST {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    pub(crate) fn all(&self) -> Vec<Usage> {
        locked(&self.0).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use jiff::ToSpan as _;

    use super::*;

    #[test]
    fn figures_of_a_hostile_guest_are_refused_or_harmless() {
        for bad in [
            "",
            "{\"mem_total\":-1}",
            "{\"cpu_count\":99999999999}",
            "{\"cpu_used_pct\":\"x\"}",
        ] {
            assert!(GuestFigures::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        let figures =
            GuestFigures::parse(b"{\"ts\":1,\"cpu_used_pct\":-3.0,\"mem_used\":7}").expect("parses");
        let sample = figures.sample(Timestamp::UNIX_EPOCH, &GroupUsage::default());
        assert_eq!((sample.cpu_used_pct, sample.mem_used), (0.0, 7));
    }

    #[test]
    fn an_hour_is_kept_and_no_more_than_the_bound() {
        let history = History::default();
        let at = |seconds: i64| {
            GuestFigures::default().sample(Timestamp::UNIX_EPOCH + seconds.seconds(), &GroupUsage::default())
        };
        history.add(at(0));
        history.add(at(10));
        history.add(at(3605));
        assert_eq!(history.all(), [at(10), at(3605)]);
        for _ in 0..2000 {
            history.add(at(3605));
        }
        assert_eq!(history.all().len(), MOST);
    }
}
