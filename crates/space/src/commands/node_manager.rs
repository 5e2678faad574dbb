//! `space node-manager`: the root process. It performs the privileged acts that the node asks for, and nothing else.
//!
//! `space up` or a service manager starts it. It stops on SIGTERM and SIGINT; what it has started goes on running.

use std::process::ExitCode;

use clap::Args;
use space_node_manager::{Server, ServerConfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::up::{
    assemble::privilege_error,
    ensure_root,
    installation::{Account, NODE_UID, Place},
};
use crate::error::CliError;

#[derive(Debug, Args)]
pub(crate) struct NodeManager {
    #[command(flatten)]
    place: Place,
    /// User that may ask for privileged acts
    #[arg(long, default_value_t = NODE_UID.to_string(), value_name = "NAME|UID")]
    user: String,
}

impl NodeManager {
    pub(crate) async fn run(&self) -> Result<ExitCode, CliError> {
        ensure_root("the node manager")?;
        let account: Account = self.user.parse().map_err(|error: String| {
            CliError::usage(error).with_hint("name an ordinary user with --user, or leave it out")
        })?;
        let installation = self.place.installation()?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let config = ServerConfig {
            data_directory: Some(installation.data_directory.clone()),
            ..ServerConfig::new(
                installation.name.as_str(),
                installation.run_directory.as_path(),
                installation.uids.start..=installation.build_uid(),
                (account.uid, account.gid),
            )
        };
        let server = Server::bind(config, &installation.manager_socket())
            .map_err(|error| privilege_error(error, &installation))?;
        let stop = CancellationToken::new();
        let mut serving = std::pin::pin!(server.serve(stop.clone()));
        tokio::select! {
            () = &mut serving => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        stop.cancel();
        serving.await;
        Ok(ExitCode::SUCCESS)
    }
}
