//! `space sandbox pause`, `resume` and `extend`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use space_api::id::SandboxId;

use crate::{
    cli::Global,
    commands::options::{sandbox_id, span},
    error::{CliError, Failures},
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// Sandboxes to stop
    #[arg(value_parser = sandbox_id, required = true)]
    sandboxes: Vec<SandboxId>,
}

#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// Sandboxes to let run on
    #[arg(value_parser = sandbox_id, required = true)]
    sandboxes: Vec<SandboxId>,
}

#[derive(Debug, Args)]
pub(crate) struct Extend {
    /// Sandbox to keep alive
    #[arg(value_parser = sandbox_id)]
    sandbox: SandboxId,
    /// For at least this time from now, such as 30m or 2h; its end never comes sooner by it
    #[arg(value_parser = span)]
    time: Duration,
}

impl Pause {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let mut records = Vec::new();
        let mut failures = Failures::default();
        for id in &self.sandboxes {
            match client.pause(id).await {
                Ok(record) => {
                    records.push(record);
                    if !global.json {
                        output::line(id.as_str())?;
                    }
                }
                Err(error) => {
                    failures.add(CliError::from(error).about(&format!("sandbox {id} was not paused")));
                }
            }
        }
        if global.json {
            output::json(&records)?;
        }
        failures.finish(global.json)
    }
}

impl Resume {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let mut records = Vec::new();
        let mut failures = Failures::default();
        for id in &self.sandboxes {
            match client.resume(id).await {
                Ok(record) => {
                    records.push(record);
                    if !global.json {
                        output::line(id.as_str())?;
                    }
                }
                Err(error) => {
                    failures.add(CliError::from(error).about(&format!("sandbox {id} was not resumed")));
                }
            }
        }
        if global.json {
            output::json(&records)?;
        }
        failures.finish(global.json)
    }
}

impl Extend {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let record = global.client()?.extend(&self.sandbox, self.time).await?;
        if global.json {
            output::json(&record)?;
        } else {
            output::line(format!("ends {}", output::relative(record.deadline)))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
