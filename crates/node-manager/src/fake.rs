//! [`RecordingPrivileges`]: performs nothing and writes down what was asked, for tests of logic without root.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt, io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use fs_err as fs;
use tokio::sync::watch;

use crate::{
    Adopted, ExitStatus, Group, GroupLimits, GroupUsage, MachineMemory, Network, ObjectName, PrivilegeError,
    Privileges, ProcessIdentity, Spawned, SweepReport, VmmProcess,
};

/// One recorded act.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "each variant is the method of `Privileges` of that name with its arguments"
)]
pub enum Act {
    CreateNetwork(ObjectName),
    DeleteNetwork(ObjectName),
    CreateGroup(ObjectName, GroupLimits),
    KillGroup(ObjectName),
    DeleteGroup(ObjectName),
    SetGroupWeight(ObjectName, u64),
    GiveFile(u32),
    Adopt(ProcessIdentity),
    OpenKvm,
    Spawn {
        name: ObjectName,
        program: PathBuf,
        arguments: Vec<OsString>,
        uid: u32,
    },
    Kill(ProcessIdentity),
    OpenMemory(ProcessIdentity),
    Sweep(BTreeSet<ObjectName>),
}

/// The fake. Networks, groups and processes exist as entries only; files stay their owner's.
#[derive(Debug, Default)]
pub struct RecordingPrivileges {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    acts: Vec<Act>,
    networks: BTreeSet<ObjectName>,
    groups: BTreeMap<ObjectName, GroupUsage>,
    processes: BTreeMap<u32, (ObjectName, watch::Sender<Option<ExitStatus>>)>,
    failures: Vec<Failure>,
}

/// Decides whether an act fails.
struct Failure(Box<dyn FnMut(&Act) -> bool + Send>);

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Failure")
    }
}

impl RecordingPrivileges {
    /// What was asked so far, in order.
    pub fn acts(&self) -> Vec<Act> {
        self.state().acts.clone()
    }

    /// From now on, an act for which `fails` says so is recorded and then fails.
    pub fn fail_if(&self, fails: impl FnMut(&Act) -> bool + Send + 'static) {
        self.state().failures.push(Failure(Box::new(fails)));
    }

    /// Networks, groups and processes that exist: all zero if nothing was left behind.
    pub fn remaining(&self) -> SweepReport {
        let state = self.state();
        SweepReport {
            processes: state.processes.len(),
            networks: state.networks.len(),
            groups: state.groups.len(),
        }
    }

    /// Lets all processes of an object end.
    pub fn end_processes(&self, name: &ObjectName, status: ExitStatus) {
        self.state().end(|_, of| of == name, status);
    }

    /// What [`Privileges::group_usage`] answers from now on.
    pub fn set_usage(&self, name: &ObjectName, usage: GroupUsage) {
        self.state().groups.insert(name.clone(), usage);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, act: Act) -> Result<MutexGuard<'_, State>, PrivilegeError> {
        let mut state = self.state();
        let fails = state.failures.iter_mut().any(|failure| (failure.0)(&act));
        let words = format!("{act:?}");
        state.acts.push(act);
        if fails {
            return Err(PrivilegeError::System {
                act: words,
                source: io::Error::other("injected failure"),
            });
        }
        Ok(state)
    }
}

impl State {
    fn end(&mut self, which: impl Fn(u32, &ObjectName) -> bool, status: ExitStatus) -> usize {
        let before = self.processes.len();
        self.processes.retain(|pid, (name, exit)| {
            let ends = which(*pid, name);
            if ends {
                exit.send_replace(Some(status));
            }
            !ends
        });
        before - self.processes.len()
    }
}

/// The digest of every pretended program.
const EXECUTABLE: [u8; 32] = [7; 32];

/// What a killed process ends with.
const KILLED: ExitStatus = ExitStatus::Signal(9);

