//! A small client for QEMU's monitor protocol.
//!
//! One task owns the socket. Commands go to it through a queue, so that a caller that goes away mid-way never leaves
//! half a line behind. QEMU answers in the order of the commands, so none carries an id (each byte counts, see
//! [`super`]). Of the events only two are of interest and kept as the newest value. What an earlier client of the same
//! QEMU left behind is gone when the next one connects: QEMU forgets half a line and commands that it has not begun.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{
        mpsc::{self, error::SendTimeoutError},
        oneshot, watch,
    },
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::VmmError;

/// Longest line accepted from QEMU, bytes.
const LONGEST_LINE: usize = 256 * 1024;

/// Commands that may wait.
const QUEUE: usize = 64;

/// How long a command may take. Generous: many machines may be starting on few cores.
pub(super) const COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// The connection. Cheap to clone; it ends when QEMU does.
#[derive(Debug, Clone)]
pub(super) struct Qmp {
    commands: mpsc::Sender<Queued>,
    close: CancellationToken,
    shutdown: watch::Receiver<Option<String>>,
}

type Answer = oneshot::Sender<Result<Value, String>>;

#[derive(Debug)]
struct Queued {
    line: Vec<u8>,
    /// Goes along with the line.
    file: Option<OwnedFd>,
    answer: Answer,
}

/// What went wrong with a command, before it is known whether the machine has ended.
#[derive(Debug)]
pub(super) enum QmpError {
    /// QEMU is gone.
    Closed,
    /// It said no.
    Refused(String),
    /// It did not answer.
    TimedOut,
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(rename = "return")]
    answer: Option<Value>,
    error: Option<Failure>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
}

#[derive(Debug, Deserialize)]
struct Failure {
    desc: String,
}

impl Qmp {
    /// Takes over a fresh connection. Nothing has to be awaited: QEMU reads what is written before its greeting.
    pub(super) fn new(stream: UnixStream, tasks: &TaskTracker) -> Self {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (tell_shutdown, shutdown) = watch::channel(None);
        let close = CancellationToken::new();
        let closing = close.clone();
        tasks.spawn(async move {
            let served = closing.run_until_cancelled(serve(stream, queue, tell_shutdown));
            if let Some(Err(error)) = served.await {
                tracing::debug!(%error, "the monitor's connection ended");
            }
        });
        Self {
            commands,
            close,
            shutdown,
        }
    }

    /// Ends the connection; QEMU then waits for the next.
    pub(super) fn close(&self) {
        self.close.cancel();
    }

    /// Why the guest stopped for good, once it has: QEMU's word for it.
    pub(super) fn shutdown(&self) -> watch::Receiver<Option<String>> {
        self.shutdown.clone()
    }

    /// Waits until the connection has ended.
    pub(super) async fn closed(&self) {
        self.commands.closed().await;
    }

    /// Puts a command into the queue at once; the answer may be awaited later. For commands that follow each other
    /// without waiting.
    pub(super) async fn send(&self, name: &str, arguments: Value) -> Pending {
        let line = match &arguments {
            Value::Null => json!({ "execute": name }),
            _ => json!({ "execute": name, "arguments": arguments }),
        };
        self.queue(line.to_string().into_bytes(), None).await
    }

