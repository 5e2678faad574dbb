//! Everything on a node that needs root, behind one narrow trait, [`Privileges`].
//!
//! Nothing else in SPACE performs a privileged act: namespaces, taps, cgroups, ownership of files, starting a VMM
//! as another user, opening a guest's memory. Objects are owned by name (`space-<installation>-…`) and can be swept.
//! The trait is asynchronous and passes only values and descriptors, so that its implementation can live in a
//! process of its own without a change above it.
//!
//! [`LocalPrivileges`] performs the acts in this process, which must be root. [`Server`] offers them to the node, which
//! is an ordinary user and asks by [`RemotePrivileges`]. [`RecordingPrivileges`] only writes them down, for tests of
//! logic that must run without root.

mod cgroup;
mod executable;
pub mod fake;
mod files;
mod jail;
pub mod local;
mod lock;
mod network;
mod packets;
pub mod privileges;
mod process;
pub mod protocol;
pub mod remote;
mod seccomp;
pub mod server;
mod spawn;

pub use cgroup::{Controller, controllers};
pub use fake::{Act, RecordingPrivileges};
pub use local::{Confinement, LocalOptions, LocalPrivileges};
pub use privileges::{
    Adopted, ExitStatus, Group, GroupLimits, GroupUsage, IoLimits, MachineMemory, Network, ObjectName,
    PrivilegeError, Privileges, ProcessIdentity, Spawned, SweepReport, View, VmmProcess,
};

pub use remote::RemotePrivileges;
pub use server::{Server, ServerConfig};

/// An [`std::io::Error`] with what was attempted.
fn failed(act: impl Into<String>, source: impl Into<std::io::Error>) -> PrivilegeError {
    let (act, source) = (act.into(), source.into());
    if source.kind() == std::io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() {
        PrivilegeError::NotPermitted { act }
    } else {
        PrivilegeError::System { act, source }
    }
}
