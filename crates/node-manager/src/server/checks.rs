//! What the node may ask for, as far as the host must be looked at.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use fs_err as fs;
use rustix::fs::{FileType, OFlags};
use tokio::sync::{OwnedMutexGuard, RwLockReadGuard, RwLockWriteGuard};

use super::ServerConfig;
use crate::{LocalPrivileges, ObjectName, PrivilegeError, View, VmmProcess, protocol::SpawnCall};

/// Networks are made ahead, so there are more of them than machines.
const NETWORKS_PER_MACHINE: usize = 2;

fn refused<T>(what: String) -> Result<T, PrivilegeError> {
    Err(PrivilegeError::Refused { what })
}

/// How many objects there are.
#[derive(Debug)]
pub(super) struct Names {
    most: usize,
    groups: Mutex<BTreeSet<ObjectName>>,
    networks: Mutex<BTreeSet<ObjectName>>,
}

impl Names {
    pub(super) fn new(local: &LocalPrivileges, most: usize) -> Result<Self, PrivilegeError> {
        let (groups, networks) = local.names()?;
        Ok(Self {
            most,
            groups: Mutex::new(groups),
            networks: Mutex::new(networks),
        })
    }

    pub(super) fn claim_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        claim(locked(&self.groups), name, self.most, "groups")
    }

    pub(super) fn free_group(&self, name: &ObjectName) {
        locked(&self.groups).remove(name);
    }

    pub(super) fn claim_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        let most = self.most * NETWORKS_PER_MACHINE;
        claim(locked(&self.networks), name, most, "networks")
    }

    pub(super) fn free_network(&self, name: &ObjectName) {
        locked(&self.networks).remove(name);
    }

    /// After a sweep.
    pub(super) fn kept(&self, keep: &BTreeSet<ObjectName>) {
        locked(&self.groups).retain(|name| keep.contains(name));
        locked(&self.networks).retain(|name| keep.contains(name));
    }
}

/// Turns at names: what is asked of one name is done one after the other, so that the count of objects is right and what
/// one act makes is not taken away by another in the middle of it.
#[derive(Debug, Default)]
pub(super) struct Turns {
    names: Mutex<BTreeMap<ObjectName, Arc<tokio::sync::Mutex<()>>>>,
    /// Held by each act for as long as it lasts, and alone by a sweep, which acts on all names.
    sweeping: tokio::sync::RwLock<()>,
}

/// One's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    name: &'a ObjectName,
    held: Option<OwnedMutexGuard<()>>,
    _no_sweep: RwLockReadGuard<'a, ()>,
}

impl Turns {
    pub(super) async fn at<'a>(&'a self, name: &'a ObjectName) -> Turn<'a> {
        let no_sweep = self.sweeping.read().await;
        let of = locked(&self.names).entry(name.clone()).or_default().clone();
        Turn {
            turns: self,
            name,
            held: Some(of.lock_owned().await),
            _no_sweep: no_sweep,
        }
    }

