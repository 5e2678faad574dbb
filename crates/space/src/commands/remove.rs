//! `space sandbox rm`.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use space_api::id::SandboxId;

use crate::{
    cli::Global,
    commands::options::sandbox_id,
    error::{CliError, Kind},
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
            let listed = client.sandboxes().await?;
            listed
                .iter()
                .filter_map(|each| each.sandbox_id.parse().ok())
                .collect()
        } else {
            self.sandboxes.clone()
        };
        let mut removed = Vec::new();
        let mut missing = Vec::new();
        for id in ids {
            if client.delete(&id).await? {
                if !global.json {
                    output::line(id.as_str())?;
                }
                removed.push(id);
            } else {
                missing.push(id);
            }
        }
        if global.json {
            output::json(&json!({"removed": removed, "not_found": missing}))?;
        }
        match missing.first() {
            Some(id) if !self.force && !self.all => Err(CliError::new(
                Kind::NotFound,
                anyhow::anyhow!("sandbox {id} was not found"),
            )
            .with_hint("`space sandbox ls` shows what there is; --force does not mind")),
            _ => Ok(ExitCode::SUCCESS),
        }
    }
}
