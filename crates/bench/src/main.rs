//! The benchmark: how fast sandboxes start compared with the least that is possible, what they cost, how fast they answer.
//!
//! `cargo xtask bench create` builds everything, starts a platform and runs this. What each figure means and what is
//! promised of it stands in `docs/specification.md` and `docs/benchmarks.md`.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the tables are its output")]

mod cold;
mod conditions;
mod create;
mod files;
mod floor;
mod machine;
mod memory;
mod pattern;
mod report;
mod statistics;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use space_client::{Client, Endpoint};

use crate::{machine::Host, report::Report};

/// Measure SPACE
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure creates against the restore floor, their cost, and a warm sandbox's answers
    Create(Create),
}

/// Options of `create`
#[derive(Debug, Args)]
struct Create {
    /// Address of the platform
    #[arg(long, env = "SPACE_API_URL", value_name = "URL")]
    api_url: String,
    /// Its key
    #[arg(long, env = "SPACE_API_KEY", value_name = "KEY", hide_env_values = true)]
    api_key: String,
    /// The platform's data directory, whose template the floor starts too
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
    /// Starts of each kind; fewer than 50 are no result
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    n: u32,
    /// Cold boots, at least 3 for a result
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    cold: u32,
    /// Only see whether everything can be measured: the curve ends at 2 and files are small
    #[arg(long)]
    smoke: bool,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Command::Create(create) = Arguments::parse().command;
    match run(&create) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Create) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(measure(options))
}

async fn measure(options: &Create) -> Result<()> {
    let client = Client::new(Endpoint::new(&options.api_url, &options.api_key)?)?;
    let node = client.node().await.context("the platform does not answer")?;
    let host = Host::open(&options.data_dir).await?;
    let mut report = Report::new(
        conditions::Conditions::gather(&node.vmm)?,
        options.n,
        options.smoke,
    );

    create::warm_up(&client, &host).await?;
    create::against_floor(&client, &host, options.n, &mut report).await?;
    create::cold_boots(&host, if options.smoke { 1 } else { options.cold }, &mut report).await?;
    create::first_results(&client, options.n, &mut report).await?;
    let largest = if options.smoke { 2 } else { 16 };
    create::curve(&client, largest, if options.smoke { 1 } else { 3 }, &mut report).await?;
    memory::idle_sandboxes(&client, if options.smoke { 2 } else { 8 }, &mut report).await?;
    create::round_trips(&client, options.n, &mut report).await?;
    let mib = if options.smoke { 4 } else { 64 };
    files::throughput(&client, &host, mib, &mut report).await?;
    host.close().await?;

    println!("{report}");
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&report.json()).context("the figures are no JSON")?;
        fs_err::write(file, text + "\n")?;
        println!("written to {}", file.display());
    }
    Ok(())
}
