//! The local terminal: raw mode that is always undone, its size, and reading standard input.

use std::{
    io::{self, IsTerminal as _, Read as _},
    os::fd::AsFd as _,
};

use bytes::Bytes;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use space_client::TerminalSize;
use tokio::sync::mpsc;

use crate::error::CliError;

/// Bytes read from standard input at once.
const CHUNK: usize = 64 * 1024;
/// Chunks read ahead of what the sandbox has taken.
const AHEAD: usize = 4;

/// Puts the terminal of standard input into raw mode until dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Fails if standard input is no terminal.
    pub(crate) fn enter() -> Result<Self, CliError> {
        let stdin = io::stdin();
        let before = tcgetattr(stdin.as_fd()).map_err(io::Error::from)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin.as_fd(), OptionalActions::Now, &raw).map_err(io::Error::from)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Nothing better can be done where even this fails.
        let _ = tcsetattr(io::stdin().as_fd(), OptionalActions::Now, &self.before);
    }
}

/// Whether both ends of a conversation are a terminal.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// The size of the terminal of standard output, or 80 x 24.
pub(crate) fn size() -> TerminalSize {
    let fallback = TerminalSize {
        rows: 24,
        columns: 80,
    };
    match tcgetwinsize(io::stdout().as_fd()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => TerminalSize {
            rows: size.ws_row,
            columns: size.ws_col,
        },
        _ => fallback,
    }
}

/// Reads standard input on a thread of its own, at most a few chunks ahead. The channel closes at its end.
///
/// The thread may stay blocked in a read when nobody wants its bytes any more; it ends with the process.
pub(crate) fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            match io::stdin().lock().read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if sender
                        .blocking_send(Bytes::copy_from_slice(&buffer[..count]))
                        .is_err()
                    {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    });
    receiver
}
