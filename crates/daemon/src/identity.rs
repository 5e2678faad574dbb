//! Giving the guest what its start needs.
//!
//! | given | new (create, fork) | kept (wake, rollback) |
//! |---|---|---|
//! | clock, entropy, generation | yes | yes |
//! | machine id, boot id, host name, guest token | yes | no |
//!
//! This is on the way of every create, in a machine that may be emulated and has executed nothing yet, where every path
//! through the kernel costs about a millisecond the first time. So [`IdentityFiles::apply`] only copies text into files
//! that were mapped long before, all in memory, and pads it with newlines to the length they have;
//! [`IdentityFiles::tidy`], after the answer, cuts the padding off and enters the host name in the hosts file.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{FileExt, PermissionsExt},
    path::Path,
};

use space_channel::{
    Identity, IdentityMode,
    message::{MAX_HOSTNAME, MAX_TOKEN},
};

use crate::{kernel::Kernel, mapped::MappedFile};

/// Length of a machine id and its newline.
const MACHINE_ID: usize = 33;
/// Length of a boot id and its newline.
const BOOT_ID: usize = 37;
/// Largest hosts file that is kept up; a larger one was made by the agent and is left alone.
const MAX_HOSTS: u64 = 64 * 1024;
/// Marks the line that names this machine in the hosts file.
const HOSTS_MARK: &str = " # this sandbox";

/// The files that tell programs who this machine is. `/etc/machine-id` and the like point to them.
#[derive(Debug)]
pub struct IdentityFiles {
    machine_id: MappedFile,
    boot_id: MappedFile,
    hostname: MappedFile,
    hosts: File,
    token: MappedFile,
    generation: u64,
    /// Host name that [`IdentityFiles::tidy`] has yet to deal with.
    untidy: Option<String>,
}

