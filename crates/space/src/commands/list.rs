//! `space sandbox ls`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use jiff::Timestamp;
use space_api::lifecycle::SandboxState;
use space_client::RecordFilter;

use crate::{
    cli::Global,
    commands::{
        inspect::cause_words,
        options::{Assignment, pairs, span, state},
    },
    error::CliError,
    output,
};

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Show ended ones too
    #[arg(long, short = 'a', conflicts_with = "state")]
    all: bool,
    /// Show only those in this state: creating, running, paused or ended
    #[arg(long, short = 's', value_name = "STATE", value_parser = state)]
    state: Vec<SandboxState>,
    /// Show only those with this label
    #[arg(long, short = 'l', value_name = "NAME=VALUE")]
    label: Vec<Assignment>,
    /// Show only those of this template
    #[arg(long, short = 't', value_name = "TEMPLATE")]
    template: Option<String>,
    /// Show only those younger than this, such as 2h
    #[arg(long, value_name = "TIME", value_parser = span)]
    since: Option<Duration>,
    /// Show at most so many, the newest
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    limit: usize,
}

impl List {
    fn filter(&self) -> RecordFilter {
        let states = match (&self.state[..], self.all) {
            ([], true) => Vec::new(),
            ([], false) => vec![
                SandboxState::Creating,
                SandboxState::Running,
                SandboxState::Paused,
            ],
            (states, _) => states.to_vec(),
        };
        RecordFilter {
            states,
            labels: pairs(&self.label),
            template: self.template.clone(),
            created_after: self
                .since
                .and_then(|since| Timestamp::now().checked_sub(since).ok()),
            created_before: None,
            limit: Some(self.limit),
        }
    }

    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let records = global.client()?.list(&self.filter()).await?;
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
                    record.state.as_str().to_owned(),
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
