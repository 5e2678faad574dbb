//! A QEMU machine in operation.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use fs_err as fs;
use serde_json::{Value, json};
use space_node_manager::ProcessIdentity;
use tokio::{net::UnixStream, sync::watch, task::spawn_blocking};

use super::{
    Shared, command_line, memory, qcow2,
    qmp::{Pending, Qmp, QmpError},
    supervise::Console,
};
use crate::{DiskLayer, ExitReason, FrozenLayer, Machine, MemoryDelta, PortStream, VmmError, io_error};

/// How long a killed process may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(15);

/// How long to wait for the cause after the monitor's connection has ended.
const CAUSE_WITHIN: Duration = Duration::from_secs(5);

/// The handle; dropping it kills the machine.
#[derive(Debug)]
pub(super) struct QemuMachine {
    pub(super) inner: Arc<Inner>,
}

/// What the handle and work under way share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    pub(super) uid: u32,
    pub(super) identity: ProcessIdentity,
    pub(super) exit: watch::Receiver<Option<ExitReason>>,
    pub(super) kill: watch::Sender<bool>,
    pub(super) qmp: Qmp,
    pub(super) console: Arc<Console>,
    pub(super) memory: Memory,
    pub(super) disk: tokio::sync::Mutex<Disk>,
    pub(super) control: Port,
    pub(super) data: Port,
}

/// The file behind the guest's memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) file: PathBuf,
    pub(super) bytes: u64,
    /// Whether the machine only reads it.
    pub(super) private: bool,
}

/// The writable disk.
#[derive(Debug)]
pub(super) struct Disk {
    /// What is written to now.
    pub(super) top: PathBuf,
    /// How many layers there are, the raw base included.
    pub(super) layers: usize,
    /// Size of the disk, bytes.
    pub(super) size: u64,
}

impl Drop for QemuMachine {
    fn drop(&mut self) {
        self.inner.kill.send_replace(true);
    }
}

impl Inner {
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

    /// A new file that the monitor may write.
    async fn output(&self, path: &Path) -> Result<(), VmmError> {
        fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| io_error("create", path, e))?;
        self.give(path).await
    }

    async fn give(&self, path: &Path) -> Result<(), VmmError> {
        let given = self.shared.privileges.give_file(path, self.uid).await;
        given.map_err(|source| VmmError::Privilege {
            step: "give a file to the monitor",
            source,
        })
    }

    async fn save_state(&self, to: &Path) -> Result<(), VmmError> {
        let arguments = json!({"filename": command_line::text(to)?, "live": false});
        self.output(to).await?;
        self.run("saving device state", "xen-save-devices-state", arguments)
            .await
            .map(drop)
    }

    async fn freeze_disk(&self, new_top: &Path) -> Result<FrozenLayer, VmmError> {
        let mut disk = self.disk.lock().await;
        qcow2::create(new_top, disk.size).map_err(|e| io_error("create the disk layer", new_top, e))?;
        self.give(new_top).await?;
        let (below, above) = (command_line::layer_node(disk.layers - 1), disk.layers);
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
            for node in [command_line::layer_node(above), format!("f{above}")] {
                self.run(step, "blockdev-del", json!({"node-name": node}))
                    .await
                    .ok();
            }
            fs::remove_file(new_top).ok();
            return Err(error);
        }
        disk.layers += 1;
        let frozen = std::mem::replace(&mut disk.top, new_top.to_owned());
        Ok(FrozenLayer {
            layer: DiskLayer { path: frozen },
        })
    }

    fn open_port(&self, port: &Port) -> Result<PortStream, VmmError> {
        if let Some(reason) = self.exit.borrow().as_ref() {
            return Err(exited("opening a port", Some(reason)));
        }
        port.open()
    }
}

#[async_trait]
impl Machine for QemuMachine {
    fn process(&self) -> ProcessIdentity {
        self.inner.identity
    }

    fn exit(&self) -> watch::Receiver<Option<ExitReason>> {
        self.inner.exit.clone()
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
        if self.inner.memory.private {
            let what = "only a machine that was booted becomes a template".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        self.inner.save_state(state).await
    }

    async fn memory_delta(&self) -> Result<MemoryDelta, VmmError> {
        let memory = &self.inner.memory;
        if !memory.private {
            let what = "a booted machine has no base file that its memory could differ from".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        let opened = open_memory(&self.inner).await?;
        let (file, bytes) = (memory.file.clone(), memory.bytes);
        blocking(&memory.file, move || memory::read_delta(opened, &file, bytes)).await
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
        self.inner.kill.send_replace(true);
        let mut exit = self.inner.exit.clone();
        let gone = exit.wait_for(Option::is_some);
        match tokio::time::timeout(GONE_WITHIN, gone).await {
            Ok(_) => Ok(()),
            Err(_) => Err(VmmError::TimedOut {
                command: "the kill".to_owned(),
                seconds: GONE_WITHIN.as_secs(),
            }),
        }
    }
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
    /// Connected before QEMU ran, until it is asked for.
    first: Option<UnixStream>,
    /// A second descriptor of the stream that was given out last, to end it with.
    given: Option<OwnedFd>,
}

impl Port {
    pub(super) fn new(path: PathBuf, first: UnixStream) -> Self {
        Self {
            path,
            state: Mutex::new(PortState {
                first: Some(first),
                given: None,
            }),
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

/// Connects to a listening socket; succeeds at once as long as there is room in its backlog.
pub(super) fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::connect(path)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}
