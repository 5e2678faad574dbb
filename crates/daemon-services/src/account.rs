//! Accounts and groups, read from the guest's own files.
//!
//! The binary is static, so there is no name service to ask: `/etc/passwd` and `/etc/group` are
//! looked at for every request, and read anew when they have changed, which keeps accounts that a
//! program adds visible at once.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Account files larger than this are refused.
const MAX_FILE: u64 = 4 << 20;
/// The kernel's own limit is 65536; a hostile file must not make every start slow.
const MAX_GROUPS: usize = 1024;

/// Accounts remembered; more are looked up each time.
const MAX_REMEMBERED: usize = 64;
/// A file that changed less than this before it was read may change again without looking different: file systems keep
/// times coarsely.
const SETTLED: Duration = Duration::from_secs(2);

/// Why an account cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccountError {
    #[error("error looking up user '{name}': unknown user; create it first or name another")]
    Unknown { name: String },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// One line of `/etc/passwd` and the groups it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, the primary one included.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: PathBuf,
}

/// What tells one state of a file from another: device, inode, length, times of change.
type Stamp = (u64, u64, u64, [i64; 4]);

/// The accounts of one directory of account files.
#[derive(Debug)]
pub(crate) struct Accounts {
    etc: PathBuf,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    stamps: [Option<Stamp>; 2],
    accounts: HashMap<String, Account>,
}

impl Accounts {
    pub(crate) fn new(etc: PathBuf) -> Self {
        Self {
            etc,
            known: Mutex::default(),
        }
    }

    /// As [`Account::find`], without reading files that are as they were.
    pub(crate) fn find(&self, name: &str) -> Result<Account, AccountError> {
        let files = ["passwd", "group"].map(|file| std::fs::metadata(self.etc.join(file)).ok());
        let stamps = files.each_ref().map(|file| file.as_ref().map(stamp));
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.stamps == stamps
                && let Some(account) = known.accounts.get(name)
            {
                return Ok(account.clone());
            }
        }
        // Looked at before they are read: a change in between is noticed by the next look.
        let account = Account::find(&self.etc, name)?;
        if files.iter().flatten().all(has_settled) {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.stamps != stamps {
                known.stamps = stamps;
                known.accounts.clear();
            }
            if known.accounts.len() < MAX_REMEMBERED {
                known.accounts.insert(name.to_owned(), account.clone());
            }
        }
        Ok(account)
    }
}

fn stamp(file: &std::fs::Metadata) -> Stamp {
    let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
    (file.dev(), file.ino(), file.len(), times)
}

fn has_settled(file: &std::fs::Metadata) -> bool {
    let changed = UNIX_EPOCH + Duration::from_secs(u64::try_from(file.ctime()).unwrap_or_default());
    SystemTime::now()
        .duration_since(changed)
        .is_ok_and(|age| age > SETTLED)
}

impl Account {
    /// Looks an account up by name, or by number if no name matches.
    pub(crate) fn find(etc: &Path, name: &str) -> Result<Self, AccountError> {
        let passwd = read(&etc.join("passwd"))?;
        let mut account = lines(&passwd)
            .find_map(|fields| passwd_entry(&fields, |found, _| found == name.as_bytes()))
            .or_else(|| {
                let number: u32 = name.parse().ok()?;
                lines(&passwd).find_map(|fields| passwd_entry(&fields, |_, uid| uid == number))
            })
            .ok_or_else(|| AccountError::Unknown {
                name: name.to_owned(),
            })?;
        // A guest without a group file has only primary groups.
        if let Ok(group) = read(&etc.join("group")) {
            for fields in lines(&group) {
                let [_, _, gid, members, ..] = fields.as_slice() else {
                    continue;
                };
                let Some(gid) = number(gid) else { continue };
                let member = members
                    .split(|&b| b == b',')
                    .any(|m| m == account.name.as_bytes());
                if member && !account.groups.contains(&gid) && account.groups.len() < MAX_GROUPS {
                    account.groups.push(gid);
                }
            }
        }
        Ok(account)
    }
}

/// Names of owners, for listings; one read of each file however many entries are named.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: Vec<(u32, String)>,
    groups: Vec<(u32, String)>,
}