    /// Hands an open file over. The answer tells the `fdset-id` to name it by, as `/dev/fdset/ID`, until it is given
    /// back with `remove-fd`.
    pub(super) async fn send_file(&self, file: OwnedFd) -> Pending {
        self.queue(br#"{"execute":"add-fd"}"#.to_vec(), Some(file)).await
    }

    async fn queue(&self, line: Vec<u8>, file: Option<OwnedFd>) -> Pending {
        let (answer, answered) = oneshot::channel();
        if self.close.is_cancelled() {
            // The task may not have seen it yet, but nothing more is to reach the monitor.
            return Pending(Some(answered));
        }
        // A closed queue drops `answer`, which `Pending` sees. A full one is emptied by no more than answers: one that
        // stays full is of a monitor that has stopped reading.
        match self
            .commands
            .send_timeout(Queued { line, file, answer }, COMMAND_LIMIT)
            .await
        {
            Err(SendTimeoutError::Timeout(_)) => Pending(None),
            _ => Pending(Some(answered)),
        }
    }

    /// Runs a command and waits for its answer.
    pub(super) async fn run(&self, name: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(name, arguments).await.wait().await
    }
}

/// An answer on its way; none if the command found no room.
#[derive(Debug)]
pub(super) struct Pending(Option<oneshot::Receiver<Result<Value, String>>>);

impl Pending {
    pub(super) async fn wait(self) -> Result<Value, QmpError> {
        let Some(answered) = self.0 else {
            return Err(QmpError::TimedOut);
        };
        match tokio::time::timeout(COMMAND_LIMIT, answered).await {
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err(words))) => Err(QmpError::Refused(words)),
            Ok(Err(_)) => Err(QmpError::Closed),
            Err(_) => Err(QmpError::TimedOut),
        }
    }
}

async fn serve(
    stream: UnixStream,
    mut queue: mpsc::Receiver<Queued>,
    shutdown: watch::Sender<Option<String>>,
) -> io::Result<()> {
    let mut waiting = VecDeque::<Answer>::new();
    let mut buffer = Vec::with_capacity(4096);
    loop {
        tokio::select! {
            queued = queue.recv() => {
                let Some(Queued { line, file, answer }) = queued else { return Ok(()) };
                waiting.push_back(answer);
                write(&stream, &line, file).await?;
            }
            readable = stream.readable() => {
                readable?;
                match stream.try_read_buf(&mut buffer) {
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(error) => return Err(error),
                }
                while let Some(end) = buffer.iter().position(|&b| b == b'\n') {
                    let line = buffer.drain(..=end).collect::<Vec<_>>();
                    take(serde_json::from_slice(&line)?, &mut waiting, &shutdown);
                }
                if buffer.len() > LONGEST_LINE {
                    return Err(io::Error::other("a line of the monitor is too long"));
                }
            }
        }
    }
}

