//! Limits of disk traffic, on the disk that holds the installation's data.
//!
//! In v1 (`blkio`) only what a process reads and what it writes past the page cache is held back; v2 (`io`) holds back
//! write-back too, where the file system supports it.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use fs_err as fs;

use super::{Version, files::write, mounts::mounts};
use crate::{IoLimits, PrivilegeError};

/// A whole disk, as the kernel counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disk {
    major: u32,
    minor: u32,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// The disk below the file system that `path` is on, or why there is none that can be limited.
pub(crate) fn disk_of(path: &Path) -> Result<Disk, String> {
    let unreadable = |e: std::io::Error| e.to_string();
    let path = fs::canonicalize(path).map_err(unreadable)?;
    let mut device = fs::metadata(&path).map_err(unreadable)?.dev();
    if rustix::fs::major(device) == 0 {
        // Not a number of a disk: some file systems have several, and tell the first as what was mounted.
        let table = fs::read_to_string("/proc/self/mountinfo").map_err(unreadable)?;
        let source = source_of(&table, &path)
            .ok_or_else(|| format!("the file system of {} is on no disk", path.display()))?;
        device = fs::metadata(&source).map_err(unreadable)?.rdev();
    }
    let number = |device| (rustix::fs::major(device), rustix::fs::minor(device));
    let (major, minor) = number(device);
    let directory = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).map_err(unreadable)?;
    if !directory.join("partition").exists() {
        return Ok(Disk { major, minor });
    }
    // Limits are set on whole disks; a partition's directory lies in its disk's.
    let whole = directory.parent().unwrap_or(&directory).join("dev");
    let text = fs::read_to_string(&whole).map_err(unreadable)?;
    parse(text.trim()).ok_or_else(|| format!("{} is not a device number: {text}", whole.display()))
}

fn parse(text: &str) -> Option<Disk> {
    let (major, minor) = text.split_once(':')?;
    Some(Disk {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

/// What was mounted where `path` is, if it is a device.
fn source_of(table: &str, path: &Path) -> Option<PathBuf> {
    let mounted = table.lines().filter_map(|line| {
        let at = line.split(' ').nth(4)?;
        let source = line.split_once(" - ")?.1.split(' ').nth(1)?;
        path.starts_with(at).then_some((at.len(), source))
    });
    // Of several at one place the last one is seen.
    let (_, source) = mounted.max_by_key(|(length, _)| *length)?;
    source.starts_with("/dev/").then(|| PathBuf::from(source))
}

/// Where v1 has the controller.
pub(super) fn v1_mount(table: &str) -> Option<PathBuf> {
    mounts(table)
        .find(|(_, kind, options)| *kind == "cgroup" && options.split(',').any(|o| o == "blkio"))
        .map(|(at, ..)| PathBuf::from(at))
}

/// Whether an error says that this disk, or a file of this kernel, cannot be limited: not that it was not tried rightly.
pub(super) fn is_unable(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENODEV | libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP)
    )
}

/// Sets the limits of a group; what has none is opened again.
pub(super) fn limit(
    version: Version,
    directory: &Path,
    disk: Disk,
    limits: &IoLimits,
) -> Result<(), PrivilegeError> {
    let values = [
        (
            "rbps",
            "blkio.throttle.read_bps_device",
            limits.read_bytes_per_second,
        ),
        (
            "wbps",
            "blkio.throttle.write_bps_device",
            limits.write_bytes_per_second,
        ),
        (
            "riops",
            "blkio.throttle.read_iops_device",
            limits.read_operations_per_second,
        ),
        (
            "wiops",
            "blkio.throttle.write_iops_device",
            limits.write_operations_per_second,
        ),
    ];
    match version {
        Version::Two => {
            let text = |value: Option<u64>| value.map_or_else(|| "max".to_owned(), |v| v.to_string());
            let words = values.map(|(key, _, value)| format!("{key}={}", text(value)));
            write(directory, "io.max", &format!("{disk} {}", words.join(" ")))
        }
        Version::One => values.into_iter().try_for_each(|(_, file, value)| {
            // Operations are counted in 32 bits there.
            let most = if file.contains("iops") {
                u32::MAX.into()
            } else {
                u64::MAX
            };
            write(
                directory,
                file,
                &format!("{disk} {}", value.unwrap_or(0).min(most)),
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 0:20 / / rw - btrfs /dev/nvme0n1p2 rw,subvol=/root
40 22 0:33 / /run rw shared:9 - tmpfs tmpfs rw
";

    #[test]
    fn the_device_of_a_file_system_is_found_by_its_mount() {
        assert_eq!(
            source_of(TABLE, Path::new("/var/lib/space")),
            Some("/dev/nvme0n1p2".into())
        );
        assert_eq!(source_of(TABLE, Path::new("/run/space")), None);
        assert_eq!(
            source_of(TABLE, Path::new("/running")),
            Some("/dev/nvme0n1p2".into())
        );
    }

    #[test]
    fn memory_is_no_disk() {
        assert!(disk_of(Path::new("/proc")).is_err());
    }
}
