//! `POST /files`: one file as a raw body, or several as a form.
//!
//! Bodies stream: a blocking thread with the account's identity writes what the event loop hands
//! it through a short queue, so the sender is held to the speed of the disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Multipart, Request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{Stream, StreamExt};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::account::Account;
use crate::core::named_user;
use crate::identity::run_as;

use super::entry::{METADATA_PREFIX, if_lossy, metadata_names};
use super::query::Query;
use super::tree::make_parents;
use super::{FileError, Files};

const FILE_MODE: u32 = 0o644;
/// Pieces of a body waiting for the disk.
const QUEUE: usize = 4;
/// A sender that is silent for so long has gone.
const STALLED: Duration = Duration::from_secs(300);
/// Files in one form.
const MAX_FILES: usize = 10_000;
const METADATA_HEADER: &str = "x-metadata-";
/// Metadata in one request, in bytes; what a file can hold is less on most file systems.
const MAX_METADATA: usize = 64 * 1024;

/// What is told of each written file.
#[derive(Debug, Serialize)]
pub(crate) struct Written {
    name: String,
    path: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    /// Bytes that this request wrote (after decompression).
    size: u64,
    /// Their digest, when the query asks `digest=sha256`.
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    raw_path: Option<Vec<u8>>,
}

/// How the bodies of one request are to be stored.
#[derive(Debug, Clone)]
struct Manner {
    gzip: bool,
    digest: bool,
    /// Write from here and keep what is before; absent replaces the file.
    offset: Option<u64>,
    metadata: BTreeMap<String, String>,
}