impl Names {
    pub(crate) fn read(etc: &Path) -> Self {
        let table = |file: &str| {
            let bytes = read(&etc.join(file)).unwrap_or_default();
            lines(&bytes)
                .filter_map(|fields| {
                    let id = number(fields.get(2)?)?;
                    Some((id, String::from_utf8_lossy(fields.first()?).into_owned()))
                })
                .collect()
        };
        Self {
            users: table("passwd"),
            groups: table("group"),
        }
    }

    pub(crate) fn user(&self, uid: u32) -> String {
        name_of(&self.users, uid)
    }

    pub(crate) fn group(&self, gid: u32) -> String {
        name_of(&self.groups, gid)
    }
}

fn name_of(table: &[(u32, String)], id: u32) -> String {
    table
        .iter()
        .find(|(found, _)| *found == id)
        .map_or_else(|| id.to_string(), |(_, name)| name.clone())
}

fn read(path: &Path) -> Result<Vec<u8>, AccountError> {
    let failed = |source| AccountError::Read {
        path: path.to_owned(),
        source,
    };
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > MAX_FILE {
        return Err(failed(std::io::Error::from(std::io::ErrorKind::FileTooLarge)));
    }
    std::fs::read(path).map_err(failed)
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    bytes
        .split(|&b| b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| l.split(|&b| b == b':').collect())
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.trim().parse().ok()
}

fn passwd_entry(fields: &[&[u8]], wanted: impl Fn(&[u8], u32) -> bool) -> Option<Account> {
    let [name, _, uid, gid, _, home, ..] = fields else {
        return None;
    };
    let (uid, gid) = (number(uid)?, number(gid)?);
    if !wanted(name, uid) {
        return None;
    }
    let home = if home.is_empty() { b"/".as_slice() } else { home };
    Some(Account {
        name: String::from_utf8_lossy(name).into_owned(),
        uid,
        gid,
        groups: vec![gid],
        home: PathBuf::from(OsString::from_vec(home.to_vec())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etc(passwd: &str, group: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("passwd"), passwd).unwrap();
        std::fs::write(directory.path().join("group"), group).unwrap();
        directory
    }

    #[test]
    fn an_account_is_found_anew_as_soon_as_the_files_change() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n";
        let etc = etc(passwd, "user:x:1000:\n");
        let accounts = Accounts::new(etc.path().to_owned());
        // Files that have just been written are read each time.
        assert_eq!(accounts.find("user").unwrap().groups, [1000]);
        assert!(accounts.known.lock().unwrap().accounts.is_empty());
        std::fs::write(etc.path().join("group"), "user:x:1000:\nsudo:x:27:user\n").unwrap();
        assert_eq!(accounts.find("user").unwrap().groups, [1000, 27]);

        // As if they had settled: what is remembered counts until a file looks different.
        let stamps = ["passwd", "group"].map(|file| std::fs::metadata(etc.path().join(file)).ok());
        let mut remembered = accounts.find("user").unwrap();
        remembered.home = "/remembered".into();
        *accounts.known.lock().unwrap() = Known {
            stamps: stamps.each_ref().map(|file| file.as_ref().map(stamp)),
            accounts: [("user".to_owned(), remembered)].into(),
        };
        assert_eq!(accounts.find("user").unwrap().home, Path::new("/remembered"));
        std::fs::write(
            etc.path().join("passwd"),
            passwd.replace("/home/user", "/home/new"),
        )
        .unwrap();
        assert_eq!(accounts.find("user").unwrap().home, Path::new("/home/new"));
    }

    #[test]
    fn finds_by_name_number_and_with_groups() {
        let etc = etc(
            "root:x:0:0:root:/root:/bin/bash\nbroken\n:x:1\nuser:x:1000:1000::/home/user:/bin/bash\n",
            "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:\nuser2:x:1001:user2\n",
        );
        let account = Account::find(etc.path(), "user").unwrap();
        assert_eq!((account.uid, account.gid), (1000, 1000));
        assert_eq!(account.groups, [1000, 27]);
        assert_eq!(account.home, Path::new("/home/user"));
        assert_eq!(Account::find(etc.path(), "1000").unwrap(), account);
        assert!(matches!(
            Account::find(etc.path(), "nobody"),
            Err(AccountError::Unknown { .. })
        ));
        let names = Names::read(etc.path());
        assert_eq!(
            (names.user(1000), names.group(27), names.user(5)),
            ("user".into(), "sudo".into(), "5".into())
        );
    }
}
