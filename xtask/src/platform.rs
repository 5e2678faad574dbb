//! A platform of our own: `space up` as a child, from ready file to orderly stop.

use std::{
    fs::File,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{
    build::Built,
    session::{Guarded, Session, tail},
};

/// How long a platform may take from start to ready. It makes no template in that time.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// How long it may take to end its sandboxes and itself.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A running platform; stopped in order at the latest when it is dropped.
#[derive(Debug)]
pub(crate) struct Platform {
    child: Guarded,
    log: PathBuf,
    /// Origin of the API and of the sandboxes' traffic.
    pub(crate) url: String,
    /// A key for the SDKs.
    pub(crate) key: String,
}

impl Platform {
    /// Starts `space up` on `data_directory` and waits until it is ready.
    pub(crate) fn start(session: &Session, built: &Built, data_directory: &Path) -> Result<Self> {
        let ready = session
            .target()
            .join("xtask-logs")
            .join(format!("ready-{}.json", std::process::id()));
        let log = session.log_path("space-up");
        if let Some(parent) = log.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        drop(std::fs::remove_file(&ready));
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = session.command(&built.space);
        command
            .arg("up")
            .arg("--data-dir")
            .arg(data_directory)
            .arg("--ready-file")
            .arg(&ready);
        command
            .arg("--daemon")
            .arg(&built.daemon)
            .args(["--listen", "127.0.0.1:0"]);
        command
            .stdout(output.try_clone().context("cannot copy a descriptor")?)
            .stderr(output);
        // A group of its own: Ctrl-C is for us, and we stop it in order when nobody uses it any more.
        command.process_group(0);
        let mut child = Guarded(command.spawn().context("cannot start space up")?);
        let begin = Instant::now();
        loop {
            session.check_interrupted()?;
            if let Ok(text) = std::fs::read_to_string(&ready)
                && let Ok(said) = serde_json::from_str::<Value>(&text)
            {
                drop(std::fs::remove_file(&ready));
                let field = |name: &str| {
                    let value = said.get(name).and_then(Value::as_str).map(str::to_owned);
                    value.with_context(|| format!("the ready file of space up has no {name}"))
                };
                let (url, key) = (field("url")?, field("key")?);
                return Ok(Self { child, log, url, key });
            }
            if let Some(status) = child.0.try_wait().context("cannot wait for space up")? {
                bail!(
                    "space up ended ({status}) before it was ready:\n{}",
                    tail(&log, 30)
                );
            }
            if begin.elapsed() > READY_LIMIT {
                bail!(
                    "space up was not ready within {} s:\n{}",
                    READY_LIMIT.as_secs(),
                    tail(&log, 30)
                );
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Tells a program where the platform is, as E2B's SDKs want to hear it.
    pub(crate) fn tell(&self, command: &mut Command) {
        command
            .env("E2B_API_URL", &self.url)
            .env("E2B_SANDBOX_URL", &self.url)
            .env("E2B_API_KEY", &self.key);
        // Whatever else the user has set for E2B's own service would lead elsewhere.
        for other in ["E2B_DOMAIN", "E2B_DEBUG", "E2B_ACCESS_TOKEN"] {
            command.env_remove(other);
        }
    }

    /// Waits for Ctrl-C; fails with it, or because the platform ended.
    pub(crate) fn wait(&mut self, session: &Session) -> Result<()> {
        loop {
            session.check_interrupted()?;
            if let Some(status) = self.child.0.try_wait().context("cannot wait for space up")? {
                bail!("space up ended by itself ({status}):\n{}", tail(&self.log, 30));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Stops it in order. Fails if it had to be killed or says that something was left.
    pub(crate) fn stop(mut self) -> Result<()> {
        let status = self
            .child
            .end(STOP_LIMIT)
            .context("space up cannot be waited for")?;
        if !status.success() {
            bail!(
                "space up did not stop in order ({status}):\n{}",
                tail(&self.log, 30)
            );
        }
        Ok(())
    }

    /// The end of its log.
    pub(crate) fn log_tail(&self) -> String {
        tail(&self.log, 40)
    }
}

/// Makes the template `base` in `data_directory`, or whatever of it is not there yet or not of this daemon.
pub(crate) fn ensure_template(session: &Session, built: &Built, data_directory: &Path) -> Result<()> {
    let mut command = session.command(&built.space);
    command
        .args(["template", "build", "base", "--data-dir"])
        .arg(data_directory);
    command.arg("--daemon").arg(&built.daemon);
    session.run("template base", &mut command).map(drop)
}
