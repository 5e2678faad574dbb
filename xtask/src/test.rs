//! `cargo xtask test`: everything that CI runs, in one order, with one count at the end.
//!
//! A step that fails does not stop those that do not need it. Everything a step prints is in its log; of a failed one the
//! end is shown.

mod count;
mod steps;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;

use crate::{
    build::Built,
    platform::Platform,
    session::{Interrupted, Session},
};

pub(crate) use self::count::Counts;

/// Options of `test`
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Run only these steps and what they need
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
    /// List the steps and end
    #[arg(long)]
    list: bool,
    /// Where the tests' template is made, to be shared read-only by all of them
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space-test")]
    data_dir: PathBuf,
}

/// One step.
pub(crate) struct Step {
    name: &'static str,
    /// Steps that must have succeeded.
    needs: &'static [&'static str],
    what: &'static str,
    run: fn(&mut Run<'_>) -> Result<Counts>,
}

/// One run of the tests and what its steps leave for later ones.
pub(crate) struct Run<'a> {
    session: &'a Session,
    data_directory: PathBuf,
    built: Option<Built>,
    platform: Option<Platform>,
}

enum Outcome {
    Passed,
    Failed,
}

/// Runs the tests.
pub(crate) fn run(session: &Session, options: &Options) -> Result<ExitCode> {
    if options.list {
        for step in steps::ALL {
            println!("{:<16} {}", step.name, step.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = chosen(&options.only)?;
    let mut run = Run {
        session,
        data_directory: options.data_dir.clone(),
        built: None,
        platform: None,
    };
    let mut outcomes: BTreeMap<&str, Outcome> = BTreeMap::new();
    let mut rows = Vec::new();
    let mut total = Counts::default();
    for (at, step) in chosen.iter().enumerate() {
        eprintln!("\n[{}/{}] {}: {}", at + 1, chosen.len(), step.name, step.what);
        let failed_need = step
            .needs
            .iter()
            .find(|need| matches!(outcomes.get(**need), Some(Outcome::Failed)));
        let begin = Instant::now();
        let (counts, outcome) = if let Some(need) = failed_need {
            eprintln!("✗ not run, because {need} failed");
            (Counts::failure(), Outcome::Failed)
        } else {
            match (step.run)(&mut run) {
                Ok(counts) if counts.failed == 0 => (counts, Outcome::Passed),
                Ok(counts) => (counts, Outcome::Failed),
                Err(error) if error.downcast_ref::<Interrupted>().is_some() => return Err(error),
                Err(error) => {
                    eprintln!("✗ {}: {error:#}", step.name);
                    (Counts::failure(), Outcome::Failed)
                }
            }
        };
        for skipped in &counts.skips {
            eprintln!("  SKIPPED: {skipped}");
        }
        rows.push((step.name, counts.clone(), begin.elapsed()));
        total.add(counts);
        outcomes.insert(step.name, outcome);
    }
    show(&rows);
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed,
        total.failed,
        total.skipped()
    );
    Ok(if total.failed == 0 && total.passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The steps asked for with all that they need, in order.
fn chosen(only: &[String]) -> Result<Vec<&'static Step>> {
    let mut wanted: Vec<&str> = only.iter().map(String::as_str).collect();
    if wanted.is_empty() {
        return Ok(steps::ALL.iter().collect());
    }
    let mut at = 0;
    while at < wanted.len() {
        let Some(step) = steps::ALL.iter().find(|step| step.name == wanted[at]) else {
            let names: Vec<&str> = steps::ALL.iter().map(|step| step.name).collect();
            bail!(
                "there is no step \"{}\"; there are: {}",
                wanted[at],
                names.join(", ")
            );
        };
        wanted.extend(
            step.needs
                .iter()
                .filter(|need| !wanted.contains(need))
                .copied()
                .collect::<Vec<_>>(),
        );
        at += 1;
    }
    Ok(steps::ALL
        .iter()
        .filter(|step| wanted.contains(&step.name))
        .collect())
}

fn show(rows: &[(&str, Counts, Duration)]) {
    println!(
        "\n{:<16} {:>8} {:>8} {:>8} {:>10}",
        "step", "passed", "failed", "skipped", "seconds"
    );
    for (name, counts, took) in rows {
        println!(
            "{name:<16} {:>8} {:>8} {:>8} {:>10.1}",
            counts.passed,
            counts.failed,
            counts.skipped(),
            took.as_secs_f64()
        );
    }
    println!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_name_earlier_steps() {
        for (at, step) in steps::ALL.iter().enumerate() {
            for need in step.needs {
                assert!(
                    steps::ALL[..at].iter().any(|earlier| earlier.name == *need),
                    "{} needs {need}",
                    step.name
                );
            }
        }
    }

    #[test]
    fn one_step_brings_all_that_it_needs() {
        let names: Vec<&str> = chosen(&["sdk-js".to_owned()])
            .unwrap()
            .iter()
            .map(|step| step.name)
            .collect();
        assert!(
            names.contains(&"setup") && names.contains(&"build") && names.contains(&"template"),
            "{names:?}"
        );
        assert!(!names.contains(&"clippy"), "{names:?}");
        assert!(chosen(&["nonsense".to_owned()]).is_err());
    }
}
