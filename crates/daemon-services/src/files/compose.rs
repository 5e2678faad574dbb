//! `POST /files/compose`: joins files that were uploaded in pieces.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use crate::core::named_user;
use crate::identity::run_as;

use super::query::Query;
use super::tree::make_parents;
use super::{FileError, Files};

const MAX_BODY: usize = 1 << 20;
const MAX_SOURCES: usize = 10_000;

#[derive(Debug, Deserialize)]
struct Order {
    #[serde(alias = "sourcePaths")]
    source_paths: Vec<String>,
    destination: String,
    #[serde(default)]
    username: Option<String>,
}

/// Handles the request. The pieces are removed once the whole is there.
pub(crate) async fn compose(files: Arc<Files>, request: Request) -> Response {
    match try_compose(&files, request).await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn try_compose(files: &Files, request: Request) -> Result<serde_json::Value, FileError> {
    let invalid = |what: &str| FileError::Invalid {
        what: what.to_owned(),
    };
    let query = Query::parse(request.uri().query())?;
    let user = query
        .text("username")
        .map(str::to_owned)
        .or_else(|| named_user(request.headers()));
    let body = axum::body::to_bytes(request.into_body(), MAX_BODY).await;
    let body = body.map_err(|_| invalid("the request is larger than 1 MiB or broke off"))?;
    let order: Order = serde_json::from_slice(&body)
        .map_err(|_| invalid("the request must be JSON with source_paths and destination"))?;
    if order.source_paths.is_empty() || order.source_paths.len() > MAX_SOURCES {
        return Err(invalid("name between 1 and 10000 files to join"));
    }
    let user = order.username.or(user);
    let mut sources = Vec::new();
    for source in &order.source_paths {
        sources.push(files.locate(user.as_deref(), source.as_bytes())?.1);
    }
    let (account, destination) = files.locate(user.as_deref(), order.destination.as_bytes())?;
    let path = destination.clone();
    let size = run_as(&account, move || join(&sources, &destination))
        .await
        .map_err(|source| FileError::from_io("write", &path, source))??;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(serde_json::json!({ "name": name, "path": path.to_string_lossy(), "type": "file", "size": size }))
}

fn join(sources: &[PathBuf], destination: &Path) -> Result<u64, FileError> {
    if let Some(parent) = destination.parent() {
        make_parents(parent)?;
    }
    if sources.iter().any(|source| source == destination) {
        return Err(FileError::Invalid {
            what: "a file cannot be joined into itself".to_owned(),
        });
    }
    let is_new = std::fs::symlink_metadata(destination).is_err();
    let joined = copy_all(sources, destination);
    if joined.is_err() && is_new {
        // Half a file is worse than none; the pieces are still there.
        drop(std::fs::remove_file(destination));
    }
    let size = joined?;
    for source in sources {
        std::fs::remove_file(source).map_err(|error| FileError::from_io("remove", source, error))?;
    }
    Ok(size)
}

fn copy_all(sources: &[PathBuf], destination: &Path) -> Result<u64, FileError> {
    let failed = |source: io::Error| FileError::from_io("write", destination, source);
    let mut out = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(destination)
        .map_err(failed)?;
    let mut size = 0;
    for source in sources {
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(source);
        let mut file = opened.map_err(|error| FileError::from_io("read", source, error))?;
        // The kernel copies, or shares the blocks where the file system can.
        size += io::copy(&mut file, &mut out).map_err(failed)?;
    }
    Ok(size)
}
