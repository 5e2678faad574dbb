//! `space node`: control plane, node and edge in one process, as an ordinary user. Everything that needs root it asks of
//! the node manager.
//!
//! ```text
//!  listener (inherited, or bound) ► node manager reached ► node opened: it takes over what lives ► store, key
//!     ► serve ► readiness told ► signal
//!     ► SIGINT: end the sandboxes │ SIGTERM: let go of them ► close the store
//! ```
//!
//! `space up` starts it with `--listen-descriptor` and friends; a service manager with `LISTEN_FDS` and `NOTIFY_SOCKET`.

mod platform;
mod readiness;

use std::{net::SocketAddr, path::Path, process::ExitCode, sync::Arc};

use clap::Args;
use serde_json::json;
use space_node_manager::RemotePrivileges;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use super::up::{LISTEN, Serving, assemble::privilege_error, installation::Place, listen_error};
use crate::{
    cli::{DATA_DIRECTORY, Global, url_file},
    error::CliError,
    output,
};
use platform::{Platform, Sandboxes};
use readiness::Inherited;

#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub(crate) struct Node {
    /// Address to listen on, unless a listening socket is inherited
    #[arg(long, default_value = LISTEN, value_name = "ADDRESS")]
    listen: SocketAddr,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    serving: Serving,
    #[command(flatten)]
    inherited: Inherited,
    /// Print how to use the platform, its key included, when it serves
    #[arg(long)]
    announce: bool,
}

impl Node {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        if rustix::process::geteuid().is_root() {
            return Err(CliError::environment("the node does not run as root")
                .with_hint("`space up` starts it as it should be; a service manager is told the user"));
        }
        self.serving.check()?;
        let installation = self.place.installation()?;
        let inherited = self.inherited.take()?;
        let listener = match inherited.listener {
            Some(listener) => TcpListener::from_std(listener)?,
            None => TcpListener::bind(self.listen)
                .await
                .map_err(|error| listen_error(self.listen, error))?,
        };
        let address = listener.local_addr()?;

        // From here on a signal is an orderly end, also in the middle of the start.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let cancel = CancellationToken::new();
        let privileges = RemotePrivileges::connect(&installation.manager_socket()).await;
        let privileges = Arc::new(privileges.map_err(|error| privilege_error(error, &installation))?);
        let mut starting = std::pin::pin!(Platform::start(
            &self.serving,
            &installation,
            privileges,
            listener,
            cancel.clone()
        ));
        let mut asked = None;
        let platform = loop {
            let sandboxes = tokio::select! {
                platform = &mut starting => break platform,
                _ = interrupt.recv() => Sandboxes::End,
                _ = terminate.recv() => Sandboxes::Leave,
            };
            if cancel.is_cancelled() {
                return Ok(ExitCode::from(130));
            }
            tracing::info!("giving the start up; once more ends it at once");
            asked = Some(sandboxes);
            cancel.cancel();
        };
        let platform = match (platform, asked) {
            (Err(_), Some(_)) => return Ok(ExitCode::SUCCESS),
            (platform, _) => platform?,
        };
        if let Some(sandboxes) = asked {
            platform.stop(sandboxes).await;
            return Ok(ExitCode::SUCCESS);
        }

        let url = format!("http://{address}");
        let data = &installation.data_directory;
        fs_err::write(url_file(data), format!("{url}\n"))?;
        let published = json!({
            "url": url, "api_url": url, "key": platform.key(), "installation": installation.name,
        });
        inherited.ready.publish(&published)?;
        if self.announce {
            announce(global, &url, &platform, data)?;
        }
        inherited.ready.tell()?;

        let (sandboxes, failure) = tokio::select! {
            _ = interrupt.recv() => (Sandboxes::End, None),
            _ = terminate.recv() => (Sandboxes::Leave, None),
            error = platform.failed() => (Sandboxes::Leave, Some(error)),
        };
        tracing::info!(?sandboxes, "shutting down; once more ends it at once");
        let forced = tokio::select! {
            () = platform.stop(sandboxes) => false,
            _ = interrupt.recv() => true,
            _ = terminate.recv() => true,
        };
        match failure {
            Some(error) => Err(error),
            None if forced => Ok(ExitCode::from(130)),
            None => Ok(ExitCode::SUCCESS),
        }
    }
}

fn announce(global: &Global, url: &str, platform: &Platform, data: &Path) -> Result<(), CliError> {
    let key = platform.key();
    if global.json {
        return output::json(&json!({"api_url": url, "key": key, "vmm": platform.description()}));
    }
    if !platform.isolates_hostile_code() {
        output::note(format!("Note: {}", super::doctor::TCG_NOTE));
    }
    output::line(format!(
        "SPACE is up: {}\n\n  API address  {url}\n  API key      {key}\n\nTry:\n",
        platform.description()
    ))?;
    let find = if data == Path::new(DATA_DIRECTORY) {
        String::new()
    } else {
        format!("SPACE_API_URL={url} SPACE_API_KEY={key} ")
    };
    output::line(format!("  {find}space run -- uname -a"))?;
    output::line(format!("  {find}space sandbox create"))?;
    output::line(format!(
        "  E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={key} python3 -c \\\n    'from e2b import Sandbox; print(Sandbox.create().commands.run(\"id\").stdout)'\n"
    ))
}
