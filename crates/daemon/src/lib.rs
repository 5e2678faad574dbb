//! The guest's first process: sets the machine up, then serves the host over the private channel.
//!
//! ```text
//!  init ── mounts, modules, overlay root, cgroups, network ──► serve
//!                                                               │
//!         ┌──────────────────────────┬──────────────────────────┤
//!    main thread                 "control"                  "services"
//!    reaps orphans               small messages             HTTP/2 on the data port,
//!    (reaper)                    (control, identity,        tunnels, the loopback service
//!                                freezer)                   (data, tunnel, loopback)
//!         └────────── none of them ends; if one does, the machine stops ──────────┘
//! ```
//!
//! The control thread never waits for the services thread, so that it answers however busy the data port is; what the two
//! share is the [`data::DataGate`].

pub mod cgroup;
pub mod control;
pub mod data;
pub mod identity;
pub mod init;
pub mod kernel;
pub mod log;
pub mod loopback;
mod mapped;
pub mod modules;
pub mod mounts;
pub mod network;
pub mod port;
pub mod reaper;
pub mod serve;
pub mod sockets;
pub mod tunnel;

/// Where the daemon keeps what programs in the guest may read.
pub const RUN_DIRECTORY: &str = "/run/space";
