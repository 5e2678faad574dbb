//! What can go wrong with the metadata store.

use std::path::PathBuf;

/// A failed operation. The source says why; it is not repeated in the message.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database file could not be made or opened.
    #[error("the metadata store {path} could not be opened: check that its directory exists and is writable")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The schema could not be brought up to date, for example because a newer version has written it.
    #[error("the schema of the metadata store {path} could not be brought up to date")]
    Migrate {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// A statement failed.
    #[error("the metadata store failed while it was asked to {what}")]
    Query {
        /// The operation.
        what: &'static str,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// What was written could not be made to survive a loss of power.
    #[error("the metadata store {path} could not be written through to the disk")]
    Flush {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Sandboxes came and went so quickly that a reservation was neither possible nor to be refused.
    #[error("there was room for a sandbox, and each time it was gone again")]
    Unsettled,
    /// A row holds something that this version cannot read.
    #[error("the metadata store holds an unreadable {column}")]
    Corrupt {
        /// Table and column.
        column: &'static str,
    },
    /// A project of that name exists.
    #[error("there is a project of that name already")]
    ProjectExists,
}

/// Names the operation of a failed statement.
pub(crate) trait Context<T> {
    fn while_asked_to(self, what: &'static str) -> Result<T, StoreError>;
}

impl<T> Context<T> for Result<T, sqlx::Error> {
    fn while_asked_to(self, what: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::Query { what, source })
    }
}
