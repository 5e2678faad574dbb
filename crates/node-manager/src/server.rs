//! The node manager's process: performs for the node, an ordinary user, the acts of [`crate::Privileges`].
//!
//! ```text
//!   listening ──► connection: peer checked ──► hello ──► requests, each a task ──► answers, exits
//! ```
//!
//! It trusts the node with the machines of the installation and with nothing else: whatever arrives is checked (form and
//! bounds in `protocol`, the rest in `checks`), a refusal is logged. What it performs outlives a connection; so do the
//! machines outlive the node and this process. It holds nothing that it could not find again by name.

mod checks;
mod connection;

use std::{
    io,
    ops::RangeInclusive,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid},
    net::SocketAddrUnix,
};
use tokio::task::JoinSet;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Confinement, LocalOptions, LocalPrivileges, PrivilegeError, failed,
    packets::{self, Listener},
    protocol::MOST_MACHINES,
};

/// Programs that may be monitors unless others are named.
pub const PROGRAMS: [&str; 3] = [
    "/usr/bin/qemu-system-x86_64",
    "/usr/local/bin/qemu-system-x86_64",
    "/usr/libexec/qemu-kvm",
];

/// Most connections at a time: the node's, and one or two that it has not yet noticed to be lost.
const CONNECTIONS: usize = 8;

/// Connections waiting to be accepted.
const BACKLOG: i32 = 16;

/// Pause after an error of `accept`, such as too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// How long the acts under way may take at the end.
const FINISH: Duration = Duration::from_secs(10);

/// What the node manager is told at its start.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Names everything that is made: 1 to 16 characters of `[a-z0-9]`.
    pub installation: String,
    /// Where the sockets lie; made if need be.
    pub run_directory: PathBuf,
    /// User ids of monitors.
    pub users: RangeInclusive<u32>,
    /// User id of the node, the only one that may connect.
    pub owner: u32,
    /// Group id of the node, which can read what is a monitor's.
    pub group: u32,
    /// Programs that may be started, absolute; they and the directories above them must be root's alone to write.
    pub programs: Vec<PathBuf>,
    /// Most machines, the ones made ahead included.
    pub machines: usize,
    /// A path on the file system whose traffic is limited by [`crate::IoLimits`].
    pub data_directory: Option<PathBuf>,
}

impl ServerConfig {
    /// With the usual programs and bounds.
    pub fn new(
        installation: impl Into<String>,
        run_directory: impl Into<PathBuf>,
        users: RangeInclusive<u32>,
        (owner, group): (u32, u32),
    ) -> Self {
        Self {
            installation: installation.into(),
            run_directory: run_directory.into(),
            users,
            owner,
            group,
            programs: PROGRAMS.iter().map(PathBuf::from).collect(),
            machines: MOST_MACHINES,
            data_directory: None,
        }
    }
}

/// A node manager that listens.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    /// The socket's path, if this server made it.
    path: Option<PathBuf>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ServerConfig,
    local: LocalPrivileges,
    names: checks::Names,
    turns: checks::Turns,
    /// Acts under way, whoever asked for them.
    acts: TaskTracker,
}

impl Server {
    /// Takes the installation's lock and listens at `socket` (0600, the node's). What an earlier one has left there is
    /// replaced. To be called on a tokio runtime.
    ///
    /// # Errors
    /// As [`LocalPrivileges::with`], and if the socket cannot be made.
    pub fn bind(config: ServerConfig, socket: &Path) -> Result<Self, PrivilegeError> {
        let shared = Shared::new(config)?;
        let act = |what: &str| format!("{what} {}", socket.display());
        match fs_err::remove_file(socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(act("removing"), e)),
            _ => {}
        }
        let listener = listen(socket, shared.config.owner, shared.config.group)
            .map_err(|e| failed(act("listening at"), e))?;
        Ok(Self {
            listener,
            path: Some(socket.to_owned()),
            shared: Arc::new(shared),
        })
    }

    /// As [`Self::bind`], on a `SOCK_SEQPACKET` Unix socket that listens already, such as one of systemd's.
    ///
    /// # Errors
    /// As [`LocalPrivileges::with`].
    pub fn on(config: ServerConfig, listener: OwnedFd) -> Result<Self, PrivilegeError> {
        let shared = Shared::new(config)?;
        Ok(Self {
            listener: Listener::new(listener).map_err(|e| failed("using the passed socket", e))?,
            path: None,
            shared: Arc::new(shared),
        })
    }

    /// Serves until `stop`, then finishes the acts under way (at most 10 s). Machines run on.
    pub async fn serve(self, stop: CancellationToken) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = self.listener.accept(), if connections.len() < CONNECTIONS => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Ok(packets) => {
                    connections.spawn(connection::serve(self.shared.clone(), packets, stop.clone()));
                }
                Err(error) => {
                    tracing::error!(%error, "no connection can be accepted");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
        if let Some(path) = &self.path {
            // Nobody is to wait for an answer from here on.
            fs_err::remove_file(path).ok();
        }
        self.shared.acts.close();
        if tokio::time::timeout(FINISH, self.shared.acts.wait())
            .await
            .is_err()
        {
            tracing::warn!(acts = self.shared.acts.len(), "stopped in the middle of acts");
        }
        // Their answers are sent by now, or nobody takes them.
        connections.shutdown().await;
    }
}

impl Shared {
    fn new(config: ServerConfig) -> Result<Self, PrivilegeError> {
        let options = LocalOptions {
            users: config.users.clone(),
            owner: config.owner,
            group: config.group,
            confinement: Confinement::Full,
            data_directory: config.data_directory.clone(),
        };
        let local = LocalPrivileges::with(&config.installation, &config.run_directory, options)?;
        let names = checks::Names::new(&local, config.machines)?;
        Ok(Self {
            config,
            local,
            names,
            turns: checks::Turns::default(),
            acts: TaskTracker::new(),
        })
    }
}

/// Listens at `path`. The directory may be the node's, so its files are not trusted to stay what they are.
fn listen(path: &Path, owner: u32, group: u32) -> io::Result<Listener> {
    let socket = packets::socket()?;
    // The file gets the mode that the socket has when it is bound.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let file = rustix::fs::openat(
        CWD,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let status = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::Socket || status.st_uid != 0 {
        return Err(io::Error::other("another file was put in the socket's place"));
    }
    let (owner, group) = (Uid::from_raw(owner), Gid::from_raw(group));
    rustix::fs::chownat(&file, "", Some(owner), Some(group), AtFlags::EMPTY_PATH)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Listener::new(socket)
}
