//! What node and node manager say to each other: JSON, one message a packet, descriptors beside it.
//!
//! ```text
//! node                                node manager
//!  Hello { version }            ──►
//!                               ◄──   Welcome { version }   or the connection is closed
//!  Request { id, call } + fds   ──►
//!                               ◄──   Answer { id, outcome } + fds       in any order
//!                               ◄──   Exited { process, status }         after the answer to its spawn or adopt
//! ```
//!
//! The node manager takes every message for hostile: [`parse_request`] checks all that can be checked without looking at
//! the host. Paths and arguments are UTF-8.

use std::{collections::BTreeSet, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    ExitStatus, GroupLimits, GroupUsage, ObjectName, PrivilegeError, ProcessIdentity, SweepReport,
    packets::{LARGEST, MOST_DESCRIPTORS},
};

/// Version of the protocol. Both ends are the same program, so there is only ever one; a difference means that one of
/// them has not been restarted after an upgrade.
pub const VERSION: u32 = 1;

/// Most machines of an installation, the ones made ahead and the one of a template being built included.
pub const MOST_MACHINES: usize = 1024;

/// Most names that a sweep keeps: of each machine its own and its network's, and networks made ahead.
pub const MOST_KEPT: usize = 3 * MOST_MACHINES;

/// Most arguments of a monitor, and the most bytes of them all.
const MOST_ARGUMENTS: usize = 512;
const ARGUMENT_BYTES: usize = 32 * 1024;

/// Bounds of a group's limits: what a host could have.
const MEMORY: std::ops::RangeInclusive<u64> = (16 << 20)..=(64 << 40);
const PIDS: std::ops::RangeInclusive<u64> = 1..=100_000;
const CPU_QUOTA: std::ops::RangeInclusive<u64> = 1_000..=(4096 * 100_000);
const WEIGHT: std::ops::RangeInclusive<u64> = 1..=10_000;

/// Largest file that a monitor may be allowed to write, bytes.
const FILE_SIZE: u64 = 1 << 50;

/// From the node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Something to do.
    Request {
        /// Chosen by the node; the answer bears it.
        id: u64,
        /// What.
        call: Call,
    },
}

/// The acts of [`crate::Privileges`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    missing_docs,
    reason = "each variant is the method of `Privileges` of that name with its arguments"
)]
pub enum Call {
    CreateNetwork { name: ObjectName },
    DeleteNetwork { name: ObjectName },
    CreateGroup { name: ObjectName, limits: GroupLimits },
    GroupUsage { name: ObjectName },
    SetGroupWeight { name: ObjectName, weight: u64 },
    KillGroup { name: ObjectName },
    DeleteGroup { name: ObjectName },
    GiveFile { uid: u32 },
    Spawn(Box<SpawnCall>),
    Adopt { process: ProcessIdentity },
    OpenKvm,
    Kill { process: ProcessIdentity },
    OpenMemory { process: ProcessIdentity },
    Sweep { keep: BTreeSet<ObjectName> },
}

/// A [`crate::VmmProcess`]. Its descriptors come in the order of the fields.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "as in `VmmProcess`")]
pub struct SpawnCall {
    pub name: ObjectName,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub uid: u32,
    pub file_size_limit: u64,
    /// Whether a network namespace is passed.
    pub network: bool,
    /// Whether a log is passed.
    pub log: bool,
    /// Numbers of the descriptors inside the process.
    pub numbers: Vec<i32>,
    /// Path and whether it is writable.
    pub views: Vec<(PathBuf, bool)>,
}

/// From the node manager.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Welcome {
        version: u32,
    },
    Answer {
        id: u64,
        outcome: Result<Done, Failure>,
    },
    Exited {
        process: ProcessIdentity,
        status: ExitStatus,
    },
}

/// What an act gave, besides descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Done {
    Nothing,
    Usage(GroupUsage),
    Process {
        identity: ProcessIdentity,
        executable: [u8; 32],
    },
    Swept(SweepReport),
}

/// A [`PrivilegeError`] on its way.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    BadName {
        name: String,
    },
    NotPermitted {
        act: String,
    },
    System {
        act: String,
        errno: Option<i32>,
        words: String,
    },
    Refused {
        what: String,
    },
    NoController {
        controller: String,
    },
}

/// Why a message is not understood.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// It is no message of this protocol.
    #[error("a message of {length} bytes is not of this protocol")]
    Malformed {
        /// Its length.
        length: usize,
        /// Where it goes wrong.
        #[source]
        source: serde_json::Error,
    },
    /// Something in it is larger or smaller than it may be.
    #[error("a message exceeds a bound: {what}")]
    OutOfBounds {
        /// The request, if that much is known: it can be answered, for its sender speaks this protocol.
        id: Option<u64>,
        /// What.
        what: &'static str,
    },
}

