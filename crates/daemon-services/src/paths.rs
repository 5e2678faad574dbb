//! Paths as requests write them: absolute, relative to the working directory, or below `~`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::account::Account;

/// The kernel's own bound for one path.
pub(crate) const MAX_PATH: usize = 4096;

/// Why a path cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum PathError {
    #[error("the path is longer than {MAX_PATH} bytes")]
    TooLong,
    #[error("the path contains a zero byte")]
    ZeroByte,
    #[error("'~name' paths are not supported; write the directory out")]
    OtherHome,
}

/// Makes a request's path absolute. An empty path is the base itself.
pub(crate) fn resolve(path: &[u8], account: &Account, workdir: Option<&str>) -> Result<PathBuf, PathError> {
    if path.len() > MAX_PATH {
        return Err(PathError::TooLong);
    }
    if path.contains(&0) {
        return Err(PathError::ZeroByte);
    }
    let home = |rest: &[u8]| account.home.join(OsStr::from_bytes(rest));
    let absolute = match path {
        b"~" => account.home.clone(),
        [b'~', b'/', rest @ ..] => {
            let start = rest.iter().position(|&b| b != b'/').unwrap_or(rest.len());
            home(&rest[start..])
        }
        [b'~', name @ ..] if is_account_like(name) => return Err(PathError::OtherHome),
        [b'/', ..] => PathBuf::from(OsStr::from_bytes(path)),
        _ => base(account, workdir)?.join(OsStr::from_bytes(path)),
    };
    Ok(tidy(&absolute))
}

/// The directory that relative paths start from.
pub(crate) fn base(account: &Account, workdir: Option<&str>) -> Result<PathBuf, PathError> {
    match workdir {
        Some(workdir) if !workdir.is_empty() => resolve(workdir.as_bytes(), account, None),
        _ => Ok(account.home.clone()),
    }
}

/// `~name` or `~name/…` where the name could be an account: files called `~$x` or `~1 copy` exist.
fn is_account_like(name: &[u8]) -> bool {
    let end = name.iter().position(|&b| b == b'/').unwrap_or(name.len());
    let name = &name[..end];
    name.first().is_some_and(|b| b.is_ascii_lowercase() || *b == b'_')
        && name
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

/// Drops `.`, doubled and trailing slashes. `..` stays: what it means depends on symbolic links.
fn tidy(path: &Path) -> PathBuf {
    path.components()
        .filter(|part| !matches!(part, Component::CurDir))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account {
            name: "user".into(),
            uid: 1,
            gid: 1,
            groups: vec![1],
            home: "/home/user".into(),
        }
    }

    #[test]
    fn resolves() {
        let resolve =
            |path: &[u8]| resolve(path, &account(), None).map(|p| p.into_os_string().into_encoded_bytes());
        assert_eq!(resolve(b"~").unwrap(), b"/home/user");
        assert_eq!(resolve(b"~//a/").unwrap(), b"/home/user/a");
        assert_eq!(resolve(b"a/./b\n").unwrap(), b"/home/user/a/b\n");
        assert_eq!(resolve(b"/x//y/../\xff").unwrap(), b"/x/y/../\xff");
        assert_eq!(resolve(b"").unwrap(), b"/home/user");
        assert_eq!(resolve(b"-n").unwrap(), b"/home/user/-n");
        assert_eq!(resolve(b"~$doc").unwrap(), b"/home/user/~$doc");
        assert_eq!(resolve(b"~root/x"), Err(PathError::OtherHome));
        assert_eq!(resolve(b"a\0b"), Err(PathError::ZeroByte));
        assert_eq!(resolve(&[b'a'; 5000]), Err(PathError::TooLong));
    }

    #[test]
    fn relative_paths_start_at_the_working_directory() {
        let at = |workdir| resolve(b"x", &account(), Some(workdir)).unwrap();
        assert_eq!(at("/srv"), Path::new("/srv/x"));
        assert_eq!(at("code"), Path::new("/home/user/code/x"));
        assert_eq!(at(""), Path::new("/home/user/x"));
    }
}
