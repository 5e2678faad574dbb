//! One run of a developer command: where things are, how programs are run, and what is shown meanwhile.
//!
//! Each step's output goes to a log file of its own. On a terminal a spinner shows the last line; elsewhere a step is one
//! line when it begins and one when it ends, and long steps say now and then that they are still at work.

use std::{
    fmt,
    fs::File,
    io::{BufRead as _, BufReader, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

/// Someone pressed Ctrl-C, or the run was asked to end.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// What a finished step left.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Everything it printed.
    pub(crate) log: PathBuf,
}

/// One run of a developer command.
#[derive(Debug)]
pub(crate) struct Session {
    root: PathBuf,
    target: PathBuf,
    interrupted: Arc<AtomicBool>,
    interactive: bool,
}

/// Lines of a failed step's log that are shown.
const TAIL_LINES: usize = 60;
/// How often a step without a terminal says that it is still at work.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// How often a running program is looked at.
const POLL: Duration = Duration::from_millis(20);
/// How long an interrupted program may clean up before it is asked to end.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(3);
/// How long an interrupted program may take to end before it is killed.
const END_LIMIT: Duration = Duration::from_secs(30);

impl Session {
    /// Finds the workspace and takes over the handling of Ctrl-C.
    pub(crate) fn open() -> Result<Self> {
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest
            .parent()
            .context("xtask lies outside of any workspace")?
            .to_owned();
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("cannot handle signals")?;
        }
        let interactive = std::io::stderr().is_terminal();
        Ok(Self {
            root,
            target,
            interrupted,
            interactive,
        })
    }

    /// The workspace's directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Cargo's target directory.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// A command that starts in the workspace, without input, and without what the running Cargo told xtask about itself.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let Some(name) = name.to_str() else { continue };
            let private = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
            if private.iter().any(|prefix| name.starts_with(prefix)) || name == "CARGO_PRIMARY_PACKAGE" {
                command.env_remove(name);
            }
        }
        command
    }

    /// Cargo, the one that runs xtask.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = self.command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.env("CARGO_TERM_COLOR", "never");
        command
    }

    /// Where the log of a step lies.
    pub(crate) fn log_path(&self, step: &str) -> PathBuf {
        let name: String = step
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        self.target.join("xtask-logs").join(format!("{name}.log"))
    }

    /// Fails if someone asked to stop.
    pub(crate) fn check_interrupted(&self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            Err(Interrupted.into())
        } else {
            Ok(())
        }
    }

    /// Runs a program as a step. Fails, with the end of its log shown, unless it succeeds.
    pub(crate) fn run(&self, step: &str, command: &mut Command) -> Result<Finished> {
        let log = self.log_path(step);
        let status = self.run_to_log(step, command, &log)?;
        if !status.success() {
            eprintln!("{}", tail(&log, TAIL_LINES));
            bail!(
                "{step}: {} failed ({status}); the whole log is {}",
                shown(command),
                log.display()
            );
        }
        Ok(Finished { log })
    }

    fn run_to_log(&self, step: &str, command: &mut Command, log: &Path) -> Result<ExitStatus> {
        self.check_interrupted()?;
        if let Some(parent) = log.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        let mut file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        command
            .stdout(writer.try_clone().context("cannot copy a pipe")?)
            .stderr(writer);
        let begin = Instant::now();
        let shown_step = Progress::begin(step, self.interactive);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        // The command holds the writing ends; without this the reader would never see the end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let last_line = Arc::new(Mutex::new(String::new()));
        let for_reader = Arc::clone(&last_line);
        let copier = thread::spawn(move || {
            let mut reader = BufReader::new(reader);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                // A log that cannot be written must not stop the program it is of.
                drop(file.write_all(&line));
                if let Ok(mut last) = for_reader.lock() {
                    *last = String::from_utf8_lossy(&line).trim().chars().take(100).collect();
                }
                line.clear();
            }
        });
        let mut child = Guarded(child);
        let ended = self.wait(&mut child, None, |elapsed| {
            let line = last_line.lock().map(|line| line.clone()).unwrap_or_default();
            shown_step.tick(elapsed, &line);
        });
        // Whatever outlived the program may hold the pipe open for ever.
        let limit = Instant::now() + Duration::from_secs(2);
        while !copier.is_finished() && Instant::now() < limit {
            thread::sleep(POLL);
        }
        shown_step.end(ended.as_ref().is_ok_and(ExitStatus::success), begin.elapsed());
        ended
    }

    /// Runs a program whose output the user sees as it is.
    pub(crate) fn run_shown(&self, command: &mut Command) -> Result<ExitStatus> {
        self.check_interrupted()?;
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        self.wait(&mut Guarded(child), None, |_| {})
    }

    /// Runs a program quietly and gives what it printed to standard output.
    pub(crate) fn output(&self, command: &mut Command) -> Result<String> {
        let output = command
            .output()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} failed ({}): {}", shown(command), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits for a program; on an interrupt asks it to end, and kills it when it does not.
    pub(crate) fn wait(
        &self,
        child: &mut Guarded,
        limit: Option<Duration>,
        mut tick: impl FnMut(Duration),
    ) -> Result<ExitStatus> {
        let begin = Instant::now();
        loop {
            if let Some(status) = child.0.try_wait().context("cannot wait for a program")? {
                self.check_interrupted()?;
                return Ok(status);
            }
            if self.interrupted.load(Ordering::Relaxed) {
                // Ctrl-C reaches the whole group of the terminal: it may be cleaning up by itself.
                let limit = Instant::now() + CLEAN_UP_LIMIT;
                while Instant::now() < limit && matches!(child.0.try_wait(), Ok(None)) {
                    thread::sleep(POLL);
                }
                child.end(END_LIMIT);
                return Err(Interrupted.into());
            }
            if limit.is_some_and(|limit| begin.elapsed() > limit) {
                child.end(END_LIMIT);
                bail!("a program did not end within {} s", begin.elapsed().as_secs());
            }
            tick(begin.elapsed());
            thread::sleep(POLL);
        }
    }
}

