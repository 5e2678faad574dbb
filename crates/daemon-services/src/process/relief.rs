//! Ends the command that has taken all memory and gets nowhere.
//!
//! The kernel ends who asks for memory that cannot be had. But the pages of a program's own files can always be had again from
//! disk: a command that fills all the rest then reads its own code over and over, for minutes, and is never refused anything.
//! The kernel measures how long everything stands still for want of memory; when that has been much of the time for a while,
//! and memory is full, the largest command is left no memory at all, for which the kernel ends it as it ends any other that
//! has too little: whole, counted, and with that cause.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::descriptor;

/// Tells when everything has stood still for 0.4 of a second; a thrashing command under emulation stands still for more than
/// half of its time, and computes for the rest. In the words of the kernel's pressure files, microseconds.
const TRIGGER: &[u8] = b"full 400000 1000000\0";
/// Events further apart than this are not of one kind.
const GAP: Duration = Duration::from_millis(2500);
/// How long it must go on.
const PATIENCE: Duration = Duration::from_secs(5);
/// Memory counts as full from this share of the limit on, percent.
const FULL: u64 = 95;

/// Looks after the groups below the agent's for ever; not at all where the kernel does not measure.
pub(crate) async fn watch(agent: PathBuf) {
    let events = match arm(&agent) {
        Ok(events) => events,
        Err(error) => {
            tracing::debug!(%error, "nothing is told of memory that is wanted");
            return;
        }
    };
    let mut streak = Streak::default();
    while let Ok(mut ready) = events.ready(Interest::PRIORITY).await {
        if ready.ready().is_error() {
            return;
        }
        ready.clear_ready();
        if streak.goes_on(Instant::now()) && is_full(&agent) {
            streak = Streak::default();
            let agent = agent.clone();
            // The kernel looks for memory first, and answers when the command has ended.
            if let Ok(Err(error)) = tokio::task::spawn_blocking(move || relieve(&agent)).await {
                tracing::warn!(%error, "the command that takes all memory cannot be ended");
            }
        }
    }
}

fn arm(agent: &Path) -> io::Result<AsyncFd<std::os::fd::OwnedFd>> {
    let mut file = fs::File::options()
        .read(true)
        .write(true)
        .open(agent.join("memory.pressure"))?;
    file.write_all(TRIGGER)?;
    descriptor::watch(file.into(), Interest::PRIORITY)
}

/// Events that follow each other closely.
#[derive(Debug, Default)]
struct Streak(Option<(Instant, Instant)>);

impl Streak {
    /// Notes an event; whether there have been such for long enough.
    fn goes_on(&mut self, now: Instant) -> bool {
        let first = match self.0 {
            Some((first, last)) if now.duration_since(last) <= GAP => first,
            _ => now,
        };
        self.0 = Some((first, now));
        now.duration_since(first) >= PATIENCE
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn is_full(agent: &Path) -> bool {
    let (used, most) = (
        number(&agent.join("memory.current")),
        number(&agent.join("memory.max")),
    );
    used.zip(most)
        .is_some_and(|(used, most)| used >= most / 100 * FULL)
}

/// Leaves the largest group no memory.
fn relieve(agent: &Path) -> io::Result<()> {
    let entries = fs::read_dir(agent)?.flatten();
    let groups = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("process-"));
    let largest = groups
        .filter_map(|entry| Some((number(&entry.path().join("memory.current"))?, entry.path())))
        .max();
    let Some((bytes, path)) = largest else {
        return Ok(());
    };
    tracing::warn!(path = %path.display(), bytes, "a command that takes all memory and gets nowhere is ended");
    fs::write(path.join("memory.max"), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_goes_on_without_a_break_is_long_enough() {
        let mut streak = Streak::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!((0..5).all(|second| !streak.goes_on(at(second))));
        assert!(streak.goes_on(at(5)));
        assert!(!streak.goes_on(at(20)), "there was a break");
        assert!((21..25).all(|second| !streak.goes_on(at(second))));
        assert!(streak.goes_on(at(25)));
    }

    #[test]
    fn the_largest_command_gives_way_when_memory_is_full() {
        let agent = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| fs::write(agent.path().join(path), text).unwrap();
        assert!(!is_full(agent.path()), "nothing is known");
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        assert!(!is_full(agent.path()));
        write("memory.current", "951\n");
        assert!(is_full(agent.path()));
        write("memory.max", "max\n");
        assert!(!is_full(agent.path()), "there is no limit");
        relieve(agent.path()).unwrap();
        for (name, bytes) in [("process-1", "10\n"), ("process-2", "800\n"), ("other", "900\n")] {
            fs::create_dir(agent.path().join(name)).unwrap();
            write(&format!("{name}/memory.current"), bytes);
        }
        relieve(agent.path()).unwrap();
        assert_eq!(number(&agent.path().join("process-2/memory.max")), Some(0));
        assert!(!agent.path().join("process-1/memory.max").exists());
    }
}
