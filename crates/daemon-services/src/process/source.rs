//! Moving a process's output into its log, during its life and for a bounded time after it.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::log::{Log, Stream};
use super::terminal::Terminal;

const PIPE_READ: usize = 32 * 1024;
const TERMINAL_READ: usize = 16 * 1024;
/// After the leader's end: silence for so long means that nothing more is coming …
const QUIET: Duration = Duration::from_millis(100);
/// … and a child that never falls silent is not waited for longer than this.
const DRAIN: Duration = Duration::from_millis(500);

/// Where output comes from.
#[derive(Debug)]
pub(crate) enum Source {
    Pipe(pipe::Receiver),
    Terminal(Arc<Terminal>),
}

impl Source {
    async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.read(buffer).await,
            Self::Terminal(terminal) => terminal.read(buffer).await,
        }
    }

    /// Bytes that can be read without waiting.
    fn pending(&self) -> u64 {
        match self {
            Self::Pipe(pipe) => rustix::io::ioctl_fionread(pipe.as_fd()).unwrap_or_default(),
            // What a terminal holds back is not countable; its end comes as end of file.
            Self::Terminal(_) => 0,
        }
    }

    fn buffer(&self) -> Vec<u8> {
        vec![
            0;
            if matches!(self, Self::Pipe(_)) {
                PIPE_READ
            } else {
                TERMINAL_READ
            }
        ]
    }
}

/// Moves output until the source ends. `leader_ended` turns true when the leader has ended;
/// `drained` is answered when its output is complete.
///
/// 1. Leader alive: reads whenever the log has space.
/// 2. Leader gone: what it wrote is in the pipe already, and is read for certain. Children that
///    hold the pipe are listened to until they fall silent, within [`DRAIN`].
/// 3. After that, what children still write is read and dropped, so that they do not stop or die
///    of a full or closed pipe.
pub(crate) async fn pump(
    mut source: Source,
    stream: Stream,
    log: Arc<Log>,
    mut leader_ended: watch::Receiver<bool>,
    drained: oneshot::Sender<()>,
) {
    let mut buffer = source.buffer();
    let finished = alive(&mut source, stream, &log, &mut leader_ended, &mut buffer).await
        || drain(&mut source, stream, &log, &mut buffer).await;
    // The receiver is gone only if nobody waits any more.
    let _ = drained.send(());
    if !finished {
        while let Ok(1..) = source.read(&mut buffer).await {}
    }
}

/// Returns whether the source has ended.
async fn alive(
    source: &mut Source,
    stream: Stream,
    log: &Log,
    leader_ended: &mut watch::Receiver<bool>,
    buffer: &mut [u8],
) -> bool {
    loop {
        let read = async {
            log.space().await;
            source.read(buffer).await
        };
        tokio::select! {
            biased;
            // An error means that the supervisor is gone, which ends it as well.
            _ = leader_ended.wait_for(|ended| *ended) => return false,
            read = read => match read {
                Ok(length @ 1..) => log.push(stream, Bytes::copy_from_slice(&buffer[..length])),
                Ok(0) => return true,
                Err(error) => {
                    tracing::warn!(%error, "reading a process's output failed");
                    return true;
                }
            },
        }
    }
}

/// Returns whether the source has ended.
async fn drain(source: &mut Source, stream: Stream, log: &Log, buffer: &mut [u8]) -> bool {
    let limit = Instant::now() + DRAIN;
    let mut owed = source.pending();
    loop {
        // What the leader wrote goes in even if a subscriber is behind: it is one pipe at most.
        if owed == 0 && timeout(limit - Instant::now(), log.space()).await.is_err() {
            return false;
        }
        let wait = if owed > 0 {
            QUIET
        } else {
            QUIET.min(limit - Instant::now())
        };
        match timeout(wait, source.read(buffer)).await {
            Ok(Ok(length @ 1..)) => {
                log.push(stream, Bytes::copy_from_slice(&buffer[..length]));
                owed = owed.saturating_sub(length as u64);
            }
            Ok(_) => return true,
            Err(_) => return false,
        }
        if owed == 0 && Instant::now() >= limit {
            return false;
        }
    }
}
