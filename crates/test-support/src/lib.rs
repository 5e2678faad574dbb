//! For tests only: a platform of one's own, `space up` as a child process on port 0 in a temporary directory with its node
//! manager and node, ways to kill each of them, and a look at what it has left on the machine.
//!
//! What a test needs and the machine lacks makes it skip, loudly: see [`prerequisites`].

#![expect(
    clippy::print_stderr,
    reason = "tests say why they skip, and what a platform said before it failed"
)]

mod census;
mod processes;
mod remains;
mod terminal;

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

pub use census::{Census, Difference};
pub use processes::{Part, Process};
pub use remains::{Remains, forget};
pub use terminal::Terminal;

/// How long a platform may take to be ready; with the template there, it takes a second or two.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// How long one of its processes may take to end, or to be started again.
const PART_LIMIT: Duration = Duration::from_secs(20);
/// How long it may take to stop in order.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// What is there to start a platform with.
#[derive(Debug, Clone)]
pub struct Prerequisites {
    /// The template store, built before.
    pub templates: PathBuf,
    /// The guest's daemon, if it is not to be found by itself.
    pub daemon: Option<PathBuf>,
    /// The program under test, if it is not the one cargo built for the test.
    pub space: Option<PathBuf>,
}

/// Finds what platform tests need, or says on standard error why they are skipped.
pub fn prerequisites() -> Option<Prerequisites> {
    let skip = |reason: &str| {
        eprintln!("SKIPPED: {reason}");
        None
    };
    if !rustix::process::geteuid().is_root() {
        return skip("not root");
    }
    if !in_path("qemu-system-x86_64") {
        return skip("qemu-system-x86_64 is not installed");
    }
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let templates =
        variable("SPACE_TEST_TEMPLATES").unwrap_or_else(|| PathBuf::from("/var/lib/space/templates"));
    if !templates.join("names/base").exists() {
        return skip(
            "there is no template `base`: build it with `space template build base`, or set SPACE_TEST_TEMPLATES",
        );
    }
    Some(Prerequisites {
        templates,
        daemon: variable("SPACE_TEST_DAEMON"),
        space: variable("SPACE_TEST_SPACE"),
    })
}

fn in_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}

