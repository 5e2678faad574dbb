//! What is told of one file.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use buffa_types::google::protobuf::Timestamp;
use space_proto::filesystem::{EntryInfo, FileType};

use crate::account::Names;

/// Prefix of the extended attributes that hold a file's metadata.
pub(crate) const METADATA_PREFIX: &str = "user.e2b.";
/// Bounds of what is read of them.
const MAX_LIST: usize = 64 * 1024;
const MAX_VALUE: usize = 64 * 1024;
/// First and last second that a timestamp may carry (years 1 to 9999).
const SECONDS: (i64, i64) = (-62_135_596_800, 253_402_300_799);

/// Describes what is at `path`, without following a link there.
pub(crate) fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let own = std::fs::symlink_metadata(path)?;
    let mut entry = EntryInfo {
        path: path.to_string_lossy().into_owned(),
        raw_path: if_lossy(path.as_os_str()),
        size: i64::try_from(own.size()).unwrap_or(i64::MAX),
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime().clamp(SECONDS.0, SECONDS.1),
            nanos: i32::try_from(own.mtime_nsec())
                .unwrap_or_default()
                .clamp(0, 999_999_999),
            ..Timestamp::default()
        }
        .into(),
        is_symlink: own.is_symlink(),
        ..EntryInfo::default()
    };
    let name = path.file_name().unwrap_or(OsStr::new("/"));
    entry.name = name.to_string_lossy().into_owned();
    entry.raw_name = if_lossy(name);

    if own.is_symlink() {
        let target = std::fs::canonicalize(path).or_else(|_| std::fs::read_link(path))?;
        entry.raw_symlink_target = if_lossy(target.as_os_str());
        entry.symlink_target = Some(target.to_string_lossy().into_owned());
    }
    // A link has the kind and mode of what it leads to; one that leads nowhere is just a link.
    match if own.is_symlink() {
        std::fs::metadata(path)
    } else {
        Ok(own)
    } {
        Ok(metadata) => {
            entry.r#type = kind(&metadata).into();
            entry.mode = metadata.mode() & 0o7777;
            if metadata.is_file() {
                entry.metadata = metadata_of(path).into_iter().collect();
            }
        }
        Err(_) => entry.r#type = FileType::FILE_TYPE_SYMLINK.into(),
    }
    Ok(entry)
}

/// Devices, sockets and pipes count as files: they have a name and can be opened or removed.
fn kind(metadata: &Metadata) -> FileType {
    if metadata.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else {
        FileType::FILE_TYPE_FILE
    }
}

/// The exact bytes where the string form loses some, else nothing.
pub(crate) fn if_lossy(name: &OsStr) -> Vec<u8> {
    if name.to_str().is_some() {
        Vec::new()
    } else {
        name.to_os_string().into_vec()
    }
}

fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let first = match () {
        () if kind.is_symlink() => 'l',
        () if kind.is_dir() => 'd',
        () if kind.is_block_device() => 'b',
        () if kind.is_char_device() => 'c',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 's',
        () => '-',
    };
    let mode = metadata.mode();
    let mut text = String::from(first);
    for (shift, special, set, unset) in [
        (6, 0o4000, 's', 'S'),
        (3, 0o2000, 's', 'S'),
        (0, 0o1000, 't', 'T'),
    ] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => set,
            (true, false) => unset,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// The metadata of a file; empty where the file system has none.
fn metadata_of(path: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for name in metadata_names(path).unwrap_or_default() {
        let mut value = vec![0; MAX_VALUE];
        let Ok(length) = rustix::fs::getxattr(path, name.as_str(), &mut value[..]) else {
            continue;
        };
        let key = name[METADATA_PREFIX.len()..].to_owned();
        found.push((key, String::from_utf8_lossy(&value[..length]).into_owned()));
    }
    found
}

/// Names of the attributes that are metadata.
pub(crate) fn metadata_names(path: &Path) -> io::Result<Vec<String>> {
    // Almost no file has any: asking for the size first saves the buffer.
    if rustix::fs::listxattr_query(path)? == 0 {
        return Ok(Vec::new());
    }
    let mut list = vec![0u8; MAX_LIST];
    let length = rustix::fs::listxattr(path, &mut list[..])?;
    let names = list[..length]
        .split(|&b| b == 0)
        .filter_map(|name| std::str::from_utf8(name).ok());
    Ok(names
        .filter(|name| name.starts_with(METADATA_PREFIX))
        .map(str::to_owned)
        .collect())
}

/// Bytes of a request's path: the exact form if given, else the text.
pub(crate) fn request_path<'a>(text: &'a str, raw: &'a [u8]) -> &'a [u8] {
    if raw.is_empty() { text.as_bytes() } else { raw }
}

/// A name as its lossy text and, where that loses something, its bytes.
pub(crate) fn both_forms(name: &Path) -> (String, Vec<u8>) {
    let name = OsStr::from_bytes(name.as_os_str().as_bytes());
    (name.to_string_lossy().into_owned(), if_lossy(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describes_files_links_and_odd_names() {
        let directory = tempfile::tempdir().unwrap();
        let names = Names::default();
        let odd = directory.path().join(OsStr::from_bytes(b"a\xff b\n"));
        std::fs::write(&odd, "12345").unwrap();
        let entry = describe(&odd, &names).unwrap();
        assert_eq!(
            (entry.size, entry.permissions.as_str(), entry.mode),
            (5, "-rw-r--r--", 0o644)
        );
        assert_eq!(
            (entry.name.as_str(), &entry.raw_name[..]),
            ("a\u{fffd} b\n", &b"a\xff b\n"[..])
        );
        assert_eq!(entry.raw_path, odd.as_os_str().as_bytes());

        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let entry = describe(&link, &names).unwrap();
        assert_eq!(entry.r#type, FileType::FILE_TYPE_SYMLINK);
        assert_eq!(
            (entry.is_symlink, entry.symlink_target.as_deref()),
            (true, Some("nowhere"))
        );
        std::fs::create_dir(directory.path().join("nowhere")).unwrap();
        assert_eq!(
            describe(&link, &names).unwrap().r#type,
            FileType::FILE_TYPE_DIRECTORY
        );
    }

    #[test]
    fn a_time_outside_the_calendar_does_not_break_the_answer() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let far = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 << 33);
        file.as_file().set_modified(far).unwrap();
        let entry = describe(file.path(), &Names::default()).unwrap();
        assert!(serde_json::to_string(&entry).is_ok());
    }
}
