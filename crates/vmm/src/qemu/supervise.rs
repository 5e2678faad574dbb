//! Learns the end of a machine and tells why.
//!
//! ```text
//! running ── SHUTDOWN event: read the console, note the cause, kill ──┐
//!    │── kill asked for, or the machine dropped: note Killed, kill ───┤
//!    │── monitor's connection lost: wait a little, then kill ─────────┤
//!    ├────────────────────────────── process gone ────────────────────┴── exited (told once)
//!    └── detached: stop looking; nothing is told
//! ```
//!
//! That the process is watched may end before the process does: whoever watches it for us may be restarted. It is then
//! watched anew; the loss is no sign of anything.

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

use super::{adopt::is_gone, qmp::Qmp};
use crate::ExitReason;

/// How much of the console is kept, bytes.
const CONSOLE: usize = 16 * 1024;

/// How much of console or log an [`ExitReason`] carries, bytes.
const END: usize = 2 * 1024;

/// Longest log that is left alone, bytes, and how often it is looked at. What a guest does can make QEMU write to it, and
/// it may lie in memory.
const LOG: u64 = 1 << 20;
const LOG_AGAIN: Duration = Duration::from_secs(5);

/// How Linux begins to say that it has panicked.
const PANIC: &str = "Kernel panic - not syncing";

/// How long QEMU may take to go after it has closed its monitor.
pub(super) const CLOSING: Duration = Duration::from_secs(2);

/// Between attempts to kill, should one fail.
const KILL_AGAIN: Duration = Duration::from_secs(1);

/// Between attempts to have a process watched again. Its end is seen by the monitor's connection meanwhile.
const WATCH_AGAIN: Duration = Duration::from_millis(250);

/// The file in the machine's directory with what was read of the console.
const CONSOLE_FILE: &str = "console";

/// What is to become of a machine; the first order stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    None,
    /// Its end.
    Kill,
    /// It is left to itself.
    Detach,
}

/// The guest's console: QEMU keeps what was written since it was last read, this keeps what was read, also for the next
/// owner of the machine.
#[derive(Debug)]
pub(super) struct Console {
    file: PathBuf,
    read: Mutex<Vec<u8>>,
}

impl Console {
    /// Of a new machine.
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            file: directory.join(CONSOLE_FILE),
            read: Mutex::default(),
        }
    }

    /// Of a machine that was another's.
    pub(super) fn load(directory: &Path) -> Self {
        let console = Self::new(directory);
        // Most consoles were never read.
        let earlier = fs::read(&console.file).unwrap_or_default();
        Self {
            read: Mutex::new(earlier),
            ..console
        }
    }

    /// The end of all that the guest has written, as far as QEMU still answers.
    pub(super) async fn text(&self, qmp: &Qmp) -> String {
        let arguments = json!({"device": "console", "size": CONSOLE, "format": "base64"});
        let fresh = match qmp.run("ringbuf-read", arguments).await {
            Ok(Value::String(fresh)) => BASE64_STANDARD.decode(fresh).unwrap_or_default(),
            _ => Vec::new(),
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if !fresh.is_empty() {
            read.extend(fresh);
            let excess = read.len().saturating_sub(CONSOLE);
            read.drain(..excess);
            if let Err(error) = fs::write(&self.file, &*read) {
                tracing::debug!(%error, "what a console said is not kept for a later owner");
            }
        }
        String::from_utf8_lossy(&read).into_owned()
    }
}

/// A process and the watch on it.
#[derive(Debug)]
pub(super) struct Process {
    privileges: Arc<dyn Privileges>,
    identity: ProcessIdentity,
    exit: watch::Receiver<Option<ExitStatus>>,
}

impl Process {
    pub(super) fn new(
        privileges: Arc<dyn Privileges>,
        identity: ProcessIdentity,
        exit: watch::Receiver<Option<ExitStatus>>,
    ) -> Self {
        Self {
            privileges,
            identity,
            exit,
        }
    }