/// A program that does not outlive its owner.
#[derive(Debug)]
pub(crate) struct Guarded(pub(crate) Child);

impl Guarded {
    /// Asks it to end in order, and kills it after `limit`. Returns how it ended, if it could be told.
    pub(crate) fn end(&mut self, limit: Duration) -> Option<ExitStatus> {
        if let Ok(Some(status)) = self.0.try_wait() {
            return Some(status);
        }
        // `kill` of procps or the shell; the child is ours and not reaped yet, so its pid cannot be another's.
        let pid = self.0.id().to_string();
        drop(
            Command::new("kill")
                .args(["-TERM", &pid])
                .stdin(Stdio::null())
                .status(),
        );
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Some(status);
            }
            thread::sleep(POLL);
        }
        drop(self.0.kill());
        self.0.wait().ok()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.end(END_LIMIT);
    }
}

/// What a step shows while it runs.
struct Progress {
    step: String,
    bar: Option<ProgressBar>,
    next_heartbeat: Mutex<Duration>,
}

impl Progress {
    fn begin(step: &str, interactive: bool) -> Self {
        let bar = interactive.then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) =
                ProgressStyle::with_template("{spinner} {prefix:<28} {elapsed:>5}  {wide_msg:.dim}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(step.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("  {step} …");
        }
        Self {
            step: step.to_owned(),
            bar,
            next_heartbeat: Mutex::new(HEARTBEAT),
        }
    }

    fn tick(&self, elapsed: Duration, last_line: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(last_line.to_owned());
            return;
        }
        if let Ok(mut next) = self.next_heartbeat.lock()
            && elapsed >= *next
        {
            *next += HEARTBEAT;
            eprintln!("    {}: {} s, {last_line}", self.step, elapsed.as_secs());
        }
    }

    fn end(&self, good: bool, took: Duration) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let mark = if good { "✓" } else { "✗" };
        eprintln!("{mark} {:<28} {:>6.1} s", self.step, took.as_secs_f64());
    }
}

/// A command as one would type it, cut to a line.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ");
    line.chars().take(160).collect()
}

/// The last `lines` of a file.
pub(crate) fn tail(file: &Path, lines: usize) -> String {
    let bytes = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(directory: &Path) -> Session {
        Session {
            root: directory.to_owned(),
            target: directory.join("target"),
            interrupted: Arc::new(AtomicBool::new(false)),
            interactive: false,
        }
    }

    #[test]
    fn a_step_keeps_all_that_its_program_prints() {
        let directory = tempfile::tempdir().unwrap();
        let session = session(directory.path());
        let finished = session
            .run(
                "a step",
                session
                    .command("sh")
                    .args(["-c", "echo out; echo err >&2; printf last"]),
            )
            .unwrap();
        let text = std::fs::read_to_string(finished.log).unwrap();
        assert!(
            ["out\n", "err\n", "last"].iter().all(|part| text.contains(part)),
            "{text:?}"
        );
    }

    #[test]
    fn a_failed_step_says_which_command_and_where_its_log_is() {
        let directory = tempfile::tempdir().unwrap();
        let session = session(directory.path());
        let error = session
            .run("bad", session.command("sh").args(["-c", "exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("bad.log"),
            "{error}"
        );
    }

    #[test]
    fn an_interrupt_ends_the_program() {
        let directory = tempfile::tempdir().unwrap();
        let session = session(directory.path());
        let flag = Arc::clone(&session.interrupted);
        let mut child = Guarded(session.command("sleep").arg("1000").spawn().unwrap());
        flag.store(true, Ordering::Relaxed);
        let error = session.wait(&mut child, None, |_| {}).unwrap_err();
        assert!(error.downcast_ref::<Interrupted>().is_some());
        assert!(child.0.try_wait().unwrap().is_some(), "it still runs");
    }

    #[test]
    fn a_grandchild_that_holds_the_output_does_not_hang_the_step() {
        let directory = tempfile::tempdir().unwrap();
        let session = session(directory.path());
        let begin = Instant::now();
        session
            .run(
                "left behind",
                session.command("sh").args(["-c", "sleep 20 & echo started"]),
            )
            .unwrap();
        assert!(begin.elapsed() < Duration::from_secs(15));
    }
}
