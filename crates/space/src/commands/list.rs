//! `space sandbox ls`.

use std::process::ExitCode;

use clap::Args;
use space_api::lifecycle::SandboxState;

use crate::{
    cli::Global,
    commands::inspect::{cause_words, state_word},
    error::CliError,
    output,
};

/// Most records that are asked for.
const LIMIT: u32 = 1000;

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Show ended ones too
    #[arg(long, short = 'a')]
    all: bool,
}

impl List {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let mut records = global.client()?.records(LIMIT).await?;
        if !self.all {
            records.retain(|record| record.state != SandboxState::Ended);
        }
        if global.json {
            output::json(&records)?;
            return Ok(ExitCode::SUCCESS);
        }
        let rows = records
            .iter()
            .map(|record| {
                let end = match (&record.ended_at, &record.end_cause) {
                    (Some(at), Some(cause)) => format!("{} ({})", output::relative(*at), cause_words(cause)),
                    _ => output::relative(record.deadline),
                };
                vec![
                    record.id.to_string(),
                    state_word(record.state).to_owned(),
                    record.template.clone(),
                    format!("{}x{}x{}", record.vcpus, record.memory_mib, record.disk_mib),
                    output::relative(record.started_at),
                    end,
                ]
            })
            .collect();
        output::table(&["id", "state", "template", "size", "created", "ends"], rows)?;
        Ok(ExitCode::SUCCESS)
    }
}
