//! Fuzzing: builds the targets with coverage counters and runs them.
//!
//! It works on stable Rust: the counters are a pass of the code generator, and libFuzzer comes with its crate. Everything
//! goes into a target directory of its own, because the flags are those of every dependency.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::session::{Session, tail};

/// What makes a program tell the fuzzer where its input has led it. A target of its own keeps the flags away from
/// procedural macros and build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: (&str, &str) = (
    "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
    "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1",
);
/// Longest input, bytes: a frame of the control port and some more.
const LONGEST_INPUT: u32 = 6000;
/// Memory of one run, MiB; no parser needs a fraction of it.
const MEMORY: u32 = 512;
/// For one input, seconds.
const ONE_INPUT: u32 = 10;
/// How long a run may go on beyond its time: reading the corpus, the last input.
const GRACE: Duration = Duration::from_secs(60);
/// Between two looks at the runs.
const LOOK: Duration = Duration::from_millis(100);

/// Options of `fuzz`
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Run only this target; see fuzz/README.md
    target: Option<String>,
    /// How long each target runs, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// Runs what a developer asked for.
pub(crate) fn run(session: &Session, options: &Options) -> Result<ExitCode> {
    let targets = run_all(session, options.target.as_deref(), options.seconds)?;
    println!(
        "{targets} targets ran for {} s each and nothing broke",
        options.seconds
    );
    Ok(ExitCode::SUCCESS)
}

/// Replays each target's corpus, then runs it for `seconds`; as many at once as there are processors. Returns how many
/// targets ran.
pub(crate) fn run_all(session: &Session, only: Option<&str>, seconds: u32) -> Result<u64> {
    let all = targets(session.root())?;
    let chosen: VecDeque<String> = all
        .iter()
        .filter(|name| only.is_none_or(|only| only == *name))
        .cloned()
        .collect();
    if chosen.is_empty() {
        bail!("there is no such target; there are: {}", all.join(", "));
    }
    let count = u64::try_from(chosen.len())?;
    let directory = build(session, &chosen)?;
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    let mut waiting = chosen;
    let mut running: Vec<Run> = Vec::new();
    let mut broken = Vec::new();
    while !(waiting.is_empty() && running.is_empty()) {
        while running.len() < at_once
            && let Some(name) = waiting.pop_front()
        {
            running.push(Run::start(session, &directory, name, seconds)?);
        }
        session.check_interrupted()?;
        std::thread::sleep(LOOK);
        let mut still = Vec::new();
        for mut run in running {
            match run.look()? {
                None => still.push(run),
                Some(Ok(())) => {}
                Some(Err(words)) => broken.push(words),
            }
        }
        running = still;
    }
    if !broken.is_empty() {
        bail!("{}", broken.join("\n"));
    }
    Ok(count)
}

/// The targets' names, by their files.
fn targets(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root.join("fuzz/fuzz_targets")).context("there are no fuzz targets")? {
        let path = entry?.path();
        if let (Some(stem), Some("rs")) = (
            path.file_stem(),
            path.extension().and_then(|ending| ending.to_str()),
        ) {
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Builds the targets; returns the directory of the programs.
fn build(session: &Session, targets: &VecDeque<String>) -> Result<PathBuf> {
    let directory = session.target().join("fuzz");
    let mut cargo = session.cargo();
    cargo
        .args([
            "build",
            "--locked",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--target",
            TARGET,
        ])
        .arg("--target-dir")
        .arg(&directory);
    for target in targets {
        cargo.args(["--bin", target]);
    }
    session.run("build fuzz targets", cargo.env(FLAGS.0, FLAGS.1))?;
    Ok(directory)
}

/// One target at work. Killed when dropped.
struct Run {
    name: String,
    child: Child,
    log: PathBuf,
    limit: Instant,
}

impl Run {
    fn start(session: &Session, directory: &Path, name: String, seconds: u32) -> Result<Self> {
        let (found, crashes) = (directory.join("corpus").join(&name), directory.join("crashes"));
        std::fs::create_dir_all(&found)?;
        std::fs::create_dir_all(&crashes)?;
        let log = session.log_path(&format!("fuzz {name}"));
        let output = std::fs::File::create(&log)?;
        let mut command = Command::new(directory.join(TARGET).join("debug").join(&name));
        // New inputs go to the first directory, the second is only read.
        command
            .arg(&found)
            .arg(session.root().join("fuzz/corpus").join(&name))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={LONGEST_INPUT}"))
            .arg(format!("-rss_limit_mb={MEMORY}"))
            .arg(format!("-timeout={ONE_INPUT}"))
            .arg(format!("-artifact_prefix={}/{name}-", crashes.display()))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = command
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let limit = Instant::now() + Duration::from_secs(seconds.into()) + GRACE;
        Ok(Self {
            name,
            child,
            log,
            limit,
        })
    }

    /// `None` while it runs; then how it ended.
    fn look(&mut self) -> Result<Option<Result<(), String>>> {
        let Self { name, log, .. } = self;
        let words = |what: &str| format!("{name} {what}; the end of {}:\n{}", log.display(), tail(log, 30));
        Ok(match self.child.try_wait()? {
            Some(status) if status.success() => Some(Ok(())),
            Some(status) => Some(Err(words(&format!("broke ({status})")))),
            None if Instant::now() > self.limit => Some(Err(words("did not end in time"))),
            None => None,
        })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A target that nobody declares is never built, and one without seeds begins at nothing.
    #[test]
    fn every_target_is_declared_documented_and_has_seeds() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
        let (manifest, readme) = (read("fuzz/Cargo.toml"), read("fuzz/README.md"));
        let targets = targets(&root).unwrap();
        assert!(targets.len() >= 8, "{targets:?}");
        for name in targets {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
            assert!(readme.contains(&format!("`{name}`")), "{name}");
            let seeds = std::fs::read_dir(root.join("fuzz/corpus").join(&name))
                .unwrap()
                .count();
            assert!(seeds > 0, "{name}");
        }
    }
}
