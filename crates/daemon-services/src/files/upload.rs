//! `POST /files`: one file as a raw body, or several as a form.
//!
//! Bodies stream: the next batch is read only when the last is on its way to the disk, so the
//! sender is held to the disk's speed and memory stays bounded.

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
use futures_util::{FutureExt, Stream, StreamExt};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::account::Account;
use crate::core::named_user;
use crate::identity::run_as;

use super::entry::{METADATA_PREFIX, if_lossy, metadata_names};
use super::query::Query;
use super::tree::make_parents;
use super::{FileError, Files};

const FILE_MODE: u32 = 0o644;
/// Bytes written at a time, if so many have come.
const BATCH: usize = 512 * 1024;
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

/// Streams one body into one file. Each batch is written on a blocking thread with the account's
/// identity, and no thread waits for the sender.
async fn store<E>(
    account: &Account,
    path: PathBuf,
    manner: &Manner,
    body: impl Stream<Item = Result<Bytes, E>>,
) -> Result<Written, FileError> {
    let failed = |source| FileError::from_io("write", &path, source);
    let opening = {
        let (path, manner) = (path.clone(), manner.clone());
        run_as(account, move || Upload::open(path, manner))
    };
    let mut upload = opening.await.map_err(failed)??;
    let mut body = std::pin::pin!(body);
    loop {
        let (batch, last) = match batch(&mut body).await {
            Ok(batch) => batch,
            Err(interruption) => {
                let error = interruption.explain(&path);
                let given_up = run_as(account, move || upload.give_up(error)).await;
                return Err(given_up.map_err(failed)?);
            }
        };
        let work = move || {
            let upload = upload.write(&batch)?;
            if last {
                upload.finish().map(Err)
            } else {
                Ok(Ok(upload))
            }
        };
        match run_as(account, work).await.map_err(failed)?? {
            Ok(open) => upload = open,
            Err(written) => return Ok(written),
        }
    }
}

/// Why a body ended too early.
enum Interruption {
    Stalled,
    Broken,
}

impl Interruption {
    fn explain(&self, path: &Path) -> FileError {
        let path = path.to_string_lossy().into_owned();
        match self {
            Self::Stalled => FileError::Stalled {
                path,
                seconds: STALLED.as_secs(),
            },
            Self::Broken => FileError::BrokenOff {
                path,
                rest: String::new(),
            },
        }
    }
}

/// Waits for the next piece, then takes what else has come; true with the last.
async fn batch<E>(
    body: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
) -> Result<(Vec<Bytes>, bool), Interruption> {
    let mut batch = Vec::new();
    let mut size = 0;
    loop {
        let next = if batch.is_empty() {
            tokio::time::timeout(STALLED, body.next())
                .await
                .map_err(|_| Interruption::Stalled)?
        } else {
            match body.next().now_or_never() {
                Some(next) => next,
                None => return Ok((batch, false)),
            }
        };
        match next {
            Some(Ok(piece)) => {
                size += piece.len();
                batch.push(piece);
            }
            Some(Err(_)) => return Err(Interruption::Broken),
            None => return Ok((batch, true)),
        }
        if size >= BATCH {
            return Ok((batch, false));
        }
    }
}

enum Sink {
    Plain(File),
    Gzip(Box<MultiGzDecoder<File>>),
}

/// A file that is being written. All methods run on a blocking thread as the account.
struct Upload {
    path: PathBuf,
    manner: Manner,
    sink: Sink,
    is_new: bool,
    digest: Option<Sha256>,
}

impl Upload {
    fn open(path: PathBuf, manner: Manner) -> Result<Self, FileError> {
        let failed = |source| FileError::from_io("write", &path, source);
        if let Some(parent) = path.parent()
            && !parent.exists()
        {
            make_parents(parent)?;
        }
        let found = std::fs::metadata(&path).ok();
        if let Some(found) = found.as_ref().filter(|found| !found.is_file()) {
            let problem = if found.is_dir() {
                "is a directory"
            } else {
                "is not a regular file"
            };
            return Err(FileError::WrongKind {
                path: path.to_string_lossy().into_owned(),
                problem,
            });
        }
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(manner.offset.is_none())
            .mode(FILE_MODE)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(failed)?;
        if let Some(offset) = manner.offset {
            let length = file.metadata().map_err(failed)?.len();
            if offset > length {
                let path = path.display();
                let what = format!("offset {offset} is past the end of '{path}', which has {length} bytes");
                return Err(FileError::Invalid { what });
            }
            file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        }
        let sink = if manner.gzip {
            Sink::Gzip(Box::new(MultiGzDecoder::new(file)))
        } else {
            Sink::Plain(file)
        };
        let digest = manner.digest.then(Sha256::new);
        Ok(Self {
            path,
            manner,
            sink,
            is_new: found.is_none(),
            digest,
        })
    }

    fn write(mut self, batch: &[Bytes]) -> Result<Self, FileError> {
        for piece in batch {
            if let Some(digest) = &mut self.digest {
                digest.update(piece);
            }
            let written = match &mut self.sink {
                Sink::Plain(file) => file.write_all(piece),
                Sink::Gzip(decoder) => decoder.write_all(piece),
            };
            if let Err(error) = written {
                let error = gzip_error(&self.path, error);
                return Err(self.give_up(error));
            }
        }
        Ok(self)
    }

    /// Bytes of the file that this upload wrote.
    fn size(&self) -> u64 {
        let mut file = match &self.sink {
            Sink::Plain(file) => file,
            Sink::Gzip(decoder) => decoder.get_ref(),
        };
        let start = self.manner.offset.unwrap_or_default();
        file.stream_position().unwrap_or(start).saturating_sub(start)
    }

    /// A new file that is not whole is nobody's and is removed. An old one was opened to be
    /// replaced, so the caller is told how far that went.
    fn give_up(self, error: FileError) -> FileError {
        if self.is_new && self.manner.offset.is_none() {
            return match std::fs::remove_file(&self.path) {
                Ok(()) => with_rest(error, "; nothing is left of it".to_owned()),
                Err(_) => with_rest(error, "; a part of it is left".to_owned()),
            };
        }
        let size = self.size();
        with_rest(
            error,
            format!("; the file is incomplete, {size} bytes were written"),
        )
    }

    fn finish(mut self) -> Result<Written, FileError> {
        if let Sink::Gzip(decoder) = &mut self.sink
            && let Err(error) = decoder.try_finish()
        {
            let error = gzip_error(&self.path, error);
            return Err(self.give_up(error));
        }
        let size = self.size();
        set_metadata(&self.path, &self.manner.metadata)?;
        let name = self.path.file_name().unwrap_or_default();
        Ok(Written {
            name: name.to_string_lossy().into_owned(),
            path: self.path.to_string_lossy().into_owned(),
            r#type: "file",
            metadata: self.manner.metadata,
            size,
            sha256: self.digest.map(|digest| hex(&digest.finalize())),
            raw_path: Some(if_lossy(self.path.as_os_str())).filter(|raw| !raw.is_empty()),
        })
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
