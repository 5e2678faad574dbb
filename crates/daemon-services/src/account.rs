//! Accounts and groups, read from the guest's own files.
//!
//! The binary is static, so there is no name service to ask: `/etc/passwd` and `/etc/group` are
//! read on every look-up, which keeps accounts that a program adds visible at once.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Account files larger than this are refused.
const MAX_FILE: u64 = 4 << 20;
/// The kernel's own limit is 65536; a hostile file must not make every start slow.
const MAX_GROUPS: usize = 1024;

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
