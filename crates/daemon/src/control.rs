//! The control port's thread: reads the host's messages, acts, answers.
//!
//! ```text
//!            ┌───── Thaw, Identity, or neither within WATCHDOG ─────┐
//!            ▼                                                      │
//!  start ► ready ───────────────── Freeze ───────────────────► frozen
//! ```
//!
//! A hello is taken in every state, drops the data session, and changes nothing else. Acts that may take long (writing to
//! disk) are done by a thread of their own, one after the other.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};
use space_channel::{
    Activity, Event, GuestControl, GuestMessage, GuestState, HelloAck, HostMessage, HostRequest, Status,
    capabilities,
};
use space_daemon_services::Services;

use crate::{cgroup::AgentGroup, data::DataGate, identity::IdentityFiles, kernel::Kernel, port::Port, say};

/// Longest freeze without a thaw, in the guest's own time. A host that died must not leave the agent frozen.
const WATCHDOG: Duration = Duration::from_secs(30);
/// Longest time a freeze may try.
const MAX_FREEZE: Duration = Duration::from_secs(2);
/// Bytes of answers waiting for the host; while more wait, no further request is read.
const MAX_WAITING: usize = 64 * 1024;
/// Long acts waiting for their turn; further ones are refused.
const MAX_SLOW: usize = 16;
/// Between two reports that the agent is refused processes; a fork bomb is refused them all the time.
const REFUSALS: Duration = Duration::from_secs(10);
/// How long the host has to read the answer to a shutdown.
const FAREWELL: Duration = Duration::from_millis(20);

/// What the control thread works with.
pub struct Control {
    /// The port.
    pub port: Port,
    /// The kernel.
    pub kernel: Arc<dyn Kernel>,
    /// The agent's processes; without a group nothing can be frozen.
    pub group: Option<AgentGroup>,
    /// Who this machine is.
    pub files: IdentityFiles,
    /// Lets the data thread's sessions in.
    pub gate: Arc<DataGate>,
    /// The services, for their token and process count.
    pub services: Arc<Services>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Serves the port until that fails.
    pub fn run(self) -> io::Error {
        match Loop::new(self).map(Loop::run) {
            Ok(error) | Err(error) => error,
        }
    }
}

struct Loop {
    control: Control,
    guest: GuestControl,
    waiting: Vec<u8>,
    slow: mpsc::SyncSender<Slow>,
    finished: Arc<Finished>,
    thaw_at: Option<Instant>,
    kills: u64,
    refused: u64,
    refusals_reported: Option<Instant>,
}

/// A long act.
enum Slow {
    Quiesce { sequence: u32 },
    Shutdown,
}

/// Answers of the thread for long acts, and what wakes the control thread to send them.
struct Finished {
    answers: Mutex<Vec<GuestMessage>>,
    wake: OwnedFd,
}