/// Handles the request.
pub(crate) async fn upload(files: Arc<Files>, request: Request) -> Response {
    match try_upload(&files, request).await {
        Ok(written) => axum::Json(written).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn try_upload(files: &Files, request: Request) -> Result<Vec<Written>, FileError> {
    let query = Query::parse(request.uri().query())?;
    let user = query
        .text("username")
        .map(str::to_owned)
        .or_else(|| named_user(request.headers()));
    let manner = Manner {
        gzip: is_gzip(request.headers())?,
        digest: query.text("digest") == Some("sha256"),
        offset: query.number("offset")?,
        metadata: metadata(request.headers())?,
    };
    let content_type = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    if content_type
        .to_ascii_lowercase()
        .starts_with("multipart/form-data")
    {
        return form(files, &query, user.as_deref(), &manner, request).await;
    }
    let path = query.bytes("path").unwrap_or_default();
    if path.is_empty() {
        return Err(FileError::Invalid {
            what: "name the file in the query: path=…".to_owned(),
        });
    }
    let (account, path) = files.locate(user.as_deref(), path)?;
    let body = request.into_body().into_data_stream();
    Ok(vec![store(&account, path, &manner, body).await?])
}

async fn form(
    files: &Files,
    query: &Query,
    user: Option<&str>,
    manner: &Manner,
    request: Request,
) -> Result<Vec<Written>, FileError> {
    let broken = |error: &dyn std::fmt::Display| FileError::Invalid {
        what: format!("the form cannot be read: {error}"),
    };
    if manner.gzip {
        return Err(FileError::Invalid {
            what: "a compressed form is not supported; send the file as octet-stream".to_owned(),
        });
    }
    let mut request = request;
    // Files are as large as the disk allows; the form itself is read part by part.
    *request.body_mut() = Body::new(std::mem::take(request.body_mut()));
    let mut parts = Multipart::from_request(request, &())
        .await
        .map_err(|error| broken(&error))?;
    let mut written = Vec::new();
    let mut named_by_query = query.bytes("path").filter(|path| !path.is_empty());
    while let Some(part) = parts.next_field().await.map_err(|error| broken(&error))? {
        if part.name() != Some("file") {
            continue;
        }
        if written.len() >= MAX_FILES {
            return Err(FileError::Invalid {
                what: format!("more than {MAX_FILES} files in one form"),
            });
        }
        let name = match named_by_query.take() {
            Some(path) => path.to_vec(),
            None => unescape(part.file_name().unwrap_or_default()),
        };
        if name.is_empty() {
            return Err(FileError::Invalid {
                what: "a part of the form has no file name".to_owned(),
            });
        }
        let (account, path) = files.locate(user, &name)?;
        written.push(store(&account, path, manner, part).await?);
    }
    if written.is_empty() {
        return Err(FileError::Invalid {
            what: "the form has no part called 'file'".to_owned(),
        });
    }
    Ok(written)
}

/// Undoes what form encoders do to file names: quotes and control characters become `%XX`, a
/// backslash is doubled. A percent sign itself is not escaped by them, so nothing else is touched.
fn unescape(name: &str) -> Vec<u8> {
    let bytes = name.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, tail @ ..] = rest {
        let code = match rest {
            [b'%', a, b, ..] => std::str::from_utf8(&[*a, *b])
                .ok()
                .and_then(|hex| u8::from_str_radix(hex, 16).ok()),
            _ => None,
        };
        match code {
            Some(code) if code < 0x20 || code == b'"' => {
                out.push(code);
                rest = &rest[3..];
            }
            _ if rest.starts_with(b"\\\\") => {
                out.push(b'\\');
                rest = &rest[2..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

fn is_gzip(headers: &HeaderMap) -> Result<bool, FileError> {
    match headers.get(CONTENT_ENCODING).map(http::HeaderValue::as_bytes) {
        None | Some(b"" | b"identity") => Ok(false),
        Some(b"gzip") => Ok(true),
        Some(_) => Err(FileError::Invalid {
            what: "the body's encoding is unknown; send gzip or none".to_owned(),
        }),
    }
}

fn metadata(headers: &HeaderMap) -> Result<BTreeMap<String, String>, FileError> {
    let mut found = BTreeMap::new();
    let mut size = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) else {
            continue;
        };
        let text = value.to_str().map_err(|_| FileError::Invalid {
            what: format!("metadata '{key}' is not printable ASCII"),
        })?;
        size += key.len() + text.len();
        if key.is_empty() || size > MAX_METADATA {
            return Err(FileError::Invalid {
                what: "metadata needs a name, and 64 KiB at most in all".to_owned(),
            });
        }
        found.insert(key.to_owned(), text.to_owned());
    }
    Ok(found)
}

/// Streams one body into one file.
async fn store<E: std::fmt::Display>(
    account: &Account,
    path: PathBuf,
    manner: &Manner,
    body: impl Stream<Item = Result<Bytes, E>>,
) -> Result<Written, FileError> {
    let (sender, receiver) = mpsc::channel::<Result<Bytes, FileError>>(QUEUE);
    let work = {
        let (path, manner) = (path.clone(), manner.clone());
        run_as(account, move || write_file(&path, &manner, receiver))
    };
    let feed = async {
        let mut body = std::pin::pin!(body);
        let text = || path.to_string_lossy().into_owned();
        loop {
            let piece = match tokio::time::timeout(STALLED, body.next()).await {
                Ok(Some(Ok(piece))) => Ok(piece),
                Ok(None) => return,
                Ok(Some(Err(_))) => Err(FileError::BrokenOff {
                    path: text(),
                    rest: String::new(),
                }),
                Err(_) => Err(FileError::Stalled {
                    path: text(),
                    seconds: STALLED.as_secs(),
                }),
            };
            let stop = piece.is_err();
            // The writer is gone after its own error, which it reports itself.
            if sender.send(piece).await.is_err() || stop {
                return;
            }
        }
    };
    // The feed ends by dropping its sender, which is what tells the writer that all has come.
    let feed = async move {
        feed.await;
        Ok::<_, io::Error>(())
    };
    let (written, _) = tokio::join!(work, feed);
    written.map_err(|source| FileError::from_io("write", &path, source))?
}

enum Sink {
    Plain(File),
    Gzip(MultiGzDecoder<File>),
}

/// Runs on a blocking thread as the account.
fn write_file(
    path: &Path,
    manner: &Manner,
    mut pieces: mpsc::Receiver<Result<Bytes, FileError>>,
) -> Result<Written, FileError> {
    let failed = |source| FileError::from_io("write", path, source);
    if let Some(parent) = path.parent()
        && !parent.exists()
    {
        make_parents(parent)?;
    }
    let found = std::fs::metadata(path).ok();
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        let is_directory = found.is_some_and(|found| found.is_dir());
        let problem = if is_directory {
            "is a directory"
        } else {
            "is not a regular file"
        };
        return Err(FileError::WrongKind {
            path: path.to_string_lossy().into_owned(),
            problem,
        });
    }
    let is_new = found.is_none();
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(manner.offset.is_none())
        .mode(FILE_MODE)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    if let Some(offset) = manner.offset {
        let length = file.metadata().map_err(failed)?.len();
        if offset > length {
            let what = format!(
                "offset {offset} is past the end of '{}', which has {length} bytes",
                path.display()
            );
            return Err(FileError::Invalid { what });
        }
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    }

    let start = manner.offset.unwrap_or_default();
    let mut digest = manner.digest.then(Sha256::new);
    let done = write_pieces(file, manner, &mut pieces, digest.as_mut(), path);
    let file = match done {
        Ok(file) => file,
        Err((error, written)) => {
            // A new file that is not whole is nobody's; an old one was opened for replacement, and
            // the caller is told how far that went.
            if is_new && manner.offset.is_none() {
                drop(std::fs::remove_file(path));
                return Err(error);
            }
            return Err(with_rest(
                error,
                format!("; the file is incomplete, {written} bytes were written"),
            ));
        }
    };
    let end = (&file).stream_position().map_err(failed)?;
    set_metadata(path, &manner.metadata)?;
    let name = path.file_name().unwrap_or_default();
    Ok(Written {
        name: name.to_string_lossy().into_owned(),
        path: path.to_string_lossy().into_owned(),
        r#type: "file",
        metadata: manner.metadata.clone(),
        size: end.saturating_sub(start),
        sha256: digest.map(|digest| hex(&digest.finalize())),
        raw_path: Some(if_lossy(path.as_os_str())).filter(|raw| !raw.is_empty()),
    })
}

fn write_pieces(
    file: File,
    manner: &Manner,
    pieces: &mut mpsc::Receiver<Result<Bytes, FileError>>,
    mut digest: Option<&mut Sha256>,
    path: &Path,
) -> Result<File, (FileError, u64)> {
    let mut sink = if manner.gzip {
        Sink::Gzip(MultiGzDecoder::new(file))
    } else {
        Sink::Plain(file)
    };
    let start = manner.offset.unwrap_or_default();
    let position = |sink: &Sink| {
        let mut file = match sink {
            Sink::Plain(file) => file,
            Sink::Gzip(decoder) => decoder.get_ref(),
        };
        file.stream_position().unwrap_or(start).saturating_sub(start)
    };
    while let Some(piece) = pieces.blocking_recv() {
        let piece = piece.map_err(|error| (error, position(&sink)))?;
        if let Some(digest) = digest.as_deref_mut() {
            digest.update(&piece);
        }
        let written = match &mut sink {
            Sink::Plain(file) => file.write_all(&piece),
            Sink::Gzip(decoder) => decoder.write_all(&piece),
        };
        if let Err(error) = written {
            return Err((gzip_error(path, error), position(&sink)));
        }
    }
    let written = position(&sink);
    match sink {
        Sink::Plain(file) => Ok(file),
        Sink::Gzip(mut decoder) => decoder
            .try_finish()
            .and_then(|()| decoder.finish())
            .map_err(|error| (gzip_error(path, error), written)),
    }
}

/// Errors about the compressed data are the sender's, the others the disk's.
fn gzip_error(path: &Path, error: io::Error) -> FileError {
    match error.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            if error.raw_os_error().is_none() =>
        {
            FileError::Invalid {
                what: "the body is not valid gzip".to_owned(),
            }
        }
        _ => FileError::from_io("write", path, error),
    }
}

fn with_rest(error: FileError, text: String) -> FileError {
    match error {
        FileError::NoSpace { path, .. } => FileError::NoSpace { path, rest: text },
        FileError::BrokenOff { path, .. } => FileError::BrokenOff { path, rest: text },
        other => other,
    }
}

/// Replaces the file's metadata.
fn set_metadata(path: &Path, metadata: &BTreeMap<String, String>) -> Result<(), FileError> {
    for name in metadata_names(path).unwrap_or_default() {
        if let Err(error) = rustix::fs::removexattr(path, name.as_str()) {
            tracing::debug!(%error, "old metadata stays");
        }
    }
    for (key, value) in metadata {
        let name = format!("{METADATA_PREFIX}{key}");
        rustix::fs::setxattr(
            path,
            name.as_str(),
            value.as_bytes(),
            rustix::fs::XattrFlags::empty(),
        )
        .map_err(|error| FileError::from_io("set metadata of", path, error.into()))?;
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        use std::fmt::Write;
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn form_names_are_unescaped() {
        assert_eq!(unescape("a%0Ab%22c%41%"), b"a\nb\"c%41%");
        assert_eq!(unescape(r"a\\b\c"), br"a\b\c");
        assert_eq!(unescape("é%1Fx"), "é\u{1f}x".as_bytes());
    }
}
