//! Files of a sandbox: content over `/files`, everything else over the filesystem service.

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use reqwest::Method;
use serde::Deserialize;
use space_proto::filesystem::{
    EntryInfo, FileType, ListDirRequest, MakeDirRequest, MoveRequest, RemoveRequest, StatRequest,
};

use crate::{
    ClientError, Sandbox,
    sandbox::{basic, unary},
};

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, or anything else.
    Other,
}

/// One file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Last part of its path, as bytes.
    pub name: Vec<u8>,
    /// Absolute path, as bytes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner's name.
    pub owner: String,
    /// Where it leads, if it is a symbolic link.
    pub target: Option<String>,
}

impl From<EntryInfo> for Entry {
    fn from(info: EntryInfo) -> Self {
        let raw = |raw: Vec<u8>, text: String| if raw.is_empty() { text.into_bytes() } else { raw };
        let kind = match info.r#type.to_i32() {
            code if code == FileType::FILE_TYPE_FILE as i32 => EntryKind::File,
            code if code == FileType::FILE_TYPE_DIRECTORY as i32 => EntryKind::Directory,
            _ => EntryKind::Other,
        };
        Self {
            name: raw(info.raw_name, info.name),
            path: raw(info.raw_path, info.path),
            kind: if info.is_symlink { EntryKind::Other } else { kind },
            size: u64::try_from(info.size).unwrap_or(0),
            mode: info.mode,
            owner: info.owner,
            target: info.symlink_target,
        }
    }
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Written {
    /// Last part of its path.
    pub name: String,
    /// Absolute path.
    pub path: String,
}

impl Sandbox {
    /// Reads a file as a stream. The path may be any bytes; a relative one starts at the user's home.
    pub async fn read_stream(
        &self,
        path: &[u8],
        user: Option<&str>,
    ) -> Result<impl Stream<Item = Result<Bytes, ClientError>> + Send + Unpin + use<>, ClientError> {
        let request = self.files_request(Method::GET, path, user);
        let answer = self.client.checked(request).await?;
        let url = self.client.endpoint().url();
        Ok(answer
            .bytes_stream()
            .map_err(move |error| ClientError::from_reqwest(&url, error))
            .boxed())
    }

    /// Reads a whole file into memory.
    pub async fn read_file(&self, path: &str, user: Option<&str>) -> Result<Vec<u8>, ClientError> {
        let mut content = Vec::new();
        let mut stream = self.read_stream(path.as_bytes(), user).await?;
        while let Some(chunk) = stream.next().await {
            content.extend_from_slice(&chunk?);
        }
        Ok(content)
    }

