//! Whether the host has memory for machines that nobody has asked for yet.

use std::path::Path;

use fs_err as fs;

/// What the kernel says, and what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostMemory {
    /// There is room.
    Plenty,
    /// Nothing is to be made ahead.
    Scarce,
    /// What was made ahead is to be given up.
    Short,
}

/// Reads the accounts under `proc`: what is available, and how long tasks have waited for memory in the last ten seconds.
/// What cannot be read says nothing, for admission has its own look.
pub(crate) fn look(proc: &Path, reserve: u64, pressure_percent: u32) -> HostMemory {
    let available = fs::read_to_string(proc.join("meminfo"))
        .ok()
        .and_then(|text| crate::host_room::field(&text, "MemAvailable:"))
        .map_or(u64::MAX, |kib| kib.saturating_mul(1024));
    let waited = fs::read_to_string(proc.join("pressure/memory"))
        .ok()
        .and_then(|text| waited(&text))
        .unwrap_or_default();
    let bound = f64::from(pressure_percent);
    if available < reserve || waited > 2.0 * bound {
        HostMemory::Short
    } else if available < reserve.saturating_add(reserve / 2) || waited > bound {
        HostMemory::Scarce
    } else {
        HostMemory::Plenty
    }
}

/// `some avg10=0.12 avg60=…`
fn waited(pressure: &str) -> Option<f64> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let average = some
        .split_whitespace()
        .find_map(|field| field.strip_prefix("avg10="))?;
    average.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_memory_and_waiting_for_it_are_seen() {
        let directory = tempfile::tempdir().expect("a directory");
        let proc = directory.path();
        let look = || look(proc, 100 << 20, 10);
        assert_eq!(look(), HostMemory::Plenty, "nothing can be read");
        let write = |mib: u64, waited: &str| {
            fs::create_dir_all(proc.join("pressure")).expect("ours");
            let available = mib * 1024;
            fs::write(
                proc.join("meminfo"),
                format!("MemTotal: 9 kB\nMemAvailable: {available} kB\n"),
            )
            .expect("ours");
            let text =
                format!("some avg10={waited} avg60=0.00 total=1\nfull avg10=99.00 avg60=0.00 total=1\n");
            fs::write(proc.join("pressure/memory"), text).expect("ours");
        };
        write(200, "0.00");
        assert_eq!(look(), HostMemory::Plenty);
        write(120, "0.00");
        assert_eq!(look(), HostMemory::Scarce);
        write(99, "0.00");
        assert_eq!(look(), HostMemory::Short);
        write(200, "10.50");
        assert_eq!(look(), HostMemory::Scarce);
        write(200, "20.50");
        assert_eq!(look(), HostMemory::Short);
    }
}
