//! Measurements and the soak: builds the benchmark binary and runs it.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::{
    build::{self, Built, Scope},
    platform, python,
    session::Session,
    setup::{self, Purpose},
};

/// What to measure
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Measure how fast sandboxes start, with and without the pool, what they cost, and how fast they answer
    Create(Create),
    /// Measure the memory of idle sandboxes of 128, 256 and 512 MiB, and what it is used for
    Density(Density),
}

/// Options of `bench create`
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Write the figures here as JSON, after each section
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Starts of each kind without the pool, at least 50 for a result that counts
    #[arg(long, default_value_t = 60)]
    n: u32,
    /// Creates from the pool, at least 200 for a result that counts
    #[arg(long, default_value_t = 200)]
    pool_n: u32,
    /// Creates per second from the pool [default: half of what refilling sustains, 0.5 to 2]
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,
    /// Only a short look whether everything can be measured
    #[arg(long)]
    smoke: bool,
    /// Where the template is kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
}

/// Options of `bench density`
#[derive(Debug, Args)]
pub(crate) struct Density {
    /// Write the figures here as JSON, after each size
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Idle sandboxes of each size
    #[arg(long, default_value_t = 16)]
    n: u32,
    /// Where the template is kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
}

/// Options of `soak`
#[derive(Debug, Args)]
pub(crate) struct Soak {
    /// Rounds of create, run, delete
    #[arg(long, value_name = "N", default_value_t = 2000)]
    rounds: u32,
    /// Processes of the platform killed meanwhile
    #[arg(long, value_name = "N", default_value_t = 200)]
    kills: u32,
    /// Clients at a time
    #[arg(long, value_name = "N", default_value_t = 4)]
    clients: u32,
    /// End after so many seconds though rounds are left
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Repeat the choices of an earlier run
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Write everything here as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the template is kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
}

/// Runs one measurement.
pub(crate) fn run(session: &Session, bench: &Bench) -> Result<ExitCode> {
    let data = match bench {
        Bench::Create(create) => &create.data_dir,
        Bench::Density(density) => &density.data_dir,
    };
    let built = prepare(session, data)?;
    let mut command;
    match bench {
        Bench::Create(create) => {
            command = self::create(session, &built, data)?;
            command.arg("--n").arg(create.n.to_string());
            command.arg("--pool-n").arg(create.pool_n.to_string());
            if let Some(rate) = create.rate {
                command.arg("--rate").arg(rate.to_string());
            }
            if create.smoke {
                command.arg("--smoke");
            }
            json(&mut command, create.json.as_deref())?;
        }
        Bench::Density(density) => {
            command = program(session, &built, data, "density");
            command.arg("--n").arg(density.n.to_string());
            json(&mut command, density.json.as_deref())?;
        }
    }
    shown(session, &mut command)
}

/// Runs the soak.
pub(crate) fn run_soak(session: &Session, options: &Soak) -> Result<ExitCode> {
    let built = prepare(session, &options.data_dir)?;
    let mut command = soak(session, &built, &options.data_dir, options.rounds, options.kills);
    command.arg("--clients").arg(options.clients.to_string());
    if let Some(seconds) = options.seconds {
        command.arg("--seconds").arg(seconds.to_string());
    }
    if let Some(seed) = options.seed {
        command.arg("--seed").arg(seed.to_string());
    }
    json(&mut command, options.json.as_deref())?;
    shown(session, &mut command)
}

/// The measurement of creates with what it always needs.
pub(crate) fn create(session: &Session, built: &Built, data_directory: &Path) -> Result<Command> {
    // The same that the tests of the SDK use.
    let requirements = session.root().join("tests/sdk/python/requirements.txt");
    let python = python::environment(session, "sdk-python", &requirements, None)?;
    let mut command = program(session, built, data_directory, "create");
    command.arg("--python").arg(python);
    Ok(command)
}

/// The soak with what it always needs.
pub(crate) fn soak(
    session: &Session,
    built: &Built,
    data_directory: &Path,
    rounds: u32,
    kills: u32,
) -> Command {
    let mut command = program(session, built, data_directory, "soak");
    command.arg("--rounds").arg(rounds.to_string());
    command.arg("--kills").arg(kills.to_string());
    command
}

fn prepare(session: &Session, data_directory: &Path) -> Result<Built> {
    setup::ensure(session, Purpose::Demo)?;
    let built = build::all(session, Scope::Benchmark)?;
    platform::ensure_template(session, &built, data_directory)?;
    Ok(built)
}

/// The benchmark starts platforms of its own, on data directories of their own, and shares only the templates.
fn program(session: &Session, built: &Built, data_directory: &Path, what: &str) -> Command {
    let mut command = session.command(session.target().join("debug/space-bench"));
    command
        .arg(what)
        .arg("--space")
        .arg(&built.space)
        .arg("--daemon")
        .arg(&built.daemon)
        .arg("--templates")
        .arg(data_directory.join("templates"));
    command
}

fn json(command: &mut Command, file: Option<&Path>) -> Result<()> {
    if let Some(file) = file {
        command.arg("--json").arg(std::path::absolute(file)?);
    }
    Ok(())
}

fn shown(session: &Session, command: &mut Command) -> Result<ExitCode> {
    Ok(if session.run_shown(command)?.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
