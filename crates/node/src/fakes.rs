//! A pretended host, monitor and template store, with faults on demand and an account of what is left.
//!
//! The guest behind a pretended machine is real in what it speaks: control frames, nonce, HTTP/2.

pub(crate) mod guest;
mod vmm;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use space_api::size::SizeClass;
use space_node_manager::{
    Adopted, Group, GroupLimits, GroupUsage, MachineMemory, Network, ObjectName, PrivilegeError, Privileges,
    ProcessIdentity, Spawned, SweepReport, VmmProcess,
};
use space_vmm::{
    Capabilities, ExitReason, FrozenLayer, Machine, MachineRecord, MachineSpec, MachineTemplate, MemoryDelta,
    PortStream, RunState, StartMode, Vmm, VmmError,
};
use tokio::{
    net::UnixStream,
    sync::{Notify, watch},
};

use crate::{
    locked,
    seam::TemplateInfo,
    templates::{Lease, ResolvedTemplate, StartingPoint, TemplateError, Templates},
};

pub(crate) use vmm::PretendedVmm;

/// What a step does instead of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An error.
    Fail,
    /// The disk is full.
    Full,
    /// A panic.
    Panic,
    /// Nothing, until the machine or the fault is gone.
    Hang,
}

/// Digest of the program that pretended machines run.
const EXECUTABLE: &str = "00";

/// See the module.
#[derive(Debug)]
pub(crate) struct World {
    faults: Mutex<HashMap<&'static str, Fault>>,
    fault_changed: Notify,
    networks: Mutex<BTreeSet<ObjectName>>,
    groups: Mutex<BTreeMap<ObjectName, GroupLimits>>,
    machines: Mutex<HashMap<String, Arc<Life>>>,
    /// Extra time of every step, to let races happen.
    pub(crate) slowness: Mutex<Duration>,
    /// Most machines that were being started at once.
    pub(crate) most_starts: AtomicUsize,
    starts: AtomicUsize,
    /// Machines started so far, which tells their processes apart.
    started: AtomicU64,
    /// Data sessions served so far.
    pub(crate) sessions: AtomicUsize,
    /// Whether the guests stay silent on the control port once greeted.
    pub(crate) mute: AtomicBool,
    /// Where `base` leads; nowhere when there is none.
    pub(crate) digest: Mutex<Option<String>>,
    /// What each group is said to use, bytes.
    pub(crate) group_memory: Mutex<u64>,
    panics: AtomicUsize,
    /// Times that a step has begun to hang.
    hanging: AtomicUsize,
    pub(crate) deleted_templates: Mutex<Vec<String>>,
    /// Alive as long as a sandbox holds the template.
    pub(crate) template: Arc<()>,
    capabilities: Capabilities,
    /// Where the guests live: they outlive a node, and the runtime it runs on.
    home: Home,
    /// Whether new guests have the oldest daemon that there is.
    pub(crate) old: AtomicBool,
    /// Whether handles are dropped by a crash, of which no guard knows.
    crashing: AtomicBool,
}

/// A runtime of the guests' own.
#[derive(Debug)]
struct Home(Option<tokio::runtime::Runtime>);

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// One pretended machine, known to the world while it lives, whoever holds its handle.
#[derive(Debug)]
pub(crate) struct Life {
    /// What it is adopted by.
    record: MachineRecord,
    exit: watch::Sender<Option<ExitReason>>,
    running: watch::Sender<bool>,
    doomed: AtomicBool,
    pub(crate) guest: guest::Guest,
}

impl Life {
    /// Stops its vCPUs or lets them run, behind the back of every handle.
    pub(crate) fn stands(&self, still: bool) {
        self.running.send_replace(!still);
    }

    /// Whether its vCPUs run.
    pub(crate) fn runs(&self) -> bool {
        *self.running.borrow()
    }

    /// Whether it has ended.
    pub(crate) fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Has it die when it is let run the next time.
    pub(crate) fn dies_at_resume(&self) {
        self.doomed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn exits(&self, reason: ExitReason) {
        self.exit.send_if_modified(|exit| {
            let first = exit.is_none();
            if first {
                *exit = Some(reason);
            }
            first
        });
    }
}

impl World {
    pub(crate) fn new() -> Arc<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().expect("a runtime");
        Arc::new(Self {
            home: Home(Some(runtime)),
            old: AtomicBool::new(false),
            crashing: AtomicBool::new(false),
            faults: Mutex::default(),
            fault_changed: Notify::new(),
            networks: Mutex::default(),
            groups: Mutex::default(),
            machines: Mutex::default(),
            slowness: Mutex::default(),
            most_starts: AtomicUsize::new(0),
            starts: AtomicUsize::new(0),
            started: AtomicU64::new(1),
            sessions: AtomicUsize::new(0),
            mute: AtomicBool::new(false),
            digest: Mutex::new(Some("sha256:0".to_owned())),
            group_memory: Mutex::new(2000),
            panics: AtomicUsize::new(0),
            hanging: AtomicUsize::new(0),
            deleted_templates: Mutex::default(),
            template: Arc::new(()),
            capabilities: Capabilities {
                driver: "pretended",
                version: "1".to_owned(),
                accelerator: "tcg",
                cpu_model: "none".to_owned(),
                isolates_hostile_code: false,
                layered_disks: true,
            },
        })
    }

