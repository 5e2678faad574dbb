//! The demo: HumanEval in microVMs, through E2B's unmodified SDK.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use clap::Args;

use crate::{
    build::{self, Scope},
    platform::{self, Platform},
    python,
    session::{Interrupted, Session},
    setup::{self, Purpose},
};

/// Problems of a quick run.
pub(crate) const QUICK: u32 = 16;

/// Options of `demo`
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Run only 16 of the 164 problems
    #[arg(long)]
    quick: bool,
    /// Run only this many problems
    #[arg(long, value_name = "N", conflicts_with = "quick")]
    limit: Option<u32>,
    /// Sandboxes at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
    /// Leave the platform running afterwards, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Where the platform keeps its data
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space")]
    data_dir: PathBuf,
    /// Write the figures and every outcome here as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs it.
pub(crate) fn run(session: &Session, options: &Options) -> Result<ExitCode> {
    setup::ensure(session, Purpose::Demo)?;
    let built = build::all(session, Scope::Space)?;
    let python = environment(session)?;
    platform::ensure_template(session, &built, &options.data_dir)?;
    let mut platform = Platform::start(session, &built, &options.data_dir)?;
    let limit = if options.quick { Some(QUICK) } else { options.limit };
    eprintln!();
    let passed = humaneval(
        session,
        &platform,
        &python,
        limit,
        options.jobs,
        options.json.as_deref(),
    );
    let passed = match passed {
        Ok(passed) => passed,
        Err(error) => {
            // The interrupt reached the driver too, and it has ended its sandboxes.
            platform.stop()?;
            return Err(error);
        }
    };
    if !passed {
        eprintln!("the end of the platform's log:\n{}", platform.log_tail());
    }
    let space = built.space.strip_prefix(session.root()).unwrap_or(&built.space);
    if options.keep {
        println!("\n{}", how_to_go_on(&platform, space));
        println!("The platform runs until Ctrl-C.");
        match platform.wait(session) {
            Err(error) if error.downcast_ref::<Interrupted>().is_some() => platform.stop()?,
            other => other?,
        }
    } else {
        let next = next_steps(&platform, space);
        platform.stop()?;
        println!("\n{next}");
    }
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The demo's Python.
pub(crate) fn environment(session: &Session) -> Result<PathBuf> {
    let demo = session.root().join("demo");
    python::environment(
        session,
        "demo",
        &demo.join("requirements.txt"),
        Some(&demo.join("requirements-no-deps.txt")),
    )
}

/// Runs the driver against a platform and says whether everything was as expected.
pub(crate) fn humaneval(
    session: &Session,
    platform: &Platform,
    python: &Path,
    limit: Option<u32>,
    jobs: u32,
    json: Option<&Path>,
) -> Result<bool> {
    let mut command = session.command(python);
    command
        .arg(session.root().join("demo/humaneval.py"))
        .arg("--jobs")
        .arg(jobs.to_string());
    if let Some(limit) = limit {
        command.arg("--limit").arg(limit.to_string());
    }
    if let Some(json) = json {
        command.arg("--json").arg(std::path::absolute(json)?);
    }
    platform.tell(&mut command);
    Ok(session.run_shown(&mut command)?.success())
}

fn how_to_go_on(platform: &Platform, space: &Path) -> String {
    let space = space.display();
    let Platform { url, key, .. } = platform;
    format!(
        "API address  {url}\n\
         API key      {key}\n\n\
         To go on, in another terminal:\n  \
         export SPACE_API_URL={url} SPACE_API_KEY={key}\n  \
         {space} run -- python3 -c 'print(6 * 7)'\n  \
         {space} sandbox create && {space} sandbox ls\n  \
         E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={key} python3 your-program-that-uses-e2b.py"
    )
}

fn next_steps(platform: &Platform, space: &Path) -> String {
    let space = space.display();
    let key = &platform.key;
    format!(
        "The platform has been stopped. To go on (or run the demo with --keep):\n  \
         {space} up                                    # prints the API address and the key; this one was {key}\n  \
         {space} run -- python3 -c 'print(6 * 7)'      # in another terminal: one command in a sandbox of its own\n  \
         {space} doctor                                # what this machine offers, and how to mend what it lacks"
    )
}
