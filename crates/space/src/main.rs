//! The one binary: the command line, and the processes of the platform. Wiring only.

mod cli;
mod commands;
mod error;
mod output;
mod terminal;

use std::{io::IsTerminal as _, process::ExitCode};

use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::{cli::Cli, error::CliError};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.global.json;
    match run(cli) {
        Ok(code) => code,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error, json);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, CliError> {
    if let Some(name) = cli.command.process_name() {
        // Only a name: nothing depends on it.
        let _: Result<(), _> = rustix::thread::set_name(name);
    }
    let default = if cli.command.is_server() { "info" } else { "error" };
    let filter = EnvFilter::try_from_env("SPACE_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let mut builder = if cli.command.is_single_threaded() {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|error| CliError::internal("cannot start the runtime", error))?;
    let result = runtime.block_on(commands::dispatch(cli));
    // A thread may be blocked reading the terminal; there is nothing in it worth waiting for.
    runtime.shutdown_background();
    result
}