    /// A turn at all names.
    pub(super) async fn at_all(&self) -> RwLockWriteGuard<'_, ()> {
        self.sweeping.write().await
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut names = locked(&self.turns.names);
        drop(self.held.take());
        // Nobody else has it or waits for it: they would have copied it from here.
        if names.get(self.name).is_some_and(|of| Arc::strong_count(of) == 1) {
            names.remove(self.name);
        }
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn claim(
    mut names: MutexGuard<'_, BTreeSet<ObjectName>>,
    name: &ObjectName,
    most: usize,
    kind: &str,
) -> Result<(), PrivilegeError> {
    if names.len() >= most && !names.contains(name) {
        return refused(format!("there are {most} {kind}, and no more are made"));
    }
    names.insert(name.clone());
    Ok(())
}

/// Puts a process together from what was asked and passed.
pub(super) fn process(
    config: &ServerConfig,
    call: SpawnCall,
    passed: Vec<OwnedFd>,
) -> Result<VmmProcess, PrivilegeError> {
    is_monitor(&config.programs, &call.program)?;
    is_roots(&call.program)?;
    let mut passed = passed.into_iter();
    // As many as belong there: counted before.
    let mut next = || {
        passed.next().ok_or_else(|| PrivilegeError::Refused {
            what: "too few descriptors".to_owned(),
        })
    };
    let network_namespace = call.network.then(&mut next).transpose()?;
    let log = call.log.then(&mut next).transpose()?;
    if let Some(log) = &log {
        is_log(log)?;
    }
    let mut descriptors = BTreeMap::new();
    for number in call.numbers {
        let descriptor = next()?;
        may_be_inherited(&descriptor)?;
        if descriptors.insert(number, descriptor).is_some() {
            return refused(format!("descriptor {number} twice"));
        }
    }
    let mut views = Vec::new();
    for (path, writable) in call.views {
        views.push(View {
            path,
            source: next()?,
            writable,
        });
    }
    Ok(VmmProcess {
        name: call.name,
        program: call.program,
        arguments: call.arguments.into_iter().map(Into::into).collect(),
        uid: call.uid,
        network_namespace,
        descriptors,
        log,
        file_size_limit: call.file_size_limit,
        views,
    })
}

/// Whether a program is one of the monitors, by whichever name: hosts have links to them.
fn is_monitor(programs: &[PathBuf], program: &Path) -> Result<(), PrivilegeError> {
    let no = || refused(format!("{} is no monitor", program.display()));
    if !program.is_absolute() {
        return no();
    }
    let Ok(real) = fs::canonicalize(program) else {
        return no();
    };
    let same = |of: &PathBuf| fs::canonicalize(of).is_ok_and(|of| of == real);
    if programs.iter().any(same) { Ok(()) } else { no() }
}

/// Whether nobody but root can change a program: neither the file nor a name on the way to it.
fn is_roots(program: &Path) -> Result<(), PrivilegeError> {
    let real =
        fs::canonicalize(program).map_err(|e| crate::failed(format!("finding {}", program.display()), e))?;
    let above = |path: &'_ Path| path.ancestors().skip(1).map(Path::to_owned).collect::<Vec<_>>();
    let way = above(program).into_iter().chain(above(&real)).chain([real]);
    for path in way {
        // Links are followed: what they lead to is on the way of `real`.
        let status =
            fs::metadata(&path).map_err(|e| crate::failed(format!("looking at {}", path.display()), e))?;
        if status.uid() != 0 || status.mode() & 0o022 != 0 {
            return refused(format!(
                "{} is no monitor: {} can be changed by others than root",
                program.display(),
                path.display()
            ));
        }
    }
    Ok(())
}

/// A log is appended to by the monitor, so it must be a file opened for just that.
fn is_log(log: &OwnedFd) -> Result<(), PrivilegeError> {
    let flags = rustix::fs::fcntl_getfl(log).unwrap_or(OFlags::PATH);
    let file =
        rustix::fs::fstat(log).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
    if file && flags.contains(OFlags::APPEND) && !flags.contains(OFlags::PATH) {
        return Ok(());
    }
    refused("a log is a file opened for appending".to_owned())
}

/// A directory would lead out of the jail, and so would whatever stands for a path.
fn may_be_inherited(descriptor: &OwnedFd) -> Result<(), PrivilegeError> {
    let flags = rustix::fs::fcntl_getfl(descriptor).unwrap_or(OFlags::PATH);
    let kind = rustix::fs::fstat(descriptor).map(|s| FileType::from_raw_mode(s.st_mode));
    match kind {
        Ok(FileType::Socket | FileType::RegularFile | FileType::CharacterDevice | FileType::Fifo)
            if !flags.contains(OFlags::PATH) =>
        {
            Ok(())
        }
        _ => refused("a monitor gets sockets, pipes, files and devices only".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_that_others_can_change_is_no_monitor() {
        if !rustix::process::geteuid().is_root() {
            // Ownership cannot be arranged; the check itself is tested where it can.
            return;
        }
        is_roots(Path::new("/usr/bin/env")).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        fs::write(&program, "").unwrap();
        // The directory for temporary files is everybody's.
        assert!(is_roots(&program).is_err());
        let link = Path::new("/usr/bin/env");
        assert_eq!(link.metadata().unwrap().permissions().mode() & 0o022, 0);
        assert!(is_roots(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_monitor_is_known_by_a_link_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let (program, link) = (directory.path().join("monitor"), directory.path().join("link"));
        fs::write(&program, "").unwrap();
        std::os::unix::fs::symlink("monitor", &link).unwrap();
        let missing = directory.path().join("missing");
        for programs in [vec![missing.clone(), program.clone()], vec![link.clone()]] {
            for asked in [&program, &link] {
                is_monitor(&programs, asked).unwrap();
            }
            assert!(is_monitor(&programs, Path::new("/usr/bin/env")).is_err());
            assert!(is_monitor(&programs, &missing).is_err());
        }
    }

    #[tokio::test]
    async fn turns_at_one_name_follow_each_other_and_a_sweep_is_alone() {
        let (a, b) = (ObjectName::new("a").unwrap(), ObjectName::new("b").unwrap());
        let turns = Turns::default();
        let first = turns.at(&a).await;
        let other = turns.at(&b).await;
        let soon = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, turns.at(&a)).await.is_err());
        drop(first);
        drop(turns.at(&a).await);
        assert!(tokio::time::timeout(soon, turns.at_all()).await.is_err());
        drop(other);
        drop(turns.at_all().await);
        assert!(locked(&turns.names).is_empty());
    }

    #[test]
    fn directories_and_paths_are_not_inherited() {
        let open = |path: &str, flags| rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        may_be_inherited(&open("/dev/null", OFlags::RDONLY)).unwrap();
        assert!(may_be_inherited(&open("/", OFlags::RDONLY)).is_err());
        assert!(may_be_inherited(&open("/dev/null", OFlags::PATH)).is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        is_log(&open(path, OFlags::WRONLY | OFlags::APPEND)).unwrap();
        for flags in [OFlags::WRONLY, OFlags::PATH] {
            assert!(is_log(&open(path, flags)).is_err(), "{flags:?}");
        }
        assert!(is_log(&open("/dev/null", OFlags::WRONLY | OFlags::APPEND)).is_err());
    }
}
