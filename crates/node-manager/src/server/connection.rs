//! One connection of a node.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Semaphore, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{Shared, checks};
use crate::{
    ExitStatus, PrivilegeError, Privileges, ProcessIdentity, Spawned,
    packets::{Packet, Packets},
    protocol::{Call, Done, Failure, ProtocolError, Reply, Request, VERSION, parse_request},
};

/// How long a peer may take to say hello.
const HELLO: Duration = Duration::from_secs(5);

/// Acts under way for one connection; the next message is read when one of them is done.
const ACTS: usize = 256;

/// Serves one peer until it goes away or breaks the protocol.
pub(super) async fn serve(shared: Arc<Shared>, packets: Packets, stop: CancellationToken) {
    match packets.peer() {
        Ok(uid) if uid == shared.config.owner => {}
        Ok(uid) => {
            tracing::warn!(uid, "refused: a connection of a user that is not the node's");
            return;
        }
        Err(error) => {
            tracing::warn!(%error, "refused: a connection of nobody");
            return;
        }
    }
    let packets = Arc::new(packets);
    let outcome = tokio::select! {
        outcome = converse(&shared, &packets) => outcome,
        () = stop.cancelled() => {
            // The answers of acts under way still go out; nothing new is taken.
            shared.acts.close();
            shared.acts.wait().await;
            return;
        }
    };
    if let Err(error) = outcome {
        tracing::warn!(%error, "refused: what the node says, so its connection is closed");
    }
}

async fn converse(shared: &Arc<Shared>, packets: &Arc<Packets>) -> io::Result<()> {
    let broken = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut buffer = Vec::new();
    let hello = timeout(HELLO, packets.receive(&mut buffer)).await??;
    let Some(hello) = hello else { return Ok(()) };
    match parse_request(&hello.bytes) {
        // Also to one of another version, which can then say so.
        Ok(Request::Hello { version }) => {
            send(packets, &Reply::Welcome { version: VERSION }, &[]).await?;
            if version != VERSION {
                return Err(broken(format!("version {version} of the protocol")));
            }
        }
        Ok(Request::Request { .. }) => return Err(broken("no hello".to_owned())),
        Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    }
    let room = Arc::new(Semaphore::new(ACTS));
    // Those who tell of ends go with the connection; acts do not.
    let mut watchers = JoinSet::new();
    // One for each process, however often it is asked for.
    let mut watched = BTreeSet::new();
    let (ends, mut started) = tokio::sync::mpsc::channel::<Spawned>(ACTS);
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else {
            return Ok(());
        };
        let packet = tokio::select! {
            packet = packets.receive(&mut buffer) => packet?,
            Some(spawned) = started.recv() => {
                // If it has ended, whoever watches it may have told so before the answer went out.
                let ended = spawned.exit.borrow().is_some();
                if watched.insert(spawned.identity) || ended {
                    watchers.spawn(tell_end(packets.clone(), spawned));
                }
                continue;
            }
            Some(told) = watchers.join_next() => {
                if let Ok(process) = told {
                    watched.remove(&process);
                }
                continue;
            }
        };
        let Some(Packet { bytes, descriptors }) = packet else {
            return Ok(());
        };
        let (id, call) = match parse_request(&bytes) {
            Ok(Request::Request { id, call }) => (id, call),
            Ok(Request::Hello { .. }) => return Err(broken("a second hello".to_owned())),
            Err(error @ ProtocolError::OutOfBounds { id: Some(id), .. }) => {
                tracing::warn!(%error, "refused");
                let what = error.to_string();
                let outcome = Err(Failure::Refused { what });
                send(packets, &Reply::Answer { id, outcome }, &[]).await?;
                continue;
            }
            Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        };
        let tracker = shared.acts.clone();
        let (shared, packets, ends) = (shared.clone(), packets.clone(), ends.clone());
        let act = async move {
            let words = call.words();
            let (outcome, descriptors, spawned) = match perform(&shared, call, descriptors).await {
                Ok(Given {
                    done,
                    descriptors,
                    spawned,
                }) => (Ok(done), descriptors, spawned),
                Err(error) => {
                    log(&words, &error);
                    (Err(Failure::from(error)), Vec::new(), None)
                }
            };
            // Whoever asked may be gone; what was done stays done, and is found by name.
            let sent = send(&packets, &Reply::Answer { id, outcome }, &descriptors).await;
            if let (Ok(()), Some(spawned)) = (sent, spawned) {
                ends.send(spawned).await.ok();
            }
            drop(permit);
        };
        // Tracked by the server, which waits for it at its end; a connection's end does not cut it short.
        tracker.spawn(act);
    }
}

