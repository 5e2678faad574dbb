//! What a worker, or the sandbox it has become, has on the host, and taking it away again.
//!
//! Everything is noted here before it is made, and every removal is idempotent, so undoing a create that failed at any
//! step, ending a sandbox and retrying what could not be removed are the same act.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use fs_err::tokio as fs;
use space_node_manager::{GroupUsage, ObjectName, Privileges};
use space_vmm::Machine;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{failure::chain, uids::UidSlots};

/// Wait between two tries in the foreground.
const RETRY: Duration = Duration::from_millis(50);
/// Wait between two tries in the background.
const BACKGROUND_RETRY: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) name: ObjectName,
    /// Ends the tasks that serve its link.
    pub(crate) stop: CancellationToken,
    pub(crate) machine: Option<Arc<dyn Machine>>,
    pub(crate) group: bool,
    pub(crate) network: Option<ObjectName>,
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) uid: Option<u32>,
}

impl Remains {
    pub(crate) fn new(name: ObjectName) -> Self {
        Self {
            name,
            stop: CancellationToken::new(),
            machine: None,
            group: false,
            network: None,
            directories: Vec::new(),
            uid: None,
        }
    }

    /// Takes over what is noted; what stays behind is empty.
    pub(crate) fn taken_from(noted: &mut Self) -> Self {
        let empty = Self::new(noted.name.clone());
        std::mem::replace(noted, empty)
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.machine.is_none()
            && !self.group
            && self.network.is_none()
            && self.directories.is_empty()
            && self.uid.is_none()
    }

    /// Ends the machine and reads what it has used.
    pub(crate) async fn kill(&mut self, privileges: &dyn Privileges) -> GroupUsage {
        self.stop.cancel();
        let machine = async {
            match &self.machine {
                None => true,
                Some(machine) => done(&self.name, "its machine", machine.kill().await),
            }
        };
        let group = async {
            // At the same time, so that a driver that hangs cannot keep its machine alive.
            self.group
                && done(
                    &self.name,
                    "its processes",
                    privileges.kill_group(&self.name).await,
                )
        };
        let (killed, emptied) = tokio::join!(machine, group);
        if killed || emptied {
            self.machine = None;
        }
        if !self.group {
            return GroupUsage::default();
        }
        privileges.group_usage(&self.name).await.unwrap_or_else(|error| {
            tracing::warn!(worker = %self.name, error = %chain(&error), "its use could not be read");
            GroupUsage::default()
        })
    }

    /// Takes away what can be taken away; what failed stays noted. The machine must have been killed.
    pub(crate) async fn clear(&mut self, privileges: &dyn Privileges, uids: &UidSlots) {
        let name = self.name.clone();
        let group = async { !self.group || done(&name, "its group", privileges.delete_group(&name).await) };
        let network = async {
            match &self.network {
                None => true,
                Some(network) => done(&name, "its network", privileges.delete_network(network).await),
            }
        };
        let directories = async {
            let mut left = Vec::new();
            for directory in &self.directories {
                let removed = match fs::remove_dir_all(directory).await {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    other => other,
                };
                if !done(&name, "its files", removed) {
                    left.push(directory.clone());
                }
            }
            left
        };
        let (group_gone, network_gone, left) = tokio::join!(group, network, directories);
        self.directories = left;
        if network_gone {
            self.network = None;
        }
        if group_gone {
            self.group = false;
            // With the group every process is gone, and with them all use of the id.
            if let Some(uid) = self.uid.take_if(|_| self.machine.is_none()) {
                uids.give_back(uid);
            }
        }
    }

    /// Kills and clears until nothing is left or the time is over. Answers what the machine has used.
    pub(crate) async fn remove(
        &mut self,
        privileges: &dyn Privileges,
        uids: &UidSlots,
        limit: Duration,
    ) -> GroupUsage {
        let mut usage = GroupUsage::default();
        let attempts = async {
            loop {
                let now = self.kill(privileges).await;
                usage.cpu_micros = usage.cpu_micros.max(now.cpu_micros);
                usage.oom_kills = usage.oom_kills.max(now.oom_kills);
                self.clear(privileges, uids).await;
                if self.is_empty() {
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        if tokio::time::timeout(limit, attempts).await.is_err() {
            tracing::error!(worker = %self.name, ?self, "parts of a sandbox are left; retrying in the background");
        }
        usage
    }
}

fn done<E: std::error::Error>(name: &ObjectName, what: &str, result: Result<(), E>) -> bool {
    match result {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(worker = %name, what, error = %chain(&error), "could not be removed");
            false
        }
    }
}

/// Removes in the background what could not be removed in time. What is left at its end is swept at the next start.
pub(crate) async fn janitor(
    privileges: Arc<dyn Privileges>,
    uids: Arc<UidSlots>,
    mut queue: mpsc::UnboundedReceiver<Remains>,
    stop: CancellationToken,
) {
    let mut left: Vec<Remains> = Vec::new();
    // Its own clock: however often something new comes, what is there has its turn.
    let mut retry = tokio::time::interval(BACKGROUND_RETRY);
    retry.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            remains = queue.recv() => match remains {
                Some(remains) => left.push(remains),
                None => return,
            },
            _ = retry.tick(), if !left.is_empty() => {
                for remains in &mut left {
                    remains.kill(privileges.as_ref()).await;
                    remains.clear(privileges.as_ref(), &uids).await;
                }
                left.retain(|remains| !remains.is_empty());
            }
        }
    }
}
