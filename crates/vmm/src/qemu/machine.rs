//! A QEMU machine in operation.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use fs_err as fs;
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use serde_json::{Value, json};
use space_node_manager::ProcessIdentity;
use tokio::{net::UnixStream, sync::watch, task::spawn_blocking};

use super::{
    Shared, command_line, memory, qcow2,
    qmp::{Pending, Qmp, QmpError},
    supervise::{Console, Order},
};
use crate::{
    DiskLayer, ExitReason, FrozenLayer, Machine, MachineRecord, MemoryDelta, PortStream, RunState, VmmError,
    io_error,
};

/// How long a killed process may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(15);

/// How long to wait for the cause after the monitor's connection has ended.
const CAUSE_WITHIN: Duration = Duration::from_secs(5);

/// The handle; dropping it kills the machine, unless it was detached.
#[derive(Debug)]
pub(super) struct QemuMachine {
    pub(super) inner: Arc<Inner>,
}

/// What the handle and work under way share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    pub(super) identity: ProcessIdentity,
    pub(super) exit: watch::Receiver<Option<ExitReason>>,
    pub(super) order: watch::Sender<Order>,
    pub(super) qmp: Qmp,
    pub(super) console: Arc<Console>,
    /// Changes with the layers of the disk.
    pub(super) record: Mutex<MachineRecord>,
    /// Held while the disk is switched to another layer.
    pub(super) freezing: tokio::sync::Mutex<()>,
    pub(super) control: Port,
    pub(super) data: Port,
}

impl Drop for QemuMachine {
    fn drop(&mut self) {
        self.inner.give_order(Order::Kill);
    }
}

impl Inner {
    /// The first order stands.
    fn give_order(&self, order: Order) {
        self.order.send_if_modified(|given| {
            let first = *given == Order::None;
            if first {
                *given = order;
            }
            first
        });
    }

