//! Serves the guest's services on 127.0.0.1:49983, as if this machine were a sandbox.
//!
//! With `E2B_DEBUG=true` the E2B SDKs talk to this address directly. For development only:
//! whoever can connect may run anything.

use std::path::PathBuf;

use axum::serve::ListenerExt;
use space_daemon_services::{GUEST_PORT, Origin, ServiceConfig, Services};

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let config = ServiceConfig {
        agent_cgroup: arguments.next().filter(|a| a != "-").map(PathBuf::from),
        default_user: arguments.next().unwrap_or_else(|| "root".to_owned()),
        ..ServiceConfig::default()
    };
    let services = Services::new(config);
    // Small answers must not wait for each other's acknowledgements.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", GUEST_PORT))
        .await?
        .tap_io(|stream| {
            stream.set_nodelay(true).ok();
        });
    axum::serve(listener, services.router(Origin::Channel)).await
}
