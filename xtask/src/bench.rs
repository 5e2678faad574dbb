//! Measurements: builds the benchmark binary and runs it.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::{
    build::{self, Scope},
    platform::{self, Platform},
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
    /// Where the platform keeps its data
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
}

/// Runs one.
pub(crate) fn run(session: &Session, bench: &Bench) -> Result<ExitCode> {
    let Bench::Create(create) = bench;
    setup::ensure(session, Purpose::Demo)?;
    let built = build::all(session, Scope::Benchmark)?;
    platform::ensure_template(session, &built, &create.data_dir)?;
    let platform = Platform::start(session, &built, &create.data_dir)?;
    let mut command = command(session, &platform, &create.data_dir);
    command.arg("--n").arg(create.n.to_string());
    if create.smoke {
        command.arg("--smoke");
    }
    if let Some(json) = &create.json {
        command.arg("--json").arg(std::path::absolute(json)?);
    }
    let ended = session.run_shown(&mut command);
    platform.stop()?;
    Ok(if ended?.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The benchmark with what it always needs.
pub(crate) fn command(session: &Session, platform: &Platform, data_directory: &Path) -> Command {
    let mut command = session.command(session.target().join("debug/space-bench"));
    command.arg("create").arg("--data-dir").arg(data_directory);
    command
        .env("SPACE_API_URL", &platform.url)
        .env("SPACE_API_KEY", &platform.key);
    command
}
