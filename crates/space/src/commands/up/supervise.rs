//! Keeps the node manager and the node running, and ends them in order.
//!
//! ```text
//!               ┌────────── dies: after a pause, unless too often ──────────┐
//!               ▼                                                           │
//!  manager:  starting ─ its socket is listened at ─────► up ─────────────────┤
//!                                                        │ the first time   │
//!  node:                                  starting ◄─────┘                  │
//!                                            │ says that it serves          │
//!                                            ▼                              │
//!                                           up ─────────────────────────────┘
//!
//!  a signal ► node: end the sandboxes (or leave them) ► manager: stop ► we are done
//!  another  ► kill both, and what is left of the sandboxes
//! ```
//!
//! The node lives through a restart of the manager: it connects anew. The listening socket is ours and is passed to each
//! node, so clients of a node that is being replaced wait instead of being refused. Nothing that a client, a guest or the
//! node itself says is read here: the node reports by a single byte, and writes what is to be published itself.

use std::{
    collections::VecDeque,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    process::Child,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::child::{self, Launch};
use crate::error::{CliError, Kind};

/// Pause before a process is started again; it doubles with each further death before it was ready.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Deaths of one process within [`DEATHS_WITHIN`] after which nothing is gained by one more start.
const MOST_DEATHS: usize = 60;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);
/// Deaths in a row before it was ready.
const MOST_FAILED_STARTS: u32 = 5;
/// Flag of a listening socket in the kernel's table.
const LISTENING: &[u8] = b"00010000";
/// How often it is looked whether the manager listens, until it does.
const TRY_INTERVAL: Duration = Duration::from_millis(2);
/// How long the manager may take to stop: it only lets go of what runs.
const MANAGER_STOP: Duration = Duration::from_secs(5);

/// How to start each of the two.
pub(super) trait Programs {
    /// The node manager.
    fn manager(&self) -> Launch;
    /// The node. It writes one byte to `ready` when it serves; before it was `published`, it also writes and prints what
    /// tells people and programs where the platform is.
    fn node(&self, ready: OwnedFd, published: bool) -> io::Result<Launch>;
    /// Puts what the first node has written into its place.
    fn publish(&self) -> Result<(), CliError>;
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Everything is stopped in order.
    Stopped,
    /// The same, before it had ever been ready.
    StoppedEarly,
    /// A second signal cut the end short: machines may be left.
    Forced,
    /// A process ended by itself with this code before it had ever been ready, and has said why.
    Refused(u8),
}

/// A signal that asks for the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Interrupt,
    Terminate,
}

