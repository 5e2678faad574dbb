//! `space run`: one command, one sandbox.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use space_client::Sandbox;
use tokio::signal::unix::{SignalKind, signal};

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

impl Run {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let lifetime = self
            .execution
            .timeout()
            .map_or(LIFETIME, |timeout| (timeout + LIFETIME_MARGIN).min(LIFETIME));
        let started = std::time::Instant::now();
        let sandbox = client
            .create(&self.new.options(Some(lifetime)))
            .await
            .map_err(|error| CliError::from(error).exiting(NOT_RUN_EXIT))?;
        let created = started.elapsed();

        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let result = tokio::select! {
            result = self.execute(&sandbox, global.json, created) => result,
            _ = interrupt.recv() => Ok(ExitCode::from(130)),
            _ = terminate.recv() => Ok(ExitCode::from(143)),
        };

        if self.keep {
            output::note(format!("space: kept sandbox {}", sandbox.id()));
        } else if let Err(error) = client.delete(sandbox.id()).await {
            let error = CliError::from(error);
            output::note(format!(
                "space: sandbox {} could not be deleted: {}",
                sandbox.id(),
                error.chain().join(": ")
            ));
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
