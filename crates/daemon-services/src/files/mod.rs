//! Files: reading, writing, listing, moving and watching them, as the account that asks.
//!
//! Every operation runs through [`crate::identity::run_as`], so permissions are the kernel's
//! business. Names are bytes throughout; only messages and the string fields of answers are lossy.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use connectrpc::{ConnectError, ErrorCode};
use http::StatusCode;

use crate::account::{Account, AccountError};
use crate::core::Core;
use crate::paths::{self, PathError};

mod compose;
mod download;
mod entry;
mod query;
mod service;
mod tree;
mod upload;
mod watch;

pub(crate) use self::compose::compose;
pub(crate) use self::download::download;
pub(crate) use self::service::Service;
pub(crate) use self::upload::upload;
use self::watch::Watchers;

/// What went wrong with a request about files.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("path '{path}' does not exist")]
    NotFound { path: String },
    #[error("path '{path}' already exists")]
    Exists { path: String },
    #[error("path '{path}' {problem}")]
    WrongKind { path: String, problem: &'static str },
    #[error("permission denied for path '{path}'; act as an account that may use it")]
    Denied { path: String },
    #[error("not enough disk space to write '{path}'{rest}")]
    NoSpace { path: String, rest: String },
    #[error("{what}")]
    Invalid { what: String },
    #[error("cannot serve the encodings that the request accepts; accept gzip or identity")]
    NotAcceptable,
    #[error("{what}")]
    TooMany { what: &'static str },
    #[error("watcher with id '{id}' not found")]
    NoWatcher { id: String },
    #[error("no data came for {seconds} s; the upload of '{path}' was stopped")]
    Stalled { path: String, seconds: u64 },
    #[error("the upload of '{path}' broke off{rest}")]
    BrokenOff { path: String, rest: String },
    #[error("cannot {what} '{path}'")]
    Internal {
        what: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
}

impl FileError {
    /// Names the kinds of failure that have names.
    pub(crate) fn from_io(what: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_string_lossy().into_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT) => Self::NotFound { path },
            Some(libc::EEXIST) => Self::Exists { path },
            Some(libc::EACCES | libc::EPERM) => Self::Denied { path },
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace {
                path,
                rest: String::new(),
            },
            Some(libc::ENOTDIR) => Self::WrongKind {
                path,
                problem: "has a parent that is not a directory",
            },
            Some(libc::EISDIR) => Self::WrongKind {
                path,
                problem: "is a directory",
            },
            Some(libc::ENOTEMPTY) => Self::WrongKind {
                path,
                problem: "is not empty",
            },
            Some(libc::ELOOP) => Self::WrongKind {
                path,
                problem: "goes through too many symbolic links",
            },
            Some(libc::ENAMETOOLONG) => Self::WrongKind {
                path,
                problem: "has a part that is too long",
            },
            Some(libc::EROFS) => Self::WrongKind {
                path,
                problem: "is on a read-only file system",
            },
            Some(libc::EXDEV) => Self::WrongKind {
                path,
                problem: "is on another file system; copy it instead",
            },
            Some(libc::ETXTBSY) => Self::WrongKind {
                path,
                problem: "is a program that is running",
            },
            Some(libc::EINVAL) => Self::WrongKind {
                path,
                problem: "cannot be used in this way",
            },
            Some(libc::ENXIO) => Self::WrongKind {
                path,
                problem: "is not a regular file",
            },
            _ if source.kind() == io::ErrorKind::PermissionDenied => Self::Denied { path },
            _ => Self::Internal { what, path, source },
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Internal { source, .. } => format!("{self}: {source}"),
            _ => self.to_string(),
        }
    }

    fn code(&self) -> ErrorCode {
        match self {
            Self::Account(AccountError::Unknown { .. }) => ErrorCode::Unauthenticated,
            Self::NotFound { .. } | Self::NoWatcher { .. } => ErrorCode::NotFound,
            Self::Exists { .. } => ErrorCode::AlreadyExists,
            Self::Denied { .. } => ErrorCode::PermissionDenied,
            Self::NoSpace { .. } | Self::TooMany { .. } => ErrorCode::ResourceExhausted,
            Self::Path(_) | Self::WrongKind { .. } | Self::Invalid { .. } | Self::NotAcceptable => {
                ErrorCode::InvalidArgument
            }
            Self::Stalled { .. } => ErrorCode::DeadlineExceeded,
            Self::BrokenOff { .. } => ErrorCode::Aborted,
            Self::Account(AccountError::Read { .. }) | Self::Internal { .. } => ErrorCode::Internal,
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Account(AccountError::Unknown { .. }) => StatusCode::UNAUTHORIZED,
            Self::NotFound { .. } | Self::NoWatcher { .. } => StatusCode::NOT_FOUND,
            Self::Exists { .. } => StatusCode::CONFLICT,
            Self::Denied { .. } => StatusCode::FORBIDDEN,
            Self::NoSpace { .. } => StatusCode::INSUFFICIENT_STORAGE,
            Self::TooMany { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Path(_) | Self::WrongKind { .. } | Self::Invalid { .. } | Self::BrokenOff { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::NotAcceptable => StatusCode::NOT_ACCEPTABLE,
            Self::Stalled { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Account(AccountError::Read { .. }) | Self::Internal { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }
}

impl From<FileError> for ConnectError {
    fn from(error: FileError) -> Self {
        Self::new(error.code(), error.text())
    }
}

impl axum::response::IntoResponse for FileError {
    fn into_response(self) -> axum::response::Response {
        let status = self.status();
        let body = serde_json::json!({ "code": status.as_u16(), "message": self.text() });
        (status, axum::Json(body)).into_response()
    }
}

/// The state of all file services.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) core: Arc<Core>,
    pub(crate) watchers: Watchers,
}

impl Files {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            watchers: Watchers::default(),
        }
    }

    /// The account that a request means, and its path made absolute.
    pub(crate) fn locate(&self, user: Option<&str>, path: &[u8]) -> Result<(Account, PathBuf), FileError> {
        let account = self.core.account(user)?;
        let workdir = self.core.defaults().workdir;
        let path = paths::resolve(path, &account, workdir.as_deref())?;
        Ok((account, path))
    }
}
