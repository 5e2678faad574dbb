//! The errors of this crate, one variant per kind of failure a caller treats differently.

use std::{io, path::PathBuf};

use space_node_manager::PrivilegeError;
use space_vmm::VmmError;

/// What can go wrong with templates and their machines.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Neither a name, a `name:tag` nor a digest.
    #[error("\"{shown}\" does not name a template: expected {expected}")]
    BadName {
        /// What was given, cut to 64 characters and escaped.
        shown: String,
        /// The form it should have.
        expected: &'static str,
    },
    /// Well formed, but nothing of that name is here.
    #[error("template \"{reference}\" was not found")]
    TemplateNotFound {
        /// As asked.
        reference: String,
    },
    /// The recipe cannot be used.
    #[error("the recipe is not usable: {what}")]
    BadRecipe {
        /// Which part and why.
        what: String,
    },
    /// The file system is full.
    #[error("no space left on the device while trying to {step}")]
    NoSpace {
        /// During what.
        step: &'static str,
    },
    /// A file operation failed; the source names the path.
    #[error("cannot {step}")]
    Io {
        /// During what.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A stored file is not what its name says.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// The act needs rights that this process does not have.
    #[error("{act} needs root")]
    NeedsRoot {
        /// Which.
        act: &'static str,
    },
    /// A host program is not installed.
    #[error("{program} is not installed: install the Debian package {package}")]
    MissingProgram {
        /// Its name.
        program: String,
        /// Where it comes from.
        package: &'static str,
    },
    /// A host program failed.
    #[error("{program} failed ({status}): {tail}")]
    ProgramFailed {
        /// Its name.
        program: String,
        /// Exit status in words.
        status: String,
        /// The end of what it said, at most 2 KiB.
        tail: String,
    },
    /// A host program ran for too long and was killed.
    #[error("{program} did not finish within {seconds} s and was killed")]
    ProgramTimedOut {
        /// Its name.
        program: String,
        /// The limit.
        seconds: u64,
    },
    /// The host's package sources do not offer what is needed.
    #[error("{what}")]
    PackageSource {
        /// What is missing and how to mend it.
        what: String,
    },
    /// The machine that was to become the template failed.
    #[error("the template's machine failed to {step}")]
    Machine {
        /// During what.
        step: &'static str,
        /// Why.
        #[source]
        source: VmmError,
    },
    /// A privileged act failed.
    #[error("cannot {step} for the template's machine")]
    Privilege {
        /// During what.
        step: &'static str,
        /// Why.
        #[source]
        source: PrivilegeError,
    },
    /// The guest did not do what it was asked to.
    #[error("the template's machine did not {step}: {what}")]
    Guest {
        /// During what.
        step: String,
        /// What was seen, at most 4 KiB, with the end of the console if that helps.
        what: String,
    },
    /// The build was given up because its owner went away.
    #[error("the build was given up")]
    Cancelled,
}

impl VolumeError {
    /// Wraps a file error, telling a full device apart.
    pub(crate) fn io(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| {
            if matches!(
                source.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) {
                Self::NoSpace { step }
            } else {
                Self::Io { step, source }
            }
        }
    }

    /// The error with all its causes in one line.
    pub fn chain(&self) -> String {
        let mut line = self.to_string();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            line.push_str(": ");
            line.push_str(&cause.to_string());
            next = cause.source();
        }
        line
    }
}