impl Loop {
    fn new(control: Control) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let finished = Arc::new(Finished {
            answers: Mutex::default(),
            wake,
        });
        let (slow, acts) = mpsc::sync_channel(MAX_SLOW);
        let (kernel, done) = (Arc::clone(&control.kernel), Arc::clone(&finished));
        thread::Builder::new()
            .name("slow".into())
            .spawn(move || do_slowly(&*kernel, &acts, &done))?;
        let kills = control.group.as_ref().map_or(0, AgentGroup::out_of_memory_kills);
        let refused = control.group.as_ref().map_or(0, AgentGroup::refused_processes);
        Ok(Self {
            control,
            guest: GuestControl::new(),
            waiting: Vec::new(),
            slow,
            finished,
            thaw_at: None,
            kills,
            refused,
            refusals_reported: None,
        })
    }

    fn run(mut self) -> io::Error {
        loop {
            if let Err(error) = self.pump() {
                return error;
            }
            // The answer to an identity is on its way.
            self.settle();
            if let Err(error) = self.wait() {
                return error;
            }
        }
    }

    /// Completes an identity: what is left of an earlier one goes.
    fn settle(&mut self) {
        match self.control.files.tidy() {
            Ok(true) => self.control.services.forget_past(),
            Ok(false) => {}
            Err(error) => say!("cannot tidy the identity files: {error}"),
        }
    }

    /// Reads, acts and writes until neither reading nor writing gets on.
    fn pump(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            self.flush()?;
            if self.waiting.len() > MAX_WAITING {
                return Ok(());
            }
            let Some(length) = self.control.port.read(&mut buffer)? else {
                return Ok(());
            };
            let mut rest = &buffer[..length];
            while let Some(request) = self.guest.next(&mut rest) {
                self.act(request);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let Some(length) = self.control.port.write(&self.waiting)? else {
                return Ok(());
            };
            self.waiting.drain(..length);
        }
        Ok(())
    }

    /// Waits until there is something to do.
    fn wait(&mut self) -> io::Result<()> {
        let left = self
            .thaw_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let finished = Arc::clone(&self.finished);
        let group = self.control.group.as_ref();
        let memory = group.and_then(AgentGroup::memory_events);
        let pids = group.and_then(AgentGroup::pids_events);
        let freezes = group.filter(|_| self.thaw_at.is_some()).map(AgentGroup::freezes);
        let mut watched = [
            PollFd::from_borrowed_fd(self.control.port.changes(), PollFlags::IN),
            PollFd::from_borrowed_fd(finished.wake.as_fd(), PollFlags::IN),
            if_there(memory, &finished.wake),
            if_there(pids, &finished.wake),
            if_there(freezes, &finished.wake),
        ];
        match poll(&mut watched, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [port, slow, memory, pids, freezes] = watched.map(|place| !place.revents().is_empty());
        if port {
            self.control.port.note_changes();
        }
        if slow {
            let mut count = [0; 8];
            rustix::io::read(&finished.wake, &mut count).ok();
            let answers =
                std::mem::take(&mut *finished.answers.lock().unwrap_or_else(PoisonError::into_inner));
            for answer in answers {
                self.say(&answer);
            }
        }
        if memory {
            self.report_kills();
        }
        if pids {
            self.report_refusals();
        }
        if freezes {
            self.keep_frozen();
        }
        if self.thaw_at.is_some_and(|at| Instant::now() >= at) {
            say!("no thaw within {} s, thawing", WATCHDOG.as_secs());
            drop(self.thaw());
            self.notify(Event::ThawedByWatchdog);
        }
        Ok(())
    }

    fn act(&mut self, HostRequest { sequence, message }: HostRequest) {
        let message = match message {
            Ok(message) => message,
            Err(error) => return self.acknowledge(sequence, Status::NotUnderstood, error.to_string()),
        };
        match message {
            HostMessage::Hello(hello) => {
                // First of all: no byte of the data port may reach the old session from here on.
                self.control.gate.open(hello.nonce);
                // Answers of an earlier connection; their reader is gone.
                self.waiting.clear();
                self.say(&GuestMessage::HelloAck(HelloAck {
                    protocol: GuestControl::agree(&hello),
                    nonce_echo: hello.nonce,
                    daemon_version: env!("CARGO_PKG_VERSION").into(),
                    capabilities: self.capabilities(),
                    generation: self.control.files.generation(),
                    state: if self.thaw_at.is_some() {
                        GuestState::Frozen
                    } else {
                        GuestState::Ready
                    },
                }));
            }
            HostMessage::Identity(identity) => {
                let outcome = self.control.files.apply(&*self.control.kernel, &identity);
                if identity.mode == space_channel::IdentityMode::New {
                    self.control.services.set_guest_token(identity.guest_token);
                }
                // Started from a frozen snapshot: from here on the agent sees the right clock and its own identity.
                let thawed = match self.thaw_at {
                    Some(_) => {
                        self.settle();
                        self.thaw().map_err(|error| ("thaw", error))
                    }
                    None => Ok(()),
                };
                self.done(sequence, outcome.and(thawed));
            }
            HostMessage::Freeze { deadline_ms } => {
                self.freeze(sequence, Duration::from_millis(deadline_ms.into()));
            }
            HostMessage::Thaw { realtime_ns } => {
                // The clock first: nobody in the agent's group shall see the old time.
                let clock = self
                    .control
                    .kernel
                    .set_clock(realtime_ns)
                    .map_err(|error| ("set the clock", error));
                let thaw = self.thaw().map_err(|error| ("thaw", error));
                self.done(sequence, thaw.and(clock));
            }
            HostMessage::Clock { realtime_ns } => {
                let outcome = self
                    .control
                    .kernel
                    .set_clock(realtime_ns)
                    .map_err(|error| ("set the clock", error));
                self.done(sequence, outcome);
            }
            HostMessage::Health => {
                let (uptime_ms, processes) = self.condition();
                self.say(&GuestMessage::HealthAck {
                    of_sequence: sequence,
                    uptime_ms,
                    processes,
                });
            }
            HostMessage::Activity => {
                let (uptime_ms, processes) = self.condition();
                let used = self.control.group.as_ref().map(AgentGroup::activity);
                self.say(&GuestMessage::ActivityAck {
                    of_sequence: sequence,
                    uptime_ms,
                    processes,
                    activity: Activity {
                        tunnels: self.control.gate.tunnels(),
                        requests: self.control.gate.requests(),
                        ..used.unwrap_or_default()
                    },
                });
            }
            HostMessage::Quiesce => {
                if self.slow.try_send(Slow::Quiesce { sequence }).is_err() {
                    self.acknowledge(
                        sequence,
                        Status::WrongState,
                        "too many such requests wait already".into(),
                    );
                }
            }
            HostMessage::Shutdown => self.shut_down(sequence),
        }
    }

    fn capabilities(&self) -> u64 {
        let of_group = if self.control.group.is_some() {
            capabilities::FREEZE | capabilities::ACTIVITY
        } else {
            0
        };
        of_group | capabilities::TUNNEL | capabilities::QUIESCE
    }

    /// Milliseconds since the start, and commands that run.
    fn condition(&self) -> (u64, u32) {
        let uptime = self.control.kernel.uptime().as_millis();
        let processes = self.control.services.process_count();
        (
            u64::try_from(uptime).unwrap_or(u64::MAX),
            u32::try_from(processes).unwrap_or(u32::MAX),
        )
    }

    fn freeze(&mut self, sequence: u32, limit: Duration) {
        let Some(group) = &self.control.group else {
            return self.acknowledge(sequence, Status::WrongState, "there is no group to freeze".into());
        };
        let begun = Instant::now();
        match group.freeze(limit.min(MAX_FREEZE)) {
            Ok(frozen) => {
                self.thaw_at = Some(Instant::now() + WATCHDOG);
                let micros = u32::try_from(begun.elapsed().as_micros()).unwrap_or(u32::MAX);
                self.say(&GuestMessage::FreezeAck {
                    of_sequence: sequence,
                    frozen,
                    micros,
                });
            }
            Err(error) => self.done(sequence, Err(("freeze", error))),
        }
    }

    fn thaw(&mut self) -> io::Result<()> {
        self.thaw_at = None;
        self.control.group.as_ref().map_or(Ok(()), AgentGroup::thaw)
    }

    /// Holds a freeze against whoever tries to end it from inside, and tells the host, whose snapshot may be of two
    /// instants now.
    fn keep_frozen(&mut self) {
        match self.control.group.as_ref().map(AgentGroup::hold) {
            Some(Ok(true)) => self.notify(Event::AgentThawed),
            // Some process has come or gone, all as it should.
            Some(Ok(false)) | None => {}
            Some(Err(error)) => say!("cannot look after the freeze: {error}"),
        }
    }

    fn shut_down(&mut self, sequence: u32) {
        if let Some(group) = &self.control.group {
            // A frozen process dies too, and writes nothing more.
            drop(group.kill());
        }
        match self.slow.try_send(Slow::Shutdown) {
            Ok(()) => self.acknowledge(sequence, Status::Ok, String::new()),
            Err(_) => self.acknowledge(
                sequence,
                Status::WrongState,
                "too many such requests wait already".into(),
            ),
        }
    }

    fn report_kills(&mut self) {
        let kills = self
            .control
            .group
            .as_ref()
            .map_or(0, AgentGroup::out_of_memory_kills);
        if kills > self.kills {
            let detail = format!(
                "{} killed because the sandbox's memory ran out",
                kills - self.kills
            );
            self.kills = kills;
            self.notify(Event::AgentOutOfMemory { detail });
        }
    }

    fn report_refusals(&mut self) {
        let refused = self
            .control
            .group
            .as_ref()
            .map_or(0, AgentGroup::refused_processes);
        let recently = |at: Instant| at.elapsed() < REFUSALS;
        if refused <= self.refused || self.refusals_reported.is_some_and(recently) {
            return;
        }
        let detail = format!("refused {} times to start a process", refused - self.refused);
        self.refused = refused;
        self.refusals_reported = Some(Instant::now());
        self.notify(Event::AgentProcessLimit { detail });
    }

    fn done(&mut self, sequence: u32, outcome: Result<(), (&'static str, io::Error)>) {
        match outcome {
            Ok(()) => self.acknowledge(sequence, Status::Ok, String::new()),
            Err((step, error)) => {
                say!("cannot {step}: {error}");
                self.acknowledge(sequence, Status::Failed, format!("cannot {step}: {error}"));
            }
        }
    }

    fn acknowledge(&mut self, of_sequence: u32, status: Status, detail: String) {
        self.say(&GuestMessage::Ack {
            of_sequence,
            status,
            detail,
        });
    }

    /// Says something that nobody asked for, unless too much waits already.
    fn notify(&mut self, event: Event) {
        if self.waiting.len() < MAX_WAITING {
            self.say(&GuestMessage::Event(event));
        }
    }

    fn say(&mut self, message: &GuestMessage) {
        self.guest.say(message, &mut self.waiting);
    }
}

/// Waits for a control file's event; for a file that is not there a place that nothing wakes.
fn if_there<'a>(file: Option<&'a File>, other: &'a OwnedFd) -> PollFd<'a> {
    match file {
        Some(file) => PollFd::new(file, PollFlags::PRI),
        None => PollFd::new(other, PollFlags::empty()),
    }
}

fn do_slowly(kernel: &dyn Kernel, acts: &mpsc::Receiver<Slow>, finished: &Finished) {
    while let Ok(act) = acts.recv() {
        match act {
            Slow::Quiesce { sequence } => {
                kernel.sync();
                let done = GuestMessage::Ack {
                    of_sequence: sequence,
                    status: Status::Ok,
                    detail: String::new(),
                };
                finished
                    .answers
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(done);
                rustix::io::write(&finished.wake, &1_u64.to_ne_bytes()).ok();
            }
            Slow::Shutdown => {
                kernel.sync();
                thread::sleep(FAREWELL);
                say!("power off: {}", kernel.power_off());
            }
        }
    }
}