/// Tells of the end of a process when it comes, and answers which it was.
async fn tell_end(packets: Arc<Packets>, spawned: Spawned) -> ProcessIdentity {
    let Spawned {
        identity, mut exit, ..
    } = spawned;
    let status = match exit.wait_for(Option::is_some).await {
        Ok(status) => status.unwrap_or(ExitStatus::Unknown),
        Err(_) => ExitStatus::Unknown,
    };
    let process = identity;
    send(&packets, &Reply::Exited { process, status }, &[]).await.ok();
    process
}

async fn send(packets: &Packets, reply: &Reply, descriptors: &[OwnedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(reply)?;
    let descriptors = descriptors.iter().map(AsFd::as_fd).collect::<Vec<_>>();
    packets.send(&bytes, &descriptors).await
}

fn log(act: &str, error: &PrivilegeError) {
    match error {
        PrivilegeError::Refused { .. } | PrivilegeError::BadName { .. } => {
            tracing::warn!(act, %error, "refused");
        }
        PrivilegeError::System { source, .. } => tracing::info!(act, %error, %source, "an act failed"),
        _ => tracing::info!(act, %error, "an act failed"),
    }
}

/// What an act gave.
struct Given {
    done: Done,
    descriptors: Vec<OwnedFd>,
    spawned: Option<Spawned>,
}

impl From<Done> for Given {
    fn from(done: Done) -> Self {
        Self {
            done,
            descriptors: Vec::new(),
            spawned: None,
        }
    }
}

impl From<Spawned> for Given {
    fn from(spawned: Spawned) -> Self {
        Self {
            done: Done::Process {
                identity: spawned.identity,
                executable: spawned.executable,
            },
            descriptors: Vec::new(),
            spawned: Some(spawned),
        }
    }
}

fn descriptors(descriptors: impl Into<Vec<OwnedFd>>) -> Given {
    Given {
        done: Done::Nothing,
        descriptors: descriptors.into(),
        spawned: None,
    }
}

async fn perform(shared: &Shared, call: Call, mut passed: Vec<OwnedFd>) -> Result<Given, PrivilegeError> {
    let local = &shared.local;
    if passed.len() != call.descriptors() {
        return Err(PrivilegeError::Refused {
            what: format!("{} descriptors where {} belong", passed.len(), call.descriptors()),
        });
    }
    match call {
        Call::CreateNetwork { name } => {
            let _turn = shared.turns.at(&name).await;
            shared.names.claim_network(&name)?;
            match local.create_network(&name).await {
                Ok(network) => Ok(descriptors([network.namespace, network.tap])),
                Err(error) => {
                    // Counted for as long as anything of it may be there.
                    if local.delete_network(&name).await.is_ok() {
                        shared.names.free_network(&name);
                    }
                    Err(error)
                }
            }
        }
        Call::DeleteNetwork { name } => {
            let _turn = shared.turns.at(&name).await;
            local.delete_network(&name).await?;
            shared.names.free_network(&name);
            Ok(Done::Nothing.into())
        }
        Call::CreateGroup { name, limits } => {
            let _turn = shared.turns.at(&name).await;
            shared.names.claim_group(&name)?;
            // Kept in the count also if it failed halfway: its removal frees it.
            local.create_group(&name, &limits).await?;
            Ok(Done::Nothing.into())
        }
        Call::GroupUsage { name } => Ok(Done::Usage(local.group_usage(&name).await?).into()),
        Call::SetGroupWeight { name, weight } => {
            local.set_group_weight(&name, weight).await?;
            Ok(Done::Nothing.into())
        }
        Call::KillGroup { name } => {
            let _turn = shared.turns.at(&name).await;
            local.kill_group(&name).await?;
            Ok(Done::Nothing.into())
        }
        Call::DeleteGroup { name } => {
            let _turn = shared.turns.at(&name).await;
            local.delete_group(&name).await?;
            shared.names.free_group(&name);
            Ok(Done::Nothing.into())
        }
        Call::GiveFile { uid } => {
            if let Some(file) = passed.pop() {
                local.give_file(file, uid).await?;
            }
            Ok(Done::Nothing.into())
        }
        Call::Spawn(call) => {
            let name = call.name.clone();
            let _turn = shared.turns.at(&name).await;
            let process = checks::process(&shared.config, *call, passed)?;
            Ok(local.spawn(process).await?.into())
        }
        Call::Adopt { process } => Ok(local.adopt(process).await?.spawned.into()),
        Call::OpenKvm => Ok(descriptors([local.open_kvm().await?])),
        Call::Kill { process } => {
            local.kill(process).await?;
            Ok(Done::Nothing.into())
        }
        Call::OpenMemory { process } => Ok(descriptors(local.open_memory_files(process).await?)),
        Call::Sweep { keep } => {
            let _turn = shared.turns.at_all().await;
            let report = local.sweep(&keep).await?;
            shared.names.kept(&keep);
            Ok(Done::Swept(report).into())
        }
    }
}
