//! What must be written down about a machine so that another process can take it over.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use space_node_manager::{ObjectName, ProcessIdentity};

/// A machine as it is now, in values only. [`Vmm::adopt`](crate::Vmm::adopt) finds it again by this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Owning object.
    #[serde(with = "name")]
    pub name: ObjectName,
    /// The user that the monitor runs as.
    pub uid: u32,
    /// Where its sockets are.
    pub directory: PathBuf,
    /// The monitor's process.
    #[serde(with = "Process")]
    pub process: ProcessIdentity,
    /// SHA-256 of the program it runs, in lower-case hexadecimal digits.
    pub executable: String,
    /// Which driver made it, as [`Capabilities::driver`](crate::Capabilities::driver).
    pub driver: String,
    /// The monitor's version, which may no longer be the one that new machines are started with.
    pub version: String,
    /// The file behind the guest's memory.
    pub memory_file: PathBuf,
    /// Its length.
    pub memory_bytes: u64,
    /// Whether that file is only read: the machine was restored, not booted.
    pub private_memory: bool,
    /// The disk's layers, the one that is written to first. A layer that was added since the record was made is found
    /// by asking the monitor.
    pub disk_layers: Vec<PathBuf>,
    /// Size of the disk, bytes.
    pub disk_bytes: u64,
}

/// The form of a [`ProcessIdentity`] in a record.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ProcessIdentity")]
struct Process {
    pid: u32,
    start_ticks: u64,
}

mod name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use space_node_manager::ObjectName;

    pub(super) fn serialize<S: Serializer>(name: &ObjectName, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(name.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectName, D::Error> {
        let name = String::deserialize(deserializer)?;
        ObjectName::new(&name).map_err(D::Error::custom)
    }
}

/// A digest as it stands in a record.
pub(crate) fn hexadecimal(digest: &[u8; 32]) -> String {
    use std::fmt::Write;
    digest.iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a string cannot fail.
        write!(text, "{byte:02x}").ok();
        text
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path() -> impl Strategy<Value = PathBuf> {
        "(/[^/\0]{1,12}){1,4}".prop_map(PathBuf::from)
    }

    prop_compose! {
        fn record()(
            name in "[a-z0-9-]{1,32}",
            (uid, pid, start_ticks) in any::<(u32, u32, u64)>(),
            digest in any::<[u8; 32]>(),
            version in ".{0,40}",
            (directory, memory_file) in (path(), path()),
            (memory_bytes, private_memory, disk_bytes) in any::<(u64, bool, u64)>(),
            disk_layers in prop::collection::vec(path(), 0..4),
        ) -> MachineRecord {
            MachineRecord {
                name: ObjectName::new(&name).expect("a valid name"),
                uid,
                directory,
                process: ProcessIdentity { pid, start_ticks },
                executable: hexadecimal(&digest),
                driver: "qemu".to_owned(),
                version,
                memory_file,
                memory_bytes,
                private_memory,
                disk_layers,
                disk_bytes,
            }
        }
    }

    proptest! {
        #[test]
        fn what_was_written_down_is_read_back(record in record()) {
            let text = serde_json::to_string(&record).unwrap();
            prop_assert_eq!(serde_json::from_str::<MachineRecord>(&text).unwrap(), record);
        }
    }

    #[test]
    fn a_name_that_no_object_can_have_is_refused() {
        let json = |name: &str| {
            serde_json::json!({
                "name": name, "uid": 1, "directory": "/d", "process": {"pid": 1, "start_ticks": 2}, "executable": "",
                "driver": "qemu", "version": "", "memory_file": "/m", "memory_bytes": 1, "private_memory": true,
                "disk_layers": [], "disk_bytes": 0,
            })
        };
        assert!(serde_json::from_value::<MachineRecord>(json("m0123456789ab")).is_ok());
        for name in ["", "../etc", "A", "a/b"] {
            assert!(
                serde_json::from_value::<MachineRecord>(json(name)).is_err(),
                "{name}"
            );
        }
    }

    #[test]
    fn digests_are_written_in_full() {
        let mut digest = [0; 32];
        digest[0] = 0x0a;
        digest[31] = 0xff;
        let text = hexadecimal(&digest);
        assert!(
            text.len() == 64 && text.starts_with("0a00") && text.ends_with("00ff"),
            "{text}"
        );
    }
}
