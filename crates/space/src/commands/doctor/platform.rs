//! What belongs to the platform itself.

use std::{net::SocketAddr, path::Path};

use space_volume::TemplateStore;

use super::Check;
use crate::{cli::Global, commands::up, output};

pub(super) fn daemon() -> Check {
    match up::find_daemon(None) {
        Ok(path) => Check::ok("daemon", path.display().to_string()),
        Err(error) => Check::fail(
            "daemon",
            error.chain().join(": "),
            error.hint().unwrap_or("name it with `space up --daemon`"),
        ),
    }
}

pub(super) fn template(directory: &Path) -> Check {
    if !directory.exists() {
        return missing();
    }
    let template = TemplateStore::open(directory).and_then(|store| {
        let template = store.resolve("base")?;
        Ok((store.disk_bytes(&template), template))
    });
    match template {
        Ok((bytes, template)) => Check::ok(
            "template",
            format!("{} ({})", template.reference(), output::bytes(bytes)),
        ),
        Err(space_volume::VolumeError::TemplateNotFound { .. }) => missing(),
        Err(error) => Check::fail(
            "template",
            format!("{}: {}", directory.display(), error.chain()),
            "move the directory away; `space up` makes a new one",
        ),
    }
}

fn missing() -> Check {
    Check::warn(
        "template",
        "there is no template `base` yet",
        "`space up` builds it on its first start, or run `space template build base`",
    )
}

pub(super) async fn port(listen: SocketAddr, global: &Global) -> Check {
    match tokio::net::TcpListener::bind(listen).await {
        Ok(_) => Check::ok("port", format!("{listen} is free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            // Most likely ourselves.
            let node = match global.client() {
                Ok(client) => client.node().await.ok(),
                Err(_) => None,
            };
            match node {
                Some(node) => Check::ok(
                    "port",
                    format!(
                        "a platform is running: {}, {} of {} sandboxes",
                        node.vmm, node.sandboxes, node.capacity
                    ),
                ),
                None => Check::fail(
                    "port",
                    format!("{listen} is in use by something else"),
                    "stop it, or choose another address with `space up --listen`",
                ),
            }
        }
        Err(error) => Check::fail(
            "port",
            format!("{listen}: {error}"),
            "choose another address with `space up --listen`",
        ),
    }
}
