//! Measurements: builds the benchmark binary and runs it.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::{
    build,
    session::Session,
    setup::{self, Purpose},
};

/// What to measure
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Measure how fast sandboxes start, what they cost, and how fast they answer
    Create(Create),
}

/// Options of `bench create`
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Starts of each kind, at least 50 for a result that counts
    #[arg(long, default_value_t = 50)]
    n: u32,
    /// Only a short look whether everything can be measured
    #[arg(long)]
    smoke: bool,
    /// Data directory, with the template in it or to make it in
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// Runs one.
pub(crate) fn run(session: &Session, bench: &Bench) -> Result<ExitCode> {
    let Bench::Create(create) = bench;
    setup::ensure(session, Purpose::Demo)?;
    let built = build::all(session)?;
    session.run(
        "build bench",
        session.cargo().args(["build", "--locked", "-p", "space-bench"]),
    )?;
    let mut command = command(session, &built);
    command.arg("--n").arg(create.n.to_string());
    if create.smoke {
        command.arg("--smoke");
    }
    if let Some(json) = &create.json {
        command.arg("--json").arg(std::path::absolute(json)?);
    }
    if let Some(directory) = &create.data_dir {
        command.arg("--data-dir").arg(std::path::absolute(directory)?);
    }
    let status = session.run_shown(&mut command)?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The benchmark binary with what it always needs.
pub(crate) fn command(session: &Session, built: &build::Built) -> std::process::Command {
    let mut command = session.command(session.target().join("debug/space-bench"));
    command
        .arg("create")
        .arg("--space")
        .arg(&built.space)
        .arg("--daemon")
        .arg(&built.daemon);
    command
}