#[async_trait]
impl Privileges for RecordingPrivileges {
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        self.record(Act::CreateNetwork(name.clone()))?
            .networks
            .insert(name.clone());
        Ok(Network {
            namespace: null()?,
            tap: null()?,
        })
    }

    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.record(Act::DeleteNetwork(name.clone()))?
            .networks
            .remove(name);
        Ok(())
    }

    async fn create_group(&self, name: &ObjectName, limits: &GroupLimits) -> Result<Group, PrivilegeError> {
        self.record(Act::CreateGroup(name.clone(), limits.clone()))?
            .groups
            .entry(name.clone())
            .or_default();
        Ok(Group { name: name.clone() })
    }

    async fn group_usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let usage = self.state().groups.get(name).cloned();
        usage.ok_or_else(|| crate::failed(format!("reading the usage of {name}"), missing()))
    }

    async fn kill_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.record(Act::KillGroup(name.clone()))?
            .end(|_, of| of == name, KILLED);
        Ok(())
    }

    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        let mut state = self.record(Act::DeleteGroup(name.clone()))?;
        state.end(|_, of| of == name, KILLED);
        state.groups.remove(name);
        Ok(())
    }

    async fn set_group_weight(&self, name: &ObjectName, cpu_weight: u64) -> Result<(), PrivilegeError> {
        self.record(Act::SetGroupWeight(name.clone(), cpu_weight))
            .map(drop)
    }

    async fn give_file(&self, _file: OwnedFd, uid: u32) -> Result<(), PrivilegeError> {
        self.record(Act::GiveFile(uid)).map(drop)
    }

    async fn spawn(&self, process: VmmProcess) -> Result<Spawned, PrivilegeError> {
        let VmmProcess {
            name,
            program,
            arguments,
            uid,
            ..
        } = process;
        let mut state = self.record(Act::Spawn {
            name: name.clone(),
            program,
            arguments,
            uid,
        })?;
        if state.processes.values().any(|(of, _)| *of == name) {
            return Err(PrivilegeError::Refused {
                what: format!("a monitor runs in the group {name} already"),
            });
        }
        let pid = 1_000_000 + u32::try_from(state.acts.len()).unwrap_or(u32::MAX - 1_000_000);
        let (tell, exit) = watch::channel(None);
        state.processes.insert(pid, (name, tell));
        Ok(Spawned {
            identity: ProcessIdentity {
                pid,
                start_ticks: u64::from(pid),
            },
            executable: EXECUTABLE,
            exit,
        })
    }

    async fn adopt(&self, process: ProcessIdentity) -> Result<Adopted, PrivilegeError> {
        let state = self.record(Act::Adopt(process))?;
        let living = state.processes.get(&process.pid);
        match living.filter(|_| u64::from(process.pid) == process.start_ticks) {
            Some((_, exit)) => Ok(Adopted {
                spawned: Spawned {
                    identity: process,
                    executable: EXECUTABLE,
                    exit: exit.subscribe(),
                },
            }),
            None => Err(crate::process::gone(format!("adopting process {}", process.pid))),
        }
    }

    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError> {
        self.record(Act::OpenKvm).map(drop)?;
        null()
    }

    async fn kill(&self, process: ProcessIdentity) -> Result<(), PrivilegeError> {
        self.record(Act::Kill(process))?.end(
            |pid, _| pid == process.pid && u64::from(pid) == process.start_ticks,
            KILLED,
        );
        Ok(())
    }

    async fn open_memory(&self, process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError> {
        drop(self.record(Act::OpenMemory(process))?);
        Ok(MachineMemory {
            memory: null()?,
            pagemap: null()?,
            maps: String::new(),
        })
    }

    async fn sweep(&self, keep: &BTreeSet<ObjectName>) -> Result<SweepReport, PrivilegeError> {
        let mut state = self.record(Act::Sweep(keep.clone()))?;
        let (networks, groups) = (state.networks.len(), state.groups.len());
        let processes = state.end(|_, name| !keep.contains(name), KILLED);
        state.networks.retain(|name| keep.contains(name));
        state.groups.retain(|name, _| keep.contains(name));
        Ok(SweepReport {
            processes,
            networks: networks - state.networks.len(),
            groups: groups - state.groups.len(),
        })
    }
}

fn null() -> Result<OwnedFd, PrivilegeError> {
    let file = fs::File::open("/dev/null").map_err(|e| crate::failed("opening /dev/null", e))?;
    Ok(file.into_parts().0.into())
}
