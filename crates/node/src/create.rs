//! The steps from an admitted request to a usable sandbox.
//!
//! ```text
//!  journal ─────────────── durable ──────────────────────────────────────┐
//!  network, uid, group, directories, disk layer ─► machine ─► greeting ──┴─► environment ─► usable
//! ```
//!
//! Each thing is noted in [`Remains`] before it is made; undoing is removing what is noted. The journal is written beside
//! the steps, because a life of which no record became durable was never promised to anyone, and whatever it made is
//! owned by name and swept. A step that acts on the host is never dropped half-way: when the sandbox is told to end, the
//! current one finishes (its machine is killed meanwhile) and the next does not begin.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use space_node_manager::{GroupLimits, Network, ObjectName};
use space_vmm::{DiskLayer, Machine, MachineSpec, StartMode};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{MONITOR_MEMORY, MONITOR_PIDS},
    failure::{self, Failure},
    journal::Beginning,
    link::{Link, LinkError},
    locked,
    sandbox::Sandbox,
    templates::StartingPoint,
};

/// A sandbox that is usable.
pub(crate) struct Born {
    pub(crate) machine: Arc<dyn Machine>,
    pub(crate) link: Arc<Link>,
    pub(crate) timings: Timings,
}

/// Where the time went, milliseconds since the create was accepted.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timings {
    pub(crate) permitted: f64,
    pub(crate) prepared: f64,
    pub(crate) started: f64,
    pub(crate) greeted: f64,
    pub(crate) recorded: f64,
    pub(crate) ready: f64,
}

/// The step a create is at, for whoever has to say why it took too long.
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

/// What the machine is made of, once it is there.
struct Prepared {
    network: Network,
    uid: u32,
    directory: PathBuf,
    layer: PathBuf,
}

pub(crate) fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Carries out all steps. When `cancel` is cancelled it stops at the next point where that leaves nothing half-made.
pub(crate) async fn create(
    sandbox: &Sandbox,
    point: StartingPoint,
    cancel: &CancellationToken,
) -> Result<Born, Failure> {
    let mut timings = Timings::default();
    let record = async {
        let recorded = sandbox.shared.journal.begin(Beginning {
            id: sandbox.request.id.clone(),
            generation: sandbox.request.generation,
            project: sandbox.request.project.clone(),
            template: sandbox.resolved.name.clone(),
            size: sandbox.size.to_string(),
            at: sandbox.accepted_at,
        });
        let recorded = recorded.await.map_err(Failure::from);
        if recorded.is_err() {
            cancel.cancel();
        }
        (recorded, milliseconds(sandbox.accepted))
    };
    // Not `try_join!`: that would drop the other half in the middle of an act.
    let ((recorded, recorded_ms), started) =
        tokio::join!(record, start(sandbox, point, cancel, &mut timings));
    recorded?;
    let (machine, link) = started?;
    timings.recorded = recorded_ms;

    if !sandbox.request.environment.is_empty() {
        sandbox.progress.at("setting its environment");
        let body = serde_json::json!({ "envVars": sandbox.request.environment })
            .to_string()
            .into_bytes();
        interruptible(cancel, link.init(body))
            .await?
            .map_err(|error| Failure::step("setting its environment", &error))?;
    }
    timings.ready = milliseconds(sandbox.accepted);
    Ok(Born {
        machine,
        link,
        timings,
    })
}

