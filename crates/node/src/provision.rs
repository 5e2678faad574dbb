//! The steps from a template's machine to a worker that stands still.
//!
//! ```text
//!  network, user id, group, directories, disk layer ─► monitor started, state loaded ─► hello written
//! ```
//!
//! Each thing is noted in [`Remains`] before it is made; undoing is removing what is noted. A step that acts on the host
//! is never dropped half-way: when the work is cancelled, the current one finishes and the next does not begin.

use std::{
    io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Instant,
};

use space_api::size::SizeClass;
use space_node_manager::{GroupLimits, Network};
use space_vmm::{DiskLayer, Machine, MachineSpec, StartMode};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{MONITOR_MEMORY, MONITOR_PIDS},
    failure::{self, Failure},
    link::{Link, NOBODY},
    locked,
    manager::Shared,
    remains::Remains,
    templates::StartingPoint,
    worker::Worker,
};

/// Share of the CPU that a sandbox has, out of 10000.
pub(crate) const CPU_WEIGHT: u64 = 100;

/// The step some work is at, for whoever has to say why it took too long.
#[derive(Debug, Default)]
pub(crate) struct Progress(Mutex<&'static str>);

impl Progress {
    pub(crate) fn at(&self, step: &'static str) {
        *locked(&self.0) = step;
    }

    pub(crate) fn step(&self) -> &'static str {
        *locked(&self.0)
    }
}

/// What is to be made, and where it is noted.
pub(crate) struct Order<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) size: SizeClass,
    pub(crate) cpu_weight: u64,
    /// Empty but for the name of the worker to be.
    pub(crate) remains: &'a Mutex<Remains>,
    pub(crate) progress: &'a Progress,
    pub(crate) cancel: &'a CancellationToken,
}

/// When the steps were done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stamps {
    pub(crate) prepared: Instant,
    pub(crate) started: Instant,
}

/// What the machine is made of, once it is there.
struct Prepared {
    network: Network,
    uid: u32,
    directory: PathBuf,
    layer: PathBuf,
}