    /// Waits until it is gone.
    pub(super) async fn ended(&mut self) -> ExitStatus {
        loop {
            if let Ok(status) = self.exit.wait_for(Option::is_some).await {
                return status.unwrap_or(ExitStatus::Unknown);
            }
            match self.privileges.adopt(self.identity).await {
                Ok(adopted) => self.exit = adopted.spawned.exit,
                Err(error) if is_gone(&error) => return ExitStatus::Unknown,
                Err(error) => {
                    tracing::debug!(%error, pid = self.identity.pid, "a process is not watched");
                    tokio::time::sleep(WATCH_AGAIN).await;
                }
            }
        }
    }

    /// Kills it and waits until it is gone.
    async fn end(&mut self, name: &ObjectName) -> ExitStatus {
        loop {
            // A process that is gone counts as killed.
            if self.exit.borrow().is_none()
                && let Err(error) = self.privileges.kill(self.identity).await
            {
                tracing::error!(%error, machine = %name, "a machine could not be killed");
            }
            if let Ok(status) = tokio::time::timeout(KILL_AGAIN, self.ended()).await {
                return status;
            }
        }
    }
}

/// What is watched of one machine.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) privileges: Arc<dyn Privileges>,
    pub(super) name: ObjectName,
    pub(super) console: Arc<Console>,
    pub(super) log: PathBuf,
    pub(super) process: Process,
}

impl Watched {
    /// Ends a machine whose guest has stopped for good while nobody looked; `status` is QEMU's word for its state.
    pub(super) async fn end_stopped(&mut self, qmp: &Qmp, status: &str) -> ExitReason {
        let reason = match status {
            "guest-panicked" => "guest-panic",
            // What of the two it was is no longer known; only a reset can be a panic.
            _ => "guest-reset",
        };
        let reason = guest_end(reason, &self.console.text(qmp).await);
        self.process.end(&self.name).await;
        reason
    }

    /// The reason behind an end that nobody here brought about.
    pub(super) async fn end(&self, status: ExitStatus) -> ExitReason {
        monitor_end(&*self.privileges, &self.name, &self.log, status).await
    }
}

/// Runs until the process is gone, or is let go.
pub(super) async fn supervise(
    mut watched: Watched,
    qmp: Qmp,
    mut orders: watch::Receiver<Order>,
    tell: watch::Sender<Option<ExitReason>>,
) {
    let log = watched.log.clone();
    let sign = tokio::select! {
        sign = first_sign(&qmp, &mut watched.process, &mut orders) => sign,
        sign = keep_short(&log) => match sign {},
    };
    let cause = match sign {
        Sign::Ordered(Order::Detach | Order::None) => return,
        Sign::Ordered(Order::Kill) => Some(ExitReason::Killed),
        Sign::Guest(reason) => Some(guest_end(&reason, &watched.console.text(&qmp).await)),
        Sign::Monitor => None,
    };
    let status = watched.process.end(&watched.name).await;
    let reason = match cause {
        Some(cause) => cause,
        None => watched.end(status).await,
    };
    tracing::debug!(machine = %watched.name, ?reason, "machine ended");
    tell.send_replace(Some(reason));
}

/// What a machine's end begins with.
enum Sign {
    /// Someone wants it dead, or left alone.
    Ordered(Order),
    /// The guest has stopped for good: QEMU's word for why.
    Guest(String),
    /// The process is gone, or cannot be talked to any more.
    Monitor,
}

