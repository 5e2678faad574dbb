//! The command line's shape, and how a command finds the platform.

use std::path::{Path, PathBuf};

use clap::{Args, Parser};
use space_client::{Client, Endpoint};

use crate::{commands::Command, error::CliError};

/// Where `space up` keeps its state unless told otherwise.
pub(crate) const DATA_DIRECTORY: &str = "/var/lib/space";
/// Where a platform is looked for when nothing says where it is.
const DEFAULT_URL: &str = "http://127.0.0.1:3000";

/// Run agents' code in microVMs of their own
#[derive(Debug, Parser)]
#[command(
    name = "space",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
#[command(
    after_help = "Exit codes: 0 done, 1 not possible here, 2 wrong use, 3 platform not reachable, 4 not found, \
                        5 refused, 70 a fault of ours. `run` and `exec` exit with the code of the command, 124 at its \
                        deadline, 125 if it could not be run"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Address of the API [default: what the local `space up` wrote, else http://127.0.0.1:3000]
    #[arg(long, global = true, env = "SPACE_API_URL", value_name = "URL")]
    api_url: Option<String>,
    /// API key [default: what the local `space up` wrote]
    #[arg(
        long,
        global = true,
        env = "SPACE_API_KEY",
        value_name = "KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// Print JSON for programs
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl Global {
    /// A client of the platform that options, environment or the local `space up` name, in this order.
    pub(crate) fn client(&self) -> Result<Client, CliError> {
        let data = Path::new(DATA_DIRECTORY);
        let url = given(self.api_url.as_deref(), "E2B_API_URL")
            .or_else(|| first_line(&url_file(data)))
            .unwrap_or_else(|| DEFAULT_URL.to_owned());
        let key = given(self.api_key.as_deref(), "E2B_API_KEY")
            .or_else(|| first_line(&key_file(data)))
            .ok_or_else(|| {
                CliError::usage("no API key is known")
                    .with_hint("start the platform here with `space up`, or set SPACE_API_KEY to a key of the one you mean")
            })?;
        Ok(Client::new(Endpoint::new(&url, &key)?)?)
    }
}

/// The file that holds the key of the local platform, mode 0600.
pub(crate) fn key_file(data_directory: &Path) -> PathBuf {
    data_directory.join("key")
}

/// The file that holds the address of the local platform.
pub(crate) fn url_file(data_directory: &Path) -> PathBuf {
    data_directory.join("api-url")
}

fn given(option: Option<&str>, fallback: &str) -> Option<String> {
    option
        .map(str::to_owned)
        .or_else(|| std::env::var(fallback).ok())
        .filter(|value| !value.is_empty())
}

fn first_line(path: &Path) -> Option<String> {
    let text = fs_err::read_to_string(path).ok()?;
    text.lines()
        .next()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
