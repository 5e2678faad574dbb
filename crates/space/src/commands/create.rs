//! `space sandbox create`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use serde_json::json;

use crate::{
    cli::Global,
    commands::{
        options::{NewSandbox, span},
        pump::millis,
    },
    error::CliError,
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    new: NewSandbox,
    /// End it after this time, such as 30m or 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = span)]
    timeout: Duration,
}

impl Create {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let started = std::time::Instant::now();
        let sandbox = client.create(&self.new.options(Some(self.timeout))).await?;
        if global.json {
            output::json(&json!({
                "id": sandbox.id(),
                "template": sandbox.details().template_id,
                "domain": sandbox.details().domain,
                "access_token": sandbox.access_token(),
                "create_ms": millis(started.elapsed()),
            }))?;
        } else {
            output::line(sandbox.id().as_str())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
