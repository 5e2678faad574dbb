//! From a request to a supervised process.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use space_proto::process::{ProcessConfig, StartRequest};
use tokio::net::unix::pipe;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::account::Account;
use crate::children::{Child, ExitStatus};
use crate::{paths, usage};

use super::end::{Circumstances, End};
use super::group::Group;
use super::input::Input;
use super::launch::{Identity, LaunchError, Plan, Step, launch};
use super::log::{Log, Stream};
use super::source::{Source, pump};
use super::terminal::{Size, Terminal};
use super::{Handles, Process, ProcessError, Processes};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Environments remembered for listings stay below this, in bytes; larger ones are left out.
const MAX_LISTED_ENVIRONMENT: usize = 16 * 1024;
/// How long the end of a command waits for all that was killed with it to be gone.
const DYING: Duration = Duration::from_secs(2);

/// A process that has just been started, its supervisor not yet.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) process: Arc<Process>,
    serial: u64,
    child: Child,
    sources: Vec<(Stream, Source)>,
}

impl Processes {
    /// Starts a process for `account`. It runs from here on; call [`Processes::watch`] next.
    pub(crate) async fn start(
        self: &Arc<Self>,
        request: StartRequest,
        account: Account,
    ) -> Result<Started, ProcessError> {
        let config = request.process.into_option().unwrap_or_default();
        let defaults = self.core.defaults();
        let implicit = config.cwd.as_deref().unwrap_or_default().is_empty();
        let directory = if implicit {
            paths::base(&account, defaults.workdir.as_deref())?
        } else {
            let cwd = config.cwd.clone().unwrap_or_default();
            paths::resolve(cwd.as_bytes(), &account, defaults.workdir.as_deref())?
        };
        let size = request
            .pty
            .into_option()
            .map(|pty| Size::new(pty.size.cols, pty.size.rows));
        let environment = environment(&account, &defaults.environment, &config, size.is_some())?;
        if !self.is_root && account.uid != rustix::process::geteuid().as_raw() {
            return Err(ProcessError::NotRoot);
        }

        let ends = Ends::open(
            size,
            request.stdin.unwrap_or(true),
            self.is_root.then_some(account.uid),
        )?;
        let identity = Identity {
            uid: account.uid,
            gid: account.gid,
            groups: account.groups.clone(),
        };
        let plan = Plan {
            candidates: candidates(&config.cmd, &environment)?,
            arguments: arguments(&config)?,
            environment: environment
                .iter()
                .map(|(key, value)| c_string([key.as_bytes(), b"=", value].concat()))
                .collect::<Result<_, _>>()?,
            directory: c_string(directory.as_os_str().as_bytes().to_vec())?,
            identity: self.is_root.then_some(identity),
            stdio: ends.program,
            terminal: ends.terminal.is_some(),
            cgroup: None,
            cgroup_namespace: None,
            reset_oom_score: self.reset_oom_score,
        };

        let groups = self.groups.clone();
        let core = Arc::clone(&self.core);
        // Launching waits for the new program's pages, so it must not hold up the event loop.
        let launched = self.launchers.run(move || {
            let group = groups
                .as_ref()
                .map(|groups| groups.take())
                .transpose()
                .map_err(|source| ProcessError::Internal {
                    what: "making a process group",
                    source,
                })?;
            let plan = Plan {
                cgroup: group.as_ref().map(Group::descriptor),
                cgroup_namespace: core.config.cgroup_namespace.as_ref().map(AsRawFd::as_raw_fd),
                ..plan
            };
            let launched = launch_in(plan, implicit);
            let (pid, pidfd) = launched.map_err(|error| explain(error, &config.cmd, &directory))?;
            Ok::<_, ProcessError>((pid, pidfd, group, config))
        });
        let (pid, pidfd, group, config) = match launched.await {
            Ok(launched) => launched?,
            Err(error) => {
                let source = io::Error::other(error);
                return Err(ProcessError::Internal {
                    what: "starting the process",
                    source,
                });
            }
        };
        let kept = pidfd.try_clone();
        let child = Child::new(pid, pidfd);
        let pidfd = match kept {
            Ok(pidfd) => Arc::new(pidfd),
            Err(source) => {
                // Out of descriptors: better no process than one that nobody can stop.
                if let Some(group) = &group {
                    group.kill().map_err(|source| ProcessError::Internal {
                        what: "stopping a process",
                        source,
                    })?;
                }
                return Err(ProcessError::Resources {
                    what: "no more descriptors can be opened",
                    source,
                });
            }
        };
        let process = Arc::new(Process {
            pid: pid.cast_unsigned(),
            tag: request.tag.filter(|tag| !tag.is_empty()),
            config: listed(config),
            user: account.name,
            log: Arc::new(Log::new(&self.budget)),
            input: tokio::sync::Mutex::new(ends.input),
            handles: Mutex::new(Handles {
                pidfd: Some(pidfd),
                terminal: ends.terminal,
                group: group.map(Arc::new),
            }),
            killed: AtomicBool::new(false),
            end: OnceLock::new(),
            ended: watch::Sender::new(false),
        });
        let serial = self.insert(&process);
        Ok(Started {
            process,
            serial,
            child,
            sources: ends.sources,
        })
    }

