//! The sandbox manager: owns each sandbox's life on one machine.
//!
//! [`Node`] is the seam towards the control plane; today it is called in process. [`NodeManager`] is what stands behind
//! it: start reading at `sandbox.rs`, which holds the state diagram, then `create.rs` and `provision.rs` for the steps and
//! `remains.rs` for undoing them.

#![forbid(unsafe_code)]

mod adopt;
mod config;
mod create;
mod failure;
mod fault;
mod host_room;
mod idle;
mod journal;
mod link;
mod lock;
mod manager;
mod network_pool;
mod pool;
mod provision;
mod registry;
mod remains;
mod sandbox;
pub mod seam;
mod start_up;
mod templates;
mod uids;
mod usage;
mod volume_templates;
mod warm;
mod worker;

#[cfg(test)]
mod fakes;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use config::{Limits, NodeConfig};
pub use fault::{FaultAct, FaultPoints};
pub use journal::JournalError;
pub use lock::LockError;
pub use manager::NodeManager;
pub use pool::PoolConfig;
pub use seam::{
    CreateSandbox, DataStream, EndRecord, GuestNotice, Node, NodeError, NodeInfo, PoolStatus, SandboxEvent,
    SandboxStatus, TemplateInfo, TunnelError, TunnelStream, Usage, WakeReason,
};
pub use start_up::{DISKS, MACHINES, OpenError};
pub use templates::{Lease, ResolvedTemplate, StartingPoint, TemplateError, Templates};
pub use volume_templates::VolumeTemplates;

/// Locks a mutex whose data is whole at every point, so that another thread's panic does not matter.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