/// Polls `check` until it gives something, at most `limit`.
///
/// # Panics
///
/// When the limit has passed.
pub fn eventually<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(
            begin.elapsed() < limit,
            "{what} did not come true within {} s",
            limit.as_secs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A platform of one's own. Killed and cleaned up after when dropped.
#[derive(Debug)]
pub struct Platform {
    space: PathBuf,
    prerequisites: Prerequisites,
    directory: TempDir,
    child: Option<Child>,
    url: String,
    key: String,
    installation: String,
    arguments: Vec<String>,
}

impl Platform {
    /// Starts one; `None` (said on standard error) if the machine lacks something. `space` is the program under test,
    /// usually `env!("CARGO_BIN_EXE_space")`.
    ///
    /// # Panics
    ///
    /// If it does not become ready.
    pub fn start(space: &str) -> Option<Self> {
        Self::start_with(space, &[])
    }

    /// The same with further arguments of `space up`.
    ///
    /// # Panics
    ///
    /// If it does not become ready.
    pub fn start_with(space: &str, arguments: &[&str]) -> Option<Self> {
        let prerequisites = prerequisites()?;
        let space = prerequisites
            .space
            .clone()
            .unwrap_or_else(|| PathBuf::from(space));
        let directory = tempfile::Builder::new()
            .prefix("space-test-")
            .tempdir()
            .expect("a temporary directory");
        let mut platform = Self {
            space,
            prerequisites,
            directory,
            child: None,
            url: String::new(),
            key: String::new(),
            installation: String::new(),
            arguments: arguments.iter().map(|&each| each.to_owned()).collect(),
        };
        platform.start_again();
        Some(platform)
    }

    /// Starts it again on what is left of it, after [`Platform::kill`] or [`Platform::stop`].
    ///
    /// # Panics
    ///
    /// If it does not become ready.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "it runs");
        let ready = self.directory.path().join("ready.json");
        drop(fs_err::remove_file(&ready));
        let log = fs_err::File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("the log can be written");
        let mut command = self.up();
        command
            .arg("--ready-file")
            .arg(&ready)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.into_file());
        self.child = Some(command.spawn().expect("space can be started"));
        let begin = Instant::now();
        loop {
            if let Ok(text) = fs_err::read_to_string(&ready)
                && let Ok(value) = serde_json::from_str::<Value>(&text)
            {
                let field = |name: &str| {
                    value[name]
                        .as_str()
                        .expect("a field of the ready file")
                        .to_owned()
                };
                self.url = field("url");
                self.key = field("key");
                self.installation = field("installation");
                return;
            }
            let ended = self
                .child
                .as_mut()
                .and_then(|child| child.try_wait().expect("can be waited for"));
            assert!(
                ended.is_none(),
                "space up ended before it was ready: {ended:?}\n{}",
                self.log()
            );
            assert!(
                begin.elapsed() < READY_LIMIT,
                "space up is not ready in time\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The command that starts a platform here, without a ready file.
    pub fn up(&self) -> Command {
        let mut command = Command::new(&self.space);
        command
            .args(["up", "--listen", "127.0.0.1:0"])
            .arg("--data-dir")
            .arg(self.data_directory())
            .arg("--templates")
            .arg(&self.prerequisites.templates);
        command.args(&self.arguments);
        if let Some(daemon) = &self.prerequisites.daemon {
            command.arg("--daemon").arg(daemon);
        }
        command
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What its objects on this machine are named by.
    pub fn installation(&self) -> String {
        self.installation.clone()
    }

    /// Where it keeps its state.
    pub fn data_directory(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// A directory for the test's own files, gone afterwards.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// The command line, told to use this platform.
    pub fn space<I, S>(&self, arguments: I) -> Command
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        let mut command = Command::new(&self.space);
        command
            .args(arguments)
            .env("SPACE_API_URL", &self.url)
            .env("SPACE_API_KEY", &self.key)
            .stdin(Stdio::null());
        command
    }

    /// Runs the command line to its end.
    ///
    /// # Panics
    ///
    /// If it cannot be run.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.space(arguments).output().expect("space can be run")
    }

    /// Runs the command line, which must succeed, and gives its output without the last line end.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "space {arguments:?} failed ({}):\n{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        String::from_utf8(output.stdout)
            .expect("UTF-8")
            .trim_end()
            .to_owned()
    }

    /// The same, for output that is JSON.
    ///
    /// # Panics
    ///
    /// If it fails, or its output is no JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.succeed(&[&["--json"], arguments].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("no JSON ({error}): {text:.2000}"))
    }

    /// Kills `space up` with a signal that it cannot see, and waits until the processes that it kept running are gone
    /// too. Its machines live on.
    ///
    /// # Panics
    ///
    /// If it does not run, or its children outlive it.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        // A monitor on its way into its program looks like the node manager that starts it, and lives on.
        let mut children = processes::of_platform(&self.data_directory());
        children.retain(|each| each.parent == child.id());
        child.kill().expect("it can be killed");
        child.wait().expect("it can be waited for");
        let begin = Instant::now();
        while let Some(left) = children.iter().find(|each| each.lives()) {
            let late = begin.elapsed() > PART_LIMIT;
            assert!(!late, "a child outlives `space up`: {}", left.describe());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The same, all three at once.
    ///
    /// # Panics
    ///
    /// If it does not run.
    pub fn kill_all(&mut self) {
        for process in processes::of_platform(&self.data_directory()) {
            process.kill();
        }
        let mut child = self.child.take().expect("it runs");
        child.wait().expect("it can be waited for");
    }

    /// The process of `space up`.
    ///
    /// # Panics
    ///
    /// If it does not run.
    pub fn supervisor(&self) -> Process {
        let child = self.child.as_ref().expect("it runs");
        Process::of(child.id()).expect("it is there")
    }

    /// One of its processes, waiting for a moment for one that is just being started again.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn part(&self, part: Part) -> Process {
        let supervisor = self.supervisor().pid;
        eventually("a process of the platform", PART_LIMIT, || {
            processes::child_of(supervisor, part)
        })
    }

    /// Kills one of its processes, and waits until another has taken its place.
    ///
    /// # Panics
    ///
    /// If none does.
    pub fn kill_part(&self, part: Part) {
        let before = self.part(part);
        before.kill();
        eventually("another process in its place", PART_LIMIT, || {
            (self.part(part) != before).then_some(())
        });
    }

    /// Its monitors, those of machines made ahead included.
    pub fn monitors(&self) -> Vec<Process> {
        processes::monitors(&self.installation)
    }

    /// The monitor of one sandbox.
    ///
    /// # Panics
    ///
    /// If the sandbox has none.
    pub fn monitor_of(&self, sandbox: &str) -> Process {
        let record = self.json(&["sandbox", "inspect", sandbox]);
        let machine = record["machine"]
            .as_str()
            .expect("it tells its machine")
            .to_owned();
        let name = format!("space-{machine}");
        let monitor = self.monitors().into_iter().find(|process| {
            let named = |argument: &String| argument.split(',').any(|part| part == name);
            process.arguments.iter().any(named)
        });
        monitor.unwrap_or_else(|| panic!("there is no monitor of {machine}"))
    }

    /// What it has on this machine now.
    pub fn remains(&self) -> Remains {
        Remains::of(&self.installation, &self.data_directory())
    }

    /// Adds arguments of `space up` for the next start.
    pub fn add_arguments(&mut self, arguments: &[&str]) {
        self.arguments
            .extend(arguments.iter().map(|&each| each.to_owned()));
    }

    /// Stops it in order.
    ///
    /// # Panics
    ///
    /// If it does not run, or does not stop in time.
    pub fn stop(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("it runs");
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it can be signalled");
        eventually("the end of the platform", STOP_LIMIT, || {
            child.try_wait().expect("can be waited for")
        })
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs_err::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("up.log")
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        if self.child.is_some() {
            if std::thread::panicking() {
                eprintln!("what the platform said:\n{}", self.log());
            }
            // In order, so that nothing is left on the machine; by force if that fails.
            let mut child = self.child.take();
            if let Some(child) = &mut child {
                let pid = rustix::process::Pid::from_child(child);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                let begin = Instant::now();
                while begin.elapsed() < STOP_LIMIT && matches!(child.try_wait(), Ok(None)) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                drop(child.kill());
                drop(child.wait());
            }
        }
        // Machines outlive everything else: what a test has left running is ended by name.
        if !self.monitors().is_empty() {
            let mut down = Command::new(&self.space);
            down.arg("down").arg("--data-dir").arg(self.data_directory());
            drop(down.stdout(Stdio::null()).status());
        }
        remains::forget(&self.installation);
    }
}
