//! Developer commands: `cargo xtask …` is the one index of them, and what CI runs.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line program talks to its user"
)]

mod apt;
mod bench;
mod build;
mod check;
mod demo;
mod fuzz;
mod platform;
mod python;
mod session;
mod setup;
mod test;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::session::Session;

/// Developer commands of SPACE
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", version, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the Debian packages that building, running and testing need
    Setup,
    /// Build the `space` binary and the static daemon for the guest
    Build,
    /// Run HumanEval in microVMs through E2B's Python SDK, and a control with broken solutions
    Demo(demo::Options),
    /// Check formatting, lints, dependencies, hygiene and links in the docs
    Check,
    /// Run everything that CI runs
    Test(test::Options),
    /// Run the fuzz targets of the parsers that read what guests and the network write
    Fuzz(fuzz::Options),
    /// Measure
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Create, run and delete while processes of the platform are killed, and count what is left on the machine
    Soak(bench::Soak),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.downcast_ref::<session::Interrupted>().is_some() {
                ExitCode::from(130)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let session = Session::open()?;
    match command {
        Command::Setup => {
            setup::ensure(&session, setup::Purpose::Test)?;
            println!("everything that is needed is installed");
            Ok(ExitCode::SUCCESS)
        }
        Command::Build => {
            setup::ensure(&session, setup::Purpose::Build)?;
            let built = build::all(&session, build::Scope::Space)?;
            println!("{}\n{}", built.space.display(), built.daemon.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::Demo(options) => demo::run(&session, &options),
        Command::Check => {
            let failed = check::run(&session)?;
            Ok(if failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Command::Test(options) => test::run(&session, &options),
        Command::Fuzz(options) => {
            setup::ensure(&session, setup::Purpose::Build)?;
            fuzz::run(&session, &options)
        }
        Command::Bench(bench) => bench::run(&session, &bench),
        Command::Soak(options) => bench::run_soak(&session, &options),
    }
}

/// Looks a program up on `PATH` and in the directories of system programs.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
}
