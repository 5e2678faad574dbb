//! QEMU's command line. Devices come in a fixed order, so that addresses inside the guest are the same in every
//! machine of a template.

use std::{ffi::OsString, path::Path};

use serde_json::{Value, json};

use crate::{Capabilities, DiskLayer, MachineSpec, VmmError};

/// Numbers of the descriptors passed to QEMU.
pub(super) const MONITOR_FD: i32 = 3;
pub(super) const CONTROL_FD: i32 = 4;
pub(super) const DATA_FD: i32 = 5;
pub(super) const TAP_FD: i32 = 6;
pub(super) const KVM_FD: i32 = 7;

/// Every guest has the same address: one snapshot fits every namespace.
const MAC: &str = "06:53:50:43:45:01";

/// Most memory for translated code of an emulated machine, MiB: a bound, since it is outside of the guest's memory and
/// never given back. A boot of Debian to its agent fills 58 of it.
const TRANSLATED_MIB: u32 = 64;

/// For a file that is only read. QEMU would lock bytes of it against writers, and so could a monitor that was taken over,
/// in a way that keeps every other from opening it; nobody writes to these.
const UNLOCKED: &str = "off";

/// How the machine comes to life.
pub(super) enum Start<'a> {
    /// From the kernel; memory is a shared mapping of this file.
    Boot { memory: &'a Path, tsc_khz: Option<u64> },
    /// From this base file; the state is loaded at once, or later on command.
    Restore {
        memory: &'a Path,
        state: Option<&'a Path>,
    },
}

/// All arguments after the program name.
pub(super) fn arguments(
    capabilities: &Capabilities,
    spec: &MachineSpec,
    start: &Start<'_>,
) -> Result<Vec<OsString>, VmmError> {
    let mut line = Line::default();
    line.add(["-nodefaults", "-no-user-config", "-display", "none"]);
    line.option("-name", format!("space-{}", spec.name));
    let mut machine = "microvm,acpi=on,rtc=on,memory-backend=mem,suppress-vmdesc=on".to_owned();
    if matches!(start, Start::Restore { .. }) {
        // Only a booting guest runs them.
        machine.push_str(",x-option-roms=off");
    }
    line.option("-M", machine);
    if capabilities.accelerator == "kvm" {
        // An ordinary user may not open the device, so it comes as a descriptor.
        line.option("-add-fd", format!("fd={KVM_FD},set=1"));
        line.add(["-accel", "kvm,device=/dev/fdset/1"]);
    } else {
        line.option("-accel", format!("tcg,thread=multi,tb-size={TRANSLATED_MIB}"));
    }
    line.option("-cpu", capabilities.cpu_model.as_str());
    line.option("-smp", spec.vcpus.to_string());
    line.option("-m", spec.memory_mib.to_string());

    let size = u64::from(spec.memory_mib) << 20;
    line.json("-object", &match start {
        Start::Boot { memory, .. } => json!({
            "qom-type": "memory-backend-file", "id": "mem", "size": size, "mem-path": text(memory)?, "share": true,
        }),
        // `readonly` besides the private mapping: otherwise QEMU holds the file open for writing, and can be made
        // to punch holes into it.
        Start::Restore { memory, .. } => json!({
            "qom-type": "memory-backend-file", "id": "mem", "size": size, "mem-path": text(memory)?,
            "share": false, "readonly": true, "rom": "off",
        }),
    });

    let root = json!({
        "driver": "file", "node-name": "root", "filename": text(&spec.root)?, "read-only": true,
        "locking": UNLOCKED,
    });
    line.json("-blockdev", &root);
    line.add(["-device", "virtio-blk-device,drive=root"]);
    let top = disk(&mut line, &spec.disk)?;
    line.option("-device", format!("virtio-blk-device,drive={top}"));
    line.option("-netdev", format!("tap,id=net,fd={TAP_FD}"));
    line.option("-device", format!("virtio-net-device,netdev=net,mac={MAC}"));
    line.add(["-device", "virtio-serial-device"]);
    for (name, number, fd) in [("control", 1, CONTROL_FD), ("data", 2, DATA_FD)] {
        line.option("-chardev", format!("socket,id={name},fd={fd},server=on,wait=off"));
        line.option(
            "-device",
            format!("virtserialport,chardev={name},name=space.{name},nr={number}"),
        );
    }
    line.add(["-device", "virtio-rng-device"]);
    line.add([
        "-chardev",
        "ringbuf,id=console,size=16384",
        "-serial",
        "chardev:console",
    ]);

    line.option(
        "-chardev",
        format!("socket,id=monitor,fd={MONITOR_FD},server=on,wait=off"),
    );
    line.add(["-mon", "chardev=monitor,mode=control"]);
    // Whatever ends the guest stops it where it is, so that its last words can be read.
    line.add(["-action", "reboot=shutdown,shutdown=pause,panic=pause"]);
    line.add([
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]);
    // Device states are saved without the section that describes the machine.
    line.add(["-global", "migration.send-configuration=off"]);
    match start {
        Start::Boot { tsc_khz, .. } => {
            line.option("-kernel", spec.kernel.as_os_str());
            line.option("-initrd", spec.initramfs.as_os_str());
            let mut kernel_arguments = spec.kernel_arguments.clone();
            if let Some(khz) = tsc_khz {
                kernel_arguments.push_str(&format!(" tsc_early_khz={khz}"));
            }
            line.option("-append", kernel_arguments);
        }
        Start::Restore { state, .. } => {
            line.add(["-S", "-incoming"]);
            line.0.push(match state {
                Some(state) => format!("file:{}", incoming_path(state)?).into(),
                None => "defer".into(),
            });
        }
    }
    Ok(line.0)
}

