//! Why a create did not come to be, in a form that every waiting caller can be told, and how errors become words.

use std::{error::Error, io};

use space_api::id::SandboxId;
use space_node_manager::PrivilegeError;
use space_vmm::VmmError;

use crate::{
    journal::JournalError,
    seam::{EndRecord, NodeError},
    templates::TemplateError,
};

/// Longest text of an error chain, bytes.
const MOST_TEXT: usize = 2048;

/// An error and its causes in one line, at most [`MOST_TEXT`] bytes.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    shortened(&text.replace(['\n', '\r'], " "), MOST_TEXT)
}

/// The start of a text, cut at a character.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// The end of a text, cut at a character.
pub(crate) fn tail(text: &str, most: usize) -> String {
    let mut start = text.len().saturating_sub(most);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].to_owned()
}

/// Why a create failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Something has run out.
    NoCapacity(String),
    /// No usable monitor.
    VmmUnavailable(String),
    /// The template is gone.
    TemplateNotFound(String),
    /// This or a later generation was recorded before.
    Stale,
    /// It was told to end before it was usable; the cause is in the end record.
    Ended,
    /// A step failed.
    Step(String),
}

impl Failure {
    /// A failed step; what has run out is told apart by the errors of the operating system underneath.
    pub(crate) fn step(step: &str, error: &(dyn Error + 'static)) -> Self {
        match exhausted(error) {
            Some(what) => Self::NoCapacity(format!("{what}: {step}: {}", chain(error))),
            None => Self::Step(format!("{step}: {}", chain(error))),
        }
    }

    /// The same in words, for the record.
    pub(crate) fn detail(&self) -> String {
        match self {
            Self::NoCapacity(what) | Self::VmmUnavailable(what) | Self::Step(what) => what.clone(),
            Self::TemplateNotFound(name) => format!("template \"{name}\" was not found"),
            Self::Stale => "an older or the same generation is recorded".to_owned(),
            Self::Ended => "it was ended before it was usable".to_owned(),
        }
    }

    /// What a caller is told.
    pub(crate) fn answer(self, id: &SandboxId, end: Option<EndRecord>) -> NodeError {
        match self {
            Self::NoCapacity(what) => no_capacity(what),
            Self::VmmUnavailable(what) => NodeError::VmmUnavailable { what },
            Self::TemplateNotFound(name) => NodeError::TemplateNotFound { name },
            Self::Step(step) => NodeError::CreateFailed { id: id.clone(), step },
            Self::Stale | Self::Ended => NodeError::NotFound {
                id: id.clone(),
                end: end.map(Box::new),
            },
        }
    }
}

/// When to try again after something of the host has run out, milliseconds: sandboxes end every few seconds, not sooner.
const RETRY_AFTER_MS: u64 = 2000;

/// A refusal for want of something on the host.
pub(crate) fn no_capacity(what: String) -> NodeError {
    NodeError::NoCapacity {
        what,
        retry_after_ms: RETRY_AFTER_MS,
    }
}

/// Names what has run out when an error of the operating system says so.
fn exhausted(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            match io.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => return Some("disk"),
                io::ErrorKind::OutOfMemory => return Some("memory"),
                _ => {}
            }
            if io.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error()) {
                return Some("process ids");
            }
        }
        next = error.source();
    }
    None
}

impl From<VmmError> for Failure {
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::Unavailable { what } => Self::VmmUnavailable(what),
            other => Self::step("starting the machine", &other),
        }
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::NotFound { name } => Self::TemplateNotFound(name),
            TemplateError::Vmm(VmmError::Unavailable { what }) => Self::VmmUnavailable(what),
            TemplateError::NoSpace { what } => Self::NoCapacity(format!("disk: {what}")),
            other => Self::step("preparing the template's machine", &other),
        }
    }
}

impl From<JournalError> for Failure {
    fn from(error: JournalError) -> Self {
        match error {
            JournalError::Stale { .. } => Self::Stale,
            JournalError::Write { full: true, what } => {
                Self::NoCapacity(format!("disk: writing the journal: {what}"))
            }
            other => Self::step("recording the sandbox", &other),
        }
    }
}

/// For use in `map_err`.
pub(crate) fn privilege(step: &'static str) -> impl FnOnce(PrivilegeError) -> Failure {
    move |error| Failure::step(step, &error)
}

/// For use in `map_err`.
pub(crate) fn file(step: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::step(step, &error)
}

impl From<TemplateError> for NodeError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::NotFound { name } => Self::TemplateNotFound {
                name: shortened(&name, 128),
            },
            TemplateError::Vmm(VmmError::Unavailable { what }) => Self::VmmUnavailable { what },
            TemplateError::NoSpace { what } => no_capacity(format!("disk: {what}")),
            other => Self::Internal { what: chain(&other) },
        }
    }
}

impl From<JournalError> for NodeError {
    fn from(error: JournalError) -> Self {
        Self::Internal { what: chain(&error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_run_out_is_told_apart_through_the_chain() {
        let full = PrivilegeError::System {
            act: "mkdir".to_owned(),
            source: io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()),
        };
        let failure = Failure::step("making its directory", &full);
        assert!(
            matches!(&failure, Failure::NoCapacity(what) if what.starts_with("disk:")),
            "{failure:?}"
        );
        let other = PrivilegeError::NotPermitted {
            act: "mkdir".to_owned(),
        };
        assert!(matches!(Failure::step("x", &other), Failure::Step(_)));
    }

    #[test]
    fn texts_are_cut_at_characters() {
        assert_eq!(shortened("aé", 2), "a");
        assert_eq!(tail("éa", 2), "a");
        assert_eq!(tail("éa", 9), "éa");
    }
}
