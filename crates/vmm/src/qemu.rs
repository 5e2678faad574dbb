//! The QEMU driver.
//!
//! ```text
//! probe ── which program, version, accelerator, CPU model (once per node)
//! start ── command_line: sockets and descriptors → one spawn → qmp: greeting, state loaded
//! adopt ── the same process and program → qmp: connected anew, what happened meanwhile is asked
//!       └─ machine: one task per machine (supervise) learns and tells its end
//! ```
//!
//! What matters for speed, measured on QEMU 10: QEMU reads its monitor one byte at a time, about 15 µs each, so
//! commands are few and short, and a device state is named on the command line; a restored machine is described
//! without kernel and option ROMs, which it never reads (7 ms, 11 MB). What matters for safety: every path is
//! given explicitly and none is taken from an image's header, base files are opened read-only, and QEMU runs as an
//! ordinary user under its own system-call filter, in a file system that holds its own files only (`views`).

mod adopt;
mod command_line;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod machine;
mod memory;
mod probe;
mod qcow2;
mod qmp;
mod start;
mod supervise;
mod views;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use space_node_manager::Privileges;
use tokio_util::task::TaskTracker;

use crate::{Capabilities, Machine, MachineRecord, MachineSpec, StartMode, Vmm, VmmError, io_error};

/// Settings of the driver; the default finds everything by itself.
#[derive(Debug, Clone, Default)]
pub struct QemuConfig {
    /// The program; else `qemu-system-x86_64` is looked for on `PATH`.
    pub program: Option<PathBuf>,
    /// Hardware or emulation.
    pub accelerator: AcceleratorChoice,
    /// CPU model under KVM instead of the default for the host's vendor. Never `host`: snapshots must be able to
    /// move.
    pub cpu_model: Option<String>,
}

/// Which accelerator to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AcceleratorChoice {
    /// KVM where the CPU really has it, else emulation.
    #[default]
    Auto,
    /// KVM, or fail.
    Kvm,
    /// Emulation (no security boundary).
    Tcg,
}

/// Runs machines under QEMU.
#[derive(Debug)]
pub struct QemuDriver {
    shared: Arc<Shared>,
}

/// What every machine of the driver needs.
#[derive(Debug)]
struct Shared {
    program: PathBuf,
    capabilities: Capabilities,
    privileges: Arc<dyn Privileges>,
    /// Owns the tasks that start, supervise and reconfigure machines.
    tasks: TaskTracker,
}

impl QemuDriver {
    /// Tells what a driver of this configuration could do here, without making one.
    ///
    /// # Errors
    /// As of [`QemuDriver::probe`].
    pub async fn detect(config: &QemuConfig) -> Result<Capabilities, VmmError> {
        probe::probe(config, None)
            .await
            .map(|(_, capabilities)| capabilities)
    }

    /// Finds QEMU and what it can do here. Takes one run of `qemu --version`.
    ///
    /// # Errors
    /// [`VmmError::Unavailable`] if QEMU is missing or older than 8.2, or KVM was demanded and is not usable.
    pub async fn probe(config: QemuConfig, privileges: Arc<dyn Privileges>) -> Result<Self, VmmError> {
        let (program, capabilities) = probe::probe(&config, Some(&*privileges)).await?;
        tracing::info!(
            program = %program.display(),
            version = capabilities.version,
            accelerator = capabilities.accelerator,
            "QEMU found"
        );
        let shared = Shared {
            program,
            capabilities,
            privileges,
            tasks: TaskTracker::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

#[async_trait]
impl Vmm for QemuDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    async fn create_disk_layer(&self, base: &Path, layer: &Path) -> Result<(), VmmError> {
        let size = qcow2::virtual_size(base)?;
        qcow2::create(layer, size)
            .map(drop)
            .map_err(|e| io_error("create the disk layer", layer, e))
    }

    async fn start(&self, spec: MachineSpec, mode: StartMode) -> Result<Box<dyn Machine>, VmmError> {
        // On a task of its own: if the caller goes away half-way, the machine is finished and then dropped, which
        // kills it, instead of left behind.
        let machine = self
            .shared
            .tasks
            .spawn(start::start(self.shared.clone(), spec, mode));
        match machine.await {
            Ok(started) => Ok(Box::new(started?)),
            Err(error) => Err(VmmError::Unavailable {
                what: format!("starting a machine broke off: {error}"),
            }),
        }
    }

    async fn adopt(&self, record: MachineRecord) -> Result<Box<dyn Machine>, VmmError> {
        // If the caller goes away half-way, the connection is closed and the machine goes on.
        let machine = adopt::adopt(self.shared.clone(), record).await?;
        Ok(Box::new(machine))
    }
}