/// Adds the disk's layers from the bottom up; answers the node name of the top one.
fn disk(line: &mut Line, layers: &[DiskLayer]) -> Result<String, VmmError> {
    let mut top = None::<String>;
    let last = layers.len().saturating_sub(1);
    for (number, layer) in layers.iter().rev().enumerate() {
        let writable = number == last;
        let (nodes, name) = match &top {
            None => {
                let mut node = json!({
                    "driver": "file", "node-name": layer_node(0), "filename": text(&layer.path)?,
                    "read-only": !writable, "cache": {"no-flush": true},
                });
                if writable {
                    node["discard"] = "unmap".into();
                    node["detect-zeroes"] = "unmap".into();
                } else {
                    node["locking"] = UNLOCKED.into();
                }
                (vec![node], layer_node(0))
            }
            Some(below) => {
                let nodes = layer_nodes(number, &layer.path, Some(below), writable)?;
                (nodes.into(), layer_node(number))
            }
        };
        for node in &nodes {
            line.json("-blockdev", node);
        }
        top = Some(name);
    }
    top.ok_or_else(|| VmmError::Unsupported {
        what: "a machine needs a writable disk".to_owned(),
    })
}

/// Node name of the n-th layer, counted from the raw base (0) up.
pub(super) fn layer_node(number: usize) -> String {
    format!("l{number}")
}

/// Node name of the file that the n-th layer (above the base) is kept in.
pub(super) fn file_node(number: usize) -> String {
    format!("f{number}")
}

/// The block nodes of a qcow2 layer: protocol, then format. What it rests on is said here and never read from it.
/// Flushes of the guest stay in the page cache: a machine does not survive its host, only its snapshots do, and
/// those are made durable when they are stored.
pub(super) fn layer_nodes(
    number: usize,
    path: &Path,
    backing: Option<&str>,
    writable: bool,
) -> Result<[Value; 2], VmmError> {
    let (name, file) = (layer_node(number), file_node(number));
    let cache = json!({"no-flush": true});
    let mut format = json!({
        "driver": "qcow2", "node-name": name, "file": file, "backing": backing, "read-only": !writable,
        "cache": cache,
    });
    if writable {
        format["discard"] = "unmap".into();
        format["detect-zeroes"] = "unmap".into();
    }
    let mut protocol = json!({
        "driver": "file", "node-name": file, "filename": text(path)?, "read-only": !writable, "discard": "unmap",
        "cache": cache,
    });
    if !writable {
        protocol["locking"] = UNLOCKED.into();
    }
    Ok([protocol, format])
}

/// A path as it stands in JSON.
pub(super) fn text(path: &Path) -> Result<&str, VmmError> {
    path.to_str().ok_or_else(|| VmmError::Unsupported {
        what: format!("the path {} is not UTF-8", path.display()),
    })
}

/// A path that stands behind `file:` where a comma would begin an option.
pub(super) fn incoming_path(path: &Path) -> Result<&str, VmmError> {
    match text(path)? {
        path if path.contains(',') => Err(VmmError::Unsupported {
            what: format!("the path {path} holds a comma"),
        }),
        path => Ok(path),
    }
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn add<const N: usize>(&mut self, arguments: [&str; N]) {
        self.0.extend(arguments.map(OsString::from));
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.extend([name.into(), value.into()]);
    }

    fn json(&mut self, name: &str, value: &Value) {
        self.option(name, value.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_only_read_are_not_locked() {
        let layers = ["/own/1.qcow2", "/own/0.qcow2", "/t/disk"].map(|path| DiskLayer { path: path.into() });
        let mut line = Line::default();
        assert_eq!(disk(&mut line, &layers).unwrap(), "l2");
        let nodes = line.0.iter().filter_map(|word| {
            let node: Value = serde_json::from_str(word.to_str()?).ok()?;
            (node["driver"] == "file").then_some(node)
        });
        let nodes = nodes.collect::<Vec<_>>();
        assert_eq!(nodes.len(), 3);
        for node in nodes {
            let locked = node.get("locking").is_none();
            assert_eq!(locked, node["read-only"] == false, "{node}");
        }
    }
}
