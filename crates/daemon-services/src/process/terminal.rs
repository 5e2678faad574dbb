//! Pseudo-terminals.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::descriptor;

/// A size that no real screen exceeds; larger values overflow programs' arithmetic.
const MAX_SIDE: u32 = 10_000;
const DEFAULT_COLUMNS: u16 = 80;
const DEFAULT_ROWS: u16 = 24;

/// Columns and rows of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    columns: u16,
    rows: u16,
}

impl Size {
    /// Zero means the usual 80 x 24.
    pub(crate) fn new(columns: u32, rows: u32) -> Self {
        let side = |value: u32, default| match u16::try_from(value.min(MAX_SIDE)) {
            Ok(0) | Err(_) => default,
            Ok(value) => value,
        };
        Self {
            columns: side(columns, DEFAULT_COLUMNS),
            rows: side(rows, DEFAULT_ROWS),
        }
    }
}

/// Our side of a terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    main: AsyncFd<OwnedFd>,
}

impl Terminal {
    /// Opens a pair: our side, and the program's, which belongs to `owner` when one is given.
    pub(crate) fn open(size: Size, owner: Option<u32>) -> io::Result<(Self, OwnedFd)> {
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&main)?;
        let peer = ioctl_tiocgptpeer(
            &main,
            OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
        )?;
        // Programs open their terminal again by name.
        if let Some(uid) = owner {
            rustix::fs::fchown(&peer, Some(rustix::fs::Uid::from_raw(uid)), None)?;
        }
        rustix::io::ioctl_fionbio(&main, true)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        let terminal = Self {
            main: descriptor::watch(main, interest)?,
        };
        terminal.resize(size)?;
        Ok((terminal, peer))
    }

    pub(crate) fn resize(&self, size: Size) -> io::Result<()> {
        let size = Winsize {
            ws_col: size.columns,
            ws_row: size.rows,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(tcsetwinsize(self.main.as_fd(), size)?)
    }

    /// Reads what the program wrote; 0 once nobody has the program's side open.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self
            .main
            .async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut *buffer)?))
            .await;
        match read {
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(0),
            other => other,
        }
    }

    /// Types all of `data`. Not cancel safe: an unknown part may have been written.
    pub(crate) async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let written = self
                .main
                .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, data)?))
                .await?;
            data = &data[written..];
        }
        Ok(())
    }
}
