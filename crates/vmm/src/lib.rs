//! Starts, stops and snapshots machines, whatever the virtual machine monitor: the [`Vmm`] trait and its drivers.
//!
//! A driver turns a [`MachineSpec`] into a process started through `space_node_manager::Privileges`. Nothing above
//! this crate knows which monitor runs a machine; what differs is said by [`Capabilities`].

pub mod machine;
pub mod qemu;
pub mod record;

pub use machine::{
    Capabilities, DiskLayer, ExitReason, FrozenLayer, Machine, MachineSpec, MachineTemplate, MemoryDelta,
    MemoryRun, PortStream, RunState, StartMode, Vmm, VmmError,
};
pub use qemu::{AcceleratorChoice, QemuConfig, QemuDriver};
pub use record::MachineRecord;

/// An I/O error with what was attempted on which file.
fn io_error(step: &'static str, path: &std::path::Path, source: impl Into<std::io::Error>) -> VmmError {
    VmmError::Io {
        step,
        path: path.to_owned(),
        source: source.into(),
    }
}
