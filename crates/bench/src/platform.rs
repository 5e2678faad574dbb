//! A platform of the benchmark's own: `space up` as a child, on a fresh data directory and a template store made before.

use std::{
    net::{SocketAddr, TcpListener},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use space_client::{Client, Endpoint};
use tempfile::TempDir;

use crate::processes::{self, Role};

/// How long a platform may take from start to ready; it makes no template in that time.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// How long it may take to end its sandboxes and itself.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Between two looks whether either has come.
const PAUSE: Duration = Duration::from_millis(10);
/// Lines of a log that an error shows.
const TAIL_LINES: usize = 30;

/// What a platform is started with
#[derive(Debug, Clone, Args)]
pub(crate) struct Programs {
    /// The `space` program
    #[arg(long, value_name = "PATH")]
    pub(crate) space: PathBuf,
    /// The guest's daemon
    #[arg(long, value_name = "PATH")]
    pub(crate) daemon: PathBuf,
    /// Template store that holds `base`
    #[arg(long, value_name = "DIR", default_value = "/var/lib/space/templates")]
    pub(crate) templates: PathBuf,
    /// Directory below which platforms keep their data while they are measured
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub(crate) scratch: PathBuf,
}

/// A platform; ended, and its traces removed, at the latest when it is dropped.
#[derive(Debug)]
pub(crate) struct Platform {
    programs: Programs,
    arguments: Vec<String>,
    directory: TempDir,
    listen: SocketAddr,
    child: Option<Child>,
    url: String,
    key: String,
    installation: String,
}

impl Platform {
    /// Starts one with further arguments of `space up`, and waits until it is ready.
    pub(crate) async fn start(programs: &Programs, arguments: &[&str]) -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("space-bench-")
            .tempdir_in(&programs.scratch)
            .with_context(|| format!("cannot make a directory in {}", programs.scratch.display()))?;
        // Its users must be able to pass through to what is theirs below.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o711))
            .context("cannot open the data directory")?;
        // One address for all its lives: clients find it again. Nobody else takes a port this soon.
        let listen = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .context("there is no free port")?;
        let mut platform = Self {
            programs: programs.clone(),
            arguments: arguments.iter().map(|&each| each.to_owned()).collect(),
            directory,
            listen,
            child: None,
            url: String::new(),
            key: String::new(),
            installation: String::new(),
        };
        platform.launch().await?;
        Ok(platform)
    }

    /// Starts it (again) and waits until it is ready.
    pub(crate) async fn launch(&mut self) -> Result<()> {
        self.spawn()?;
        let begin = Instant::now();
        while !self.learn_ready()? {
            if let Some(status) = self.ended()? {
                bail!(
                    "space up ended ({status}) before it was ready:\n{}",
                    self.log_tail()
                );
            }
            ensure!(
                begin.elapsed() < READY_LIMIT,
                "space up was not ready within {} s:\n{}",
                READY_LIMIT.as_secs(),
                self.log_tail()
            );
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Starts its process, and does not wait.
    pub(crate) fn spawn(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "it runs already");
        drop(fs_err::remove_file(self.ready_file()));
        let log = fs_err::File::options()
            .create(true)
            .append(true)
            .open(self.log_path())?
            .into_file();
        let mut command = Command::new(&self.programs.space);
        command
            .arg("up")
            .args(["--listen", &self.listen.to_string()])
            .arg("--data-dir")
            .arg(self.data_directory())
            .arg("--templates")
            .arg(&self.programs.templates)
            .arg("--daemon")
            .arg(&self.programs.daemon)
            .arg("--ready-file")
            .arg(self.ready_file())
            .args(&self.arguments);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot copy a descriptor")?)
            .stderr(log);
        // A group of its own: Ctrl-C is for us, and we stop it in order.
        command.process_group(0);
        self.child = Some(command.spawn().context("cannot start space up")?);
        Ok(())
    }

    /// Whether it has said that it is ready; then what it said is known.
    fn learn_ready(&mut self) -> Result<bool> {
        let Ok(text) = fs_err::read_to_string(self.ready_file()) else {
            return Ok(false);
        };
        let Ok(said) = serde_json::from_str::<Value>(&text) else {
            return Ok(false);
        };
        let field = |name: &str| {
            let value = said[name].as_str().map(str::to_owned);
            value.with_context(|| format!("the ready file of space up has no {name}"))
        };
        (self.url, self.key, self.installation) = (field("url")?, field("key")?, field("installation")?);
        Ok(true)
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let Some(child) = &mut self.child else {
            return Ok(None);
        };
        let status = child.try_wait().context("cannot wait for space up")?;
        if status.is_some() {
            self.child = None;
        }
        Ok(status)
    }

    /// Stops it in order; fails if it does not, or says that something was left.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        let pid = self.pid().context("space up does not run")?;
        rustix::process::kill_process(pid, Signal::TERM).context("cannot signal space up")?;
        let begin = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                ensure!(
                    status.success(),
                    "space up did not stop in order ({status}):\n{}",
                    self.log_tail()
                );
                return Ok(());
            }
            ensure!(
                begin.elapsed() < STOP_LIMIT,
                "space up did not stop within {} s:\n{}",
                STOP_LIMIT.as_secs(),
                self.log_tail()
            );
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// A client of its own, with connections of its own.
    pub(crate) fn client(&self) -> Result<Client> {
        Ok(Client::new(Endpoint::new(&self.url, &self.key)?)?)
    }

    /// Its process, while it runs.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.child.as_ref().map(Pid::from_child)
    }

    /// Origin of its API.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Its key.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// What its objects on this machine are named by.
    pub(crate) fn installation(&self) -> &str {
        &self.installation
    }

    /// Where it keeps its state.
    pub(crate) fn data_directory(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// The template store it uses.
    pub(crate) fn templates(&self) -> &Path {
        &self.programs.templates
    }

    /// The end of what it has said, all its lives together.
    pub(crate) fn log_tail(&self) -> String {
        let said = fs_err::read(self.log_path()).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    /// Keeps its log beyond its end, and says where.
    pub(crate) fn keep_log(&self) -> Result<PathBuf> {
        let place = self
            .programs
            .scratch
            .join(format!("space-bench-{}.log", self.installation));
        fs_err::copy(self.log_path(), &place)?;
        Ok(place)
    }

    fn ready_file(&self) -> PathBuf {
        self.directory.path().join("ready.json")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("up.log")
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            // In order, so that nothing is left on the machine; by force if that fails.
            let _: Result<(), _> = rustix::process::kill_process(pid, Signal::TERM);
            let begin = Instant::now();
            while begin.elapsed() < STOP_LIMIT && matches!(self.ended(), Ok(None)) {
                std::thread::sleep(PAUSE);
            }
            if let Some(mut child) = self.child.take() {
                drop(child.kill());
                drop(child.wait());
            }
        }
        if self.installation.is_empty() {
            return;
        }
        let left = processes::of_platform(&self.data_directory(), &self.installation);
        for process in left {
            // Never the pid alone: it may be another's by now.
            drop(process.kill());
        }
        space_test_support::forget(&self.installation);
    }
}

impl Platform {
    /// Its processes: those of the platform, or the monitors.
    pub(crate) fn processes(&self, role: Role) -> Vec<processes::Process> {
        processes::of_platform(&self.data_directory(), &self.installation)
            .into_iter()
            .filter(|process| process.role == role)
            .collect()
    }
}
