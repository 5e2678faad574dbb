//! `GET /files`: one file, whole or in part, plain or compressed.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::stream;
use http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, ETAG, IF_RANGE, RANGE, VARY,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};

use crate::core::named_user;
use crate::identity::run_as;

use super::query::Query;
use super::{FileError, Files};

/// Bytes read at a time; a file up to this size is answered in one step.
const BLOCK: usize = 128 * 1024;

/// Handles the request.
pub(crate) async fn download(files: Arc<Files>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    try_download(&files, &parts)
        .await
        .unwrap_or_else(IntoResponse::into_response)
}

/// The part of a file to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Whole,
    /// First byte and length.
    Range(u64, u64),
    /// The asked range is outside the file.
    None,
}

struct Opened {
    file: File,
    length: u64,
    etag: String,
}

async fn try_download(files: &Files, request: &Parts) -> Result<Response, FileError> {
    let query = Query::parse(request.uri.query())?;
    let user = query
        .text("username")
        .map(str::to_owned)
        .or_else(|| named_user(&request.headers));
    let (account, path) = files.locate(user.as_deref(), query.bytes("path").unwrap_or_default())?;
    let gzip = wants_gzip(&request.headers)?;

    let name = path.file_name().unwrap_or_default().to_os_string();
    let failed_path = path.clone();
    let opened = run_as(&account, move || open(&path)).await;
    let opened = opened.map_err(|source| FileError::from_io("read", &failed_path, source))??;

    let part = match wanted_range(&request.headers, &opened.etag) {
        Some(range) => part(range, opened.length),
        None => Part::Whole,
    };
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    let disposition = format!(
        "inline; filename*=utf-8''{}",
        percent_encode(name.as_bytes(), NON_ALPHANUMERIC)
    );
    insert(&mut headers, CONTENT_DISPOSITION, &disposition);
    insert(&mut headers, ETAG, &opened.etag);

    let length = opened.length;
    let (status, start, count) = match part {
        Part::Whole => (StatusCode::OK, 0, length),
        Part::Range(start, count) => {
            insert(
                &mut headers,
                CONTENT_RANGE,
                &format!("bytes {start}-{}/{length}", start + count - 1),
            );
            (StatusCode::PARTIAL_CONTENT, start, count)
        }
        Part::None => {
            insert(&mut headers, CONTENT_RANGE, &format!("bytes */{length}"));
            return Ok((StatusCode::RANGE_NOT_SATISFIABLE, headers).into_response());
        }
    };
    // A range counts bytes of the file, which a compressed answer no longer has.
    let gzip = gzip && part == Part::Whole;
    if gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    } else {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(count));
    }
    let body = if request.method == Method::HEAD {
        Body::empty()
    } else {
        body(opened.file, start, count, gzip)
    };
    Ok((status, headers, body).into_response())
}

fn insert(headers: &mut HeaderMap, name: http::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn open(path: &Path) -> Result<Opened, FileError> {
    // Without O_NONBLOCK, opening a named pipe would wait for a writer.
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = opened.map_err(|source| FileError::from_io("read", path, source))?;
    let found = file
        .metadata()
        .map_err(|source| FileError::from_io("read", path, source))?;
    if !found.is_file() {
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
    let etag = format!(
        "\"{:x}-{:x}.{:x}\"",
        found.len(),
        found.mtime(),
        found.mtime_nsec()
    );
    Ok(Opened {
        length: length(&file, found.len()),
        file,
        etag,
    })
}

/// Files of `/proc` and the like say that they are empty; their length is what can be read, within
/// one block.
fn length(file: &File, told: u64) -> u64 {
    if told > 0 {
        return told;
    }
    let mut probe = vec![0; BLOCK];
    let mut filled = 0;
    while filled < probe.len() {
        match std::os::unix::fs::FileExt::read_at(file, &mut probe[filled..], filled as u64) {
            Ok(0) | Err(_) => break,
            Ok(count) => filled += count,
        }
    }
    filled as u64
}

/// Whether the answer is to be compressed: when gzip is asked for by itself. Libraries that list
/// all they know by habit get the plain file, which costs less than compressing it.
fn wants_gzip(headers: &HeaderMap) -> Result<bool, FileError> {
    let mut gzip = None;
    let mut identity = None;
    let mut any = None;
    let mut others = false;
    for item in headers
        .get_all(ACCEPT_ENCODING)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|v| v.split(','))
    {
        let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
        let quality: f32 = parameters
            .trim()
            .strip_prefix("q=")
            .and_then(|q| q.parse().ok())
            .unwrap_or(1.0);
        match name.trim().to_ascii_lowercase().as_str() {
            "" => {}
            "gzip" | "x-gzip" => gzip = Some(quality),
            "identity" => identity = Some(quality),
            "*" => any = Some(quality),
            _ => others = true,
        }
    }
    let may_gzip = gzip.or(any).unwrap_or(0.0) > 0.0;
    let may_identity = identity.or(any).unwrap_or(1.0) > 0.0;
    match (may_gzip, may_identity) {
        (false, false) => Err(FileError::NotAcceptable),
        (true, false) => Ok(true),
        (false, true) => Ok(false),
        (true, true) => Ok(gzip.is_some() && identity.is_none() && !others),
    }
}

/// The range a request asks for, unless it is for another version of the file.
fn wanted_range<'a>(headers: &'a HeaderMap, etag: &str) -> Option<&'a str> {
    if headers
        .get(IF_RANGE)
        .is_some_and(|version| version.as_bytes() != etag.as_bytes())
    {
        return None;
    }
    headers.get(RANGE)?.to_str().ok()
}

