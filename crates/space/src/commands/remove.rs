//! `space sandbox rm`.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use space_api::{id::SandboxId, lifecycle::SandboxState};
use space_client::RecordFilter;

use crate::{
    cli::Global,
    commands::options::sandbox_id,
    error::{CliError, Failures, Kind},
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Remove {
    /// Sandboxes to end
    #[arg(value_parser = sandbox_id, required_unless_present = "all")]
    sandboxes: Vec<SandboxId>,
    /// End all of the project
    #[arg(long, conflicts_with = "sandboxes")]
    all: bool,
    /// Do not mind those that are gone already
    #[arg(long, short = 'f')]
    force: bool,
}

impl Remove {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let ids = if self.all {
            // Those too that are being made: they would be there a moment later.
            let live = RecordFilter {
                states: vec![
                    SandboxState::Creating,
                    SandboxState::Running,
                    SandboxState::Paused,
                ],
                ..RecordFilter::default()
            };
            let listed = client.list(&live).await?;
            listed.into_iter().map(|each| each.id).collect()
        } else {
            self.sandboxes.clone()
        };
        let mut removed = Vec::new();
        let mut missing = Vec::new();
        let mut failures = Failures::default();
        for id in ids {
            match client.delete(&id).await {
                Ok(true) => {
                    if !global.json {
                        output::line(id.as_str())?;
                    }
                    removed.push(id);
                }
                Ok(false) => {
                    if !self.force && !self.all {
                        let error = anyhow::anyhow!("sandbox {id} was not found");
                        failures.add(
                            CliError::new(Kind::NotFound, error)
                                .with_hint("`space sandbox ls` shows what there is; --force does not mind"),
                        );
                    }
                    missing.push(id);
                }
                Err(error) => {
                    failures.add(CliError::from(error).about(&format!("sandbox {id} was not ended")));
                }
            }
        }
        if global.json {
            output::json(&json!({"removed": removed, "not_found": missing}))?;
        }
        failures.finish(global.json)
    }
}
