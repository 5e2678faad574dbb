//! Errors of the command line: a kind that decides the exit code, causes, and a hint that says what to do next.

use std::process::ExitCode;

use space_api::error::ErrorCode;
use space_client::ClientError;

use crate::output;

/// What sort of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// The machine lacks something.
    Environment,
    /// The command line asks for something impossible.
    Usage,
    /// Nobody answers.
    Unreachable,
    /// What was named does not exist.
    NotFound,
    /// The platform said no.
    Refused,
    /// Should not happen.
    Internal,
}

/// A failed command.
#[derive(Debug)]
pub(crate) struct CliError {
    kind: Kind,
    error: anyhow::Error,
    hint: Option<String>,
    exit_code: Option<u8>,
}

impl CliError {
    pub(crate) fn new(kind: Kind, error: impl Into<anyhow::Error>) -> Self {
        Self {
            kind,
            error: error.into(),
            hint: None,
            exit_code: None,
        }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, anyhow::Error::msg(message.into()))
    }

    pub(crate) fn environment(message: impl Into<String>) -> Self {
        Self::new(Kind::Environment, anyhow::Error::msg(message.into()))
    }

    pub(crate) fn internal(
        doing: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::new(Kind::Internal, anyhow::Error::new(source).context(doing.into()))
    }

    #[must_use]
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Overrides the exit code that the kind gives.
    #[must_use]
    pub(crate) fn exiting(mut self, code: u8) -> Self {
        self.exit_code = Some(code);
        self
    }

    /// Says first what it was about. Kind, causes and hint stay.
    #[must_use]
    pub(crate) fn about(mut self, what: &str) -> Self {
        self.error = self.error.context(what.to_owned());
        self
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The message and its causes, outermost first, without repetitions.
    pub(crate) fn chain(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for cause in self.error.chain() {
            let text = cause.to_string();
            if !lines.last().is_some_and(|last| last.contains(&text)) {
                lines.push(text);
            }
        }
        lines
    }

    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code.unwrap_or(match self.kind {
            Kind::Environment => 1,
            Kind::Usage => 2,
            Kind::Unreachable => 3,
            Kind::NotFound => 4,
            Kind::Refused => 5,
            Kind::Internal => 70,
        })
    }

    /// Whether another process holds what is needed, and will give it back.
    pub(crate) fn is_busy(&self) -> bool {
        self.error.chain().any(|cause| {
            matches!(
                cause.downcast_ref::<space_node_manager::PrivilegeError>(),
                Some(space_node_manager::PrivilegeError::Refused { .. })
            )
        })
    }

    /// Whether the reader of our output went away, which is no failure.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.error.chain().any(|cause| {
            cause
                .downcast_ref::<std::io::Error>()
                .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
        })
    }
}

/// What went wrong in a command that goes on with the others, and reports at the end.
#[derive(Debug, Default)]
pub(crate) struct Failures(Vec<CliError>);

impl Failures {
    pub(crate) fn add(&mut self, error: CliError) {
        self.0.push(error);
    }

    /// All are told; the first one decides the exit code.
    pub(crate) fn finish(mut self, as_json: bool) -> Result<ExitCode, CliError> {
        let code = self.0.first().map(CliError::exit_code);
        let (Some(last), Some(code)) = (self.0.pop(), code) else {
            return Ok(ExitCode::SUCCESS);
        };
        for other in &self.0 {
            output::error(other, as_json);
        }
        Err(last.exiting(code))
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        let not_found = error.is_not_found();
        let code = error.error_code();
        let hint = error.hint().map(str::to_owned);
        let (kind, default_hint) = match &error {
            ClientError::BadEndpoint { .. } => (Kind::Usage, None),
            ClientError::Unreachable { .. } => (
                Kind::Unreachable,
                Some("start the platform with `space up`, or name another one with --api-url"),
            ),
            _ if not_found && code == Some(ErrorCode::TemplateNotFound) => {
                (Kind::NotFound, Some("`space template ls` shows what there is"))
            }
            _ if not_found => (Kind::NotFound, Some("`space sandbox ls` shows what there is")),
            ClientError::Refused { body } if body.code == 401 => (
                Kind::Refused,
                Some("check the API key: SPACE_API_KEY or --api-key; `space up` prints one"),
            ),
            ClientError::Refused { .. } | ClientError::Guest { .. } => (Kind::Refused, None),
            ClientError::StreamBroken { .. } => (
                Kind::Refused,
                Some("`space sandbox inspect` says whether the sandbox is still there"),
            ),
            ClientError::Unexpected { .. } => (Kind::Internal, None),
        };
        let hint = hint.or_else(|| default_hint.map(str::to_owned));
        Self {
            hint,
            ..Self::new(kind, error)
        }
    }
}

impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        Self::new(Kind::Environment, error)
    }
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        Self::new(Kind::Environment, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_on_after_a_failure_ends_with_the_code_of_the_first() {
        assert!(Failures::default().finish(false).is_ok());
        let mut failures = Failures::default();
        let missing = CliError::new(Kind::NotFound, anyhow::anyhow!("no such thing"));
        failures.add(missing.about("it was not ended"));
        failures.add(CliError::usage("no"));
        let error = failures.finish(true).expect_err("two have failed");
        assert_eq!(error.exit_code(), 4);
        assert_eq!(error.chain(), ["no"]);
    }
}
