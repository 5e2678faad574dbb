//! Giving the guest what its start needs.
//!
//! | given | new (create, fork) | kept (wake, rollback) |
//! |---|---|---|
//! | clock, entropy, generation | yes | yes |
//! | machine id, boot id, host name, guest token | yes | no |
//!
//! This is on the way of every create, in a machine that may be emulated and has executed nothing yet: few system calls on
//! files opened long before, all of them in memory.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
};

use space_channel::{Identity, IdentityMode};

use crate::kernel::Kernel;

/// Largest hosts file that is kept up; a larger one was made by the agent and is left alone.
const MAX_HOSTS: u64 = 64 * 1024;
/// Marks the line that names this machine in the hosts file.
const HOSTS_MARK: &str = " # this sandbox";

/// The files that tell programs who this machine is. `/etc/machine-id` and the like point to them.
#[derive(Debug)]
pub struct IdentityFiles {
    machine_id: File,
    boot_id: File,
    hostname: File,
    hosts: File,
    token: File,
    generation: u64,
}

impl IdentityFiles {
    /// Makes the files in `directory`, which exists.
    pub fn create(directory: &Path) -> io::Result<Self> {
        let create = |name: &str| -> io::Result<File> {
            let path: PathBuf = directory.join(name);
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o644))?;
            Ok(file)
        };
        Ok(Self {
            machine_id: create("machine-id")?,
            boot_id: create("boot-id")?,
            hostname: create("hostname")?,
            hosts: create("hosts")?,
            token: create("token")?,
            generation: 0,
        })
    }

    /// Sets what there is before the first identity.
    pub fn begin(&self, boot_id: &[u8], hosts: &[u8], hostname: &str) -> io::Result<()> {
        overwrite(&self.boot_id, boot_id)?;
        overwrite(&self.hosts, hosts)?;
        self.name(hostname)
    }

    /// The generation of the last identity, zero before the first.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Applies an identity as far as it goes; the first failure is reported, the rest done all the same.
    pub fn apply(
        &mut self,
        kernel: &dyn Kernel,
        identity: &Identity,
    ) -> Result<(), (&'static str, io::Error)> {
        self.generation = identity.generation;
        let mut first = Ok(());
        let mut attempt = |what: &'static str, outcome: io::Result<()>| {
            if let (Ok(()), Err(error)) = (&first, outcome) {
                first = Err((what, error));
            }
        };
        attempt("reseed the generator", kernel.reseed(&identity.entropy));
        attempt("set the clock", kernel.set_clock(identity.realtime_ns));
        if identity.mode == IdentityMode::New {
            attempt(
                "write the machine id",
                overwrite(&self.machine_id, &machine_id(&identity.machine_id)),
            );
            attempt(
                "write the boot id",
                overwrite(&self.boot_id, &uuid(&identity.boot_id)),
            );
            attempt(
                "write the token",
                overwrite(&self.token, identity.guest_token.as_bytes()),
            );
            if !identity.hostname.is_empty() {
                attempt("set the host name", kernel.set_hostname(&identity.hostname));
                attempt("write the host name", self.name(&identity.hostname));
            }
        }
        first
    }

    /// Writes the host name where programs look for it, so that resolving it needs no network.
    fn name(&self, hostname: &str) -> io::Result<()> {
        overwrite(&self.hostname, format!("{hostname}\n").as_bytes())?;
        let length = self.hosts.metadata()?.len();
        if length > MAX_HOSTS {
            return Ok(());
        }
        let mut old = vec![0; usize::try_from(length).unwrap_or_default()];
        self.hosts.read_exact_at(&mut old, 0)?;
        overwrite(&self.hosts, &renamed(&old, hostname))
    }
}

/// The hosts file with this machine's line replaced, or added.
fn renamed(hosts: &[u8], hostname: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(hosts.len() + hostname.len() + 40);
    for line in hosts.split_inclusive(|&byte| byte == b'\n') {
        if !line.trim_ascii_end().ends_with(HOSTS_MARK.as_bytes()) {
            new.extend_from_slice(line);
        }
    }
    if new.last().is_some_and(|&byte| byte != b'\n') {
        new.push(b'\n');
    }
    for part in ["127.0.1.1 ", hostname, HOSTS_MARK, "\n"] {
        new.extend_from_slice(part.as_bytes());
    }
    new
}

/// Replaces a file's content in place, so that it stays the same file for whoever holds or covers it.
fn overwrite(file: &File, content: &[u8]) -> io::Result<()> {
    file.write_all_at(content, 0)?;
    file.set_len(content.len() as u64)
}

fn hex(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]])
}

fn machine_id(bytes: &[u8; 16]) -> Vec<u8> {
    hex(bytes).chain([b'\n']).collect()
}

fn uuid(bytes: &[u8; 16]) -> Vec<u8> {
    let digits: Vec<u8> = hex(bytes).collect();
    let mut text = Vec::with_capacity(37);
    for (from, to) in [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)] {
        if from > 0 {
            text.push(b'-');
        }
        text.extend_from_slice(&digits[from..to]);
    }
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use space_channel::message::ENTROPY_LENGTH;

    use super::*;
    use crate::kernel::Recording;

    fn identity(mode: IdentityMode) -> Identity {
        Identity {
            mode,
            realtime_ns: 5,
            entropy: [9; ENTROPY_LENGTH],
            generation: 3,
            machine_id: [0xab; 16],
            boot_id: [0x12; 16],
            hostname: "one".into(),
            guest_token: "secret".into(),
        }
    }

    #[test]
    fn a_new_identity_changes_everything_a_kept_one_only_clock_and_entropy() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = IdentityFiles::create(directory.path()).unwrap();
        files.begin(b"before\n", b"127.0.0.1 localhost", "space").unwrap();
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(
            read("hosts"),
            "127.0.0.1 localhost\n127.0.1.1 space # this sandbox\n"
        );

        let kernel = Recording::default();
        files.apply(&kernel, &identity(IdentityMode::Kept)).unwrap();
        assert_eq!(kernel.calls(), ["reseed 9", "clock 5"]);
        assert_eq!(files.generation(), 3);
        assert_eq!(
            (read("machine-id"), read("boot-id"), read("token")),
            ("".into(), "before\n".into(), "".into())
        );

        files.apply(&kernel, &identity(IdentityMode::New)).unwrap();
        assert_eq!(kernel.calls()[2..], ["reseed 9", "clock 5", "hostname one"]);
        assert_eq!(read("machine-id"), format!("{}\n", "ab".repeat(16)));
        assert_eq!(read("boot-id"), "12121212-1212-1212-1212-121212121212\n");
        assert_eq!(read("token"), "secret");
        assert_eq!(read("hostname"), "one\n");
        assert_eq!(
            read("hosts"),
            "127.0.0.1 localhost\n127.0.1.1 one # this sandbox\n"
        );
    }
}