async fn first_sign(qmp: &Qmp, process: &mut Process, orders: &mut watch::Receiver<Order>) -> Sign {
    let mut shutdown = qmp.shutdown();
    tokio::select! {
        biased;
        // The sender is dropped only after it has sent.
        Ok(order) = orders.wait_for(|order| *order != Order::None) => Sign::Ordered(*order),
        Ok(reason) = shutdown.wait_for(Option::is_some) => Sign::Guest(reason.clone().unwrap_or_default()),
        _ = process.ended() => Sign::Monitor,
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

pub(super) async fn monitor_end(
    privileges: &dyn Privileges,
    name: &ObjectName,
    log: &Path,
    status: ExitStatus,
) -> ExitReason {
    // One that was not watched may have been killed by anyone; the group knows better.
    if matches!(status, ExitStatus::Signal(libc::SIGKILL) | ExitStatus::Unknown) {
        let usage = privileges.group_usage(name).await;
        if usage.is_ok_and(|usage| usage.oom_kills > 0) {
            return ExitReason::OutOfMemory;
        }
    }
    let words = match status {
        ExitStatus::Code(code) => format!("ended with code {code}"),
        ExitStatus::Signal(signal) => format!("was killed by signal {signal}"),
        ExitStatus::Unknown => "is gone".to_owned(),
    };
    let log = log_end(log);
    let detail = if log.is_empty() {
        words
    } else {
        format!("{words}: {log}")
    };
    ExitReason::MonitorFailed { detail }
}

/// Shortens a log for as long as there is a machine.
async fn keep_short(log: &Path) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(LOG_AGAIN).await;
        if let Err(error) = shorten(log) {
            tracing::debug!(%error, "a monitor's log is not kept short");
        }
    }
}

/// Leaves no more than its end of a log that is too long. The monitor appends, so it goes on behind that.
fn shorten(path: &Path) -> std::io::Result<()> {
    use std::io::Write;
    if fs::symlink_metadata(path)?.len() <= LOG {
        return Ok(());
    }
    let end = log_end(path);
    let mut log = fs::OpenOptions::new().append(true).open(path)?;
    log.set_len(0)?;
    log.write_all(format!("(earlier lines were removed)\n{end}\n").as_bytes())
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
    use space_node_manager::{Act, RecordingPrivileges, VmmProcess};

    use super::*;

    #[tokio::test]
    async fn a_watch_that_is_lost_with_its_keeper_is_no_end() {
        let privileges = Arc::new(RecordingPrivileges::default());
        let name = ObjectName::new("m").unwrap();
        let started = VmmProcess {
            name: name.clone(),
            program: "/usr/bin/monitor".into(),
            arguments: Vec::new(),
            uid: 1,
            network_namespace: None,
            descriptors: std::collections::BTreeMap::new(),
            log: None,
            file_size_limit: 0,
            views: Vec::new(),
        };
        let identity = privileges.spawn(started).await.unwrap().identity;
        // The keeper is gone, and cannot be reached for the first two tries.
        let mut refusals = 2;
        privileges.fail_if(move |act| {
            let refuse = matches!(act, Act::Adopt(_)) && refusals > 0;
            refusals -= i32::from(refuse);
            refuse
        });
        let (_, lost) = watch::channel(None);
        let mut process = Process::new(privileges.clone(), identity, lost);
        let watching = tokio::spawn(async move { process.ended().await });
        let adopted = async {
            while privileges
                .acts()
                .iter()
                .filter(|act| matches!(act, Act::Adopt(_)))
                .count()
                < 3
            {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), adopted)
            .await
            .expect("it asks again");
        assert!(!watching.is_finished());
        privileges.end_processes(&name, ExitStatus::Code(3));
        assert_eq!(watching.await.unwrap(), ExitStatus::Code(3));

        // One that ended in between is gone, and how is not known.
        let (_, lost) = watch::channel(None);
        let mut gone = Process::new(privileges, identity, lost);
        assert_eq!(gone.ended().await, ExitStatus::Unknown);
    }

    #[test]
    fn a_log_is_bounded_and_its_writer_goes_on() {
        use std::io::Write;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("monitor.log");
        let mut monitor = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .unwrap();
        monitor.write_all(b"first\n").unwrap();
        shorten(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first\n");
        monitor.write_all(&vec![b'x'; 2 << 20]).unwrap();
        monitor.write_all(b"\nlast\n").unwrap();
        shorten(&path).unwrap();
        monitor.write_all(b"next\n").unwrap();
        let log = fs::read_to_string(&path).unwrap();
        assert!(log.len() <= 2 * END && log.ends_with("\nlast\nnext\n"), "{log}");
        assert!(log_end(&path).ends_with("next"));
    }

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
