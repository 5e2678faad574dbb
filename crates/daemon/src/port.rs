//! One end of a byte stream to the host: a virtio-serial port.
//!
//! A port is not a socket: while no host is connected, reading gives end of file and writing would block, and both go on
//! when one comes back. A plain poll says "hang-up" all that time and would spin. Edge-triggered epoll reports only
//! changes, so each port has an epoll of its own; that is what callers wait on.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};

/// A port, never blocking.
#[derive(Debug)]
pub struct Port {
    stream: OwnedFd,
    changes: OwnedFd,
}

impl Port {
    /// Takes a descriptor that is set to non-blocking: a port or a socket.
    pub fn new(stream: OwnedFd) -> io::Result<Self> {
        let changes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::HUP | epoll::EventFlags::ET;
        epoll::add(&changes, &stream, epoll::EventData::new_u64(0), flags)?;
        Ok(Self { stream, changes })
    }

    /// Opens the virtio-serial port of this name.
    pub fn open(name: &str) -> io::Result<Self> {
        let path = find(Path::new("/sys/class/virtio-ports"), name)?;
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        Self::new(file.into())
    }

    /// Reads what is there. `None`: nothing for now.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.stream, &mut *buffer) {
                // No host, or none any more; the next change tells.
                Ok(0) | Err(Errno::AGAIN) => return Ok(None),
                Ok(length) => return Ok(Some(length)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes what fits. `None`: nothing for now.
    pub fn write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::write(&self.stream, bytes) {
                Ok(0) | Err(Errno::AGAIN | Errno::PIPE) => return Ok(None),
                Ok(length) => return Ok(Some(length)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Becomes readable whenever the port's state may have changed, until [`Port::note_changes`].
    pub fn changes(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    /// Takes note of all changes so far. Try to read and write after it, not before.
    pub fn note_changes(&self) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 1];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // A change that stays unnoted only means one more look.
        epoll::wait(&self.changes, &mut events, Some(&now)).ok();
    }
}

/// The device of the port called `name`, by the kernel's listing in `class`.
fn find(class: &Path, name: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir(class)? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|found| found.trim_end() == name) {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("the machine has no virtio-serial port named {name}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_by_its_name() {
        let class = tempfile::tempdir().unwrap();
        for (device, name) in [("vport0p1", "space.control\n"), ("vport0p2", "space.data\n")] {
            fs::create_dir(class.path().join(device)).unwrap();
            fs::write(class.path().join(device).join("name"), name).unwrap();
        }
        assert_eq!(
            find(class.path(), "space.data").unwrap(),
            Path::new("/dev/vport0p2")
        );
        let error = find(class.path(), "space").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
