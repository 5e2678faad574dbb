//! `space sandbox inspect`.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use serde_json::json;
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};

use crate::{cli::Global, commands::options::sandbox_id, error::CliError, output};

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Sandbox to show
    #[arg(value_parser = sandbox_id)]
    sandbox: SandboxId,
}

impl Inspect {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        let record = client.inspect(&self.sandbox).await?;
        let usage = if record.state == SandboxState::Running {
            // Gone meanwhile, or its daemon does not answer: the record is worth showing all the same.
            client
                .metrics(&self.sandbox)
                .await
                .ok()
                .and_then(|samples| samples.into_iter().last())
        } else {
            None
        };
        if global.json {
            let mut value = json!(record);
            value["usage"] = json!(usage);
            output::json(&value)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut rows = vec![
            ("id", record.id.to_string()),
            ("state", record.state.as_str().to_owned()),
            ("template", record.template.clone()),
            ("digest", record.template_digest.clone()),
            (
                "size",
                format!(
                    "{} vCPU, {} MiB memory, {} MiB disk",
                    record.vcpus, record.memory_mib, record.disk_mib
                ),
            ),
            ("generation", record.generation.to_string()),
            (
                "created",
                format!("{} ({})", output::relative(record.started_at), record.started_at),
            ),
        ];
        if let Some(ready) = record.ready_ms {
            rows.push(("ready after", format!("{ready:.1} ms")));
        }
        match (&record.ended_at, &record.end_cause) {
            (Some(at), Some(cause)) => {
                rows.push(("ended", format!("{} ({at})", output::relative(*at))));
                rows.push(("cause", cause_words(cause)));
            }
            _ => rows.push((
                "ends",
                format!("{} ({})", output::relative(record.deadline), record.deadline),
            )),
        }
        if let Some(cpu) = record.cpu_micros {
            rows.push(("cpu time", output::duration(Duration::from_micros(cpu))));
        }
        if let Some(usage) = usage {
            rows.push(("cpu", format!("{:.0} %", usage.cpu_used_pct)));
            rows.push((
                "memory",
                format!(
                    "{} of {}",
                    output::bytes(usage.mem_used),
                    output::bytes(usage.mem_total)
                ),
            ));
            rows.push((
                "disk",
                format!(
                    "{} of {}",
                    output::bytes(usage.disk_used),
                    output::bytes(usage.disk_total)
                ),
            ));
        }
        if let Some(machine) = &record.machine {
            rows.push(("machine", machine.clone()));
        }
        if let Some(at) = record.paused_at {
            rows.push(("paused", output::relative(at)));
        } else if let Some(at) = record.idle_since {
            rows.push(("idle", output::relative(at)));
        } else if let Some(at) = record.last_active_at {
            rows.push(("last active", output::relative(at)));
        }
        if let Some(policy) = record.on_idle {
            let span = output::duration(Duration::from_secs(policy.after_seconds.into()));
            rows.push(("when idle", format!("paused after {span}")));
        }
        for (name, value) in &record.labels {
            rows.push(("label", format!("{name}={value}")));
        }
        for (name, value) in &record.metadata {
            rows.push(("metadata", format!("{name}={value}")));
        }
        for (name, value) in rows {
            output::line(format!("{name:<12} {}", output::printable(&value)))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A cause in plain words.
pub(crate) fn cause_words(cause: &EndCause) -> String {
    match cause {
        EndCause::Deleted => "deleted".to_owned(),
        EndCause::Deadline => "its time was up".to_owned(),
        EndCause::GuestShutdown => "shut down from inside".to_owned(),
        EndCause::GuestFailed { detail } => format!("the guest failed: {detail}"),
        EndCause::VmmFailed { detail } => format!("the VMM failed: {detail}"),
        EndCause::OutOfMemory => "out of memory on the host".to_owned(),
        EndCause::PlatformShutdown => "the platform was shut down".to_owned(),
        EndCause::PlatformRestarted => "the platform was killed and started again".to_owned(),
        EndCause::CreateFailed { detail } => format!("could not be created: {detail}"),
    }
}
