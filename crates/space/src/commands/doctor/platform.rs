//! What belongs to the platform itself.

use std::{net::SocketAddr, os::unix::fs::MetadataExt as _, path::Path};

use space_volume::TemplateStore;

use super::Check;
use crate::{
    cli::Global,
    commands::up::{
        self,
        installation::{Account, Installation},
    },
    output,
};

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

/// Whose the data directory is: the node must be able to write it, and nobody else.
pub(super) fn owner(data: &Path, node: Account) -> Check {
    match fs_err::metadata(data) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Check::ok(
            "data",
            format!("{} is not there yet; `space up` makes it", data.display()),
        ),
        Err(error) => Check::fail("data", error.to_string(), "choose another --data-dir"),
        Ok(metadata) if metadata.uid() == node.uid => Check::ok(
            "data",
            format!("{} belongs to the node's user {}", data.display(), node.uid),
        ),
        Ok(metadata) if metadata.uid() == 0 => Check::warn(
            "data",
            format!("{} belongs to root", data.display()),
            "nothing to do: the next `space up` hands it to the node's user. Stop a platform of an earlier version first",
        ),
        Ok(metadata) => Check::warn(
            "data",
            format!("{} belongs to user {}", data.display(), metadata.uid()),
            "start the platform with that user as --user, or the next start hands the directory over",
        ),
    }
}

/// Whether the node manager of a running platform answers.
pub(super) fn manager(installation: &Installation) -> Check {
    let socket = installation.manager_socket();
    let place = socket.display();
    if up::manager_listens(&socket) {
        Check::ok(
            "manager",
            format!("the node manager of a running platform listens at {place}"),
        )
    } else if socket.exists() {
        Check::warn(
            "manager",
            format!("nobody listens at {place}"),
            "a platform was killed here: `space up` takes its sandboxes over, `space down` ends them",
        )
    } else {
        Check::ok("manager", "no platform runs on this data directory")
    }
}
