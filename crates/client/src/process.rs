//! Programs to run, their streams and their ends.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStringExt as _,
    time::Duration,
};

use bytes::Bytes;
use connectrpc::client::{ClientTransport, HttpClient, ServerStream};
use serde::{Deserialize, Serialize};
use space_proto::process::{
    self,
    __buffa::{
        oneof::process_event::{Event, data_event::Output as Data},
        view::{ConnectResponseView, StartResponseView},
    },
    PTY, ProcessConfig, StartRequest,
    process_event::{EndEvent, end_event},
};

use crate::{ClientError, CollectLimits, Output, output::Collector};

/// A program to run.
#[derive(Debug, Clone, Default)]
pub struct Command {
    program: OsString,
    arguments: Vec<OsString>,
    environment: BTreeMap<String, String>,
    directory: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) timeout: Option<Duration>,
    terminal: Option<TerminalSize>,
    stdin: bool,
}

impl Command {
    /// A program by path, or by name to be found in the guest's `PATH`. Its standard input is at its end.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            ..Self::default()
        }
    }

    /// A line for a login shell, as E2B's SDKs run it.
    pub fn shell(line: &str) -> Self {
        Self::new("/bin/bash").arg("-l").arg("-c").arg(line)
    }

    /// Adds one argument; it need not be UTF-8.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Sets one environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the working directory; the user's home if not set.
    #[must_use]
    pub fn directory(mut self, directory: &str) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Sets the account; the sandbox's default if not set.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// Sets a deadline, at which the program and everything it started is killed. None if not set.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Runs it on a new terminal.
    #[must_use]
    pub fn terminal(mut self, size: TerminalSize) -> Self {
        self.terminal = Some(size);
        self
    }

    /// Gives it a pipe as standard input, to be written with [`crate::Sandbox::send_stdin`].
    #[must_use]
    pub fn stdin(mut self) -> Self {
        self.stdin = true;
        self
    }

    pub(crate) fn request(&self) -> StartRequest {
        // `raw_args` follow `args`, so from the first argument that is not UTF-8 on all of them are raw.
        let plain = self
            .arguments
            .iter()
            .take_while(|argument| argument.to_str().is_some())
            .count();
        StartRequest {
            process: ProcessConfig {
                cmd: self.program.to_string_lossy().into_owned(),
                args: self.arguments[..plain]
                    .iter()
                    .map(|argument| argument.to_string_lossy().into_owned())
                    .collect(),
                raw_args: self.arguments[plain..]
                    .iter()
                    .map(|argument| argument.clone().into_vec())
                    .collect(),
                envs: self.environment.clone().into_iter().collect(),
                cwd: self.directory.clone(),
                ..Default::default()
            }
            .into(),
            pty: self.terminal.map(PTY::from).into(),
            stdin: Some(self.stdin || self.terminal.is_some()),
            ..Default::default()
        }
    }
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters per line.
    pub columns: u16,
}

impl From<TerminalSize> for PTY {
    fn from(size: TerminalSize) -> Self {
        PTY {
            size: process::pty::Size {
                cols: size.columns.into(),
                rows: size.rows.into(),
                ..Default::default()
            }
            .into(),
            ..Default::default()
        }
    }
}

/// Where to begin in each kept stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    /// First byte of standard output.
    pub stdout: u64,
    /// First byte of standard error.
    pub stderr: u64,
    /// First byte of the terminal.
    pub terminal: u64,
}

/// Why a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// By itself.
    Exit,
    /// By a signal.
    Signal,
    /// By its deadline.
    Deadline,
    /// By the guest's OOM killer.
    OutOfMemory,
    /// By itself, with a failure, while the disk had no room left.
    DiskFull,
    /// Because someone killed it.
    Killed,
    /// The daemon does not know, or says something this client does not know.
    Unknown,
}

