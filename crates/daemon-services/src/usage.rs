//! What the guest uses: processors, memory, disk.

use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The body of `GET /metrics`; sizes in bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Usage {
    ts: u64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ticks {
    busy: u64,
    total: u64,
}

/// Remembers the last sample, since use of processors is a difference.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    last: Mutex<Ticks>,
}

impl Meter {
    /// Measures now; processor use is since the last call, or since boot.
    pub(crate) fn measure(&self) -> Usage {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let now = ticks(&stat);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (busy, total) = (
            now.busy.saturating_sub(last.busy),
            now.total.saturating_sub(last.total),
        );
        *last = now;
        drop(last);
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total_memory = kilobytes(&memory, "MemTotal:");
        let (disk_used, disk_total) = disk();
        Usage {
            ts: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            cpu_count: std::thread::available_parallelism()
                .map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
            cpu_used_pct: percent(busy, total),
            mem_total: total_memory,
            mem_used: total_memory.saturating_sub(kilobytes(&memory, "MemAvailable:")),
            mem_cache: kilobytes(&memory, "Cached:"),
            disk_used,
            disk_total,
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    let hundredths = part.saturating_mul(10_000).checked_div(whole).unwrap_or_default();
    f64::from(u32::try_from(hundredths).unwrap_or(10_000)) / 100.0
}

/// `cpu user nice system idle iowait irq softirq steal …`
fn ticks(stat: &str) -> Ticks {
    let line = stat.lines().next().unwrap_or_default();
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|field| field.parse().ok())
        .collect();
    let total = fields.iter().sum();
    let idle = fields.get(3).copied().unwrap_or_default() + fields.get(4).copied().unwrap_or_default();
    Ticks {
        busy: u64::saturating_sub(total, idle),
        total,
    }
}

fn kilobytes(meminfo: &str, key: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or_default().saturating_mul(1024)
}

/// With less room than this a disk counts as full, bytes: some file systems keep a few blocks that no file gets.
const FULL: u64 = 256 * 1024;

/// Whether programs find no room on the guest's disk, be it for bytes or for files.
pub(crate) fn disk_is_full() -> bool {
    rustix::fs::statvfs("/").is_ok_and(|found| {
        found.f_bavail.saturating_mul(found.f_frsize) < FULL || (found.f_files > 0 && found.f_favail == 0)
    })
}

fn disk() -> (u64, u64) {
    let Ok(found) = rustix::fs::statvfs("/") else {
        return (0, 0);
    };
    let total = found.f_blocks.saturating_mul(found.f_frsize);
    let free = found.f_bfree.saturating_mul(found.f_frsize);
    (total.saturating_sub(free), total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_something_plausible() {
        let meter = Meter::default();
        let usage = meter.measure();
        assert!(usage.mem_total > usage.mem_used && usage.mem_used > 0);
        assert!(usage.disk_total >= usage.disk_used && usage.disk_total > 0);
        assert!((0.0..=100.0).contains(&usage.cpu_used_pct));
        assert_eq!(percent(1, 3), 33.33);
        assert_eq!(percent(1, 0), 0.0);
    }
}
