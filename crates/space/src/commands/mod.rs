//! One module per command.

mod completion;
mod copy;
mod create;
mod doctor;
mod down;
mod edit;
mod events;
mod exec;
mod inspect;
mod key;
mod list;
mod node;
mod node_manager;
mod options;
mod pausing;
mod pump;
mod remove;
mod run;
mod shell;
mod template;
mod up;

use std::process::ExitCode;

use clap::Subcommand;

use crate::{cli::Cli, error::CliError};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the platform on this machine
    Up(Box<up::Up>),
    /// End all sandboxes of a platform that is not running
    Down(down::Down),
    /// Serve the API as an ordinary user; `space up` starts it
    #[command(hide = true)]
    Node(Box<node::Node>),
    /// Perform the privileged acts for the node; `space up` starts it
    #[command(hide = true)]
    NodeManager(node_manager::NodeManager),
    /// Check what this machine has and lacks
    Doctor(doctor::Doctor),
    /// Run one command in a sandbox of its own
    Run(run::Run),
    /// Work with sandboxes
    #[command(subcommand, visible_alias = "sb")]
    Sandbox(SandboxCommand),
    /// Work with templates
    #[command(subcommand)]
    Template(template::TemplateCommand),
    /// Work with API keys
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Print a completion script
    Completion(completion::Completion),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Create a sandbox and print its id
    Create(create::Create),
    /// List sandboxes
    Ls(list::List),
    /// Show everything known of a sandbox, also after its end
    Inspect(inspect::Inspect),
    /// Stop sandboxes, which stay in memory and keep their places
    Pause(pausing::Pause),
    /// Let paused sandboxes run on
    Resume(pausing::Resume),
    /// Keep a sandbox alive for at least so long from now
    Extend(pausing::Extend),
    /// Change the labels of a sandbox, or its metadata
    Label(edit::Label),
    /// Show what happened to a sandbox, also after its end, or follow all of the project
    Events(events::Events),
    /// Run a command in a sandbox
    Exec(exec::Exec),
    /// Open a terminal in a sandbox
    Shell(shell::Shell),
    /// Copy files and directories into or out of a sandbox
    Cp(copy::Copy),
    /// End sandboxes
    Rm(remove::Remove),
}

impl Command {
    /// Whether it is a long-running service, whose log people want to see.
    pub(crate) fn is_server(&self) -> bool {
        matches!(self, Self::Up(_) | Self::Node(_) | Self::NodeManager(_))
    }

    /// What tools that list processes show for it, if it is one of the platform's: it is started by another name.
    pub(crate) fn process_name(&self) -> Option<&'static std::ffi::CStr> {
        match self {
            Self::Up(_) => Some(c"space-up"),
            Self::Node(_) => Some(c"space-node"),
            Self::NodeManager(_) => Some(c"space-manager"),
            _ => None,
        }
    }

    /// Whether one thread is to do it all: `space up` only waits, and its children end with the thread that made them.
    pub(crate) fn is_single_threaded(&self) -> bool {
        matches!(self, Self::Up(_))
    }
}

/// Runs the command that was asked for.
pub(crate) async fn dispatch(cli: Cli) -> Result<ExitCode, CliError> {
    let global = cli.global;
    match cli.command {
        Command::Up(command) => Box::pin(command.run(&global)).await,
        Command::Down(command) => command.run(&global).await,
        Command::Node(command) => Box::pin(command.run(&global)).await,
        Command::NodeManager(command) => Box::pin(command.run()).await,
        Command::Doctor(command) => command.run(&global).await,
        Command::Run(command) => Box::pin(command.run(&global)).await,
        Command::Sandbox(command) => match command {
            SandboxCommand::Create(command) => command.run(&global).await,
            SandboxCommand::Ls(command) => command.run(&global).await,
            SandboxCommand::Inspect(command) => command.run(&global).await,
            SandboxCommand::Pause(command) => command.run(&global).await,
            SandboxCommand::Resume(command) => command.run(&global).await,
            SandboxCommand::Extend(command) => command.run(&global).await,
            SandboxCommand::Label(command) => command.run(&global).await,
            SandboxCommand::Events(command) => command.run(&global).await,
            SandboxCommand::Exec(command) => Box::pin(command.run(&global)).await,
            SandboxCommand::Shell(command) => Box::pin(command.run(&global)).await,
            SandboxCommand::Cp(command) => Box::pin(command.run(&global)).await,
            SandboxCommand::Rm(command) => command.run(&global).await,
        },
        Command::Template(command) => command.run(&global).await,
        Command::Key(command) => command.run(&global).await,
        Command::Completion(command) => command.run(),
    }
}
