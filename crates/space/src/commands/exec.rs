//! `space sandbox exec`.

use std::process::ExitCode;

use clap::Args;
use space_api::id::SandboxId;

use crate::{
    cli::Global,
    commands::{
        options::{Assignment, sandbox_id},
        pump::{Execution, not_run},
    },
    error::CliError,
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Set an environment variable; NAME alone takes the value from here
    #[arg(long, short = 'e', value_name = "NAME=VALUE")]
    env: Vec<Assignment>,
    /// Sandbox to run it in
    #[arg(value_parser = sandbox_id)]
    sandbox: SandboxId,
    #[command(flatten)]
    execution: Execution,
}

impl Exec {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let sandbox = global
            .client()?
            .connect(&self.sandbox, None)
            .await
            .map_err(not_run)?;
        if !global.json {
            return self.execution.stream(&sandbox, &self.env).await;
        }
        let (value, code) = self.execution.collect(&sandbox, &self.env).await?;
        output::json(&value)?;
        Ok(code)
    }
}
