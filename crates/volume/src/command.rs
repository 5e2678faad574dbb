//! Runs host programs: no shell, a clean environment, a deadline, and nothing left running when given up.

use std::{ffi::OsStr, os::fd::OwnedFd, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::VolumeError;

/// Most standard output that is kept, bytes; `apt-cache search` prints about 30 KB.
const MAX_OUTPUT: u64 = 16 * 1024 * 1024;
/// Where programs are looked for.
const SEARCHED: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How much of the end of standard error goes into an error.
const TAIL: usize = 2048;

/// A host program to run.
pub(crate) struct Program<'a> {
    name: &'a str,
    package: &'static str,
    deadline: Duration,
    command: Command,
    input: Stdio,
}

impl<'a> Program<'a> {
    /// `package` is the Debian package that has it.
    pub(crate) fn new(name: &'a str, package: &'static str, deadline: Duration) -> Self {
        let mut command = Command::new(name);
        command
            .env_clear()
            .env("PATH", SEARCHED)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive");
        // A mirror may be reachable through a proxy only.
        for name in ["http_proxy", "https_proxy", "no_proxy"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        Self {
            name,
            package,
            deadline,
            command,
            input: Stdio::null(),
        }
    }

    /// Passes an open file as standard input, which the program can also write to as `/proc/self/fd/0`.
    pub(crate) fn input(mut self, file: OwnedFd) -> Self {
        self.input = file.into();
        self
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub(crate) fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn current_dir(mut self, directory: &std::path::Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Runs it to its end and gives its standard output.
    pub(crate) async fn output(self) -> Result<Vec<u8>, VolumeError> {
        self.watch(|_| {}).await
    }

    /// Like [`Program::output`], showing each line of standard error as it comes.
    pub(crate) async fn watch(mut self, line: impl FnMut(&str)) -> Result<Vec<u8>, VolumeError> {
        let child = self
            .command
            .stdin(self.input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Its own group, so that what it started can be ended with it.
            .process_group(0)
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(VolumeError::MissingProgram {
                    program: self.name.to_owned(),
                    package: self.package,
                });
            }
            Err(error) => return Err(VolumeError::io("start a host program")(error)),
        };
        let group = GroupGuard::new(child);
        tokio::time::timeout(self.deadline, group.finish(self.name, line))
            .await
            .map_err(|_| VolumeError::ProgramTimedOut {
                program: self.name.to_owned(),
                seconds: self.deadline.as_secs(),
            })?
    }
}

/// Whether the program can be found where [`Program`] looks for it.
pub(crate) fn require(program: &str, package: &'static str) -> Result<(), VolumeError> {
    if SEARCHED
        .split(':')
        .any(|directory| std::path::Path::new(directory).join(program).exists())
    {
        Ok(())
    } else {
        Err(VolumeError::MissingProgram {
            program: program.to_owned(),
            package,
        })
    }
}

/// Kills the whole process group unless the program has ended by itself.
struct GroupGuard {
    child: Child,
    group: Option<Pid>,
}

impl GroupGuard {
    fn new(child: Child) -> Self {
        let group = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .map(Pid::from_raw);
        Self { child, group }
    }

    async fn finish(mut self, program: &str, mut line: impl FnMut(&str)) -> Result<Vec<u8>, VolumeError> {
        let stdout = self.child.stdout.take();
        let stderr = self.child.stderr.take();
        let read_output = async {
            let mut output = Vec::new();
            if let Some(stdout) = stdout {
                stdout.take(MAX_OUTPUT).read_to_end(&mut output).await?;
            }
            Ok::<_, std::io::Error>(output)
        };
        let read_errors = async {
            let mut tail = String::new();
            let Some(stderr) = stderr else { return Ok(tail) };
            let mut reader = BufReader::new(stderr);
            let mut buffer = Vec::new();
            // One line at a time, each bounded, so that a program without newlines cannot fill memory.
            while (&mut reader)
                .take(64 * 1024)
                .read_until(b'\n', &mut buffer)
                .await?
                > 0
            {
                let text = String::from_utf8_lossy(&buffer);
                line(text.trim_end());
                tail.push_str(&text);
                if tail.len() > 2 * TAIL {
                    tail = end_of(&tail).to_owned();
                }
                buffer.clear();
            }
            Ok::<_, std::io::Error>(tail)
        };
        let (output, tail) = tokio::try_join!(read_output, read_errors)
            .map_err(VolumeError::io("read from a host program"))?;
        let status = self
            .child
            .wait()
            .await
            .map_err(VolumeError::io("wait for a host program"))?;
        self.group = None;
        if status.success() {
            Ok(output)
        } else if tail.contains("No space left on device") {
            Err(VolumeError::NoSpace {
                step: "run a host program",
            })
        } else {
            Err(VolumeError::ProgramFailed {
                program: program.to_owned(),
                status: status.to_string(),
                tail: end_of(tail.trim_end()).to_owned(),
            })
        }
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        if let Some(group) = self.group {
            // Gone already is fine. The runtime reaps the child.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

fn end_of(text: &str) -> &str {
    let from = (text.len().saturating_sub(TAIL)..=text.len())
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(text.len());
    &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> Program<'static> {
        Program::new("sh", "dash", deadline).arg("-c").arg(script)
    }

    #[tokio::test]
    async fn output_and_lines_arrive() {
        let mut lines = Vec::new();
        let output = shell("echo out; echo one >&2; echo two >&2", Duration::from_secs(10))
            .watch(|line| lines.push(line.to_owned()))
            .await
            .unwrap();
        assert_eq!(output, b"out\n");
        assert_eq!(lines, ["one", "two"]);
    }

    #[tokio::test]
    async fn failure_tells_status_and_the_end_of_what_was_said() {
        let error = shell("echo reason >&2; exit 3", Duration::from_secs(10))
            .output()
            .await
            .unwrap_err();
        let VolumeError::ProgramFailed { status, tail, .. } = error else {
            panic!("{error:?}")
        };
        assert!(status.contains('3'), "{status}");
        assert_eq!(tail, "reason");
    }

    #[tokio::test]
    async fn a_missing_program_is_named_with_its_package() {
        let error = Program::new("no-such-program-here", "some-package", Duration::from_secs(1))
            .output()
            .await
            .unwrap_err();
        assert!(error.to_string().contains("some-package"), "{error}");
    }

    #[tokio::test]
    async fn a_deadline_kills_the_whole_group() {
        let directory = tempfile::tempdir().unwrap();
        let pid_file = directory.path().join("pid");
        let script = format!("sleep 600 & echo $! > {}; wait", pid_file.display());
        let error = shell(&script, Duration::from_millis(500))
            .output()
            .await
            .unwrap_err();
        assert!(matches!(error, VolumeError::ProgramTimedOut { .. }), "{error:?}");
        let pid: i32 = fs_err::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        let gone = || {
            let state = fs_err::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            state.is_empty() || state.contains(") Z ")
        };
        let limit = std::time::Instant::now() + Duration::from_secs(10);
        while !gone() {
            assert!(std::time::Instant::now() < limit, "the grandchild still runs");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