    pub(crate) fn home(&self) -> tokio::runtime::Handle {
        self.home
            .0
            .as_ref()
            .expect("until it is dropped")
            .handle()
            .clone()
    }

    /// The host was switched off and on: nothing of before is there.
    pub(crate) fn start_anew(&self) {
        for (_, life) in locked(&self.machines).drain() {
            life.exits(ExitReason::Killed);
        }
        locked(&self.groups).clear();
        locked(&self.networks).clear();
    }

    /// Ends a node as a kill does: its tasks stop where they are, its machines live on.
    pub(crate) fn crash(&self, node: tokio::runtime::Runtime) {
        self.crashing.store(true, Ordering::SeqCst);
        node.shutdown_timeout(Duration::from_secs(10));
        self.crashing.store(false, Ordering::SeqCst);
    }

    pub(crate) fn inject(&self, step: &'static str, fault: Fault) {
        locked(&self.faults).insert(step, fault);
    }

    pub(crate) fn mend(&self) {
        locked(&self.faults).clear();
        self.fault_changed.notify_waiters();
    }

    pub(crate) fn life(&self, name: &str) -> Option<Arc<Life>> {
        locked(&self.machines).get(name).cloned()
    }

    /// Share of the CPU that a group has.
    pub(crate) fn weight(&self, name: &ObjectName) -> Option<u64> {
        locked(&self.groups).get(name).map(|limits| limits.cpu_weight)
    }

    /// How often a step has begun to hang on demand.
    pub(crate) fn hanging(&self) -> usize {
        self.hanging.load(Ordering::SeqCst)
    }

    /// How often a step has panicked on demand.
    pub(crate) fn panics(&self) -> usize {
        self.panics.load(Ordering::SeqCst)
    }

    /// Everything that exists on the pretended host, by name.
    pub(crate) fn objects(&self) -> Vec<String> {
        let machines = locked(&self.machines);
        let alive = machines.iter().filter(|(_, life)| life.exit.borrow().is_none());
        let mut all: Vec<_> = alive.map(|(name, _)| format!("machine {name}")).collect();
        all.extend(
            locked(&self.networks)
                .iter()
                .map(|name| format!("network {name}")),
        );
        all.extend(locked(&self.groups).keys().map(|name| format!("group {name}")));
        all
    }

    async fn step(&self, step: &'static str) -> io::Result<()> {
        let slowness = *locked(&self.slowness);
        if !slowness.is_zero() {
            tokio::time::sleep(slowness.mul_f64(rand::random::<f64>())).await;
        }
        loop {
            let changed = self.fault_changed.notified();
            let fault = locked(&self.faults).get(step).copied();
            match fault {
                None => return Ok(()),
                Some(Fault::Fail) => return Err(io::Error::other(format!("{step} fails on demand"))),
                Some(Fault::Full) => return Err(io::ErrorKind::StorageFull.into()),
                Some(Fault::Panic) => {
                    self.panics.fetch_add(1, Ordering::SeqCst);
                    panic!("{step} panics on demand")
                }
                Some(Fault::Hang) => {
                    self.hanging.fetch_add(1, Ordering::SeqCst);
                    changed.await;
                }
            }
        }
    }

    async fn privileged(&self, act: &'static str) -> Result<(), PrivilegeError> {
        self.step(act).await.map_err(|source| PrivilegeError::System {
            act: act.to_owned(),
            source,
        })
    }
}

