//! `space completion`.

use std::process::ExitCode;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::{cli::Cli, error::CliError, output};

#[derive(Debug, Args)]
pub(crate) struct Completion {
    /// Shell to print it for
    shell: Shell,
}

impl Completion {
    pub(crate) fn run(&self) -> Result<ExitCode, CliError> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "space", &mut script);
        output::stdout(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}
