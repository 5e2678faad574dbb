//! Joins a process in a sandbox to our own standard streams.

use std::{ffi::OsString, io::IsTerminal as _, process::ExitCode, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use space_client::{
    Cause, ClientError, CollectLimits, Collected, Command, Process, ProcessEnd, ProcessEvent, Sandbox,
};

use crate::{commands::options, error::CliError, output, terminal};

/// Exit code when a command met its deadline, as of `timeout(1)`.
const DEADLINE_EXIT: u8 = 124;
/// Exit code when a command could not be run at all.
pub(crate) const NOT_RUN_EXIT: u8 = 125;

/// How to run a command in a sandbox.
#[derive(Debug, Args)]
pub(crate) struct Execution {
    /// Working directory [default: the user's home]
    #[arg(long, short = 'w', value_name = "DIRECTORY")]
    cwd: Option<String>,
    /// Account to run as [default: user]
    #[arg(long, short = 'u', value_name = "NAME")]
    user: Option<String>,
    /// Kill the command and everything it started after this time, such as 90s or 5m
    #[arg(long, value_name = "TIME", value_parser = options::span)]
    timeout: Option<Duration>,
    /// Pass standard input on even if it is a terminal
    #[arg(long, short = 'i', conflicts_with = "no_stdin")]
    interactive: bool,
    /// Leave standard input alone; the command sees its end at once
    #[arg(long)]
    no_stdin: bool,
    /// Command with its arguments; one word with spaces is run by a login shell
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Execution {
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    fn passes_stdin(&self) -> bool {
        !self.no_stdin && (self.interactive || !std::io::stdin().is_terminal())
    }

    fn command(&self) -> Command {
        let mut command = match self.command.as_slice() {
            [line]
                if line
                    .to_str()
                    .is_some_and(|line| line.contains(char::is_whitespace)) =>
            {
                Command::shell(&line.to_string_lossy())
            }
            [program, arguments @ ..] => Command::new(program).args(arguments),
            [] => Command::new(""),
        };
        if let Some(directory) = &self.cwd {
            command = command.directory(directory);
        }
        if let Some(user) = &self.user {
            command = command.user(user);
        }
        if let Some(timeout) = self.timeout {
            command = command.timeout(timeout);
        }
        if self.passes_stdin() {
            command = command.stdin();
        }
        command
    }

    /// Runs it, streaming, and gives the exit code to exit with.
    pub(crate) async fn stream(
        &self,
        sandbox: &Sandbox,
        environment: &[options::Assignment],
    ) -> Result<ExitCode, CliError> {
        let process = self.start(sandbox, environment).await?;
        let stdin = self.stdin_of(sandbox, process.pid());
        let reading = read_to_end(process, |event| match event {
            ProcessEvent::Stdout { bytes, .. } | ProcessEvent::Terminal { bytes, .. } => {
                output::stdout(&bytes)
            }
            ProcessEvent::Stderr { bytes, .. } => output::stderr(&bytes),
            ProcessEvent::End(_) => Ok(()),
        });
        let end = tokio::select! {
            end = reading => end?,
            never = stdin => match never {},
        };
        self.explain(&end);
        Ok(ExitCode::from(exit_code(&end)))
    }

    /// Runs it, collecting head and tail of its output, and gives the result as JSON with the exit code.
    pub(crate) async fn collect(
        &self,
        sandbox: &Sandbox,
        environment: &[options::Assignment],
    ) -> Result<(Value, ExitCode), CliError> {
        let started = std::time::Instant::now();
        let process = self.start(sandbox, environment).await?;
        let pid = process.pid();
        let start_ms = started.elapsed();
        let stdin = self.stdin_of(sandbox, process.pid());
        let collected = tokio::select! {
            output = process.collect(CollectLimits::default()) => output.map_err(not_run)?,
            never = stdin => match never {},
        };
        let end = &collected.end;
        let value = json!({
            "exit_code": end.exit_code,
            "cause": end.cause,
            "signal": end.signal,
            "error": end.error,
            "left_behind": end.left_behind,
            "pid": pid,
            "stdout": stream_json(&collected.stdout),
            "stderr": stream_json(&collected.stderr),
            "timings": {
                "start_ms": millis(start_ms),
                "run_ms": millis(started.elapsed()),
            },
        });
        Ok((value, ExitCode::from(exit_code(end))))
    }

    async fn start(
        &self,
        sandbox: &Sandbox,
        environment: &[options::Assignment],
    ) -> Result<Process, CliError> {
        let mut command = self.command();
        for each in environment {
            command = command.env(&each.name, &each.value);
        }
        sandbox.start(&command).await.map_err(not_run)
    }

    /// Passes our standard input on, if it is to be; never returns, so that the process's end decides.
    async fn stdin_of(&self, sandbox: &Sandbox, pid: u32) -> std::convert::Infallible {
        if self.passes_stdin() {
            let mut chunks = terminal::read_stdin();
            let mut open = true;
            while let Some(chunk) = chunks.recv().await {
                // A process that has ended, or closed its input, wants no more: its end tells the rest.
                open = sandbox.send_stdin(pid, chunk).await.is_ok();
                if !open {
                    break;
                }
            }
            if open {
                drop(sandbox.close_stdin(pid).await);
            }
        }
        std::future::pending().await
    }

    fn explain(&self, end: &ProcessEnd) {
        match end.cause {
            Cause::Deadline => {
                let limit = self.timeout.map(output::duration).unwrap_or_default();
                output::note(format!("space: killed at its deadline of {limit}"));
            }
            Cause::OutOfMemory => {
                output::note("space: killed because the sandbox ran out of memory; try a larger --size");
            }
            Cause::DiskFull => {
                output::note("space: it failed with the sandbox's disk full; try a larger --size");
            }
            _ => {}
        }
        if end.left_behind > 0 {
            output::note(format!("space: {} processes it started live on", end.left_behind));
        }
    }
}

/// Reads a process's stream to its end, handing every event to `each`.
pub(crate) async fn read_to_end(
    mut process: Process,
    mut each: impl FnMut(ProcessEvent) -> Result<(), CliError>,
) -> Result<ProcessEnd, CliError> {
    loop {
        match process.next().await.map_err(not_run)? {
            ProcessEvent::End(end) => return Ok(end),
            event => each(event)?,
        }
    }
}

/// The exit code to pass on for an end.
pub(crate) fn exit_code(end: &ProcessEnd) -> u8 {
    match end.cause {
        Cause::Deadline => DEADLINE_EXIT,
        _ => match u8::try_from(end.exit_code) {
            Ok(code) => code,
            Err(_) if end.signal > 0 => u8::try_from(128 + end.signal).unwrap_or(1),
            Err(_) => 1,
        },
    }
}

pub(crate) fn not_run(error: ClientError) -> CliError {
    CliError::from(error).exiting(NOT_RUN_EXIT)
}

pub(crate) fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e6).round() / 1e3
}

fn stream_json(stream: &Collected) -> Value {
    json!({
        "head": String::from_utf8_lossy(&stream.head),
        "tail": String::from_utf8_lossy(&stream.tail),
        "total": stream.total,
        "truncated": stream.truncated,
    })
}