#[async_trait]
impl Privileges for World {
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        assert!(
            locked(&self.networks).insert(name.clone()),
            "{name} is used twice"
        );
        // Fails after making it, which is the harder case.
        self.privileged("create_network").await?;
        let null = || {
            File::open("/dev/null")
                .map(OwnedFd::from)
                .expect("there is always /dev/null")
        };
        Ok(Network {
            namespace: null(),
            tap: null(),
        })
    }

    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.privileged("delete_network").await?;
        locked(&self.networks).remove(name);
        Ok(())
    }

    async fn create_group(&self, name: &ObjectName, limits: &GroupLimits) -> Result<Group, PrivilegeError> {
        assert!(
            locked(&self.groups)
                .insert(name.clone(), limits.clone())
                .is_none(),
            "{name} is used twice"
        );
        self.privileged("create_group").await?;
        Ok(Group { name: name.clone() })
    }

    async fn group_usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError> {
        self.privileged("group_usage").await?;
        if !locked(&self.groups).contains_key(name) {
            return Err(PrivilegeError::System {
                act: format!("reading the group {name}"),
                source: io::ErrorKind::NotFound.into(),
            });
        }
        Ok(GroupUsage {
            cpu_micros: 1000,
            memory_bytes: *locked(&self.group_memory),
            oom_kills: 0,
        })
    }

    async fn kill_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.privileged("kill_group").await?;
        if let Some(life) = self.life(name.as_str()) {
            life.exits(ExitReason::MonitorFailed {
                detail: "signal 9".to_owned(),
            });
        }
        Ok(())
    }

    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.privileged("delete_group").await?;
        if let Some(life) = locked(&self.machines).remove(name.as_str()) {
            life.exits(ExitReason::Killed);
        }
        locked(&self.groups).remove(name);
        Ok(())
    }

    async fn set_group_weight(&self, name: &ObjectName, cpu_weight: u64) -> Result<(), PrivilegeError> {
        self.privileged("set_group_weight").await?;
        match locked(&self.groups).get_mut(name) {
            Some(limits) => limits.cpu_weight = cpu_weight,
            None => panic!("{name} has no group"),
        }
        Ok(())
    }

    async fn give_file(&self, file: OwnedFd, _uid: u32) -> Result<(), PrivilegeError> {
        assert!(File::from(file).metadata().is_ok_and(|file| file.is_file()));
        self.privileged("give_file").await
    }

    async fn adopt(&self, _process: ProcessIdentity) -> Result<Adopted, PrivilegeError> {
        Err(PrivilegeError::NotPermitted {
            act: "adopt".to_owned(),
        })
    }

    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError> {
        Err(PrivilegeError::NotPermitted {
            act: "open_kvm".to_owned(),
        })
    }

    async fn spawn(&self, _process: VmmProcess) -> Result<Spawned, PrivilegeError> {
        Err(PrivilegeError::NotPermitted {
            act: "spawn".to_owned(),
        })
    }

    async fn kill(&self, _process: ProcessIdentity) -> Result<(), PrivilegeError> {
        Ok(())
    }

    async fn open_memory(&self, _process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError> {
        Err(PrivilegeError::NotPermitted {
            act: "open_memory".to_owned(),
        })
    }

    async fn sweep(&self, keep: &BTreeSet<ObjectName>) -> Result<SweepReport, PrivilegeError> {
        self.privileged("sweep").await?;
        let mut report = SweepReport::default();
        locked(&self.machines).retain(|name, life| {
            let kept = keep.iter().any(|keep| keep.as_str() == name);
            if !kept {
                report.processes += usize::from(life.exit.borrow().is_none());
                life.exits(ExitReason::Killed);
            }
            kept
        });
        let mut networks = locked(&self.networks);
        report.networks = networks.len();
        networks.retain(|name| keep.contains(name));
        report.networks -= networks.len();
        let mut groups = locked(&self.groups);
        report.groups = groups.len();
        groups.retain(|name, _| keep.contains(name));
        report.groups -= groups.len();
        Ok(report)
    }
}

#[async_trait]
impl Templates for World {
    async fn resolve(&self, name: &str) -> Result<ResolvedTemplate, TemplateError> {
        let digest = locked(&self.digest).clone();
        let Some(digest) = digest.filter(|_| name.split(':').next() == Some("base")) else {
            return Err(TemplateError::NotFound {
                name: name.to_owned(),
            });
        };
        Ok(ResolvedTemplate {
            name: "base:latest".to_owned(),
            digest,
            default_size: SizeClass::DEFAULT,
        })
    }

    async fn ensure_machine(
        &self,
        _template: &ResolvedTemplate,
        _size: SizeClass,
    ) -> Result<StartingPoint, TemplateError> {
        self.step("ensure_machine")
            .await
            .map_err(|source| TemplateError::Failed {
                step: "make the template's machine".to_owned(),
                source: Box::new(source),
            })?;
        let at = |name: &str| Path::new("/template").join(name);
        Ok(StartingPoint {
            lease: Lease::new(self.template.clone()),
            root: at("root"),
            disk: at("disk"),
            machine: MachineTemplate {
                memory: at("memory"),
                state: at("state"),
            },
            kernel: at("kernel"),
            initramfs: at("initramfs"),
            kernel_arguments: String::new(),
        })
    }

    async fn hold(&self, digest: &str, _size: SizeClass) -> Result<Option<Lease>, TemplateError> {
        assert_eq!(digest, "sha256:0");
        Ok(Some(Lease::new(self.template.clone())))
    }

    async fn list(&self) -> Result<Vec<TemplateInfo>, TemplateError> {
        Ok(vec![TemplateInfo {
            name: "base:latest".to_owned(),
            digest: "sha256:0".to_owned(),
            default_size: SizeClass::DEFAULT,
            ready_sizes: vec![SizeClass::DEFAULT],
            disk_bytes: 0,
            created_at: Timestamp::UNIX_EPOCH,
        }])
    }

    async fn delete(&self, name: &str) -> Result<(), TemplateError> {
        self.resolve(name).await?;
        locked(&self.deleted_templates).push(name.to_owned());
        Ok(())
    }
}
