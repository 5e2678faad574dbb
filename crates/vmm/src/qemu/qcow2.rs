//! Makes empty qcow2 files and reads the size of existing images.
//!
//! A layer's header never names what it rests on: the driver says that to QEMU itself, so nothing that could get
//! into a header is ever followed.

use std::{
    io,
    io::Read,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt;

use crate::{VmmError, io_error};

/// Bytes per cluster: also the unit in which disks are kept in snapshots.
const CLUSTER: u64 = 64 * 1024;

/// Disk bytes that one second-level table maps.
const PER_TABLE: u64 = CLUSTER / 8 * CLUSTER;

/// `QFI\xfb`.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Largest disk, bytes: its first-level table fits one cluster.
const LARGEST: u64 = CLUSTER / 8 * PER_TABLE;

/// Clusters of an empty file: header, refcount table, refcount block, first-level table.
const CLUSTERS: u64 = 4;

/// Writes a new, empty version-3 image of `size` bytes (a multiple of 512), for its maker alone, and answers it open.
/// Fails if the file exists.
pub(super) fn create(path: &Path, size: u64) -> io::Result<OwnedFd> {
    if !size.is_multiple_of(512) || size > LARGEST {
        let what = format!("{size} bytes is not a size a disk can have");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let tables = u32::try_from(size.div_ceil(PER_TABLE)).map_err(io::Error::other)?;
    let mut header = Vec::with_capacity(112);
    header.extend(MAGIC);
    header.extend(3_u32.to_be_bytes()); // version
    header.extend(0_u64.to_be_bytes()); // no backing file name …
    header.extend(0_u32.to_be_bytes()); // … and its length
    header.extend(CLUSTER.trailing_zeros().to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend(0_u32.to_be_bytes()); // not encrypted
    header.extend(tables.to_be_bytes());
    header.extend((3 * CLUSTER).to_be_bytes()); // first-level table
    header.extend(CLUSTER.to_be_bytes()); // refcount table …
    header.extend(1_u32.to_be_bytes()); // … and its clusters
    header.extend(0_u32.to_be_bytes()); // no internal snapshots …
    header.extend(0_u64.to_be_bytes()); // … and their table
    header.extend([0; 3 * 8]); // incompatible, compatible, autoclear features
    header.extend(4_u32.to_be_bytes()); // refcounts of 1 << 4 bits
    header.extend(104_u32.to_be_bytes()); // header length
    header.extend([0; 8]); // end of header extensions

    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?
        .into_parts()
        .0;
    file.set_len(CLUSTERS * CLUSTER)?;
    file.write_all_at(&header, 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    let used = (0..CLUSTERS)
        .flat_map(|_| 1_u16.to_be_bytes())
        .collect::<Vec<_>>();
    file.write_all_at(&used, 2 * CLUSTER)?;
    Ok(file.into())
}

/// Size of the disk that an image holds, in bytes: from the header of a qcow2 file, else the length of the raw file.
pub(super) fn virtual_size(path: &Path) -> Result<u64, VmmError> {
    let read = || -> io::Result<u64> {
        let mut file = fs::File::open(path)?;
        let mut start = Vec::with_capacity(32);
        (&mut file).take(32).read_to_end(&mut start)?;
        match size_in(&start) {
            Some(size) => Ok(size),
            None => Ok(file.metadata()?.len()),
        }
    };
    read().map_err(|e| io_error("read the size of the disk", path, e))
}

/// The size that a header tells, if the bytes begin with one.
pub(super) fn size_in(start: &[u8]) -> Option<u64> {
    let (magic, size) = (start.get(..4)?, start.get(24..32)?);
    (magic == MAGIC).then(|| size.try_into().map(u64::from_be_bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn qemu_img_finds_nothing_wrong() {
        if Command::new("qemu-img").arg("--version").output().is_err() {
            println!("SKIPPED: qemu-img is not installed");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        for size in [512, 1 << 20, 4 << 30, (4 << 30) + 512, LARGEST] {
            let path = directory.path().join(size.to_string());
            create(&path, size).unwrap();
            assert_eq!(virtual_size(&path).unwrap(), size);
            let check = Command::new("qemu-img")
                .args(["check", "-f", "qcow2"])
                .arg(&path)
                .output()
                .unwrap();
            let words = String::from_utf8_lossy(&check.stdout);
            assert!(
                check.status.success() && words.contains("No errors"),
                "{size}: {words} {check:?}"
            );
            let info = Command::new("qemu-img")
                .args(["info", "--output=json"])
                .arg(&path)
                .output()
                .unwrap();
            let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
            assert_eq!(info["virtual-size"], size);
            assert_eq!(info["backing-filename"], serde_json::Value::Null);
            assert!(create(&path, size).is_err(), "an existing file stays");
        }
        assert!(create(&directory.path().join("odd"), 513).is_err());
        assert!(create(&directory.path().join("huge"), LARGEST + 512).is_err());
    }
}