/// Reads a message from the node.
///
/// # Errors
/// If it is none, or one whose values are out of bounds.
pub fn parse_request(bytes: &[u8]) -> Result<Request, ProtocolError> {
    if bytes.len() > LARGEST {
        return Err(ProtocolError::OutOfBounds {
            id: None,
            what: "its length",
        });
    }
    let request = serde_json::from_slice(bytes).map_err(|source| ProtocolError::Malformed {
        length: bytes.len(),
        source,
    })?;
    let Request::Request { id, call } = &request else {
        return Ok(request);
    };
    let outside = |what| Err(ProtocolError::OutOfBounds { id: Some(*id), what });
    match call {
        Call::CreateGroup { limits, .. } => {
            let io = limits.io.unwrap_or_default();
            let rates = [
                io.read_bytes_per_second,
                io.write_bytes_per_second,
                io.read_operations_per_second,
                io.write_operations_per_second,
            ];
            if !MEMORY.contains(&limits.memory_bytes) {
                return outside("memory");
            } else if !PIDS.contains(&limits.pids) {
                return outside("processes");
            } else if !CPU_QUOTA.contains(&limits.cpu_quota_micros) || !WEIGHT.contains(&limits.cpu_weight) {
                return outside("CPU");
            } else if rates.contains(&Some(0)) {
                return outside("a rate of nothing");
            }
        }
        Call::SetGroupWeight { weight, .. } if !WEIGHT.contains(weight) => return outside("CPU"),
        Call::Sweep { keep } if keep.len() > MOST_KEPT => return outside("names to keep"),
        Call::Spawn(call) => {
            let bytes = call.arguments.iter().map(String::len).sum::<usize>();
            if call.arguments.len() > MOST_ARGUMENTS || bytes > ARGUMENT_BYTES {
                return outside("arguments");
            } else if call.file_size_limit > FILE_SIZE {
                return outside("the size of its files");
            } else if call.descriptors() > MOST_DESCRIPTORS {
                return outside("descriptors");
            }
        }
        _ => {}
    }
    Ok(request)
}

impl SpawnCall {
    fn descriptors(&self) -> usize {
        usize::from(self.network) + usize::from(self.log) + self.numbers.len() + self.views.len()
    }
}

impl Call {
    /// How many descriptors come with it.
    pub(crate) fn descriptors(&self) -> usize {
        match self {
            Self::GiveFile { .. } => 1,
            Self::Spawn(call) => call.descriptors(),
            _ => 0,
        }
    }

    /// Whether doing it twice is the same as doing it once. For all but `spawn`: what is made anew replaces what an
    /// earlier try has made.
    pub(crate) fn is_idempotent(&self) -> bool {
        !matches!(self, Self::Spawn(_))
    }

    /// Short, for messages: the act without its arguments.
    pub(crate) fn words(&self) -> String {
        match self {
            Self::CreateNetwork { name } => format!("making the network {name}"),
            Self::DeleteNetwork { name } => format!("removing the network {name}"),
            Self::CreateGroup { name, .. } => format!("making the group {name}"),
            Self::GroupUsage { name } => format!("reading the usage of {name}"),
            Self::SetGroupWeight { name, .. } => format!("setting the weight of {name}"),
            Self::KillGroup { name } => format!("killing {name}"),
            Self::DeleteGroup { name } => format!("removing the group {name}"),
            Self::GiveFile { uid } => format!("giving a file to user {uid}"),
            Self::Spawn(call) => format!("starting the monitor of {}", call.name),
            Self::Adopt { process } => format!("adopting process {}", process.pid),
            Self::OpenKvm => "opening /dev/kvm".to_owned(),
            Self::Kill { process } => format!("killing process {}", process.pid),
            Self::OpenMemory { process } => format!("opening the memory of process {}", process.pid),
            Self::Sweep { .. } => "sweeping".to_owned(),
        }
    }
}

impl From<PrivilegeError> for Failure {
    fn from(error: PrivilegeError) -> Self {
        match error {
            PrivilegeError::BadName { name } => Self::BadName { name },
            PrivilegeError::NotPermitted { act } => Self::NotPermitted { act },
            PrivilegeError::System { act, source } | PrivilegeError::Unreachable { act, source } => {
                Self::System {
                    act,
                    errno: source.raw_os_error(),
                    words: source.to_string(),
                }
            }
            PrivilegeError::Refused { what } => Self::Refused { what },
            PrivilegeError::NoController { controller } => Self::NoController {
                controller: controller.to_owned(),
            },
        }
    }
}

impl From<Failure> for PrivilegeError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::BadName { name } => Self::BadName { name },
            Failure::NotPermitted { act } => Self::NotPermitted { act },
            Failure::System { act, errno, words } => Self::System {
                act,
                source: errno.map_or_else(|| std::io::Error::other(words), std::io::Error::from_raw_os_error),
            },
            Failure::Refused { what } => Self::Refused { what },
            Failure::NoController { controller } => Self::NoController {
                controller: crate::cgroup::controller(&controller),
            },
        }
    }
}
