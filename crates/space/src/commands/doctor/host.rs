//! What the machine and its operating system have to offer.

use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, statvfs};
use space_vmm::{QemuConfig, QemuDriver};

use super::Check;
use crate::output;

/// Oldest kernel that is tested.
const KERNEL: (u32, u32) = (5, 10);
/// Memory below which not even a few sandboxes fit.
const LITTLE_MEMORY: u64 = 2 << 30;
/// Room below which the first template cannot be built.
const LITTLE_DISK: u64 = 6 << 30;
/// Said wherever machines are emulated.
pub(crate) const TCG_NOTE: &str = "no hardware virtualisation: guests are emulated by QEMU, which promises no security \
                                   boundary this way; fine for development and code you trust, not for hostile code";

pub(super) fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::ok("root", "running as root")
    } else {
        Check::fail(
            "root",
            "not root",
            "run `sudo space doctor` and `sudo space up`: namespaces, taps and cgroups need it",
        )
    }
}

pub(super) fn kernel() -> Check {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    match version(&release) {
        Some(found) if found >= KERNEL => Check::ok("kernel", release),
        _ => Check::fail(
            "kernel",
            format!("Linux {release}"),
            format!(
                "Linux {}.{} or newer is needed: upgrade the system's kernel",
                KERNEL.0, KERNEL.1
            ),
        ),
    }
}

/// QEMU itself, and how it would run machines: KVM only where it really works, since the device file alone proves nothing.
pub(super) async fn monitor() -> [Check; 2] {
    match QemuDriver::detect(&QemuConfig::default()).await {
        Ok(found) => {
            let accelerator = if found.accelerator == "kvm" {
                Check::ok("accelerator", format!("KVM, presenting {} CPUs", found.cpu_model))
            } else {
                Check::warn("accelerator", "TCG: KVM is not usable here", TCG_NOTE)
            };
            [Check::ok("qemu", found.version), accelerator]
        }
        Err(error) => [
            Check::fail(
                "qemu",
                error.to_string(),
                "apt-get install qemu-system-x86 (Debian 12: from bookworm-backports)",
            ),
            Check::warn("accelerator", "unknown without QEMU", "install QEMU first"),
        ],
    }
}

pub(super) fn cgroups() -> Vec<Check> {
    let unified = fs_err::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    // The disk's controller has another name in version 1.
    [
        ("cgroup mem", "memory", "memory"),
        ("cgroup pids", "pids", "pids"),
        ("cgroup cpu", "cpu", "cpu"),
        ("cgroup io", "io", "blkio"),
    ]
    .into_iter()
    .map(|(name, controller, older)| {
        if unified.split_whitespace().any(|each| each == controller) {
            Check::ok(name, "cgroup v2 at /sys/fs/cgroup")
        } else if let Some(path) = v1_hierarchy(older) {
            Check::ok(name, format!("cgroup v1 at {}", path.display()))
        } else if controller == "io" {
            Check::warn(
                name,
                "no hierarchy has the io controller",
                "boot with systemd.unified_cgroup_hierarchy=1; until then one sandbox can keep the disk busy",
            )
        } else {
            Check::fail(
                name,
                format!("no hierarchy has the {controller} controller"),
                "boot with systemd.unified_cgroup_hierarchy=1, or mount the controller below /sys/fs/cgroup",
            )
        }
    })
    .collect()
}

fn v1_hierarchy(controller: &str) -> Option<PathBuf> {
    let mounts = fs_err::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (point, kind, options) = (fields.nth(1)?, fields.next()?, fields.next()?);
        let has = kind == "cgroup" && options.split(',').any(|option| option == controller);
        has.then(|| PathBuf::from(point))
    })
}

pub(super) fn namespaces() -> Check {
    if !Path::new("/proc/self/ns/net").exists() {
        return Check::fail(
            "network",
            "the kernel has no network namespaces",
            "use a kernel with CONFIG_NET_NS",
        );
    }
    if rustix::fs::accessat(
        CWD,
        "/dev/net/tun",
        rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK,
        AtFlags::EACCESS,
    )
    .is_err()
    {
        return Check::fail(
            "network",
            "/dev/net/tun cannot be opened",
            "run `modprobe tun`; in a container, pass the device in",
        );
    }
    Check::ok("network", "network namespaces and taps")
}

/// Programs that building a template needs; not running one.
pub(super) fn programs() -> Vec<Check> {
    [
        ("mmdebstrap", "mmdebstrap"),
        ("mkfs.erofs", "erofs-utils"),
        ("mkfs.ext4", "e2fsprogs"),
        ("xz", "xz-utils"),
    ]
    .into_iter()
    .map(|(program, package)| match find(program) {
        Some(path) => Check::ok(program, path.display().to_string()),
        None => Check::warn(
            program,
            "not installed; templates cannot be built here",
            format!("apt-get install {package}"),
        ),
    })
    .collect()
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

pub(super) fn memory() -> Check {
    let text = fs_err::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    match kib("MemAvailable:") {
        None => Check::warn("memory", "unknown: /proc/meminfo cannot be read", "mount /proc"),
        Some(available) => {
            let available = available * 1024;
            let found = format!("{} available", output::bytes(available));
            if available < LITTLE_MEMORY {
                Check::warn(
                    "memory",
                    found,
                    "only very few sandboxes fit; free some or use a larger machine",
                )
            } else {
                Check::ok("memory", found)
            }
        }
    }
}

pub(super) fn disk(data: &Path) -> Check {
    // The directory need not exist yet; what counts is the file system it will be on.
    let there = data
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    match statvfs(there) {
        Err(error) => Check::warn(
            "disk",
            format!("{}: {error}", there.display()),
            "choose another --data-dir",
        ),
        Ok(info) => {
            let free = info.f_bavail * info.f_frsize;
            let found = format!("{} free for {}", output::bytes(free), data.display());
            if free < LITTLE_DISK {
                Check::warn(
                    "disk",
                    found,
                    format!(
                        "building a template wants {}; free some or choose another --data-dir",
                        output::bytes(LITTLE_DISK)
                    ),
                )
            } else {
                Check::ok("disk", found)
            }
        }
    }
}

/// The first two numbers of a version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_programs_say() {
        assert_eq!(version("10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)"), Some((10, 0)));
        assert_eq!(version("6.18.0-rc1"), Some((6, 18)));
        assert_eq!(version("garbage"), None);
    }
}