/// One range of bytes; several at once, or another unit, count as none.
fn part(range: &str, length: u64) -> Part {
    let Some((first, last)) = range
        .trim()
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
    else {
        return Part::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    let (start, end) = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(start), Ok(end)) if start <= end => (start, end.saturating_add(1).min(length)),
        (Ok(start), Err(_)) if last.is_empty() => (start, length),
        (Err(_), Ok(0)) if first.is_empty() => return Part::None,
        (Err(_), Ok(count)) if first.is_empty() => (length.saturating_sub(count), length),
        _ => return Part::Whole,
    };
    if start >= end {
        Part::None
    } else {
        Part::Range(start, end - start)
    }
}

struct Reading {
    file: File,
    left: u64,
    gzip: Option<GzEncoder<Vec<u8>>>,
    done: bool,
}

fn body(file: File, start: u64, count: u64, gzip: bool) -> Body {
    let gzip = gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
    let reading = Reading {
        file,
        left: count,
        gzip,
        done: false,
    };
    let first = Some(start);
    Body::from_stream(stream::try_unfold(
        (reading, first),
        |(reading, seek)| async move {
            if reading.done {
                return Ok(None);
            }
            let block = tokio::task::spawn_blocking(move || block(reading, seek))
                .await
                .map_err(io::Error::other)?;
            let (reading, bytes) = block?;
            Ok::<_, io::Error>(Some((bytes, (reading, None))))
        },
    ))
}

/// Reads the next block. A file that became shorter breaks the answer off, so that the receiver
/// does not take a part for the whole.
fn block(mut reading: Reading, seek: Option<u64>) -> io::Result<(Reading, Bytes)> {
    if let Some(start) = seek.filter(|start| *start > 0) {
        reading.file.seek(SeekFrom::Start(start))?;
    }
    loop {
        let size = usize::try_from(reading.left).unwrap_or(BLOCK).min(BLOCK);
        let mut buffer = vec![0; size];
        reading.file.read_exact(&mut buffer)?;
        reading.left -= size as u64;
        reading.done = reading.left == 0;
        let Some(encoder) = &mut reading.gzip else {
            return Ok((reading, buffer.into()));
        };
        encoder.write_all(&buffer)?;
        let out = if reading.done {
            reading
                .gzip
                .take()
                .map(GzEncoder::finish)
                .transpose()?
                .unwrap_or_default()
        } else {
            std::mem::take(encoder.get_mut())
        };
        // The compressor may swallow a block without giving anything out yet.
        if !out.is_empty() || reading.done {
            return Ok((reading, out.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(part("bytes=0-0", 10), Part::Range(0, 1));
        assert_eq!(part("bytes=2-", 10), Part::Range(2, 8));
        assert_eq!(part("bytes=-3", 10), Part::Range(7, 3));
        assert_eq!(part("bytes=-30", 10), Part::Range(0, 10));
        assert_eq!(part("bytes=5-99", 10), Part::Range(5, 5));
        assert_eq!(part("bytes=10-", 10), Part::None);
        assert_eq!(part("bytes=-0", 10), Part::None);
        for odd in [
            "bytes=5-2",
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes=x-y",
            "bytes=-",
            "",
        ] {
            assert_eq!(part(odd, 10), Part::Whole, "{odd}");
        }
        assert_eq!(part("bytes=0-", 0), Part::None);
    }

    #[test]
    fn encodings() {
        let asked = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(value));
            wants_gzip(&headers)
        };
        assert!(asked("gzip").unwrap());
        assert!(!asked("gzip, deflate, br").unwrap());
        assert!(!asked("identity").unwrap());
        assert!(!asked("").unwrap());
        assert!(asked("gzip, identity;q=0").unwrap());
        assert!(matches!(asked("br, identity;q=0"), Err(FileError::NotAcceptable)));
        assert!(matches!(asked("*;q=0"), Err(FileError::NotAcceptable)));
    }
}
