//! The benchmark: how fast sandboxes start compared with the least that is possible, what they cost, how fast they answer,
//! and whether everything is back where it was after a long time with crashes.
//!
//! `cargo xtask bench create`, `cargo xtask bench density` and `cargo xtask soak` build everything and run this. What each
//! figure means and what is promised of it stands in `docs/specification.md` and `docs/benchmarks.md`.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the tables are its output")]

mod cold;
mod conditions;
mod create;
mod density;
mod files;
mod floor;
mod machine;
mod memory;
mod pattern;
mod platform;
mod pool;
mod processes;
mod report;
mod sdk;
mod smaps;
mod soak;
mod statistics;
mod streams;
mod suite;

use std::{future::Future, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

/// Measure SPACE
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure creates against the restore floor and from the pool, their cost, and a warm sandbox's answers
    Create(suite::Create),
    /// Measure the memory of idle sandboxes of each size, by what it is used for
    Density(suite::Density),
    /// Create, run and delete while processes of the platform are killed, and count what is left
    Soak(soak::Options),
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        match command {
            Command::Create(options) => unless_interrupted(Box::pin(suite::create(&options))).await,
            Command::Density(options) => unless_interrupted(Box::pin(suite::density(&options))).await,
            Command::Soak(options) => unless_interrupted(Box::pin(soak::run(&options))).await,
        }
    })
}

/// Drops the work when the user has had enough: platforms stop in order when they are dropped.
async fn unless_interrupted(work: impl Future<Output = Result<bool>>) -> Result<bool> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle signals")?;
    tokio::select! {
        ended = work => ended,
        _ = interrupt.recv() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("interrupted"),
    }
}