impl Order<'_> {
    /// Carries out all steps. Must not be dropped; cancelling is by the token.
    pub(crate) async fn provision(&self, point: StartingPoint) -> Result<(Worker, Stamps), Failure> {
        let shared = self.shared;
        let (name, stop) = {
            let remains = locked(self.remains);
            (remains.name.clone(), remains.stop.clone())
        };
        let _starting = shared.networks.starting();
        self.progress.at("making its network, group and disk");
        let prepared = self.prepare(&point).await?;
        let prepared_at = Instant::now();
        self.go_on()?;

        self.progress.at("starting the machine");
        let spec = MachineSpec {
            name: name.clone(),
            uid: prepared.uid,
            directory: prepared.directory,
            vcpus: self.size.vcpus,
            memory_mib: self.size.memory_mib,
            root: point.root,
            disk: vec![DiskLayer { path: prepared.layer }, DiskLayer { path: point.disk }],
            network_namespace: prepared.network.namespace,
            tap: prepared.network.tap,
            kernel: point.kernel,
            initramfs: point.initramfs,
            kernel_arguments: point.kernel_arguments,
        };
        let mode = StartMode::Restore {
            template: point.machine,
            delta: None,
        };
        let machine: Arc<dyn Machine> = shared.vmm.start(spec, mode).await?.into();
        locked(self.remains).machine = Some(machine.clone());
        let stamps = Stamps {
            prepared: prepared_at,
            started: Instant::now(),
        };
        self.go_on()?;

        self.progress.at("greeting the daemon");
        let link = Link::open(
            machine.clone(),
            NOBODY,
            shared.owner(stop),
            shared.config.limits.ask,
        )
        .await
        .map_err(|error| Failure::step("greeting the daemon", &error))?;
        Ok((Worker { name, machine, link }, stamps))
    }

    fn go_on(&self) -> Result<(), Failure> {
        if self.cancel.is_cancelled() {
            Err(Failure::Ended)
        } else {
            Ok(())
        }
    }

    /// Makes what does not depend on each other at the same time. All parts run to their end even when one fails.
    async fn prepare(&self, point: &StartingPoint) -> Result<Prepared, Failure> {
        let shared = self.shared;
        let name = locked(self.remains).name.clone();
        let directory = shared.machine_directory(&name);
        let disks = shared.disk_directory(&name);
        let layer = disks.join("0.qcow2");
        let Some(uid) = shared.uids.take() else {
            return Err(Failure::NoCapacity(
                "all user ids for machines are in use".to_owned(),
            ));
        };
        {
            let mut remains = locked(self.remains);
            remains.uid = Some(uid);
            remains.group = true;
            remains.directories = vec![directory.clone(), disks.clone()];
        }

        let network = async {
            let named = shared
                .networks
                .take()
                .await
                .map_err(failure::privilege("making its network"))?;
            locked(self.remains).network = Some(named.name);
            Ok::<_, Failure>(named.network)
        };
        let group = async {
            shared
                .privileges
                .create_group(&name, &self.limits())
                .await
                .map_err(failure::privilege("making its group"))
        };
        let files = async {
            // The monitor has its sockets and its log by descriptor and never sees this one.
            make_directory(&directory, 0o700).map_err(failure::file("making its directory"))?;
            // The monitor opens the layer by name and may not make files beside it.
            make_directory(&disks, 0o711).map_err(failure::file("making its disk's directory"))?;
            shared
                .vmm
                .create_disk_layer(&point.disk, &layer)
                .await
                .map_err(|error| Failure::step("making its disk", &error))?;
            let file = open(&layer).map_err(failure::file("opening its disk"))?;
            shared
                .privileges
                .give_file(file.into(), uid)
                .await
                .map_err(failure::privilege("giving it its disk"))
        };
        let (network, group, files) = tokio::join!(network, group, files);
        files?;
        group?;
        Ok(Prepared {
            network: network?,
            uid,
            directory,
            layer,
        })
    }

    fn limits(&self) -> GroupLimits {
        let vcpus = u64::from(self.size.vcpus);
        GroupLimits {
            memory_bytes: (u64::from(self.size.memory_mib) << 20) + MONITOR_MEMORY,
            pids: MONITOR_PIDS + vcpus,
            // One CPU more than the guest has: the monitor's own thread serves disk and network.
            cpu_quota_micros: (vcpus + 1) * 100_000,
            cpu_weight: self.cpu_weight,
            io: self.shared.config.disk_traffic,
        }
    }
}

/// Ends work that acts on the host: it is told to, its machine is killed, and it has the time to come to a point where
/// nothing is half-made. Answers whether it did; what it makes otherwise is swept later.
pub(crate) async fn wind_up(
    shared: &Shared,
    remains: &Mutex<Remains>,
    cancel: &CancellationToken,
    work: impl Future,
) -> bool {
    cancel.cancel();
    let hurry = async {
        let group = {
            let remains = locked(remains);
            remains.group.then(|| remains.name.clone())
        };
        if let Some(group) = group {
            // A machine that is being started would otherwise be waited for.
            drop(shared.privileges.kill_group(&group).await);
        }
    };
    let wait = tokio::time::timeout(shared.config.limits.stop, work);
    let (waited, ()) = tokio::join!(wait, hurry);
    waited.is_ok()
}

/// Not handed to another thread: that would take longer than the act.
fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    std::fs::DirBuilder::new()
        .mode(mode)
        .create(path)
        .map_err(named)?;
    // Whatever the umask: a monitor passes through one of them.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(named)
}

fn open(path: &Path) -> io::Result<std::fs::File> {
    let file = fs_err::OpenOptions::new().read(true).write(true).open(path)?;
    Ok(file.into_parts().0)
}
