//! `space sandbox label`.

use std::{collections::BTreeMap, process::ExitCode};

use clap::Args;
use space_api::{id::SandboxId, rest::SandboxEdit};

use crate::{cli::Global, commands::options::sandbox_id, error::CliError, output};

#[derive(Debug, Args)]
pub(crate) struct Label {
    /// Sandbox to change, live or ended
    #[arg(value_parser = sandbox_id)]
    sandbox: SandboxId,
    /// NAME=VALUE sets it, NAME- takes it away
    #[arg(value_name = "CHANGE", required = true, value_parser = change)]
    changes: Vec<(String, Option<String>)>,
    /// Change metadata instead of labels
    #[arg(long)]
    metadata: bool,
}

fn change(given: &str) -> Result<(String, Option<String>), String> {
    let (name, value) = match given.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => match given.strip_suffix('-') {
            Some(name) => (name, None),
            None => return Err("expected NAME=VALUE, or NAME- to take it away".to_owned()),
        },
    };
    if name.is_empty() {
        return Err("the name is empty".to_owned());
    }
    Ok((name.to_owned(), value))
}

impl Label {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let changes: BTreeMap<_, _> = self.changes.iter().cloned().collect();
        let edit = if self.metadata {
            SandboxEdit {
                metadata: changes,
                ..SandboxEdit::default()
            }
        } else {
            SandboxEdit {
                labels: changes,
                ..SandboxEdit::default()
            }
        };
        let record = global.client()?.edit(&self.sandbox, &edit).await?;
        if global.json {
            output::json(&record)?;
            return Ok(ExitCode::SUCCESS);
        }
        let shown = if self.metadata {
            &record.metadata
        } else {
            &record.labels
        };
        for (name, value) in shown {
            output::line(output::printable(&format!("{name}={value}")))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_set_and_take_away() {
        assert_eq!(change("a=b=c"), Ok(("a".to_owned(), Some("b=c".to_owned()))));
        assert_eq!(change("a-"), Ok(("a".to_owned(), None)));
        for bad in ["", "-", "a", "=b"] {
            assert!(change(bad).is_err(), "{bad}");
        }
    }
}