impl IdentityFiles {
    /// Makes the files in `directory`, which exists.
    pub fn create(directory: &Path) -> io::Result<Self> {
        let create = |name: &str| -> io::Result<File> {
            let path = directory.join(name);
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
            machine_id: MappedFile::new(create("machine-id")?, MACHINE_ID)?,
            boot_id: MappedFile::new(create("boot-id")?, BOOT_ID)?,
            hostname: MappedFile::new(create("hostname")?, MAX_HOSTNAME + 1)?,
            hosts: create("hosts")?,
            token: MappedFile::new(create("token")?, MAX_TOKEN)?,
            generation: 0,
            untidy: None,
        })
    }

    /// Sets what there is before the first identity.
    pub fn begin(&mut self, boot_id: &[u8], hosts: &[u8], hostname: &str) -> io::Result<()> {
        self.machine_id.put(b"uninitialized\n")?;
        self.boot_id.put(boot_id)?;
        self.hostname.put(hostname.as_bytes())?;
        overwrite(&self.hosts, &renamed(hosts, hostname))
    }

    /// The generation of the last identity, zero before the first.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Applies an identity as far as it goes; the first failure is reported, the rest done all the same. What programs
    /// read is right from here on, but for newlines at the end and the hosts file, until [`IdentityFiles::tidy`].
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
            let (machine_id, boot_id) = (machine_id(&identity.machine_id), uuid(&identity.boot_id));
            attempt("write the machine id", self.machine_id.put(&machine_id));
            attempt("write the boot id", self.boot_id.put(&boot_id));
            attempt("write the token", self.token.put(identity.guest_token.as_bytes()));
            if !identity.hostname.is_empty() {
                let name = identity.hostname.as_bytes();
                attempt("write the host name", self.hostname.put(name));
                attempt("set the host name", kernel.set_hostname(&identity.hostname));
            }
            self.untidy = Some(identity.hostname.clone());
        }
        first
    }

    /// Does what [`IdentityFiles::apply`] left for later; `false` if that was nothing.
    pub fn tidy(&mut self) -> io::Result<bool> {
        let Some(hostname) = self.untidy.take() else {
            return Ok(false);
        };
        // The host name keeps one newline, as is usual; a token has none.
        for (file, newlines) in [
            (&mut self.machine_id, 0),
            (&mut self.boot_id, 0),
            (&mut self.token, 0),
            (&mut self.hostname, 1),
        ] {
            file.trim(newlines)?;
        }
        let length = self.hosts.metadata()?.len();
        if hostname.is_empty() || length > MAX_HOSTS {
            return Ok(true);
        }
        let mut old = vec![0; usize::try_from(length).unwrap_or_default()];
        self.hosts.read_exact_at(&mut old, 0)?;
        overwrite(&self.hosts, &renamed(&old, &hostname))?;
        Ok(true)
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

fn machine_id(id: &[u8; 16]) -> [u8; MACHINE_ID] {
    let mut text = [b'\n'; MACHINE_ID];
    write_hex(id, &mut text);
    text
}

/// In groups of 8, 4, 4, 4 and 12 digits.
fn uuid(id: &[u8; 16]) -> [u8; BOOT_ID] {
    let mut text = [b'-'; BOOT_ID];
    for (bytes, at) in [(0..4, 0), (4..6, 9), (6..8, 14), (8..10, 19), (10..16, 24)] {
        write_hex(&id[bytes], &mut text[at..]);
    }
    text[36] = b'\n';
    text
}

fn write_hex(bytes: &[u8], text: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (digits, byte) in text.chunks_exact_mut(2).zip(bytes) {
        digits[0] = DIGITS[usize::from(byte >> 4)];
        digits[1] = DIGITS[usize::from(byte & 15)];
    }
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
        let shown = |name: &str| read(name).trim_end().to_owned();
        assert_eq!(
            (
                shown("machine-id"),
                shown("boot-id"),
                shown("token"),
                shown("hostname")
            ),
            ("uninitialized".into(), "before".into(), "".into(), "space".into())
        );

        files.apply(&kernel, &identity(IdentityMode::New)).unwrap();
        assert_eq!(kernel.calls()[2..], ["reseed 9", "clock 5", "hostname one"]);
        assert_eq!(read("token").trim_end(), "secret");
        assert_eq!(read("machine-id"), format!("{}\n", "ab".repeat(16)));
        assert_eq!(read("boot-id"), "12121212-1212-1212-1212-121212121212\n");
        // What an agent appended, or the padding, is gone after tidying.
        fs::write(
            directory.path().join("machine-id"),
            format!("{}\nmore", "ab".repeat(16)),
        )
        .unwrap();
        files.tidy().unwrap();
        assert_eq!(read("machine-id"), format!("{}\n", "ab".repeat(16)));
        assert_eq!(read("boot-id"), "12121212-1212-1212-1212-121212121212\n");
        assert_eq!(read("token"), "secret");
        assert_eq!(read("hostname"), "one\n");
        assert_eq!(
            read("hosts"),
            "127.0.0.1 localhost\n127.0.1.1 one # this sandbox\n"
        );
    }

    /// A machine of the warm pool has had an identity that was thrown away.
    #[test]
    fn a_second_new_identity_leaves_nothing_of_the_first() {
        let first = Identity {
            hostname: "the-first-of-all-names-and-the-longest".into(),
            guest_token: "first-token-that-is-rather-long".into(),
            ..identity(IdentityMode::New)
        };
        let second = Identity {
            realtime_ns: 6,
            entropy: [8; ENTROPY_LENGTH],
            generation: 4,
            machine_id: [0xcd; 16],
            boot_id: [0x34; 16],
            hostname: "two".into(),
            guest_token: "other".into(),
            ..identity(IdentityMode::New)
        };
        for tidied_between in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let mut files = IdentityFiles::create(directory.path()).unwrap();
            files
                .begin(b"before\n", b"127.0.0.1 localhost\n", "space")
                .unwrap();
            let kernel = Recording::default();
            files.apply(&kernel, &first).unwrap();
            if tidied_between {
                assert!(files.tidy().unwrap());
            }
            files.apply(&kernel, &second).unwrap();
            // Before the files are tidied, what programs read is right already but for newlines and the hosts file.
            let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
            let shown =
                ["machine-id", "boot-id", "hostname", "token"].map(|name| read(name).trim_end().to_owned());
            let boot_id = "34343434-3434-3434-3434-343434343434";
            assert_eq!(
                shown,
                ["cd".repeat(16), boot_id.into(), "two".into(), "other".into()]
            );
            assert!(files.tidy().unwrap());
            assert!(!files.tidy().unwrap());
            assert_eq!(
                kernel.calls(),
                [
                    "reseed 9",
                    "clock 5",
                    "hostname the-first-of-all-names-and-the-longest",
                    "reseed 8",
                    "clock 6",
                    "hostname two"
                ]
            );
            assert_eq!(files.generation(), 4);
            let all = ["machine-id", "boot-id", "hostname", "token", "hosts"].map(read);
            let expected = [
                format!("{}\n", "cd".repeat(16)),
                format!("{boot_id}\n"),
                "two\n".into(),
                "other".into(),
                "127.0.0.1 localhost\n127.0.1.1 two # this sandbox\n".into(),
            ];
            assert_eq!(all, expected);
        }
    }
}
