//! `space doctor`: what this machine has and lacks, and how to mend it.

mod host;
mod platform;
mod resources;

pub(crate) use host::TCG_NOTE;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::Args;
use serde::Serialize;

use crate::{
    cli::Global,
    commands::up::installation::{Account, Installation, NODE_UID, Place},
    error::CliError,
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Address that `space up` is to listen on
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDRESS")]
    listen: SocketAddr,
    #[command(flatten)]
    place: Place,
    /// User that the node is to run as
    #[arg(long, default_value_t = NODE_UID.to_string(), value_name = "NAME|UID")]
    user: String,
    /// Template store [default: DATA_DIR/templates]
    #[arg(long, value_name = "DIRECTORY", env = "SPACE_TEMPLATES")]
    templates: Option<PathBuf>,
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    /// Works, but there is something to know.
    Warn,
    /// `space up` would not work.
    Fail,
}

/// One prerequisite.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            mend: None,
        }
    }

    fn warn(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Warn,
            found: found.into(),
            mend: Some(mend.into()),
        }
    }

    fn fail(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            status: Status::Fail,
            ..Self::warn(name, found, mend)
        }
    }
}

impl Doctor {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let data = std::path::absolute(&self.place.data_dir)?;
        // What is not there yet has no links that could be resolved.
        let data = fs_err::canonicalize(&data).unwrap_or(data);
        let node: Account = self.user.parse().map_err(CliError::usage)?;
        let installation = Installation::of(data, self.place.run_dir.as_deref());
        let data = &installation.data_directory;
        let templates = self.templates.clone().unwrap_or_else(|| data.join("templates"));
        let mut checks = vec![host::root(), host::kernel()];
        checks.extend(host::monitor().await);
        checks.extend(host::cgroups());
        checks.push(host::namespaces());
        checks.extend(host::programs());
        checks.push(host::memory());
        checks.push(resources::swap());
        checks.push(resources::pressure());
        checks.push(resources::users(&installation.all_uids(), node));
        checks.push(host::disk(data));
        checks.push(platform::owner(data, node));
        checks.push(platform::daemon());
        checks.push(platform::template(&templates));
        checks.push(platform::manager(&installation));
        checks.push(platform::port(self.listen, global).await);

        let failed = checks.iter().filter(|check| check.status == Status::Fail).count();
        if global.json {
            output::json(&serde_json::json!({"ok": failed == 0, "checks": checks}))?;
        } else {
            print(&checks)?;
            output::line(match failed {
                0 => "This machine can run sandboxes.".to_owned(),
                1 => "One thing is to be mended first.".to_owned(),
                more => format!("{more} things are to be mended first."),
            })?;
        }
        Ok(ExitCode::from(u8::from(failed > 0)))
    }
}

fn print(checks: &[Check]) -> Result<(), CliError> {
    for check in checks {
        let mark = match check.status {
            Status::Ok => "ok  ",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        output::line(format!(
            "{mark}  {:<12} {}",
            check.name,
            output::printable(&check.found)
        ))?;
        if let Some(mend) = &check.mend {
            output::line(format!("{:<19}{mend}", ""))?;
        }
    }
    Ok(())
}
