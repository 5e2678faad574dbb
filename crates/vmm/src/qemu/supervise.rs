//! Learns the end of a machine and tells why.
//!
//! ```text
//! running ── SHUTDOWN event: read the console, note the cause, kill ──┐
//!    │── kill asked for, or the machine dropped: note Killed, kill ───┤
//!    │── monitor's connection lost: wait a little, then kill ─────────┤
//!    └────────────────────────────── process gone ────────────────────┴── exited (told once)
//! ```

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use fs_err as fs;
use serde_json::{Value, json};
use space_node_manager::{ExitStatus, ObjectName, Privileges, ProcessIdentity};
use tokio::sync::watch;

use super::qmp::Qmp;
use crate::ExitReason;

/// How much of the console is kept, bytes.
const CONSOLE: usize = 16 * 1024;

/// How much of console or log an [`ExitReason`] carries, bytes.
const END: usize = 2 * 1024;

/// How Linux begins to say that it has panicked.
const PANIC: &str = "Kernel panic - not syncing";

/// How long QEMU may take to go after it has closed its monitor.
const CLOSING: Duration = Duration::from_secs(2);

/// Between attempts to kill, should one fail.
const KILL_AGAIN: Duration = Duration::from_secs(1);

/// The guest's console: QEMU keeps what was written since it was last read, this keeps what was read.
#[derive(Debug, Default)]
pub(super) struct Console {
    read: Mutex<Vec<u8>>,
}

impl Console {
    /// The end of all that the guest has written, as far as QEMU still answers.
    pub(super) async fn text(&self, qmp: &Qmp) -> String {
        let arguments = json!({"device": "console", "size": CONSOLE, "format": "base64"});
        let fresh = match qmp.run("ringbuf-read", arguments).await {
            Ok(Value::String(fresh)) => BASE64_STANDARD.decode(fresh).unwrap_or_default(),
            _ => Vec::new(),
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.extend(fresh);
        let excess = read.len().saturating_sub(CONSOLE);
        read.drain(..excess);
        String::from_utf8_lossy(&read).into_owned()
    }
}

/// One machine's process.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) privileges: Arc<dyn Privileges>,
    pub(super) name: ObjectName,
    pub(super) identity: ProcessIdentity,
    pub(super) qmp: Qmp,
    pub(super) console: Arc<Console>,
    pub(super) log: PathBuf,
}

/// Runs until the process is gone.
pub(super) async fn supervise(
    watched: Watched,
    mut process: watch::Receiver<Option<ExitStatus>>,
    mut kill: watch::Receiver<bool>,
    tell: watch::Sender<Option<ExitReason>>,
) {
    let cause = match first_sign(&watched.qmp, &mut process, &mut kill).await {
        Sign::Kill => Some(ExitReason::Killed),
        Sign::Guest(reason) => Some(guest_end(&reason, &watched.console.text(&watched.qmp).await)),
        Sign::Monitor => None,
    };
    let status = loop {
        let ended = process.borrow().is_some();
        if !ended && let Err(error) = watched.privileges.kill(watched.identity).await {
            tracing::error!(%error, machine = %watched.name, "a machine could not be killed");
        }
        let gone = tokio::time::timeout(KILL_AGAIN, process.wait_for(Option::is_some)).await;
        match gone.map(|gone| gone.map(|status| *status)) {
            Ok(Ok(status)) => break status,
            // Nobody will ever tell: the privileges are gone with the whole node.
            Ok(Err(_)) => break None,
            Err(_) => {}
        }
    };
    let reason = match cause {
        Some(cause) => cause,
        None => monitor_end(&watched, status).await,
    };
    tracing::debug!(machine = %watched.name, ?reason, "machine ended");
    tell.send_replace(Some(reason));
}

/// What a machine's end begins with.
enum Sign {
    /// Someone wants it dead.
    Kill,
    /// The guest has stopped for good: QEMU's word for why.
    Guest(String),
    /// The process is gone, or cannot be talked to any more.
    Monitor,
}