/// The end of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessEnd {
    /// Exit code; 128 and the signal's number if a signal ended it.
    pub exit_code: i32,
    /// Why.
    pub cause: Cause,
    /// The signal that ended it, 0 if none did.
    pub signal: i32,
    /// The daemon's words about anything but a plain exit.
    pub error: Option<String>,
    /// Processes that it started and that live on.
    pub left_behind: u32,
    /// Bytes it wrote to standard output (or its terminal) in all.
    pub stdout_bytes: u64,
    /// Bytes it wrote to standard error in all.
    pub stderr_bytes: u64,
}

impl From<EndEvent> for ProcessEnd {
    fn from(end: EndEvent) -> Self {
        use end_event::Cause as Wire;
        let cause = match end.cause.to_i32() {
            code if code == Wire::CAUSE_EXIT as i32 => Cause::Exit,
            code if code == Wire::CAUSE_SIGNAL as i32 => Cause::Signal,
            code if code == Wire::CAUSE_DEADLINE as i32 => Cause::Deadline,
            code if code == Wire::CAUSE_OUT_OF_MEMORY as i32 => Cause::OutOfMemory,
            code if code == Wire::CAUSE_KILLED as i32 => Cause::Killed,
            code if code == Wire::CAUSE_DISK_FULL as i32 => Cause::DiskFull,
            _ => Cause::Unknown,
        };
        Self {
            exit_code: end.exit_code,
            cause,
            signal: end.signal,
            error: end.error,
            left_behind: end.left_behind,
            stdout_bytes: end.stdout_bytes,
            stderr_bytes: end.stderr_bytes,
        }
    }
}

/// A process in the daemon's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSummary {
    /// Its id inside the guest.
    pub pid: u32,
    /// Program.
    pub program: String,
    /// Arguments, where they are UTF-8.
    pub arguments: Vec<String>,
    /// Account.
    pub user: String,
    /// Living processes in its group, itself included; 0 when unknown.
    pub members: u32,
    /// Set if it has ended.
    pub end: Option<ProcessEnd>,
}

impl From<process::ProcessInfo> for ProcessSummary {
    fn from(info: process::ProcessInfo) -> Self {
        let config = info.config.into_option().unwrap_or_default();
        Self {
            pid: info.pid,
            program: config.cmd,
            arguments: config.args,
            user: info.user,
            members: info.members,
            end: info.end.into_option().map(ProcessEnd::from),
        }
    }
}

/// Something a process did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// It wrote to standard output.
    Stdout {
        /// What.
        bytes: Bytes,
        /// Bytes directly before that are lost, because nobody was attached.
        dropped: u64,
    },
    /// It wrote to standard error.
    Stderr {
        /// What.
        bytes: Bytes,
        /// Bytes directly before that are lost.
        dropped: u64,
    },
    /// Its terminal showed something.
    Terminal {
        /// What.
        bytes: Bytes,
        /// Bytes directly before that are lost.
        dropped: u64,
    },
    /// It ended. Always the last event.
    End(ProcessEnd),
}

type Body = <HttpClient as ClientTransport>::ResponseBody;

#[derive(Debug)]
enum Events {
    Start(Box<ServerStream<Body, StartResponseView<'static>>>),
    Connect(Box<ServerStream<Body, ConnectResponseView<'static>>>),
}

/// The stream of a running process. Dropping it does not end the process.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    events: Events,
    url: String,
}

impl Process {
    pub(crate) async fn from_start(
        stream: ServerStream<Body, StartResponseView<'static>>,
        url: String,
    ) -> Result<Self, ClientError> {
        Self::begin(Events::Start(Box::new(stream)), url).await
    }

    pub(crate) async fn from_connect(
        stream: ServerStream<Body, ConnectResponseView<'static>>,
        url: String,
    ) -> Result<Self, ClientError> {
        Self::begin(Events::Connect(Box::new(stream)), url).await
    }

    async fn begin(events: Events, url: String) -> Result<Self, ClientError> {
        let mut process = Self { pid: 0, events, url };
        loop {
            match process.event().await? {
                Some(Event::Start(start)) => {
                    process.pid = start.pid;
                    return Ok(process);
                }
                Some(Event::Keepalive(_)) => {}
                other => return Err(process.broken(&format!("it began with {other:?}"))),
            }
        }
    }

