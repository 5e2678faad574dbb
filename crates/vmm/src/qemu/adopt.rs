//! Taking over a machine whose earlier owner is gone.
//!
//! ```text
//! record ─► process: the same pid and start time? the same program? ─► connect to the monitor ─► negotiate, ask all
//!   there is to know ─► running or paused: supervise it
//!                   └─► stopped for good while nobody looked: read its last words, end it, say why
//! ```
//!
//! Up to the last step nothing is done to the machine, so whatever fails leaves it as it was.

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use space_node_manager::{ExitStatus, PrivilegeError};
use tokio::{net::UnixStream, sync::watch};

use super::{
    Shared, command_line,
    machine::{self, Inner, Port, QemuMachine, exited},
    qmp::{Qmp, QmpError},
    start::{CONTROL_SOCKET, DATA_SOCKET, MONITOR_SOCKET},
    supervise::{CLOSING, Console, Order, Process, Watched, supervise},
};
use crate::{MachineRecord, VmmError, io_error, record::hexadecimal};

const STEP: &str = "adopting it";

pub(super) async fn adopt(shared: Arc<Shared>, record: MachineRecord) -> Result<QemuMachine, VmmError> {
    if record.driver != shared.capabilities.driver {
        let what = format!("it was made by the driver {}", record.driver);
        return Err(VmmError::Unadoptable { what });
    }
    let adopted = match shared.privileges.adopt(record.process).await {
        Ok(adopted) => adopted,
        Err(error) if is_gone(&error) => {
            let log = record.directory.join(super::start::LOG);
            let reason =
                super::supervise::monitor_end(&*shared.privileges, &record.name, &log, ExitStatus::Unknown)
                    .await;
            return Err(exited(STEP, Some(&reason)));
        }
        Err(PrivilegeError::Refused { what }) => return Err(VmmError::Unadoptable { what }),
        Err(source) => {
            let step = "adopt the monitor";
            return Err(VmmError::Privilege { step, source });
        }
    };
    let runs = hexadecimal(&adopted.spawned.executable);
    if runs != record.executable {
        let what = format!(
            "process {} runs a program with the digest {runs} instead of {}",
            record.process.pid, record.executable
        );
        return Err(VmmError::Unadoptable { what });
    }

    let process = Process::new(shared.privileges.clone(), record.process, adopted.spawned.exit);
    let socket = record.directory.join(MONITOR_SOCKET);
    let console = Arc::new(Console::load(&record.directory));
    let connected = machine::connect(&socket).map_err(|e| io_error("connect to", &socket, e));
    let found = match connected {
        Ok(stream) => ask(Qmp::new(stream, &shared.tasks), &record).await,
        Err(error) => Err(error),
    };
    let mut watched = Watched {
        privileges: shared.privileges.clone(),
        name: record.name.clone(),
        console: console.clone(),
        log: record.directory.join(super::start::LOG),
        process,
    };
    let Found { qmp, layers, stopped } = match found {
        Ok(found) => found,
        // An ending monitor closes its sockets before it is gone.
        Err(error) => match tokio::time::timeout(CLOSING, watched.process.ended()).await {
            Ok(status) => return Err(exited(STEP, Some(&watched.end(status).await))),
            Err(_) => return Err(error),
        },
    };
    if let Some(status) = stopped {
        let reason = watched.end_stopped(&qmp, &status).await;
        return Err(exited(STEP, Some(&reason)));
    }
    let record = MachineRecord {
        disk_layers: layers,
        ..record
    };
    Ok(take_over(shared, record, watched, qmp))
}

fn take_over(shared: Arc<Shared>, record: MachineRecord, watched: Watched, qmp: Qmp) -> QemuMachine {
    let (order, orders) = watch::channel(Order::None);
    let (tell, exit) = watch::channel(None);
    let console = watched.console.clone();
    shared.tasks.spawn(supervise(watched, qmp.clone(), orders, tell));
    let port = |name| Port::new(record.directory.join(name), None::<UnixStream>);
    QemuMachine {
        inner: Arc::new(Inner {
            identity: record.process,
            exit,
            order,
            qmp,
            console,
            freezing: tokio::sync::Mutex::default(),
            control: port(CONTROL_SOCKET),
            data: port(DATA_SOCKET),
            record: std::sync::Mutex::new(record),
            shared,
        }),
    }
}

/// What the monitor tells.
struct Found {
    qmp: Qmp,
    /// The disk's layers as they are now, top first.
    layers: Vec<std::path::PathBuf>,
    /// QEMU's word for its state, if the guest has stopped for good.
    stopped: Option<String>,
}