    /// Supervises a started process until its end, and after it until its group is empty.
    pub(crate) fn watch(self: &Arc<Self>, started: Started, deadline: Option<Instant>) {
        tokio::spawn(supervise(Arc::clone(self), started, deadline));
        // Otherwise when a command has ended, so that this one has the processor to itself.
        if self.groups.as_ref().is_some_and(|groups| groups.are_used_up()) {
            self.prepare();
        }
    }
}

/// The one task that takes a process through its states.
async fn supervise(processes: Arc<Processes>, started: Started, deadline: Option<Instant>) {
    let Started {
        process,
        serial,
        child,
        sources,
    } = started;
    let leader_ended = watch::Sender::new(false);
    let mut drained = Vec::new();
    for (stream, source) in sources {
        let (sender, receiver) = oneshot::channel();
        drained.push(receiver);
        tokio::spawn(pump(
            source,
            stream,
            Arc::clone(&process.log),
            leader_ended.subscribe(),
            sender,
        ));
    }

    let mut deadline_passed = false;
    let wait = child.wait();
    tokio::pin!(wait);
    let status = loop {
        let limit = async {
            match deadline {
                Some(deadline) if !deadline_passed => tokio::time::sleep_until(deadline).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            status = &mut wait => break status,
            () = limit => {
                deadline_passed = true;
                if let Err(error) = process.kill_all() {
                    tracing::warn!(pid = process.pid, %error, "cannot kill a process at its deadline");
                }
            }
        }
    };
    leader_ended.send_replace(true);
    for receiver in drained {
        // A pump that is gone has nothing left to move.
        let _ = receiver.await;
    }

    let group = process.group();
    let killed = process.killed.load(Ordering::Relaxed);
    // Each is looked up only where it can be the explanation: this is on the way of every answer.
    let out_of_memory = status == ExitStatus::Signaled(libc::SIGKILL)
        && group
            .as_ref()
            .is_some_and(|group| group.out_of_memory_kills() > 0);
    if (deadline_passed || killed || out_of_memory)
        && let Some(group) = &group
    {
        // All were killed at once; one of many that is still on its way out would look as if it had been spared.
        drop(tokio::time::timeout(DYING, group.emptied()).await);
    }
    let circumstances = Circumstances {
        deadline_passed,
        killed,
        out_of_memory,
        disk_full: status != ExitStatus::Exited(0) && usage::disk_is_full(),
    };
    let end = End {
        status,
        cause: circumstances.cause(status),
        left_behind: group
            .as_ref()
            .filter(|group| group.is_populated())
            .map_or(0, |g| u32::try_from(g.members().len()).unwrap_or(u32::MAX)),
        totals: process.log.totals(),
    };
    // Only this task sets it.
    let _ = process.end.set(end);
    process.ended.send_replace(true);
    process.log.end();
    if let Ok(mut input) = process.input.try_lock() {
        // A writer that holds the lock sees the end and closes the input itself.
        *input = Input::Closed;
    }
    {
        let mut handles = process.handles();
        handles.pidfd = None;
        handles.terminal = None;
    }

    if let Some(group) = group {
        if let Err(error) = group.emptied().await {
            tracing::debug!(%error, "cannot watch what a process left behind");
        }
        process.handles().group = None;
        processes.remember(serial, &process);
        group.remove().await;
        processes.prepare();
    } else {
        processes.remember(serial, &process);
    }
}

/// The descriptors of a new process, ours and the program's.
struct Ends {
    program: [OwnedFd; 3],
    input: Input,
    terminal: Option<Arc<Terminal>>,
    sources: Vec<(Stream, Source)>,
}

impl Ends {
    fn open(size: Option<Size>, stdin: bool, owner: Option<u32>) -> Result<Self, ProcessError> {
        Self::try_open(size, stdin, owner).map_err(|source| match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::ENOMEM) => ProcessError::Resources {
                what: "no more pipes or terminals can be opened",
                source,
            },
            _ => ProcessError::Internal {
                what: "opening the process's pipes",
                source,
            },
        })
    }

    fn try_open(size: Option<Size>, stdin: bool, owner: Option<u32>) -> io::Result<Self> {
        if let Some(size) = size {
            let (terminal, peer) = Terminal::open(size, owner)?;
            let terminal = Arc::new(terminal);
            return Ok(Self {
                program: [high(peer.try_clone()?)?, high(peer.try_clone()?)?, high(peer)?],
                input: Input::Terminal(Arc::clone(&terminal)),
                terminal: Some(Arc::clone(&terminal)),
                sources: vec![(Stream::Terminal, Source::Terminal(terminal))],
            });
        }
        let (zero, input) = if stdin {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&write, true)?;
            (read, Input::Pipe(pipe::Sender::from_owned_fd(write)?))
        } else {
            (std::fs::File::open("/dev/null")?.into(), Input::Absent)
        };
        let (out_read, out_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (err_read, err_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let source = |fd: OwnedFd| -> io::Result<Source> {
            rustix::io::ioctl_fionbio(&fd, true)?;
            Ok(Source::Pipe(pipe::Receiver::from_owned_fd(fd)?))
        };
        Ok(Self {
            program: [high(zero)?, high(out_write)?, high(err_write)?],
            input,
            terminal: None,
            sources: vec![
                (Stream::Stdout, source(out_read)?),
                (Stream::Stderr, source(err_read)?),
            ],
        })
    }
}