async fn first_sign(
    qmp: &Qmp,
    process: &mut watch::Receiver<Option<ExitStatus>>,
    kill: &mut watch::Receiver<bool>,
) -> Sign {
    let mut shutdown = qmp.shutdown();
    tokio::select! {
        biased;
        // The sender is dropped only after it has sent.
        _ = kill.wait_for(|asked| *asked) => Sign::Kill,
        Ok(reason) = shutdown.wait_for(Option::is_some) => Sign::Guest(reason.clone().unwrap_or_default()),
        _ = process.wait_for(Option::is_some) => Sign::Monitor,
        () = lost(qmp) => Sign::Monitor,
    }
}

/// Waits until the monitor's connection has been gone for longer than an ending QEMU needs.
async fn lost(qmp: &Qmp) {
    qmp.closed().await;
    tokio::time::sleep(CLOSING).await;
}

/// From QEMU's word for why the guest stopped. A panicked Linux guest is told to reboot at once (`panic=-1`) and says
/// so on its console before.
fn guest_end(reason: &str, console: &str) -> ExitReason {
    let panicked = reason == "guest-panic" || (reason.starts_with("guest-reset") && console.contains(PANIC));
    match reason {
        _ if panicked => ExitReason::GuestPanicked {
            console: last_words(console),
        },
        "guest-shutdown" | "guest-reset" => ExitReason::GuestShutdown,
        // A signal from outside, or our own `quit`, neither of which is sent.
        other => ExitReason::MonitorFailed {
            detail: format!("the monitor stopped by itself: {other}"),
        },
    }
}

async fn monitor_end(watched: &Watched, status: Option<ExitStatus>) -> ExitReason {
    if status == Some(ExitStatus::Signal(libc::SIGKILL)) {
        let usage = watched.privileges.group_usage(&watched.name).await;
        if usage.is_ok_and(|usage| usage.oom_kills > 0) {
            return ExitReason::OutOfMemory;
        }
    }
    let words = match status {
        Some(ExitStatus::Code(code)) => format!("ended with code {code}"),
        Some(ExitStatus::Signal(signal)) => format!("was killed by signal {signal}"),
        None => "is gone".to_owned(),
    };
    let log = log_end(&watched.log);
    let detail = if log.is_empty() {
        words
    } else {
        format!("{words}: {log}")
    };
    ExitReason::MonitorFailed { detail }
}

fn log_end(path: &Path) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(END as u64)))?;
        let mut end = Vec::new();
        file.take(END as u64).read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default())
        .trim()
        .to_owned()
}

/// What a panicked guest had to say: from the panic's own line on, else the end; at most [`END`] bytes.
fn last_words(console: &str) -> String {
    let mut from = console
        .rfind(PANIC)
        .unwrap_or_else(|| console.len().saturating_sub(END));
    while !console.is_char_boundary(from) {
        from += 1;
    }
    let words = &console[from..];
    let mut to = words.len().min(END);
    while !words.is_char_boundary(to) {
        to -= 1;
    }
    words[..to].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_told_from_a_reboot_by_the_console() {
        let panic = "[ 1.0] Kernel panic - not syncing: sysrq triggered crash";
        assert!(matches!(
            guest_end("guest-reset", panic),
            ExitReason::GuestPanicked { .. }
        ));
        assert_eq!(guest_end("guest-reset", "all well"), ExitReason::GuestShutdown);
        assert_eq!(guest_end("guest-shutdown", panic), ExitReason::GuestShutdown);
        assert!(matches!(
            guest_end("host-signal", ""),
            ExitReason::MonitorFailed { .. }
        ));
        let long = format!("{}{panic}{}", "ä".repeat(5000), "ö".repeat(5000));
        assert!(
            matches!(guest_end("guest-reset", &long), ExitReason::GuestPanicked { console }
                if console.starts_with(PANIC) && console.len() <= END)
        );
        let long = "ä".repeat(5000);
        assert!(
            matches!(guest_end("guest-panic", &long), ExitReason::GuestPanicked { console } if console.len() <= END)
        );
    }
}
