//! `space sandbox events`.

use std::process::ExitCode;

use clap::Args;
use space_api::{id::SandboxId, lifecycle::EndCause, rest::SandboxEvent};

use crate::{
    cli::Global,
    commands::{inspect::cause_words, options::sandbox_id},
    error::CliError,
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Events {
    /// Sandbox to show, live or ended
    #[arg(value_parser = sandbox_id, required_unless_present = "follow", conflicts_with = "follow")]
    sandbox: Option<SandboxId>,
    /// Go on with what happens to all sandboxes of the project, until interrupted
    #[arg(long, short = 'f')]
    follow: bool,
}

impl Events {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        if let Some(id) = &self.sandbox {
            let events = client.events(id).await?;
            if global.json {
                output::json(&events)?;
            } else {
                for event in &events {
                    output::line(words(event))?;
                }
            }
            return Ok(ExitCode::SUCCESS);
        }
        let mut stream = client.follow_events(None).await?;
        loop {
            let event = stream.next().await?;
            if global.json {
                // One a line: a stream has no end at which an array could be closed.
                let text = serde_json::to_string(&event)
                    .map_err(|error| CliError::internal("cannot write the event", error))?;
                output::line(text)?;
            } else {
                output::line(words(&event))?;
            }
        }
    }
}

fn words(event: &SandboxEvent) -> String {
    let detail = match event.kind.as_str() {
        "ended" => serde_json::from_str::<EndCause>(&event.detail)
            .map_or_else(|_| event.detail.clone(), |cause| cause_words(&cause)),
        _ => event.detail.clone(),
    };
    let text = format!("{}  {}  {:<8}  {detail}", event.at, event.sandbox_id, event.kind);
    output::printable(&text)
}