/// The two signals.
#[derive(Debug)]
pub(super) struct Requests {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Requests {
    pub(super) fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) -> Request {
        tokio::select! {
            _ = self.interrupt.recv() => Request::Interrupt,
            _ = self.terminate.recv() => Request::Terminate,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Manager,
    Node,
}

enum Event {
    Asked(Request),
    Ended(Part, io::Result<ExitStatus>),
    Due(Part),
    Ready(Part),
}

pub(super) struct Supervisor<P> {
    programs: P,
    manager_socket: PathBuf,
    manager: Watched,
    node: Watched,
    ready: Option<pipe::Receiver>,
    published: bool,
}

impl<P: Programs> Supervisor<P> {
    pub(super) fn new(programs: P, manager_socket: PathBuf) -> Self {
        Self {
            programs,
            manager_socket,
            manager: Watched::new("the node manager"),
            node: Watched::new("the node"),
            ready: None,
            published: false,
        }
    }

    /// Runs both until a signal asks for the end, or one of them cannot be kept running. `keep`: the end of the platform
    /// leaves the sandboxes running.
    pub(super) async fn run(
        mut self,
        requests: &mut Requests,
        keep: bool,
    ) -> Result<(Option<Request>, End), CliError> {
        loop {
            match self.next(requests).await {
                Event::Asked(request) => {
                    tracing::info!("shutting down; once more ends it at once");
                    let end = match self.stop(requests, keep).await {
                        End::Stopped if !self.published => End::StoppedEarly,
                        end => end,
                    };
                    return Ok((Some(request), end));
                }
                Event::Due(Part::Manager) => {
                    let launch = self.programs.manager();
                    self.manager.start(&launch)?;
                }
                Event::Due(Part::Node) => self.start_node()?,
                Event::Ready(Part::Manager) => self.manager.became_ready(),
                Event::Ready(Part::Node) => {
                    self.node.became_ready();
                    if !self.published {
                        if let Err(error) = self.programs.publish() {
                            self.stop(requests, true).await;
                            return Err(error);
                        }
                        self.published = true;
                    }
                }
                Event::Ended(part, status) => {
                    let watched = match part {
                        Part::Manager => &mut self.manager,
                        Part::Node => &mut self.node,
                    };
                    let given_up = watched.ended(status);
                    match given_up {
                        Ok(None) => {}
                        // It is we who fail, not the sandboxes: they stay for whoever comes next.
                        Ok(Some(code)) => {
                            self.stop(requests, true).await;
                            return Ok((None, End::Refused(code)));
                        }
                        Err(error) => {
                            self.stop(requests, true).await;
                            return Err(error);
                        }
                    }
                }
            }
        }
    }

    async fn next(&mut self, requests: &mut Requests) -> Event {
        let manager_waits = self.manager.child.is_some() && !self.manager.ready;
        let node_waits = self.node.child.is_some() && !self.node.ready;
        let node_may_start = self.manager.ready || self.node.was_ready;
        tokio::select! {
            request = requests.next() => Event::Asked(request),
            status = ended(&mut self.manager.child) => Event::Ended(Part::Manager, status),
            status = ended(&mut self.node.child) => Event::Ended(Part::Node, status),
            () = self.manager.due.wait() => Event::Due(Part::Manager),
            () = self.node.due.wait(), if node_may_start => Event::Due(Part::Node),
            () = listens(&self.manager_socket), if manager_waits => Event::Ready(Part::Manager),
            () = says_ready(&mut self.ready), if node_waits => Event::Ready(Part::Node),
        }
    }

    fn start_node(&mut self) -> Result<(), CliError> {
        let failed = |error: io::Error| CliError::internal("cannot start the node", error);
        let (report, ready) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| failed(error.into()))?;
        rustix::io::ioctl_fionbio(&report, true).map_err(|error| failed(error.into()))?;
        let launch = self.programs.node(ready, self.published).map_err(failed)?;
        self.node.start(&launch)?;
        self.ready = Some(pipe::Receiver::from_owned_fd(report).map_err(failed)?);
        Ok(())
    }

    /// Ends both in order; a signal meanwhile ends them at once.
    async fn stop(&mut self, requests: &mut Requests, keep: bool) -> End {
        if let Some(node) = &mut self.node.child {
            child::signal(node, if keep { Signal::TERM } else { Signal::INT });
            let forced = tokio::select! {
                status = node.wait() => {
                    report_end("the node", status);
                    false
                }
                _ = requests.next() => true,
            };
            if forced {
                kill(&mut self.node.child).await;
                kill(&mut self.manager.child).await;
                return End::Forced;
            }
            self.node.child = None;
        }
        if let Some(manager) = &mut self.manager.child {
            child::signal(manager, Signal::TERM);
            match timeout(MANAGER_STOP, manager.wait()).await {
                Ok(status) => report_end("the node manager", status),
                Err(_) => {
                    tracing::warn!("the node manager does not stop: killing it");
                    kill(&mut self.manager.child).await;
                }
            }
            self.manager.child = None;
        }
        End::Stopped
    }
}

fn report_end(who: &str, status: io::Result<ExitStatus>) {
    if !status.as_ref().is_ok_and(ExitStatus::success) {
        tracing::warn!(status = child::describe(status), "{who} did not end well");
    }
}

async fn kill(child: &mut Option<Child>) {
    if let Some(mut child) = child.take()
        && let Err(error) = child.kill().await
    {
        tracing::warn!(%error, "a process could not be killed");
    }
}

/// Waits for the end of a process, for ever if there is none.
async fn ended(child: &mut Option<Child>) -> io::Result<ExitStatus> {
    match child {
        Some(child) => child.wait().await,
        None => std::future::pending().await,
    }
}

/// Waits until somebody listens there.
async fn listens(socket: &Path) {
    while !is_listened_at(socket) {
        sleep(TRY_INTERVAL).await;
    }
}

/// Whether somebody does, by the kernel's table: the manager takes connections of the node only, and notes others.
pub(super) fn is_listened_at(socket: &Path) -> bool {
    let table = fs_err::read("/proc/net/unix").unwrap_or_default();
    table.split(|&byte| byte == b'\n').any(|line| {
        // Address, references, protocol, flags, type, state, number (filled up with blanks), path.
        let mut fields = line.splitn(7, |&byte| byte == b' ').skip(3);
        let listening = fields.next() == Some(LISTENING);
        let rest = fields.nth(2).unwrap_or_default().trim_ascii_start();
        let path = rest.splitn(2, |&byte| byte == b' ').nth(1).unwrap_or_default();
        listening && path == socket.as_os_str().as_bytes()
    })
}

/// Waits for the byte. A pipe that ends without one belongs to a node that has died, which is noticed otherwise.
async fn says_ready(ready: &mut Option<pipe::Receiver>) {
    let said = match ready {
        Some(pipe) => pipe.read_u8().await.is_ok(),
        None => false,
    };
    *ready = None;
    if !said {
        std::future::pending::<()>().await;
    }
}

/// When a process is to be started.
#[derive(Debug)]
enum Due {
    No,
    At(Instant),
}

impl Due {
    async fn wait(&self) {
        match self {
            Self::At(instant) => sleep_until(*instant).await,
            Self::No => std::future::pending().await,
        }
    }
}

/// One process that is kept running.
#[derive(Debug)]
struct Watched {
    name: &'static str,
    child: Option<Child>,
    ready: bool,
    was_ready: bool,
    due: Due,
    pause: Duration,
    failed_starts: u32,
    deaths: VecDeque<Instant>,
}

impl Watched {
    fn new(name: &'static str) -> Self {
        let now = Instant::now();
        Self {
            name,
            child: None,
            ready: false,
            was_ready: false,
            due: Due::At(now),
            pause: FIRST_PAUSE,
            failed_starts: 0,
            deaths: VecDeque::new(),
        }
    }

