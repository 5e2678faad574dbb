//! Out of a sandbox, which is hostile: whatever it answers, nothing is written outside the destination, and nothing
//! through a link that it made.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::{OpenOptionsExt as _, PermissionsExt as _, symlink},
    },
    path::{Path, PathBuf},
};

use futures_util::StreamExt as _;
use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use space_client::{CollectLimits, Command, Entry, EntryKind, Sandbox};
use tokio::io::AsyncWriteExt as _;

use super::{MAX_DEPTH, MAX_ENTRIES, Moved, join, last_part, lossy};
use crate::error::{CliError, Kind};

/// Longest content of a link, as of the kernel.
const MAX_LINK: usize = 4096;

/// Copies `source` to `destination`, or into it if that is a directory.
pub(super) async fn copy(
    sandbox: &Sandbox,
    source: Vec<u8>,
    destination: &Path,
    user: Option<&str>,
) -> Result<Moved, CliError> {
    let Some(entry) = sandbox.entry(&source, user).await? else {
        return Err(CliError::new(
            Kind::NotFound,
            anyhow::anyhow!("{} was not found in sandbox {}", lossy(&source), sandbox.id()),
        ));
    };
    let target = if destination.is_dir() {
        let name = last_part(&source).or_else(|| last_part(&entry.path));
        destination.join(name.unwrap_or_else(|| OsString::from("root")))
    } else {
        destination.to_owned()
    };
    let mut moved = Moved::default();
    match entry.kind {
        EntryKind::Directory => directory(sandbox, source, target, user, &mut moved).await?,
        // A link that was named is followed, inside.
        EntryKind::File | EntryKind::Other => {
            let (bytes, digest) = file(sandbox, &source, &target, entry.mode, user).await?;
            moved.files = 1;
            moved.bytes = bytes;
            moved.digest = Some(digest);
        }
    }
    Ok(moved)
}

async fn directory(
    sandbox: &Sandbox,
    source: Vec<u8>,
    target: PathBuf,
    user: Option<&str>,
    moved: &mut Moved,
) -> Result<(), CliError> {
    // Links are made last, so that no path of ours leads through one of theirs.
    let mut links: Vec<(Vec<u8>, PathBuf)> = Vec::new();
    let mut waiting = vec![(source, target, 0_usize)];
    let mut seen = 0;
    while let Some((from, to, depth)) = waiting.pop() {
        match std::fs::DirBuilder::new().create(&to) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(anyhow::Error::new(error)
                    .context(format!("cannot make {}", to.display()))
                    .into());
            }
            _ => {}
        }
        moved.directories += 1;
        let mut names = HashSet::new();
        for entry in sandbox.list_directory(&from, 1, user).await? {
            seen += 1;
            if depth >= MAX_DEPTH || seen > MAX_ENTRIES {
                return Err(CliError::usage(format!(
                    "the directory is too deep or too large to copy: at most {MAX_DEPTH} levels and {MAX_ENTRIES} entries"
                ))
                .with_hint("pack it with tar inside and copy the archive"));
            }
            let name = safe_name(&entry)?;
            if !names.insert(name.to_owned()) {
                return Err(hostile(&entry, "it is listed twice"));
            }
            let path = to.join(name);
            match entry.kind {
                EntryKind::Directory => waiting.push((join(&from, &entry.name), path, depth + 1)),
                EntryKind::File => {
                    let (bytes, _) =
                        file(sandbox, &join(&from, &entry.name), &path, entry.mode, user).await?;
                    moved.files += 1;
                    moved.bytes += bytes;
                }
                EntryKind::Other if entry.target.is_some() => links.push((join(&from, &entry.name), path)),
                EntryKind::Other => moved.skipped.push(lossy(&entry.path)),
            }
        }
    }
    for (inside, path) in links {
        let content = OsString::from_vec(link_content(sandbox, &inside, user).await?);
        match symlink(&content, &path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(anyhow::Error::new(error)
                    .context(format!("cannot make {}", path.display()))
                    .into());
            }
            _ => moved.links += 1,
        }
    }
    Ok(())
}

/// Copies one file; gives its size and SHA-256.
async fn file(
    sandbox: &Sandbox,
    source: &[u8],
    target: &Path,
    mode: u32,
    user: Option<&str>,
) -> Result<(u64, String), CliError> {
    let mut content = sandbox.read_stream(source, user).await?;
    let mut options = std::fs::OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0));
    let file = options
        .open(target)
        .map_err(|error| anyhow::Error::new(error).context(format!("cannot write {}", target.display())))?;
    let executable = mode & 0o111;
    if executable != 0 {
        let mode = file.metadata()?.permissions().mode();
        // As far as our own umask lets others read it, they may run it.
        file.set_permissions(std::fs::Permissions::from_mode(mode | (mode & 0o444) >> 2))?;
    }
    let mut file = tokio::fs::File::from_std(file);
    let mut digest = Sha256::new();
    let mut bytes = 0;
    while let Some(chunk) = content.next().await {
        let chunk = chunk?;
        bytes += chunk.len() as u64;
        digest.update(&chunk);
        file.write_all(&chunk).await?;
    }
    file.flush().await?;
    Ok((bytes, space_api::key::hex(&digest.finalize())))
}

/// What a link says. The files API tells where it leads in the end, which is not the same.
async fn link_content(sandbox: &Sandbox, path: &[u8], user: Option<&str>) -> Result<Vec<u8>, CliError> {
    let mut command = Command::new("readlink")
        .arg("-n")
        .arg("--")
        .arg(OsStr::from_bytes(path));
    if let Some(user) = user {
        command = command.user(user);
    }
    let limits = CollectLimits {
        head: MAX_LINK,
        tail: 0,
    };
    let output = sandbox.run(&command, limits).await?;
    if output.end.exit_code != 0 || output.stdout.truncated {
        return Err(CliError::environment(format!(
            "the link {} cannot be read: {}",
            lossy(path),
            output.stderr.text().trim()
        )));
    }
    Ok(output.stdout.head)
}

/// A name that is one plain part of a path.
fn safe_name(entry: &Entry) -> Result<&OsStr, CliError> {
    let name = entry.name.as_slice();
    if matches!(name, b"" | b"." | b"..") || name.contains(&b'/') || name.contains(&0) {
        return Err(hostile(entry, "its name is none"));
    }
    Ok(OsStr::from_bytes(name))
}

fn hostile(entry: &Entry, what: &str) -> CliError {
    CliError::new(
        Kind::Refused,
        anyhow::anyhow!(
            "the sandbox lists \"{}\" in a way that is not possible: {what}",
            lossy(&entry.name).escape_default()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let entry = |name: &[u8]| Entry {
            name: name.to_vec(),
            path: Vec::new(),
            kind: EntryKind::File,
            size: 0,
            mode: 0,
            owner: String::new(),
            target: None,
        };
        for bad in [&b""[..], b".", b"..", b"../x", b"/etc/passwd", b"a\0b"] {
            assert!(safe_name(&entry(bad)).is_err(), "{bad:?}");
        }
        assert!(safe_name(&entry(b"..x\xff")).is_ok());
    }
}
