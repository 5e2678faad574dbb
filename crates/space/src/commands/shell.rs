//! `space sandbox shell`: our terminal joined to one inside.

use std::process::ExitCode;

use clap::Args;
use space_api::id::SandboxId;
use space_client::{Command, ProcessEvent};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cli::Global,
    commands::{
        options::{Assignment, sandbox_id},
        pump::{exit_code, not_run, read_to_end},
    },
    error::CliError,
    output,
    terminal::{self, RawMode},
};

#[derive(Debug, Args)]
pub(crate) struct Shell {
    /// Sandbox to open it in
    #[arg(value_parser = sandbox_id)]
    sandbox: SandboxId,
    /// Account [default: user]
    #[arg(long, short = 'u', value_name = "NAME")]
    user: Option<String>,
    /// Working directory [default: the user's home]
    #[arg(long, short = 'w', value_name = "DIRECTORY")]
    cwd: Option<String>,
    /// Set an environment variable; NAME alone takes the value from here
    #[arg(long, short = 'e', value_name = "NAME=VALUE")]
    env: Vec<Assignment>,
    /// Program to run instead of a login shell
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Shell {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        if !terminal::is_interactive() {
            return Err(CliError::usage("standard input and output are not a terminal")
                .with_hint("use `space sandbox exec` to run a command without one"));
        }
        let sandbox = global
            .client()?
            .connect(&self.sandbox, None)
            .await
            .map_err(not_run)?;
        let process = sandbox.start(&self.program()).await.map_err(not_run)?;
        let pid = process.pid();

        let raw = RawMode::enter()?;
        let mut resized = signal(SignalKind::window_change())?;
        let mut typed = terminal::read_stdin();
        let forwarding = async {
            let mut open = true;
            loop {
                tokio::select! {
                    chunk = typed.recv(), if open => match chunk {
                        Some(chunk) => open = sandbox.send_terminal(pid, chunk).await.is_ok(),
                        None => open = false,
                    },
                    Some(()) = resized.recv() => {
                        // The shell may have ended meanwhile; its end tells.
                        drop(sandbox.resize(pid, terminal::size()).await);
                    }
                }
            }
        };
        let reading = read_to_end(process, |event| match event {
            ProcessEvent::Terminal { bytes, .. } | ProcessEvent::Stdout { bytes, .. } => {
                output::stdout(&bytes)
            }
            _ => Ok(()),
        });
        let end = tokio::select! {
            end = reading => end,
            () = forwarding => unreachable!("forwarding never ends by itself"),
        };
        drop(raw);
        let end = end?;
        Ok(ExitCode::from(exit_code(&end)))
    }

    fn program(&self) -> Command {
        let mut command = match self.command.as_slice() {
            [] => Command::new("/bin/bash").arg("-i").arg("-l"),
            [program, arguments @ ..] => Command::new(program).args(arguments),
        };
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm-256color".to_owned());
        command = command.env("TERM", &term).env("LANG", "C.UTF-8");
        for each in &self.env {
            command = command.env(&each.name, &each.value);
        }
        if let Some(user) = &self.user {
            command = command.user(user);
        }
        if let Some(directory) = &self.cwd {
            command = command.directory(directory);
        }
        command.terminal(terminal::size())
    }
}