    fn start(&mut self, launch: &Launch) -> Result<(), CliError> {
        let child = launch
            .start()
            .map_err(|error| CliError::internal(format!("cannot start {}", self.name), error))?;
        tracing::debug!(pid = child.id(), "started {}", self.name);
        self.child = Some(child);
        self.due = Due::No;
        self.ready = false;
        Ok(())
    }

    fn became_ready(&mut self) {
        self.ready = true;
        self.was_ready = true;
        self.failed_starts = 0;
    }

    /// Takes note of an end: it is started again after a pause, or it has refused with a code, or it died too often.
    fn ended(&mut self, status: io::Result<ExitStatus>) -> Result<Option<u8>, CliError> {
        self.child = None;
        let code = status.as_ref().ok().and_then(ExitStatus::code);
        let described = child::describe(status);
        if !self.was_ready
            && let Some(code) = code
        {
            // It lacks something and has said so; a further start would only say it again.
            return Ok(Some(u8::try_from(code).unwrap_or(1).max(1)));
        }
        if self.ready {
            self.pause = FIRST_PAUSE;
        } else {
            self.failed_starts += 1;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        self.ready = false;
        let now = Instant::now();
        self.deaths.push_back(now);
        self.deaths.retain(|&death| now - death < DEATHS_WITHIN);
        if self.deaths.len() >= MOST_DEATHS || self.failed_starts >= MOST_FAILED_STARTS {
            let what = format!(
                "{} died {} times within a minute, the last time with {described}",
                self.name,
                self.deaths.len()
            );
            return Err(CliError::new(Kind::Internal, anyhow::Error::msg(what)).with_hint(
                "its messages above say why. Sandboxes go on running: the next `space up` takes them over",
            ));
        }
        tracing::warn!(status = described, "{} died: starting it again", self.name);
        self.due = Due::At(now + self.pause);
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
