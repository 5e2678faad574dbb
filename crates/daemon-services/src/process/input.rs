//! Writing to a process, in order and with back-pressure.

use std::sync::Arc;

use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

use super::terminal::Terminal;

/// Where input goes.
#[derive(Debug)]
pub(crate) enum Input {
    /// Started without one.
    Absent,
    /// Ended by a request or with the process.
    Closed,
    Pipe(pipe::Sender),
    Terminal(Arc<Terminal>),
}

/// Which kind of input a request named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Stdin,
    Terminal,
}

/// Why nothing, or not everything, was written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error("the process was started without stdin; start it with stdin enabled to write to it")]
    Absent,
    #[error("stdin of the process is closed")]
    Closed,
    #[error("the process runs on a terminal; send terminal input instead of stdin")]
    IsTerminal,
    #[error("the process has no terminal; send stdin instead of terminal input")]
    NoTerminal,
    #[error("a terminal's input cannot be closed; send byte 0x04 (Ctrl+D) instead")]
    TerminalStaysOpen,
    #[error("the process no longer reads its input")]
    Write {
        #[source]
        source: std::io::Error,
    },
}

impl Input {
    /// Writes all of `data`. Not cancel safe: an unknown part may have been written.
    pub(crate) async fn write(&mut self, kind: Kind, data: &[u8]) -> Result<(), InputError> {
        let written = match (self, kind) {
            (Self::Pipe(pipe), Kind::Stdin) => pipe.write_all(data).await,
            (Self::Terminal(terminal), Kind::Terminal) => terminal.write_all(data).await,
            (Self::Terminal(_), Kind::Stdin) => return Err(InputError::IsTerminal),
            (_, Kind::Terminal) => return Err(InputError::NoTerminal),
            (Self::Absent, _) => return Err(InputError::Absent),
            (Self::Closed, _) => return Err(InputError::Closed),
        };
        written.map_err(|source| InputError::Write { source })
    }

    /// Ends a pipe; doing so twice is fine.
    pub(crate) fn close(&mut self) -> Result<(), InputError> {
        match self {
            Self::Pipe(_) | Self::Closed => {
                *self = Self::Closed;
                Ok(())
            }
            Self::Absent => Err(InputError::Absent),
            Self::Terminal(_) => Err(InputError::TerminalStaysOpen),
        }
    }
}