/// Moves a descriptor out of the way of 0, 1 and 2, which the child fills one after the other.
fn high(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 {
        Ok(fd)
    } else {
        Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
    }
}

fn launch_in(mut plan: Plan, implicit: bool) -> Result<(i32, OwnedFd), LaunchError> {
    match launch(&plan) {
        // Nobody asked for this directory: an account without a home starts at the root.
        Err(error) if error.step == Step::Directory && implicit => {
            plan.directory = c"/".to_owned();
            launch(&plan)
        }
        launched => launched,
    }
}

fn explain(error: LaunchError, program: &str, directory: &Path) -> ProcessError {
    let program = program.to_owned();
    let source = error.source;
    let code = source.raw_os_error().unwrap_or_default();
    match (error.step, code) {
        (Step::Execute, libc::ENOENT) => ProcessError::Program {
            program,
            problem: "was not found",
        },
        (Step::Execute, libc::EACCES) => ProcessError::Program {
            program,
            problem: "may not be executed by this user",
        },
        (Step::Execute, libc::ENOEXEC) => ProcessError::Program {
            program,
            problem: "is not an executable format",
        },
        (Step::Execute, libc::E2BIG) => ProcessError::Program {
            program,
            problem: "got more arguments or environment than the kernel takes",
        },
        (Step::Directory, _) => ProcessError::Directory {
            path: directory.to_string_lossy().into_owned(),
            problem: match code {
                libc::ENOENT => "does not exist",
                libc::ENOTDIR => "is not a directory",
                libc::EACCES => "may not be entered by this user",
                _ => "cannot be entered",
            },
        },
        (Step::Clone, libc::EAGAIN) => ProcessError::Resources {
            what: "the limit of processes is reached",
            source,
        },
        (_, libc::ENOMEM) => ProcessError::Resources {
            what: "memory is exhausted",
            source,
        },
        _ => ProcessError::Internal {
            what: "starting the process",
            source,
        },
    }
}

type Environment = BTreeMap<String, Vec<u8>>;

fn environment(
    account: &Account,
    global: &BTreeMap<String, String>,
    config: &ProcessConfig,
    terminal: bool,
) -> Result<Environment, ProcessError> {
    let mut environment = Environment::new();
    let mut set = |key: &str, value: &[u8]| environment.insert(key.to_owned(), value.to_vec());
    set("PATH", PATH.as_bytes());
    set("HOME", account.home.as_os_str().as_bytes());
    set("USER", account.name.as_bytes());
    set("LOGNAME", account.name.as_bytes());
    if terminal {
        set("TERM", b"xterm-256color");
    }
    for (key, value) in global.iter().chain(&config.envs) {
        set(key, value.as_bytes());
    }
    for (key, value) in &config.raw_envs {
        set(key, value);
    }
    if environment.keys().any(|key| key.is_empty() || key.contains('=')) {
        return Err(ProcessError::Invalid {
            what: "an environment name is empty or contains '='",
        });
    }
    Ok(environment)
}

fn candidates(program: &str, environment: &Environment) -> Result<Vec<CString>, ProcessError> {
    if program.is_empty() {
        return Err(ProcessError::Invalid {
            what: "no program was named",
        });
    }
    if program.contains('/') {
        return Ok(vec![c_string(program.into())?]);
    }
    let path = environment.get("PATH").map(Vec::as_slice).unwrap_or_default();
    path.split(|&b| b == b':')
        .filter(|directory| !directory.is_empty())
        .map(|directory| {
            c_string(
                Path::new(OsStr::from_bytes(directory))
                    .join(program)
                    .into_os_string()
                    .into_encoded_bytes(),
            )
        })
        .collect()
}

fn arguments(config: &ProcessConfig) -> Result<Vec<CString>, ProcessError> {
    let texts = std::iter::once(&config.cmd)
        .chain(&config.args)
        .map(|text| text.clone().into_bytes());
    texts
        .chain(config.raw_args.iter().cloned())
        .map(c_string)
        .collect()
}

fn c_string(bytes: Vec<u8>) -> Result<CString, ProcessError> {
    CString::new(bytes).map_err(|_| ProcessError::Invalid {
        what: "a program, argument, environment value or directory contains a zero byte",
    })
}

/// What is kept of a request for listings.
fn listed(mut config: ProcessConfig) -> ProcessConfig {
    let size: usize = config.envs.iter().map(|(k, v)| k.len() + v.len()).sum();
    if size > MAX_LISTED_ENVIRONMENT {
        config.envs.clear();
    }
    config.raw_envs.clear();
    config
}
