//! Programs: starting, watching, feeding, signalling and remembering them.
//!
//! ```text
//!            start                 leader ends           group empty
//!   (none) ─────────▶ Running ────────────────▶ Ended ───────────────▶ Remembered ──▶ forgotten
//!                       │ ▲                       │                        (1000 / 1 h)
//!          kill, deadline─┘                       └─ still listed while anything it started lives
//! ```
//!
//! Each process has one supervising task (`supervise` in [`run`]) that alone takes the edges. A
//! client that goes away changes nothing; only the leader's own end, a signal or its deadline do.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use space_proto::process::{ProcessConfig, ProcessInfo};
use tokio::time::Instant;

use crate::account::AccountError;
use crate::core::Core;
use crate::paths::PathError;

use self::end::End;
use self::group::{Group, Groups};
use self::input::{Input, InputError};
use self::launcher::Launchers;
use self::log::{Budget, Log};
use self::terminal::Terminal;

mod end;
mod group;
mod input;
mod launch;
mod launcher;
mod log;
mod relief;
mod run;
mod service;

pub(crate) use self::service::{Service, deadline, keepalive};
mod source;
mod subscription;
mod terminal;

/// How many ended processes are remembered, and for how long.
const REMEMBERED: usize = 1000;
const REMEMBERED_FOR: Duration = Duration::from_secs(3600);
/// Output of ended processes kept for a late reader, in bytes, all together.
const REMEMBERED_OUTPUT: usize = 8 * 1024 * 1024;

