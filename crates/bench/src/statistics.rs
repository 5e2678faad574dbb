//! Distributions of times.

use std::time::Duration;

use serde_json::{Value, json};

/// Times of the same thing, in the order they were taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    /// Adds one.
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The nearest-rank percentile in milliseconds; 0 of nothing.
    pub(crate) fn percentile(&self, percent: u32) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let percent = usize::try_from(percent.min(100)).unwrap_or(100);
        let rank = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        sorted.get(rank).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    }

    /// The figures as they stand in the JSON file.
    pub(crate) fn json(&self) -> Value {
        json!({
            "n": self.count(),
            "min_ms": round(self.percentile(0)),
            "p50_ms": round(self.percentile(50)),
            "p90_ms": round(self.percentile(90)),
            "p99_ms": round(self.percentile(99)),
            "max_ms": round(self.percentile(100)),
        })
    }
}

impl Extend<Duration> for Times {
    fn extend<T: IntoIterator<Item = Duration>>(&mut self, times: T) {
        self.0.extend(times);
    }
}

impl IntoIterator for Times {
    type Item = Duration;
    type IntoIter = std::vec::IntoIter<Duration>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<Duration> for Times {
    fn from_iter<T: IntoIterator<Item = Duration>>(times: T) -> Self {
        Self(times.into_iter().collect())
    }
}

/// To a thousandth, which is beyond what these clocks mean.
pub(crate) fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let times: Times = (1..=100).rev().map(Duration::from_millis).collect();
        let found = [0, 1, 50, 90, 99, 100].map(|percent| round(times.percentile(percent)));
        assert_eq!(found, [1.0, 1.0, 50.0, 90.0, 99.0, 100.0]);
        let one: Times = [Duration::from_micros(1500)].into_iter().collect();
        assert_eq!([round(one.percentile(50)), round(one.percentile(99))], [1.5, 1.5]);
        assert_eq!(round(Times::default().percentile(50)), 0.0);
    }
}
