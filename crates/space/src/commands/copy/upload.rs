//! Into a sandbox.

use std::{
    ffi::OsString,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures_util::stream;
use sha2::{Digest as _, Sha256};
use space_client::{CollectLimits, Command, EntryKind, Sandbox};
use tokio::io::AsyncReadExt as _;

use super::{MAX_DEPTH, MAX_ENTRIES, Moved, join, lossy};
use crate::error::CliError;

/// Bytes read from a file at once.
const CHUNK: usize = 256 * 1024;
/// Bytes of paths given to one helper command inside.
const BATCH: usize = 64 * 1024;

/// Copies `source` to `destination`, or into it if that is a directory.
pub(super) async fn copy(
    sandbox: &Sandbox,
    source: &Path,
    destination: Vec<u8>,
    user: Option<&str>,
) -> Result<Moved, CliError> {
    let into = destination.ends_with(b"/")
        || matches!(sandbox.entry(&destination, user).await?, Some(entry) if entry.kind == EntryKind::Directory);
    let target = match source.file_name() {
        Some(name) if into => join(&destination, name.as_bytes()),
        _ => destination,
    };
    let metadata = fs_err::metadata(source)?;
    let mut moved = Moved::default();
    if !metadata.is_dir() {
        let (bytes, digest) = file(sandbox, source, &target, user).await?;
        if metadata.permissions().mode() & 0o111 != 0 {
            helper(sandbox, &["chmod", "+x", "--"], vec![as_argument(&target)], user).await?;
        }
        moved.files = 1;
        moved.bytes = bytes;
        moved.digest = Some(digest);
        return Ok(moved);
    }
    directory(sandbox, source, target, user, &mut moved).await?;
    Ok(moved)
}

async fn directory(
    sandbox: &Sandbox,
    source: &Path,
    target: Vec<u8>,
    user: Option<&str>,
    moved: &mut Moved,
) -> Result<(), CliError> {
    let mut executable = Vec::new();
    let mut links: Vec<(OsString, Vec<u8>)> = Vec::new();
    let mut waiting: Vec<(PathBuf, Vec<u8>, usize)> = vec![(source.to_owned(), target, 0)];
    let mut seen = 0;
    while let Some((from, to, depth)) = waiting.pop() {
        sandbox.make_directory(&to, user).await?;
        moved.directories += 1;
        for entry in fs_err::read_dir(&from)? {
            let entry = entry?;
            seen += 1;
            if depth >= MAX_DEPTH || seen > MAX_ENTRIES {
                return Err(CliError::usage(format!(
                    "{} is too deep or too large to copy: at most {MAX_DEPTH} levels and {MAX_ENTRIES} entries",
                    source.display()
                ))
                .with_hint("pack it with tar, copy the archive and unpack it inside"));
            }
            let target = join(&to, entry.file_name().as_bytes());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                waiting.push((entry.path(), target, depth + 1));
            } else if kind.is_symlink() {
                links.push((fs_err::read_link(entry.path())?.into_os_string(), target));
            } else if kind.is_file() {
                let (bytes, _) = file(sandbox, &entry.path(), &target, user).await?;
                moved.files += 1;
                moved.bytes += bytes;
                if entry.metadata()?.permissions().mode() & 0o111 != 0 {
                    executable.push(as_argument(&target));
                }
            } else {
                moved.skipped.push(lossy(entry.path().as_os_str().as_bytes()));
            }
        }
    }
    helper(sandbox, &["chmod", "+x", "--"], executable, user).await?;
    for (content, target) in links {
        let pair = vec![content, as_argument(&target)];
        helper(sandbox, &["ln", "-sfn", "--"], pair, user).await?;
        moved.links += 1;
    }
    Ok(())
}

/// Copies one file; gives its size and SHA-256.
async fn file(
    sandbox: &Sandbox,
    source: &Path,
    target: &[u8],
    user: Option<&str>,
) -> Result<(u64, String), CliError> {
    struct Reading {
        file: fs_err::tokio::File,
        shared: Arc<Mutex<(u64, Sha256)>>,
    }
    let shared = Arc::new(Mutex::new((0, Sha256::new())));
    let reading = Reading {
        file: fs_err::tokio::File::open(source).await?,
        shared: Arc::clone(&shared),
    };
    let content = stream::try_unfold(reading, |mut reading| async move {
        let mut buffer = vec![0; CHUNK];
        let count = reading.file.read(&mut buffer).await?;
        if count == 0 {
            return Ok::<_, std::io::Error>(None);
        }
        buffer.truncate(count);
        if let Ok(mut shared) = reading.shared.lock() {
            shared.0 += count as u64;
            shared.1.update(&buffer);
        }
        Ok(Some((Bytes::from(buffer), reading)))
    });
    sandbox.write_stream(target, user, content).await?;
    let (bytes, digest) = shared.lock().map(|shared| shared.clone()).unwrap_or_default();
    Ok((bytes, space_api::key::hex(&digest.finalize())))
}

/// Runs a program inside on many paths, in as many batches as needed.
async fn helper(
    sandbox: &Sandbox,
    program: &[&str],
    paths: Vec<OsString>,
    user: Option<&str>,
) -> Result<(), CliError> {
    let mut paths = paths.into_iter().peekable();
    while paths.peek().is_some() {
        let mut command = Command::new(program[0]).args(&program[1..]);
        if let Some(user) = user {
            command = command.user(user);
        }
        let mut bytes = 0;
        while bytes < BATCH
            && let Some(path) = paths.next()
        {
            bytes += path.len();
            command = command.arg(path);
        }
        let output = sandbox.run(&command, CollectLimits::default()).await?;
        if output.end.exit_code != 0 {
            return Err(CliError::environment(format!(
                "{} inside the sandbox failed: {}",
                program[0],
                output.stderr.text().trim()
            )));
        }
    }
    Ok(())
}

/// A path for a helper command, which starts in the home of the user, as relative paths of the files API do.
fn as_argument(path: &[u8]) -> OsString {
    OsString::from_vec(path.to_vec())
}