/// What went wrong with a request about processes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessError {
    #[error("process with {selector} not found")]
    NotFound { selector: String },
    #[error("process with pid {pid} has ended")]
    Ended { pid: u32 },
    #[error("{what}")]
    Invalid { what: &'static str },
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("cwd '{path}' {problem}")]
    Directory { path: String, problem: &'static str },
    #[error("error starting process: '{program}' {problem}")]
    Program { program: String, problem: &'static str },
    #[error("error starting process: {what}; end some processes or use a larger sandbox")]
    Resources {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("error starting process: only the account of this service can be used without root")]
    NotRoot,
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{what} failed")]
    Internal {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
}

/// Descriptors of a process, given back as soon as it no longer needs them.
#[derive(Debug)]
struct Handles {
    /// Until the leader has ended.
    pidfd: Option<Arc<OwnedFd>>,
    /// Until the leader has ended.
    terminal: Option<Arc<Terminal>>,
    /// Until nothing lives in it.
    group: Option<Arc<Group>>,
}

/// One process that was started here.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) tag: Option<String>,
    pub(crate) config: ProcessConfig,
    pub(crate) user: String,
    pub(crate) log: Arc<Log>,
    pub(crate) input: tokio::sync::Mutex<Input>,
    handles: Mutex<Handles>,
    /// A request asked for its death.
    killed: AtomicBool,
    end: OnceLock<End>,
    /// Notified once `end` is set.
    ended: tokio::sync::watch::Sender<bool>,
}

impl Process {
    pub(crate) fn end(&self) -> Option<&End> {
        self.end.get()
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn group(&self) -> Option<Arc<Group>> {
        self.handles().group.clone()
    }

    /// Its terminal, while it runs on one.
    pub(crate) fn terminal(&self) -> Option<Arc<Terminal>> {
        self.handles().terminal.clone()
    }

    /// Kills it and everything it started.
    pub(crate) fn kill(&self) -> std::io::Result<()> {
        self.killed.store(true, Ordering::Relaxed);
        self.kill_all()
    }

    fn kill_all(&self) -> std::io::Result<()> {
        if let Some(group) = self.group() {
            match group.kill() {
                Ok(()) => return Ok(()),
                Err(error) => {
                    tracing::warn!(path = %group.path().display(), %error, "cannot kill a process group by its cgroup");
                }
            }
        }
        // The leader is a session and group leader from its start. Its pid is not reused while the
        // leader is unreaped, and signalled only until then.
        if self.end().is_none() {
            let pid = rustix::process::Pid::from_raw(self.pid.cast_signed());
            let pid = pid.ok_or(std::io::ErrorKind::NotFound)?;
            rustix::process::kill_process_group(pid, rustix::process::Signal::KILL)?;
        }
        Ok(())
    }

    /// Sends a signal other than kill: to the leader, or when it has ended to what it left behind.
    pub(crate) fn signal(&self, number: i32) -> Result<(), ProcessError> {
        let failed = |source| ProcessError::Internal {
            what: "sending the signal",
            source,
        };
        let invalid = ProcessError::Invalid {
            what: "the signal is not one of 1 to 64",
        };
        let signal = rustix::process::Signal::from_named_raw(number);
        if number == libc::SIGKILL {
            return self.kill().map_err(failed);
        }
        let Some(signal) = signal else { return Err(invalid) };
        if let Some(pidfd) = self.handles().pidfd.clone() {
            return match rustix::process::pidfd_send_signal(&pidfd, signal) {
                Err(rustix::io::Errno::SRCH) => Err(ProcessError::Ended { pid: self.pid }),
                other => other.map_err(|error| failed(error.into())),
            };
        }
        let Some(group) = self.group() else {
            return Err(ProcessError::Ended { pid: self.pid });
        };
        for pid in group
            .members()
            .into_iter()
            .filter_map(rustix::process::Pid::from_raw)
        {
            // It was in the group a moment ago; a pidfd makes sure that it still is the same one.
            let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
                continue;
            };
            if group.members().contains(&pid.as_raw_nonzero().get())
                && let Err(error) = rustix::process::pidfd_send_signal(&pidfd, signal)
            {
                tracing::debug!(%error, "a member ended before its signal");
            }
        }
        Ok(())
    }

    /// Living members of its group, itself included.
    fn members(&self) -> u32 {
        match self.group() {
            Some(group) => u32::try_from(group.members().len()).unwrap_or(u32::MAX),
            None => u32::from(self.end().is_none()),
        }
    }

    fn info(&self) -> ProcessInfo {
        ProcessInfo {
            config: self.config.clone().into(),
            pid: self.pid,
            tag: self.tag.clone(),
            user: self.user.clone(),
            end: self.end().map(End::to_message).into(),
            members: self.members(),
            ..ProcessInfo::default()
        }
    }
}

#[derive(Debug, Default)]
struct Registry {
    /// Running, or ended with something left behind. By serial number, since the pid of a leader
    /// that has ended may be another's by now.
    living: HashMap<u64, Arc<Process>>,
    started: u64,
    /// Oldest first.
    remembered: VecDeque<(Instant, Arc<Process>)>,
}

/// All processes.
#[derive(Debug)]
pub(crate) struct Processes {
    core: Arc<Core>,
    groups: Option<Arc<Groups>>,
    launchers: Launchers,
    budget: Budget,
    registry: Mutex<Registry>,
    is_root: bool,
    reset_oom_score: bool,
}

impl Processes {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let groups = core
            .config
            .agent_cgroup
            .clone()
            .map(|parent| Arc::new(Groups::new(parent)));
        let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
        Self {
            core,
            groups,
            launchers: Launchers::default(),
            budget: Budget::default(),
            registry: Mutex::default(),
            is_root: rustix::process::geteuid().is_root(),
            reset_oom_score: score.trim() != "0",
        }
    }

    /// Prepares what the next start needs, without waiting for it.
    pub(crate) fn prepare(&self) {
        let Some(groups) = self.groups.clone() else { return };
        let work = move |free: &dyn Fn()| {
            if let Err(error) = groups.refill() {
                tracing::warn!(%error, "cannot prepare a process group");
            }
            free();
        };
        if let Err(error) = self.launchers.give(Box::new(work)) {
            tracing::debug!(%error, "no thread to prepare a process group");
        }
    }

    /// Ends commands that take all memory and get nowhere, from now on. Only inside a runtime.
    pub(crate) fn relieve(&self) {
        if let Some(agent) = self.core.config.agent_cgroup.clone() {
            tokio::spawn(relief::watch(agent));
        }
    }

    /// Forgets what has ended: it belonged to whoever had this machine before.
    pub(crate) fn forget_ended(&self) {
        self.registry().remembered.clear();
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Processes that live, or left something behind that does.
    pub(crate) fn count(&self) -> usize {
        self.registry().living.len()
    }

    pub(crate) fn list(&self, include_ended: bool) -> Vec<ProcessInfo> {
        let registry = self.registry();
        let mut found: Vec<Arc<Process>> = registry.living.values().cloned().collect();
        if include_ended {
            found.extend(registry.remembered.iter().map(|(_, process)| Arc::clone(process)));
        }
        drop(registry);
        found.sort_by_key(|process| process.pid);
        found.iter().map(|process| process.info()).collect()
    }

    /// The process that a selector means: a living one first, then the last that ended.
    pub(crate) fn find(&self, wanted: impl Fn(&Process) -> bool) -> Option<Arc<Process>> {
        let registry = self.registry();
        let living = registry.living.values().filter(|process| wanted(process));
        living
            .min_by_key(|process| process.end().is_some())
            .or_else(|| {
                let remembered = registry.remembered.iter().rev();
                remembered
                    .map(|(_, process)| process)
                    .find(|process| wanted(process))
            })
            .cloned()
    }

    /// Adds a process and returns its serial number.
    fn insert(&self, process: &Arc<Process>) -> u64 {
        let mut registry = self.registry();
        registry.started += 1;
        let serial = registry.started;
        registry.living.insert(serial, Arc::clone(process));
        serial
    }

    /// Moves a process whose group is empty from the living to the remembered.
    fn remember(&self, serial: u64, process: &Arc<Process>) {
        let now = Instant::now();
        let mut registry = self.registry();
        registry.living.remove(&serial);
        registry.remembered.push_back((now, Arc::clone(process)));
        while registry.remembered.len() > REMEMBERED
            || registry
                .remembered
                .front()
                .is_some_and(|(at, _)| now.duration_since(*at) > REMEMBERED_FOR)
        {
            registry.remembered.pop_front();
        }
        let mut output = 0;
        for (_, process) in registry.remembered.iter().rev() {
            output += process.log.kept();
            if output > REMEMBERED_OUTPUT {
                process.log.forget();
            }
        }
    }
}
