//! Digests of running programs.
//!
//! A monitor's program has some twenty megabytes, so its digest is remembered for as long as the file is the same.

use std::{
    collections::VecDeque,
    io::{self, Read},
    path::Path,
    sync::{Mutex, PoisonError},
};

use fs_err as fs;
use sha2::{Digest, Sha256};

use crate::{PrivilegeError, failed};

/// Programs remembered: a few versions of one or two monitors.
const REMEMBERED: usize = 16;

/// Bytes read at once.
const CHUNK: usize = 256 * 1024;

/// Tells one content of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, u64),
    changed: (i64, u64),
}

/// Digests by version of file.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    known: Mutex<VecDeque<(Version, [u8; 32])>>,
    /// Held while a file is read: many machines are adopted at once, and all run the same program.
    reading: Mutex<()>,
}

impl Digests {
    /// SHA-256 of the program that process `pid` runs.
    pub(crate) fn of_process(&self, pid: u32) -> Result<[u8; 32], PrivilegeError> {
        // The link in /proc leads to the very file that runs, also when another lies under its name by now.
        match self.of_file(Path::new(&format!("/proc/{pid}/exe"))) {
            // A process that is ending is still listed, but runs no program any more.
            Err(PrivilegeError::System { act, source }) if source.kind() == io::ErrorKind::NotFound => {
                Err(crate::process::gone(act))
            }
            other => other,
        }
    }

    /// SHA-256 of a program.
    pub(crate) fn of_file(&self, path: &Path) -> Result<[u8; 32], PrivilegeError> {
        let act = || format!("reading the program {}", path.display());
        let mut file = fs::File::open(path).map_err(|e| failed(act(), e))?;
        let status = rustix::fs::fstat(&file).map_err(|e| failed(act(), e))?;
        let version = Version {
            device: status.st_dev,
            inode: status.st_ino,
            size: status.st_size,
            modified: (status.st_mtime, status.st_mtime_nsec),
            changed: (status.st_ctime, status.st_ctime_nsec),
        };
        if let Some(digest) = self.find(version) {
            return Ok(digest);
        }
        let _alone = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(digest) = self.find(version) {
            return Ok(digest);
        }
        let digest = digest(&mut file).map_err(|e| failed(act(), e))?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.push_front((version, digest));
        known.truncate(REMEMBERED);
        Ok(digest)
    }

    fn find(&self, version: Version) -> Option<[u8; 32]> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.iter().find(|(of, _)| *of == version);
        found.map(|(_, digest)| *digest)
    }
}

fn digest(file: &mut impl Read) -> io::Result<[u8; 32]> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(digest.finalize().into()),
            read => digest.update(&buffer[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_but_is_listed_is_gone() {
        let mut ended = std::process::Command::new("/bin/true").spawn().unwrap();
        let wait = rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&ended));
        let keep = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(wait, keep).unwrap();
        let error = Digests::default().of_process(ended.id()).unwrap_err();
        assert!(
            matches!(&error, PrivilegeError::System { source, .. } if source.raw_os_error() == Some(libc::ESRCH)),
            "{error:?}"
        );
        ended.wait().unwrap();
        assert!(Digests::default().of_process(std::process::id()).is_ok());
    }
}