    /// Writes a file from a stream; makes missing directories above it.
    ///
    /// # Errors
    ///
    /// An error of `content` breaks the request off; the file may then hold a part.
    pub async fn write_stream<E>(
        &self,
        path: &[u8],
        user: Option<&str>,
        content: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    ) -> Result<Written, ClientError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let request = self
            .files_request(Method::POST, path, user)
            .header("content-type", "application/octet-stream")
            .body(reqwest::Body::wrap_stream(content));
        let answer = self.client.checked(request).await?;
        let written: Vec<Written> = answer
            .json()
            .await
            .map_err(|error| ClientError::from_reqwest(&self.client.endpoint().url(), error))?;
        written.into_iter().next().ok_or_else(|| ClientError::Unexpected {
            what: "the write of a file".to_owned(),
            source: "it names no file".into(),
        })
    }

    /// Writes a file from memory.
    pub async fn write_file(
        &self,
        path: &str,
        content: Bytes,
        user: Option<&str>,
    ) -> Result<Written, ClientError> {
        let stream = futures_util::stream::iter([Ok::<_, std::io::Error>(content)]);
        self.write_stream(path.as_bytes(), user, stream).await
    }

    fn files_request(&self, method: Method, path: &[u8], user: Option<&str>) -> reqwest::RequestBuilder {
        let mut query = format!("/files?path={}", percent_encode(path, NON_ALPHANUMERIC));
        if let Some(user) = user {
            query.push_str("&username=");
            query.extend(percent_encode(user.as_bytes(), NON_ALPHANUMERIC));
        }
        self.client
            .raw_request(method, &query)
            .headers(self.headers.clone())
    }

    /// Lists what is in a directory, `depth` levels down (1 is the directory itself).
    pub async fn list_directory(
        &self,
        path: &[u8],
        depth: u32,
        user: Option<&str>,
    ) -> Result<Vec<Entry>, ClientError> {
        let (path, raw_path) = wire_path(path);
        let request = ListDirRequest {
            path,
            depth,
            raw_path,
            ..Default::default()
        };
        let answer = self
            .filesystem
            .list_dir_with_options(request, as_user(user)?)
            .await
            .map_err(|error| self.connect_error(error))?;
        Ok(answer.into_owned().entries.into_iter().map(Entry::from).collect())
    }

    /// What a path is; `None` if it is not there.
    pub async fn entry(&self, path: &[u8], user: Option<&str>) -> Result<Option<Entry>, ClientError> {
        let (path, raw_path) = wire_path(path);
        let request = StatRequest {
            path,
            raw_path,
            ..Default::default()
        };
        match self.filesystem.stat_with_options(request, as_user(user)?).await {
            Ok(answer) => Ok(answer.into_owned().entry.into_option().map(Entry::from)),
            Err(error) if error.code == connectrpc::ErrorCode::NotFound => Ok(None),
            Err(error) => Err(self.connect_error(error)),
        }
    }

    /// Makes a directory with those above it. `false` if it was there.
    pub async fn make_directory(&self, path: &[u8], user: Option<&str>) -> Result<bool, ClientError> {
        let (path, raw_path) = wire_path(path);
        let request = MakeDirRequest {
            path,
            raw_path,
            ..Default::default()
        };
        match self
            .filesystem
            .make_dir_with_options(request, as_user(user)?)
            .await
        {
            Ok(_) => Ok(true),
            Err(error) if error.code == connectrpc::ErrorCode::AlreadyExists => Ok(false),
            Err(error) => Err(self.connect_error(error)),
        }
    }

    /// Removes a file, or a directory with everything in it.
    pub async fn remove(&self, path: &[u8], user: Option<&str>) -> Result<(), ClientError> {
        let (path, raw_path) = wire_path(path);
        let request = RemoveRequest {
            path,
            raw_path,
            ..Default::default()
        };
        self.filesystem
            .remove_with_options(request, as_user(user)?)
            .await
            .map(drop)
            .map_err(|error| self.connect_error(error))
    }

    /// Renames a file or directory.
    pub async fn rename(&self, from: &[u8], to: &[u8], user: Option<&str>) -> Result<(), ClientError> {
        let (source, raw_source) = wire_path(from);
        let (destination, raw_destination) = wire_path(to);
        let request = MoveRequest {
            source,
            destination,
            raw_source,
            raw_destination,
            ..Default::default()
        };
        // `move` is a keyword, so the generated method has another name than the call.
        self.filesystem
            .r#move_with_options(request, as_user(user)?)
            .await
            .map(drop)
            .map_err(|error| self.connect_error(error))
    }
}

/// String form for those that read only that, and the exact bytes where it is lossy.
fn wire_path(path: &[u8]) -> (String, Vec<u8>) {
    match std::str::from_utf8(path) {
        Ok(path) => (path.to_owned(), Vec::new()),
        Err(_) => (String::from_utf8_lossy(path).into_owned(), path.to_vec()),
    }
}

fn as_user(user: Option<&str>) -> Result<connectrpc::client::CallOptions, ClientError> {
    let mut options = unary();
    if let Some(user) = user {
        let (name, value) = basic(user)?;
        options = options.with_header(name, value);
    }
    Ok(options)
}
