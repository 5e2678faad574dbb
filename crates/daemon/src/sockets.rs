//! The daemon on an ordinary host: Unix sockets in place of the machine's ports, for tests.
//!
//! Each socket behaves as a virtual machine monitor's does: one host at a time, and bytes that the guest wrote while none
//! was there, or that one left behind, reach the next.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixListener as StdListener, unix::net::UnixStream as StdStream},
    path::Path,
    sync::Arc,
    thread,
};

use space_daemon_services::Services;
use tokio::{
    io::copy,
    net::{UnixListener, UnixStream},
};

use crate::{
    cgroup::AgentGroup, control::Control, identity::IdentityFiles, kernel::Kernel, port::Port, serve,
};

/// What to serve, where.
#[derive(Debug)]
pub struct Stand<'a> {
    /// Socket to make for the control port.
    pub control: &'a Path,
    /// Socket to make for the data port.
    pub data: &'a Path,
    /// An existing directory for the identity files.
    pub run: &'a Path,
    /// The agent's group, if there is one.
    pub group: Option<AgentGroup>,
    /// Port of the loopback service, if there is to be one.
    pub loopback: Option<u16>,
}

/// Serves on two Unix sockets; returns when both listen.
pub fn start(stand: Stand<'_>, kernel: Arc<dyn Kernel>, services: Arc<Services>) -> io::Result<()> {
    let control = Control {
        port: stand_in(stand.control)?,
        kernel,
        group: stand.group,
        files: IdentityFiles::create(stand.run)?,
        gate: Arc::default(),
        services,
    };
    serve::start(serve::Served {
        control,
        data: stand_in(stand.data)?,
        loopback: stand.loopback,
    })
}

/// A port whose other end is a socket at `path`.
pub fn stand_in(path: &Path) -> io::Result<Port> {
    let listener = StdListener::bind(path)?;
    let (guest, host) = StdStream::pair()?;
    for stream in [&guest, &host] {
        stream.set_nonblocking(true)?;
    }
    listener.set_nonblocking(true)?;
    thread::Builder::new().name("port".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(relay(listener, host))
    })?;
    Port::new(OwnedFd::from(guest))
}

async fn relay(listener: StdListener, port: StdStream) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let mut port = UnixStream::from_std(port)?;
    loop {
        let (mut host, _) = listener.accept().await?;
        let (mut from_port, mut to_port) = port.split();
        let (mut from_host, mut to_host) = host.split();
        tokio::select! {
            _ = copy(&mut from_host, &mut to_port) => {}
            _ = copy(&mut from_port, &mut to_host) => {}
        }
    }
}