    /// Its id inside the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for what it does next. Must not be called again after [`ProcessEvent::End`].
    ///
    /// Cancellation safe only in the sense that nothing is lost if the future is dropped and never asked again.
    ///
    /// # Errors
    ///
    /// [`ClientError::StreamBroken`] if the stream ends before the process; it may be attached to again.
    pub async fn next(&mut self) -> Result<ProcessEvent, ClientError> {
        loop {
            match self.event().await? {
                Some(Event::Data(data)) => {
                    let dropped = data.dropped;
                    match data.output {
                        Some(Data::Stdout(bytes)) => {
                            let bytes = bytes.into();
                            return Ok(ProcessEvent::Stdout { bytes, dropped });
                        }
                        Some(Data::Stderr(bytes)) => {
                            let bytes = bytes.into();
                            return Ok(ProcessEvent::Stderr { bytes, dropped });
                        }
                        Some(Data::Pty(bytes)) => {
                            let bytes = bytes.into();
                            return Ok(ProcessEvent::Terminal { bytes, dropped });
                        }
                        None => {}
                    }
                }
                Some(Event::End(end)) => return Ok(ProcessEvent::End(ProcessEnd::from(*end))),
                Some(Event::Start(_) | Event::Keepalive(_)) => {}
                None => return Err(self.broken("it closed without an end")),
            }
        }
    }

    /// Reads to the end, keeping head and tail of what it writes.
    pub async fn collect(mut self, limits: CollectLimits) -> Result<Output, ClientError> {
        let mut collector = Collector::new(limits);
        loop {
            match self.next().await? {
                ProcessEvent::Stdout { bytes, .. } | ProcessEvent::Terminal { bytes, .. } => {
                    collector.stdout(&bytes);
                }
                ProcessEvent::Stderr { bytes, .. } => collector.stderr(&bytes),
                ProcessEvent::End(end) => return Ok(collector.finish(end)),
            }
        }
    }

    /// Reads and drops output until the end.
    pub async fn wait(mut self) -> Result<ProcessEnd, ClientError> {
        loop {
            if let ProcessEvent::End(end) = self.next().await? {
                return Ok(end);
            }
        }
    }

    async fn event(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            let event = match &mut self.events {
                Events::Start(stream) => stream
                    .message()
                    .await
                    .map(|message| message.map(|message| message.to_owned_message().event)),
                Events::Connect(stream) => stream
                    .message()
                    .await
                    .map(|message| message.map(|message| message.to_owned_message().event)),
            };
            match event {
                Ok(None) => return Ok(None),
                Ok(Some(event)) => {
                    // An event of a kind this client does not know is none.
                    if let Some(event) = event.into_option().and_then(|event| event.event) {
                        return Ok(Some(event));
                    }
                }
                Err(error) if error.code == connectrpc::ErrorCode::DeadlineExceeded && self.pid != 0 => {
                    // Said in this form for E2B's SDKs: the guest has killed the process at its deadline.
                    return Ok(Some(Event::End(Box::new(EndEvent {
                        exit_code: 137,
                        status: "killed at its deadline".to_owned(),
                        error: error.message,
                        cause: end_event::Cause::CAUSE_DEADLINE.into(),
                        signal: 9,
                        ..Default::default()
                    }))));
                }
                Err(error) if self.pid == 0 => return Err(ClientError::from_connect(&self.url, error)),
                Err(error) => {
                    let words = error.message.unwrap_or_else(|| error.code.as_str().to_owned());
                    return Err(self.broken(&words));
                }
            }
        }
    }

    fn broken(&self, message: &str) -> ClientError {
        ClientError::StreamBroken {
            pid: self.pid,
            message: message.chars().take(1000).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn arguments_keep_their_order_and_bytes() {
        let odd = OsStr::from_bytes(b"a\xffb");
        let request = Command::new("printf").arg("%s").arg(odd).arg("plain").request();
        let config = request.process.into_option().expect("set");
        assert_eq!(config.args, ["%s"]);
        assert_eq!(config.raw_args, [b"a\xffb".to_vec(), b"plain".to_vec()]);
        assert_eq!(request.stdin, Some(false));
    }
}
