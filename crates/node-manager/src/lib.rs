//! Everything on a node that needs root, behind one narrow trait, [`Privileges`].
//!
//! Nothing else in SPACE performs a privileged act: namespaces, taps, cgroups, ownership of files, starting a VMM
//! as another user, opening a guest's memory. Objects are owned by name (`space-<installation>-…`) and can be swept.
//! The trait is asynchronous and passes only values and descriptors, so that its implementation can live in a
//! process of its own without a change above it.

pub mod privileges;

pub use privileges::{
    ExitStatus, Group, GroupLimits, GroupUsage, MachineMemory, Network, ObjectName, PrivilegeError,
    Privileges, ProcessIdentity, Spawned, SweepReport, VmmProcess,
};
