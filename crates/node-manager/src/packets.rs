//! Messages with descriptors over a `SOCK_SEQPACKET` Unix socket: one message is one packet.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Largest message, bytes. A command line of a monitor has three thousand; the names that a sweep keeps are at most
/// [`crate::protocol::MOST_KEPT`] of 35. A socket's usual buffer takes one of that size whole.
pub(crate) const LARGEST: usize = 128 * 1024;

/// Most descriptors of one message: a monitor gets five and a log, a network and its views.
pub(crate) const MOST_DESCRIPTORS: usize = 32;

/// One message.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A connected socket. Messages may be sent from many tasks; one task receives.
#[derive(Debug)]
pub(crate) struct Packets(AsyncFd<OwnedFd>);

impl Packets {
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        register(socket).map(Self)
    }

    /// Connects to a listening socket.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let socket = socket()?;
        // At once or not at all: a Unix socket whose queue is full answers EAGAIN.
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::new(socket)
    }

    /// User id of the process at the other end.
    pub(crate) fn peer(&self) -> io::Result<u32> {
        Ok(rustix::net::sockopt::socket_peercred(self.0.get_ref())?
            .uid
            .as_raw())
    }

    /// Sends one message as a whole.
    pub(crate) async fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.len() > LARGEST || descriptors.len() > MOST_DESCRIPTORS {
            let what = format!(
                "a message of {} bytes with {} descriptors is too large",
                bytes.len(),
                descriptors.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.0
            .async_io(Interest::WRITABLE, |socket| {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
                Ok(())
            })
            .await
    }

    /// The next message; `None` if the other end has closed.
    ///
    /// # Errors
    /// Also if a message is larger than it may be: whoever sends that does not speak this protocol.
    pub(crate) async fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<Option<Packet>> {
        buffer.resize(LARGEST, 0);
        self.0
            .async_io(Interest::READABLE, |socket| {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let received = rustix::net::recvmsg(
                    socket,
                    &mut [IoSliceMut::new(buffer)],
                    &mut control,
                    RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
                )?;
                let mut descriptors = Vec::new();
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(passed) = message {
                        descriptors.extend(passed);
                    }
                }
                if received
                    .flags
                    .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
                {
                    let what = "a message is larger than allowed";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                if received.bytes == 0 {
                    return Ok(None);
                }
                Ok(Some(Packet {
                    bytes: buffer[..received.bytes].to_vec(),
                    descriptors,
                }))
            })
            .await
    }
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        register(socket).map(Self)
    }

    pub(crate) async fn accept(&self) -> io::Result<Packets> {
        let accepted = self
            .0
            .async_io(Interest::READABLE, |socket| {
                Ok(rustix::net::accept_with(socket.as_fd(), SocketFlags::CLOEXEC)?)
            })
            .await?;
        Packets::new(accepted)
    }
}

/// A new socket of the protocol's kind.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

fn register(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is the same open descriptor for as long as it lives. The safe constructor is deprecated.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE | Interest::WRITABLE) }
        .map_err(io::Error::from)
}
