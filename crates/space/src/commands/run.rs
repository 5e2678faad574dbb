//! `space run`: one command, one sandbox.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use space_client::Sandbox;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    cli::Global,
    commands::{
        options::NewSandbox,
        pump::{Execution, NOT_RUN_EXIT, millis},
    },
    error::CliError,
    output,
};

/// How long the sandbox outlives its command's deadline, should we die before we delete it.
const LIFETIME_MARGIN: Duration = Duration::from_secs(60);
/// How long it lives if the command has no deadline.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    new: NewSandbox,
    /// Keep the sandbox afterwards and say its id
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    execution: Execution,
}

/// The signals that end a run in order, with the exit codes that shells give them.
#[derive(Debug)]
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn recv(&mut self) -> ExitCode {
        tokio::select! {
            _ = self.interrupt.recv() => ExitCode::from(130),
            _ = self.terminate.recv() => ExitCode::from(143),
        }
    }
}

impl Run {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let lifetime = self
            .execution
            .timeout()
            .map_or(LIFETIME, |timeout| (timeout + LIFETIME_MARGIN).min(LIFETIME));
        let mut signals = Signals::new()?;
        let started = std::time::Instant::now();
        let options = self.new.options(Some(lifetime));
        let mut creating = std::pin::pin!(client.create(&options));
        // Given up half-way the sandbox would come to be all the same, and nobody would know its id.
        let (created, signalled) = tokio::select! {
            created = &mut creating => (created, None),
            code = signals.recv() => {
                output::note("space: waiting for the sandbox, to delete it; once more leaves it behind");
                tokio::select! {
                    created = &mut creating => (created, Some(code)),
                    code = signals.recv() => return Ok(code),
                }
            }
        };
        let sandbox = created.map_err(|error| CliError::from(error).exiting(NOT_RUN_EXIT))?;
        let created = started.elapsed();
        let result = match signalled {
            Some(code) => Ok(code),
            None => tokio::select! {
                result = self.execute(&sandbox, global.json, created) => result,
                code = signals.recv() => Ok(code),
            },
        };

        if self.keep {
            output::note(format!("space: kept sandbox {}", sandbox.id()));
            return result;
        }
        tokio::select! {
            deleted = client.delete(sandbox.id()) => {
                if let Err(error) = deleted {
                    let error = CliError::from(error);
                    output::note(format!(
                        "space: sandbox {} could not be deleted: {}",
                        sandbox.id(),
                        error.chain().join(": ")
                    ));
                }
            }
            code = signals.recv() => {
                output::note(format!("space: sandbox {} may not be deleted yet", sandbox.id()));
                return Ok(code);
            }
        }
        result
    }

    async fn execute(&self, sandbox: &Sandbox, json: bool, created: Duration) -> Result<ExitCode, CliError> {
        if !json {
            return self.execution.stream(sandbox, &[]).await;
        }
        let (mut value, code) = self.execution.collect(sandbox, &[]).await?;
        value["sandbox"] = sandbox.id().as_str().into();
        value["timings"]["create_ms"] = millis(created).into();
        output::json(&value)?;
        Ok(code)
    }
}