/// Everything up to the daemon's acknowledgement.
async fn start(
    sandbox: &Sandbox,
    point: StartingPoint,
    cancel: &CancellationToken,
    timings: &mut Timings,
) -> Result<(Arc<dyn Machine>, Arc<Link>), Failure> {
    let shared = &sandbox.shared;
    sandbox.progress.at("waiting for its turn");
    let _permit = interruptible(cancel, shared.starts.acquire())
        .await?
        .map_err(|error| Failure::step("waiting for its turn", &error))?;
    let _starting = shared.networks.starting();
    timings.permitted = milliseconds(sandbox.accepted);

    sandbox.progress.at("making its network, group and disk");
    let prepared = prepare(sandbox, &point).await?;
    timings.prepared = milliseconds(sandbox.accepted);
    if cancel.is_cancelled() {
        return Err(Failure::Ended);
    }

    sandbox.progress.at("starting the machine");
    let spec = MachineSpec {
        name: sandbox.name.clone(),
        uid: prepared.uid,
        directory: prepared.directory,
        vcpus: sandbox.size.vcpus,
        memory_mib: sandbox.size.memory_mib,
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
    locked(&sandbox.remains).machine = Some(machine.clone());
    timings.started = milliseconds(sandbox.accepted);

    sandbox.progress.at("greeting the daemon");
    let greeting = Link::greet(
        machine.clone(),
        sandbox.request.id.as_str(),
        sandbox.request.generation,
        &sandbox.secrets,
        sandbox.owner.clone(),
        shared.config.limits.ask,
    );
    let link = match interruptible(cancel, greeting).await? {
        Ok(link) => link,
        Err(error) => return Err(greeting_failure(machine.as_ref(), &error).await),
    };
    timings.greeted = milliseconds(sandbox.accepted);
    Ok((machine, link))
}

/// A machine that died is the better explanation than a port that was closed.
async fn greeting_failure(machine: &dyn Machine, error: &LinkError) -> Failure {
    let mut exit = machine.exit();
    // The monitor's exit may be noticed a moment after its sockets closed.
    let reason = tokio::time::timeout(Duration::from_millis(500), exit.wait_for(Option::is_some)).await;
    match reason {
        Ok(Ok(reason)) => Failure::Step(format!(
            "greeting the daemon: the machine ended: {:?}",
            reason.as_ref()
        )),
        _ => Failure::step("greeting the daemon", error),
    }
}

/// Makes what does not depend on each other at the same time. All parts run to their end even when one fails.
async fn prepare(sandbox: &Sandbox, point: &StartingPoint) -> Result<Prepared, Failure> {
    let shared = &sandbox.shared;
    let directory = shared.machine_directory(&sandbox.request.id);
    let disks = shared.disk_directory(&sandbox.request.id);
    let layer = disks.join("0.qcow2");
    let Some(uid) = shared.uids.take() else {
        return Err(Failure::NoCapacity(
            "all user ids for machines are in use".to_owned(),
        ));
    };
    {
        let mut remains = locked(&sandbox.remains);
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
        locked(&sandbox.remains).network = Some(named.name);
        Ok::<_, Failure>(named.network)
    };
    let group = async {
        shared
            .privileges
            .create_group(&sandbox.name, &limits(sandbox))
            .await
            .map_err(failure::privilege("making its group"))
    };
    let files = async {
        shared
            .privileges
            .create_directory(&directory, uid)
            .await
            .map_err(failure::privilege("making its directory"))?;
        // Owned by the manager: the monitor opens the layer by name and may not make files beside it.
        let mut builder = fs_err::tokio::DirBuilder::new();
        builder.mode(0o711);
        builder
            .create(&disks)
            .await
            .map_err(failure::file("making its disk's directory"))?;
        shared
            .vmm
            .create_disk_layer(&point.disk, &layer)
            .await
            .map_err(|error| Failure::step("making its disk", &error))?;
        shared
            .privileges
            .give_file(&layer, uid)
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

fn limits(sandbox: &Sandbox) -> GroupLimits {
    let vcpus = u64::from(sandbox.size.vcpus);
    GroupLimits {
        memory_bytes: (u64::from(sandbox.size.memory_mib) << 20) + MONITOR_MEMORY,
        pids: MONITOR_PIDS + vcpus,
        // One CPU more than the guest has: the monitor's own thread serves disk and network.
        cpu_quota_micros: (vcpus + 1) * 100_000,
        cpu_weight: 100,
    }
}

/// Runs what may be dropped at any point until it is done or the sandbox is to end.
async fn interruptible<T>(cancel: &CancellationToken, work: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Failure::Ended),
        done = work => Ok(done),
    }
}

/// The name of a sandbox's objects on the host.
pub(crate) fn object_name(id: &space_api::id::SandboxId) -> Result<ObjectName, Failure> {
    ObjectName::new(id.as_str()).map_err(failure::privilege("naming its objects"))
}
