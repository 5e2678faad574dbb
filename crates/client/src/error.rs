//! What can go wrong between a client and the platform.

use connectrpc::{ConnectError, ErrorCode as ConnectCode};
use space_api::error::{ErrorBody, ErrorCode};

/// A call that did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address or key cannot be used.
    #[error("\"{given}\" is not an address of the API: {why}")]
    BadEndpoint {
        /// The URL as given.
        given: String,
        /// What is wrong.
        why: String,
    },
    /// Nothing answers at the address, or the connection broke.
    #[error("the platform at {url} cannot be reached")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The platform refused, in its own words.
    #[error("{}", body.message)]
    Refused {
        /// Its answer.
        body: ErrorBody,
    },
    /// The daemon inside the sandbox refused.
    #[error("{message}")]
    Guest {
        /// The Connect code, such as `not_found`.
        code: &'static str,
        /// Its words.
        message: String,
    },
    /// The answer is not of the form that was agreed.
    #[error("the platform answered {what} in a form this client does not understand")]
    Unexpected {
        /// Which call.
        what: String,
        /// Details.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A process stream ended without saying how the process ended.
    #[error("the stream of process {pid} broke off: {message}")]
    StreamBroken {
        /// Its process.
        pid: u32,
        /// What the other side said, if anything.
        message: String,
    },
}

impl ClientError {
    /// The platform's error code, if it gave one.
    pub fn error_code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused { body } => body.error_code,
            _ => None,
        }
    }

    /// What the platform suggests to do.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Refused { body } => body.hint.as_deref(),
            _ => None,
        }
    }

    /// Whether the thing asked for does not exist.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Refused { body } => body.code == 404 || body.message.contains("was not found"),
            Self::Guest { code, message } => *code == "not_found" || message.contains("was not found"),
            _ => false,
        }
    }

    /// Whether it was asked and its answer was lost on the way, so that what became of it is not known.
    pub(crate) fn broke_off(&self) -> bool {
        match self {
            Self::Unreachable { source, .. } => source
                .downcast_ref::<reqwest::Error>()
                .is_some_and(|error| !error.is_connect() && !error.is_timeout() && !error.is_builder()),
            _ => false,
        }
    }

    pub(crate) fn from_connect(url: &str, error: ConnectError) -> Self {
        let message = error
            .message
            .clone()
            .unwrap_or_else(|| error.code.as_str().to_owned());
        if error.code == ConnectCode::Unavailable && std::error::Error::source(&error).is_some() {
            return Self::Unreachable {
                url: url.to_owned(),
                source: Box::new(error),
            };
        }
        // An answer of the edge rather than of the daemon is JSON in the body of the error.
        if let Ok(body) = serde_json::from_str::<ErrorBody>(&message) {
            return Self::Refused { body };
        }
        Self::Guest {
            code: error.code.as_str(),
            message,
        }
    }

    pub(crate) fn from_reqwest(url: &str, error: reqwest::Error) -> Self {
        if error.is_decode() {
            Self::Unexpected {
                what: error
                    .url()
                    .map_or_else(|| url.to_owned(), |url| url.path().to_owned()),
                source: Box::new(error),
            }
        } else {
            Self::Unreachable {
                url: url.to_owned(),
                source: Box::new(error.without_url()),
            }
        }
    }

    pub(crate) fn from_status(status: u16, text: &str) -> Self {
        let body = serde_json::from_str(text).unwrap_or_else(|_| ErrorBody {
            code: status,
            message: match text.trim() {
                "" => format!("the platform answered HTTP {status}"),
                text => text.chars().take(1000).collect(),
            },
            error_code: None,
            hint: None,
        });
        Self::Refused { body }
    }
}
