//! What a node inherits from whoever started it: its listening socket, and ways to say that it serves.

use std::{
    io::{self, Write as _},
    net::TcpListener,
    os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd},
    path::PathBuf,
};

use clap::Args;
use rustix::{
    fs::FileType,
    io::FdFlags,
    net::{AddressFamily, SocketAddrUnix, SocketType},
};

use crate::error::CliError;

/// The first descriptor that a service manager passes.
const FIRST_PASSED: RawFd = 3;

/// Descriptors by number. `space up` passes them; there is no use in giving them by hand.
#[derive(Debug, Args)]
pub(super) struct Inherited {
    /// Descriptor of a listening socket
    #[arg(long, value_name = "NUMBER", hide = true)]
    listen_descriptor: Option<RawFd>,
    /// Descriptor that gets one byte when sandboxes can be made
    #[arg(long, value_name = "NUMBER", hide = true)]
    ready_descriptor: Option<RawFd>,
    /// Descriptor of a file that gets address and key as JSON before
    #[arg(long, value_name = "NUMBER", hide = true)]
    ready_file_descriptor: Option<RawFd>,
}

/// The descriptors themselves.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) listener: Option<TcpListener>,
    pub(super) ready: Ready,
}

/// Whom to tell, and how.
#[derive(Debug)]
pub(super) struct Ready {
    pipe: Option<OwnedFd>,
    file: Option<OwnedFd>,
    /// Of a service manager.
    notify: Option<PathBuf>,
}

impl Inherited {
    /// Takes them, once, before anything else opens files.
    pub(super) fn take(&self) -> Result<Taken, CliError> {
        let listener = match self.listen_descriptor.or_else(passed_by_service_manager) {
            Some(number) => Some(listener(take(number, FileType::Socket)?)?),
            None => None,
        };
        let optional = |number: Option<RawFd>, kind| number.map(|number| take(number, kind)).transpose();
        Ok(Taken {
            listener,
            ready: Ready {
                pipe: optional(self.ready_descriptor, FileType::Fifo)?,
                file: optional(self.ready_file_descriptor, FileType::RegularFile)?,
                notify: std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from),
            },
        })
    }
}

impl Ready {
    /// Writes what programs want to know where they look for it.
    pub(super) fn publish(&self, value: &serde_json::Value) -> Result<(), CliError> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let mut file = std::fs::File::from(file.try_clone()?);
        Ok(file.write_all(format!("{value}\n").as_bytes())?)
    }

    /// Says that sandboxes can be made. Whoever wanted to know may be gone by now.
    pub(super) fn tell(self) -> Result<(), CliError> {
        if let Some(pipe) = &self.pipe {
            let _: Result<usize, _> = rustix::io::write(pipe, b"R");
        }
        if let Some(socket) = &self.notify {
            notify(socket).map_err(|error| CliError::internal("cannot tell the service manager", error))?;
        }
        Ok(())
    }
}

/// The number of the one socket that systemd passes, if it does and means us.
fn passed_by_service_manager() -> Option<RawFd> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    (number("LISTEN_PID")? == std::process::id() && number("LISTEN_FDS")? == 1).then_some(FIRST_PASSED)
}

/// Takes a descriptor that must be open and of one kind, so that a wrong number is an error and no accident.
fn take(number: RawFd, kind: FileType) -> Result<OwnedFd, CliError> {
    let wrong = || CliError::usage(format!("descriptor {number} is not what it is said to be"));
    if number < FIRST_PASSED {
        return Err(wrong());
    }
    // SAFETY: the descriptor is only looked at while it is borrowed; a closed one gives an error.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
    let status = rustix::fs::fstat(borrowed).map_err(|_| wrong())?;
    if FileType::from_raw_mode(status.st_mode) != kind {
        return Err(wrong());
    }
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|_| wrong())?;
    // SAFETY: it is open, and was passed to us to own. Each option is taken once, and the kinds differ.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn listener(socket: OwnedFd) -> Result<TcpListener, CliError> {
    let listens = rustix::net::sockopt::socket_acceptconn(socket.as_fd()).unwrap_or(false);
    if !listens {
        return Err(CliError::usage("the inherited socket does not listen"));
    }
    let listener = TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn notify(socket: &std::path::Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let name = socket.as_os_str().as_bytes();
    // An abstract name is written with an at sign.
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(socket)?,
    };
    let sender = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    rustix::net::sendto(&sender, b"READY=1", rustix::net::SendFlags::empty(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    fn what_is_inherited_must_be_what_it_is_said_to_be() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("an address");
        let number = listener.into_raw_fd();
        assert!(take(number, FileType::Fifo).is_err());
        let taken = super::listener(take(number, FileType::Socket).expect("a socket")).expect("it listens");
        assert_eq!(taken.local_addr().expect("an address"), address);

        assert!(
            take(2, FileType::CharacterDevice).is_err(),
            "never a standard stream"
        );
        assert!(take(9_999, FileType::Socket).is_err(), "not open");
        let connection = std::net::TcpStream::connect(address).expect("connected");
        assert!(super::listener(connection.into()).is_err(), "it does not listen");
    }

    #[test]
    fn a_service_manager_is_told() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let manager = std::os::unix::net::UnixDatagram::bind(&path).expect("bound");
        let (pipe, ready) = rustix::pipe::pipe().expect("a pipe");
        let file = tempfile::tempfile().expect("a file");
        let ready = Ready {
            pipe: Some(ready),
            file: Some(file.try_clone().expect("a copy").into()),
            notify: Some(path),
        };
        ready
            .publish(&serde_json::json!({"url": "there"}))
            .expect("written");
        ready.tell().expect("told");
        let mut buffer = [0; 16];
        let bytes = manager.recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..bytes], b"READY=1");
        assert_eq!(rustix::io::read(&pipe, &mut buffer).expect("read"), 1);
        let mut written = file;
        io::Seek::rewind(&mut written).expect("rewound");
        let written = io::read_to_string(written).expect("read");
        assert_eq!(written, "{\"url\":\"there\"}\n");
    }
}