/// Writes a line; a file goes with its first bytes, as `SCM_RIGHTS`.
async fn write(stream: &UnixStream, mut line: &[u8], mut file: Option<OwnedFd>) -> io::Result<()> {
    while !line.is_empty() {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let passed = file.as_ref().map(|file| [file.as_fd()]);
            if let Some(passed) = &passed {
                ancillary.push(SendAncillaryMessage::ScmRights(passed));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            Ok(rustix::net::sendmsg(
                stream,
                &[IoSlice::new(line)],
                &mut ancillary,
                flags,
            )?)
        });
        match sent {
            Ok(sent) => {
                line = line.get(sent..).unwrap_or_default();
                file = None;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What [`serve`] does with whole lines, until one is not understood.
#[cfg(feature = "fuzzing")]
pub(super) fn take_all(lines: &[u8]) {
    let (shutdown, _) = watch::channel(None);
    let mut waiting: VecDeque<Answer> = (0..4).map(|_| oneshot::channel().0).collect();
    for line in lines.split_inclusive(|&byte| byte == b'\n') {
        let Ok(message) = serde_json::from_slice(line) else {
            return;
        };
        take(message, &mut waiting, &shutdown);
    }
}

fn take(message: Message, waiting: &mut VecDeque<Answer>, shutdown: &watch::Sender<Option<String>>) {
    match message {
        Message {
            answer: Some(value), ..
        } => {
            if let Some(answer) = waiting.pop_front() {
                // Whoever asked may have gone.
                answer.send(Ok(value)).ok();
            }
        }
        Message {
            error: Some(failure), ..
        } => {
            if let Some(answer) = waiting.pop_front() {
                answer.send(Err(failure.desc.chars().take(1024).collect())).ok();
            }
        }
        Message {
            event: Some(event),
            data,
            ..
        } => match event.as_str() {
            "SHUTDOWN" => {
                let reason = data.get("reason").and_then(Value::as_str).unwrap_or("unknown");
                shutdown.send_replace(Some(reason.to_owned()));
            }
            // The guest's kernel told of its own panic (a pvpanic device); not in use on this machine type.
            "GUEST_PANICKED" => {
                shutdown.send_replace(Some("guest-panic".to_owned()));
            }
            _ => tracing::trace!(event, "monitor"),
        },
        // The greeting.
        _ => {}
    }
}

impl QmpError {
    /// For a machine that has not ended.
    pub(super) fn into_vmm(self, command: &str) -> VmmError {
        let command = command.to_owned();
        match self {
            QmpError::Refused(answer) => VmmError::Refused { command, answer },
            QmpError::Closed => VmmError::Refused {
                command,
                answer: "the connection was closed".to_owned(),
            },
            QmpError::TimedOut => VmmError::TimedOut {
                command,
                seconds: COMMAND_LIMIT.as_secs(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn answers_go_to_whom_they_belong_though_a_caller_left() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let qmp = Qmp::new(ours, &TaskTracker::new());
        let first = qmp.send("one", Value::Null).await;
        drop(qmp.send("two", Value::Null).await);
        let third = qmp.send("three", json!({"a": 1})).await;
        let mut seen = Vec::new();
        while !seen.ends_with(br#"{"arguments":{"a":1},"execute":"three"}"#) {
            theirs.read_buf(&mut seen).await.unwrap();
        }
        theirs
            .write_all(
                b"{\"QMP\": {}}\r\n{\"return\": {\"n\": 1}}\r\n{\"event\": \"SHUTDOWN\", \"data\": {\"reason\": \
                \"guest-reset\"}}\r\n{\"return\": {}}\r\n{\"error\": {\"class\": \"x\", \"desc\": \"no\"}}\r\n",
            )
            .await
            .unwrap();
        assert_eq!(first.wait().await.unwrap(), json!({"n": 1}));
        assert!(matches!(third.wait().await, Err(QmpError::Refused(words)) if words == "no"));
        assert_eq!(qmp.shutdown().borrow().as_deref(), Some("guest-reset"));
        drop(theirs);
        qmp.closed().await;
        assert!(matches!(
            qmp.run("four", Value::Null).await,
            Err(QmpError::Closed)
        ));
    }

    #[tokio::test]
    async fn nothing_is_sent_once_it_is_closed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let qmp = Qmp::new(ours, &TaskTracker::new());
        qmp.close();
        assert!(matches!(
            qmp.run("stop", Value::Null).await,
            Err(QmpError::Closed)
        ));
        let mut seen = Vec::new();
        let end = theirs.read_to_end(&mut seen);
        tokio::time::timeout(Duration::from_secs(5), end)
            .await
            .expect("it ends")
            .unwrap();
        assert!(seen.is_empty(), "{seen:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_monitor_that_does_not_read_is_not_waited_for_without_end() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let qmp = Qmp::new(ours, &TaskTracker::new());
        let long = "x".repeat(64 * 1024);
        let mut last = None;
        // What a socket holds, one that is being written, and what the queue holds.
        for _ in 0..2 * QUEUE {
            last = Some(qmp.send("long", json!({ "a": long })).await);
        }
        let asked = last.expect("one was sent");
        assert!(matches!(asked.wait().await, Err(QmpError::TimedOut)));
    }

    #[tokio::test]
    async fn an_endless_line_ends_the_connection() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let qmp = Qmp::new(ours, &TaskTracker::new());
        let line = vec![b' '; 2 * LONGEST_LINE];
        theirs.write_all(&line).await.ok();
        tokio::time::timeout(Duration::from_secs(5), qmp.closed())
            .await
            .expect("it ends");
    }
}