async fn ask(qmp: Qmp, record: &MachineRecord) -> Result<Found, VmmError> {
    let named = |command: &'static str| move |error: QmpError| error.into_vmm(command);
    // All at once: QEMU answers in order.
    let negotiated = qmp.send("qmp_capabilities", Value::Null).await;
    let status = qmp.send("query-status", Value::Null).await;
    let nodes = qmp.send("query-named-block-nodes", json!({"flat": true})).await;
    negotiated.wait().await.map_err(named("qmp_capabilities"))?;
    let status = status.wait().await.map_err(named("query-status"))?;
    let nodes = nodes.wait().await.map_err(named("query-named-block-nodes"))?;
    let status = status.get("status").and_then(Value::as_str).unwrap_or_default();
    match status {
        "shutdown" | "guest-panicked" => {
            return Ok(Found {
                qmp,
                layers: record.disk_layers.clone(),
                stopped: Some(status.to_owned()),
            });
        }
        "inmigrate" => {
            let what = "its state was never loaded".to_owned();
            return Err(VmmError::Unadoptable { what });
        }
        _ => {}
    }
    let Layers { layers, stray } = layers(&nodes);
    if layers.is_empty() || !layers.ends_with(&record.disk_layers) {
        let what = format!("its disk has the layers {layers:?}, not {:?}", record.disk_layers);
        return Err(VmmError::Unadoptable { what });
    }
    // A layer that was being added when the earlier owner went away must not be in the way of the next.
    for node in stray {
        let deleted = qmp.run("blockdev-del", json!({"node-name": node})).await;
        deleted.map_err(named("blockdev-del"))?;
    }
    Ok(Found {
        qmp,
        layers,
        stopped: None,
    })
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Layers {
    /// Top first.
    layers: Vec<std::path::PathBuf>,
    /// Nodes that nothing uses, the ones above first.
    stray: Vec<String>,
}

/// The disk's layers from the list of all block nodes. Each layer but the first rests on another; one that was added,
/// but never put on top, rests on none.
fn layers(nodes: &Value) -> Layers {
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    let named = |name: &str| {
        nodes
            .iter()
            .find(|node| node.get("node-name").and_then(Value::as_str) == Some(name))
    };
    let file = |name: &str| named(name)?.get("file").and_then(Value::as_str).map(Path::new);
    let mut found = Layers::default();
    for number in 0.. {
        let name = command_line::layer_node(number);
        let below = match number {
            0 => name.clone(),
            _ => command_line::file_node(number),
        };
        let node = named(&name);
        let rests = number == 0 || node.is_some_and(|node| node.get("backing_file").is_some());
        match (node, file(&below)) {
            (Some(_), Some(path)) if rests => found.layers.insert(0, path.to_owned()),
            (node, path) => {
                found.stray.extend(node.map(|_| name));
                found.stray.extend(path.map(|_| below));
                return found;
            }
        }
    }
    found
}

/// Whether an act failed because the process is no more.
pub(super) fn is_gone(error: &PrivilegeError) -> bool {
    matches!(error, PrivilegeError::System { source, .. } if source.raw_os_error() == Some(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, file: &str, backing: Option<&str>) -> Value {
        let mut node = json!({"node-name": name, "file": file, "backing_file_depth": 0, "ro": false});
        if let Some(backing) = backing {
            node["backing_file"] = backing.into();
        }
        node
    }

    #[test]
    fn layers_are_found_and_one_that_was_never_put_on_top_is_not_taken_for_one() {
        let mut nodes = vec![
            node("root", "/t/root", None),
            node("l1", "json:{}", Some("/t/disk")),
            node("f1", "/own/0", None),
            node("l0", "/t/disk", None),
        ];
        let paths = |paths: &[&str]| paths.iter().map(std::path::PathBuf::from).collect::<Vec<_>>();
        let found = layers(&Value::Array(nodes.clone()));
        assert_eq!(found.layers, paths(&["/own/0", "/t/disk"]));
        assert_eq!(found.stray, Vec::<String>::new());

        nodes.push(node("f2", "/own/1", None));
        assert_eq!(layers(&Value::Array(nodes.clone())).stray, ["f2"]);
        nodes.push(node("l2", "json:{}", None));
        let found = layers(&Value::Array(nodes.clone()));
        assert_eq!(found.layers, paths(&["/own/0", "/t/disk"]));
        assert_eq!(found.stray, ["l2", "f2"]);

        nodes.pop();
        nodes.push(node("l2", "json:{}", Some("json:{}")));
        let found = layers(&Value::Array(nodes));
        assert_eq!(found.layers, paths(&["/own/1", "/own/0", "/t/disk"]));
        assert_eq!(layers(&json!({"not": "a list"})), Layers::default());
    }
}
