//! `space sandbox pause`, `resume` and `extend`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use space_api::id::SandboxId;

use crate::{
    cli::Global,
    commands::options::{sandbox_id, span},
    error::CliError,
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
        for id in &self.sandboxes {
            records.push(client.pause(id).await?);
            if !global.json {
                output::line(id.as_str())?;
            }
        }
        if global.json {
            output::json(&records)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Resume {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let mut records = Vec::new();
        for id in &self.sandboxes {
            records.push(client.resume(id).await?);
            if !global.json {
                output::line(id.as_str())?;
            }
        }
        if global.json {
            output::json(&records)?;
        }
        Ok(ExitCode::SUCCESS)
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