    pub(super) fn record(&self) -> MachineRecord {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Awaits an answer; if QEMU is gone, says why instead.
    pub(super) async fn answer(
        &self,
        step: &'static str,
        command: &str,
        pending: Pending,
    ) -> Result<Value, VmmError> {
        match pending.wait().await {
            Ok(value) => Ok(value),
            Err(QmpError::Closed) => {
                let mut exit = self.exit.clone();
                match tokio::time::timeout(CAUSE_WITHIN, exit.wait_for(Option::is_some)).await {
                    Ok(Ok(reason)) => Err(exited(step, reason.as_ref())),
                    _ => Err(QmpError::Closed.into_vmm(command)),
                }
            }
            Err(other) => match self.exit.borrow().as_ref() {
                Some(reason) => Err(exited(step, Some(reason))),
                None => Err(other.into_vmm(command)),
            },
        }
    }

    /// Runs a command.
    pub(super) async fn run(
        &self,
        step: &'static str,
        command: &str,
        arguments: Value,
    ) -> Result<Value, VmmError> {
        let pending = self.qmp.send(command, arguments).await;
        self.answer(step, command, pending).await
    }

    /// The file is made here and handed over open: the monitor need not even see where it lies.
    async fn save_state(&self, to: &Path) -> Result<(), VmmError> {
        let step = "saving device state";
        let file = create_new(to).map_err(|e| io_error("create", to, e))?;
        let passed = self.qmp.send_file(file).await;
        let set = self.answer(step, "add-fd", passed).await?;
        let set = set.get("fdset-id").cloned().unwrap_or_default();
        let arguments = json!({"filename": format!("/dev/fdset/{set}"), "live": false});
        let saved = self.qmp.send("xen-save-devices-state", arguments).await;
        let closed = self.qmp.send("remove-fd", json!({"fdset-id": set})).await;
        self.answer(step, "xen-save-devices-state", saved).await?;
        self.answer(step, "remove-fd", closed).await.map(drop)
    }

    async fn freeze_disk(&self, new_top: &Path) -> Result<FrozenLayer, VmmError> {
        let _alone = self.freezing.lock().await;
        let record = self.record();
        let layers = record.disk_layers.len();
        let top = record.disk_layers.into_iter().next().unwrap_or_default();
        // What the monitor was given to see when it was started (see `views`).
        if layers < 2 || top.parent() != new_top.parent() {
            let what = "a layer lies beside the one it follows, above a template's disk".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        let made = qcow2::create(new_top, record.disk_bytes)
            .map_err(|e| io_error("create the disk layer", new_top, e))?;
        give(&self.shared, made, record.uid).await?;
        let (below, above) = (command_line::layer_node(layers - 1), layers);
        let [protocol, format] = command_line::layer_nodes(above, new_top, None, true)?;
        let step = "freezing the disk";
        // All three at once: each is refused harmlessly if the one before it was.
        let sent = [
            ("blockdev-add", self.qmp.send("blockdev-add", protocol).await),
            ("blockdev-add", self.qmp.send("blockdev-add", format).await),
            ("blockdev-snapshot", {
                let nodes = json!({"node": below, "overlay": command_line::layer_node(above)});
                self.qmp.send("blockdev-snapshot", nodes).await
            }),
        ];
        let mut result = Ok(());
        for (command, pending) in sent {
            let answered = self.answer(step, command, pending).await;
            result = result.and(answered.map(drop));
        }
        if let Err(error) = result {
            // Whatever was added must not be in the way of the next attempt; the disk goes on as it was.
            for node in [command_line::layer_node(above), command_line::file_node(above)] {
                self.run(step, "blockdev-del", json!({"node-name": node}))
                    .await
                    .ok();
            }
            fs::remove_file(new_top).ok();
            return Err(error);
        }
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.disk_layers.insert(0, new_top.to_owned());
        Ok(FrozenLayer {
            layer: DiskLayer { path: top },
        })
    }

    fn open_port(&self, port: &Port) -> Result<PortStream, VmmError> {
        if let Some(reason) = self.exit.borrow().as_ref() {
            return Err(exited("opening a port", Some(reason)));
        }
        if *self.order.borrow() == Order::Detach {
            let what = "the machine was detached".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        port.open()
    }
}

#[async_trait]
impl Machine for QemuMachine {
    fn process(&self) -> ProcessIdentity {
        self.inner.identity
    }

    fn record(&self) -> MachineRecord {
        self.inner.record()
    }

    fn exit(&self) -> watch::Receiver<Option<ExitReason>> {
        self.inner.exit.clone()
    }

    async fn status(&self) -> Result<RunState, VmmError> {
        let step = "asking for its state";
        let answer = self.inner.run(step, "query-status", Value::Null).await?;
        Ok(run_state(&answer))
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.inner.run("pausing", "stop", Value::Null).await.map(drop)
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.inner.run("resuming", "cont", Value::Null).await.map(drop)
    }

    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError> {
        self.inner.save_state(to).await
    }

    async fn save_template(&self, state: &Path) -> Result<(), VmmError> {
        if self.inner.record().private_memory {
            let what = "only a machine that was booted becomes a template".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        self.inner.save_state(state).await
    }

    async fn memory_delta(&self) -> Result<MemoryDelta, VmmError> {
        let record = self.inner.record();
        if !record.private_memory {
            let what = "a booted machine has no base file that its memory could differ from".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        let opened = open_memory(&self.inner).await?;
        let (file, bytes) = (record.memory_file.clone(), record.memory_bytes);
        blocking(&record.memory_file, move || {
            memory::read_delta(opened, &file, bytes)
        })
        .await
    }

    async fn freeze_disk(&self, new_top: &Path) -> Result<FrozenLayer, VmmError> {
        // On a task of its own, so that a caller that goes away does not leave the disk half switched.
        let (inner, new_top) = (self.inner.clone(), new_top.to_owned());
        let path = new_top.clone();
        match self
            .inner
            .shared
            .tasks
            .spawn(async move { inner.freeze_disk(&new_top).await })
            .await
        {
            Ok(result) => result,
            Err(error) => Err(io_error(
                "freeze the disk to",
                &path,
                std::io::Error::other(error),
            )),
        }
    }

    async fn control_port(&self) -> Result<PortStream, VmmError> {
        self.inner.open_port(&self.inner.control)
    }

    async fn data_port(&self) -> Result<PortStream, VmmError> {
        self.inner.open_port(&self.inner.data)
    }

    async fn console(&self) -> String {
        self.inner.console.text(&self.inner.qmp).await
    }

    async fn kill(&self) -> Result<(), VmmError> {
        self.inner.give_order(Order::Kill);
        let mut exit = self.inner.exit.clone();
        let gone = exit.wait_for(Option::is_some);
        match tokio::time::timeout(GONE_WITHIN, gone).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(VmmError::Unsupported {
                what: "the machine was detached, and is not this handle's to kill".to_owned(),
            }),
            Err(_) => Err(VmmError::TimedOut {
                command: "the kill".to_owned(),
                seconds: GONE_WITHIN.as_secs(),
            }),
        }
    }

    fn detach(&self) {
        self.inner.give_order(Order::Detach);
        if *self.inner.order.borrow() == Order::Detach {
            self.inner.qmp.close();
            self.inner.control.close();
            self.inner.data.close();
        }
    }
}

/// From the answer to `query-status`.
pub(super) fn run_state(answer: &Value) -> RunState {
    match answer.get("running").and_then(Value::as_bool) {
        Some(true) => RunState::Running,
        _ => RunState::Paused,
    }
}

/// Gives a file to the user that the monitor runs as.
pub(super) async fn give(shared: &Shared, file: OwnedFd, uid: u32) -> Result<(), VmmError> {
    let given = shared.privileges.give_file(file, uid).await;
    given.map_err(|source| VmmError::Privilege {
        step: "give a file to the monitor",
        source,
    })
}

pub(super) fn exited(step: &'static str, reason: Option<&ExitReason>) -> VmmError {
    let unknown = || ExitReason::MonitorFailed {
        detail: String::new(),
    };
    VmmError::Exited {
        step,
        reason: reason.cloned().unwrap_or_else(unknown),
    }
}

pub(super) async fn open_memory(inner: &Inner) -> Result<space_node_manager::MachineMemory, VmmError> {
    let opened = inner.shared.privileges.open_memory(inner.identity).await;
    opened.map_err(|source| VmmError::Privilege {
        step: "open the machine's memory",
        source,
    })
}

pub(super) async fn blocking<T: Send + 'static>(
    file: &Path,
    work: impl FnOnce() -> Result<T, VmmError> + Send + 'static,
) -> Result<T, VmmError> {
    match spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(io_error("copy pages of", file, std::io::Error::other(error))),
    }
}

/// One of the guest's two ports: a socket that QEMU listens on and takes one client at a time from.
#[derive(Debug)]
pub(super) struct Port {
    path: PathBuf,
    state: Mutex<PortState>,
}

#[derive(Debug)]
struct PortState {
    /// Connected before QEMU ran, until it is asked for; none if the machine was adopted.
    first: Option<UnixStream>,
    /// A second descriptor of the stream that was given out last, to end it with.
    given: Option<OwnedFd>,
}

impl Port {
    pub(super) fn new(path: PathBuf, first: Option<UnixStream>) -> Self {
        let state = Mutex::new(PortState { first, given: None });
        Self { path, state }
    }

    /// Ends whatever is connected.
    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.first = None;
        if let Some(given) = state.given.take() {
            rustix::net::shutdown(&given, rustix::net::Shutdown::Both).ok();
        }
    }

    fn open(&self) -> Result<PortStream, VmmError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(given) = state.given.take() {
            // QEMU takes the next client once it has seen the end of this one.
            rustix::net::shutdown(&given, rustix::net::Shutdown::Both).ok();
        }
        let failed = |e| io_error("connect to", &self.path, e);
        let stream = match state.first.take() {
            Some(first) => first,
            None => connect(&self.path).map_err(failed)?,
        };
        state.given = Some(rustix::io::fcntl_dupfd_cloexec(&stream, 3).map_err(|e| failed(e.into()))?);
        Ok(PortStream::Unix(stream))
    }
}

/// Connects to a listening socket: at once, or not at all if there is no room in its backlog.
pub(super) fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    UnixStream::from_std(socket.into())
}

/// Makes a file to be written. Whoever runs this may be root, in a directory that is another user's: no link on the way
/// is followed.
pub(super) fn create_new(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    Ok(rustix::fs::openat2(
        CWD,
        path,
        flags,
        mode,
        ResolveFlags::NO_SYMLINKS,
    )?)
}
