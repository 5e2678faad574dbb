//! Machines of a template: booted once per size and monitor, warmed, snapshotted, then started from any number of
//! times.
//!
//! ```text
//!  locked ► disk made ► room made ► booted ► greeted ► warmed ► run, start, ready ► quiesced ► paused ► saved
//!     ► killed ► files copied without their zeros ► published (one rename)
//! ```
//!
//! Whatever fails, the room (network, cgroup, process, directories) is taken down again; what a crash leaves of it is
//! the node's to sweep by name.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fs_err::{self as fs, File};
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use rand::Rng as _;
use serde::{Deserialize, Serialize};
use space_api::size::SizeClass;
use space_channel::HostControl;
use space_node_manager::{GroupLimits, ObjectName, PrivilegeError, Privileges};
use space_vmm::{
    Capabilities, DiskLayer, Machine, MachineSpec, MachineTemplate, PortStream, StartMode, Vmm, VmmError,
};

use crate::{
    Digest, MachineFiles, Progress, Template, TemplateStore, VolumeError, command::Program, lock,
    owner::Owner, progress::Part, root::in_background, sparse, store::set_mode, warm,
};

/// Raise when the way a machine is brought up changes what its snapshot holds.
const BUILDER: &str = "space-machine-4";
/// From the start of the vCPUs to the daemon's first answer.
const BOOT: Duration = Duration::from_secs(120);
/// For one answer on the control port.
const ANSWER: Duration = Duration::from_secs(60);
/// How long the start command may take to stand still for the snapshot.
const FREEZE: Duration = Duration::from_secs(2);
/// Memory the monitor may use beside the guest's own, bytes.
const MONITOR_MEMORY: u64 = 768 << 20;
/// Longest end of a console in an error, characters.
const CONSOLE: usize = 2048;

/// What the kernel is told. Nothing here differs between sandboxes. Counted in emulated instructions, expedited RCU takes
/// a third off making and removing a cgroup, which every command costs; huge pages only on request keep the memory that
/// a snapshot must copy small.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=4 reboot=t panic=-1 8250.nr_uarts=1 tsc=reliable \
    no_timer_check random.trust_cpu=on cryptomgr.notests cgroup_no_v1=all rcupdate.rcu_expedited=1 \
    transparent_hugepage=madvise";
/// Under emulation only, where it saves 2 to 8 % of the instructions of starting a program, and where nothing is
/// promised that clearing the kernel's own memory would defend.
const EMULATED_KERNEL_ARGUMENTS: &str = " init_on_alloc=0";

/// What a machine of one template is built with.
#[derive(Debug, Clone)]
pub struct MachineRequest {
    /// Size of the machine.
    pub size: SizeClass,
    /// The driver.
    pub vmm: Arc<dyn Vmm>,
    /// Who makes its network, cgroup and process.
    pub privileges: Arc<dyn Privileges>,
    /// Ordinary user that the monitor runs as while the machine is built; used by nobody else meanwhile.
    pub uid: u32,
    /// Where the monitor's sockets go; at most 48 bytes long, passable by `uid`.
    pub run_directory: PathBuf,
}

/// Beside a machine's files: what they are, for people and for starting it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    builder: String,
    driver: String,
    version: String,
    accelerator: String,
    cpu_model: String,
    size: SizeClass,
    kernel_arguments: String,
    memory_bytes_on_disk: u64,
}

/// What a snapshot is bound to beside its template and size, as part of a file name.
pub(crate) fn monitor_key(capabilities: &Capabilities) -> String {
    let parts = [
        BUILDER,
        capabilities.driver,
        &capabilities.version,
        capabilities.accelerator,
        &capabilities.cpu_model,
    ];
    Digest::of(parts.join("\n").as_bytes()).hex()[..16].to_owned()
}

/// The machine's files if it has been built.
pub(crate) fn existing(
    store: &TemplateStore,
    template: &Template,
    size: SizeClass,
    capabilities: &Capabilities,
) -> Result<Option<MachineFiles>, VolumeError> {
    let directory = directory(store, template, size, capabilities);
    let record_path = directory.join("machine.json");
    let text = match fs::read(&record_path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(VolumeError::io("read a machine's record")(error)),
    };
    let record: Record = serde_json::from_slice(&text).map_err(|error| VolumeError::Damaged {
        path: record_path,
        what: error.to_string(),
    })?;
    let manifest = &template.manifest;
    Ok(Some(MachineFiles {
        root: store.blob_path(manifest.root.digest),
        kernel: store.blob_path(manifest.kernel.digest),
        initramfs: store.blob_path(manifest.initramfs.digest),
        kernel_arguments: record.kernel_arguments,
        template: MachineTemplate {
            memory: directory.join("memory"),
            state: directory.join("state"),
        },
        disk_base: directory.join("disk.raw"),
        _lease: store.lease(template.digest)?,
    }))
}

fn directory(
    store: &TemplateStore,
    template: &Template,
    size: SizeClass,
    capabilities: &Capabilities,
) -> PathBuf {
    store
        .machines_path(template.digest)
        .join(format!("{size}-{}", monitor_key(capabilities)))
}

/// Builds the machine unless another process has done so meanwhile.
pub(crate) async fn build(
    store: &TemplateStore,
    template: &Template,
    request: &MachineRequest,
    progress: &Progress,
) -> Result<(), VolumeError> {
    let part = Part::new(progress, 0.0, 1.0);
    let capabilities = request.vmm.capabilities();
    let _lease = store.lease(template.digest)?;
    let target = directory(store, template, request.size, capabilities);
    let key = format!(
        "{}-{}-{}",
        template.digest.hex(),
        request.size,
        monitor_key(capabilities)
    );
    part.report("waiting for another build of the same machine", 0.0);
    let _lock = lock::exclusive(store.build_lock(&key)?).await?;
    if existing(store, template, request.size, capabilities)?.is_some() {
        return Ok(());
    }

    part.report("making the writable disk", 0.01);
    let work = store.work()?;
    // The store may be another user's: from here on no link is followed in it.
    let place = fs::canonicalize(work.path()).map_err(VolumeError::io("look at the working directory"))?;
    let disk = place.join("disk");
    let disk_file = make_disk(store, &disk, request.size).await?;

    let room = Room::new(request, &place)?;
    let made: Result<PathBuf, VolumeError> = async {
        room.make(store, request, &disk_file).await?;
        let kernel_arguments = if capabilities.accelerator == "tcg" {
            format!("{KERNEL_ARGUMENTS}{EMULATED_KERNEL_ARGUMENTS}")
        } else {
            KERNEL_ARGUMENTS.to_owned()
        };
        run_machine(store, template, request, &room, &disk, &kernel_arguments, &part).await?;
        part.report("copying the snapshot", 0.9);
        let result = place.join("machine");
        let record = Record {
            builder: BUILDER.to_owned(),
            driver: capabilities.driver.to_owned(),
            version: capabilities.version.clone(),
            accelerator: capabilities.accelerator.to_owned(),
            cpu_model: capabilities.cpu_model.clone(),
            size: request.size,
            kernel_arguments,
            memory_bytes_on_disk: 0,
        };
        let (memory, state, copied) = (room.memory(), room.state(), result.clone());
        let owner = store.owner();
        in_background(move || keep(&memory, &state, &disk_file, &copied, record, owner)).await?;
        Ok(result)
    }
    .await;
    let taken_down = room.take_down(request).await;
    let result = made?;
    taken_down?;

    let _owner = store.act();
    let machines = store.machines_path(template.digest);
    fs::create_dir_all(&machines).map_err(VolumeError::io("publish a machine"))?;
    set_mode(&machines, 0o755, "publish a machine")?;
    store.place(&result, &target, "publish a machine")?;
    part.report("ready", 1.0);
    Ok(())
}

/// A sparse ext4 file. No journal: after a crash of the guest its machine is started from a snapshot, never mounted
/// again as it is. No checksums of metadata: they cost emulated instructions and protect from nothing here.
///
/// By descriptor once it is made: its directory may be another user's, who could put a link in its place.
async fn make_disk(store: &TemplateStore, path: &Path, size: SizeClass) -> Result<File, VolumeError> {
    let step = "make the writable disk";
    let file = {
        let _owner = store.act();
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path);
        let file = file.map_err(VolumeError::io(step))?;
        file.set_len(u64::from(size.disk_mib) << 20)
            .map_err(VolumeError::io(step))?;
        file
    };
    store.owner().take_back(&file)?;
    const UUID: &str = "7a1f0c52-93de-4b07-8f41-2c6d5e8b9a03";
    Program::new("mkfs.ext4", "e2fsprogs", Duration::from_secs(120))
        .env("E2FSPROGS_FAKE_TIME", "1700000000")
        .args(["-q", "-F", "-m", "1", "-L", "space", "-U", UUID])
        .args(["-O", "^has_journal,^metadata_csum,^orphan_file,^resize_inode"])
        .arg("-E")
        .arg(format!("hash_seed={UUID},lazy_itable_init=0,nodiscard"))
        .arg("/proc/self/fd/0")
        .input(descriptor(&file)?)
        .output()
        .await?;
    Ok(file)
}

/// Another descriptor of an open file.
fn descriptor(file: &File) -> Result<OwnedFd, VolumeError> {
    let copy = file.file().try_clone();
    copy.map(OwnedFd::from)
        .map_err(VolumeError::io("copy a descriptor"))
}

/// Opens a file in a directory that may be another user's, without following a link to what is not theirs.
fn open_plain(path: &Path, step: &'static str) -> Result<File, VolumeError> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    let opened = openat2(AT_FDCWD, path, how).map_err(|error| VolumeError::io(step)(error.into()))?;
    Ok(File::from_parts(opened.into(), path))
}

/// Everything outside the guest that the machine needs while it is built.
struct Room {
    name: ObjectName,
    sockets: PathBuf,
    /// Where the files of the monitor are.
    files: PathBuf,
}

fn make_directory(path: &Path, mode: u32) -> Result<(), VolumeError> {
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::create_dir(path)
        .and_then(|()| fs::set_permissions(path, permissions))
        .map_err(VolumeError::io("make a directory"))
}

impl Room {
    fn new(request: &MachineRequest, work: &Path) -> Result<Self, VolumeError> {
        let number: u64 = rand::rng().random();
        let name = ObjectName::new(&format!("template-{number:016x}"))
            .map_err(|source| privilege("name the objects")(source))?;
        Ok(Self {
            sockets: request.run_directory.join(name.as_str()),
            files: work.join("monitor"),
            name,
        })
    }

    fn memory(&self) -> PathBuf {
        self.files.join("memory")
    }

    fn state(&self) -> PathBuf {
        self.files.join("state")
    }

    async fn make(
        &self,
        store: &TemplateStore,
        request: &MachineRequest,
        disk: &File,
    ) -> Result<(), VolumeError> {
        let privileges = &request.privileges;
        make_directory(&self.sockets, 0o700)?;
        {
            let _owner = store.act();
            // The monitor's user opens the memory by name in it.
            make_directory(&self.files, 0o711)?;
        }
        privileges
            .give_file(descriptor(disk)?, request.uid)
            .await
            .map_err(privilege("give away the disk"))?;
        let limits = GroupLimits {
            memory_bytes: (u64::from(request.size.memory_mib) << 20) + MONITOR_MEMORY,
            pids: 64 + u64::from(request.size.vcpus),
            cpu_quota_micros: 100_000 * (u64::from(request.size.vcpus) + 1),
            cpu_weight: 100,
            io: None,
        };
        privileges
            .create_group(&self.name, &limits)
            .await
            .map_err(privilege("make a cgroup"))?;
        Ok(())
    }

    /// Removes everything; goes on when a part fails, and tells the first failure.
    async fn take_down(&self, request: &MachineRequest) -> Result<(), VolumeError> {
        let privileges = &request.privileges;
        let group = privileges
            .delete_group(&self.name)
            .await
            .map_err(privilege("remove the cgroup"));
        let network = privileges
            .delete_network(&self.name)
            .await
            .map_err(privilege("remove the network"));
        let sockets = match fs::remove_dir_all(&self.sockets) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(VolumeError::io("remove the machine's directory")(error))
            }
            _ => Ok(()),
        };
        let outcome = group.and(network).and(sockets);
        if let Err(error) = &outcome {
            tracing::warn!(name = %self.name, error = error.chain(), "a template's machine was not taken down");
        }
        outcome
    }
}

/// From boot to saved; the machine is gone when this returns, whichever way.
async fn run_machine(
    store: &TemplateStore,
    template: &Template,
    request: &MachineRequest,
    room: &Room,
    disk: &Path,
    kernel_arguments: &str,
    part: &Part,
) -> Result<(), VolumeError> {
    let network = request
        .privileges
        .create_network(&room.name)
        .await
        .map_err(privilege("make a network"))?;
    let manifest = &template.manifest;
    let spec = MachineSpec {
        name: room.name.clone(),
        uid: request.uid,
        directory: room.sockets.clone(),
        vcpus: request.size.vcpus,
        memory_mib: request.size.memory_mib,
        root: store.blob_path(manifest.root.digest),
        disk: vec![DiskLayer {
            path: disk.to_owned(),
        }],
        network_namespace: network.namespace,
        tap: network.tap,
        kernel: store.blob_path(manifest.kernel.digest),
        initramfs: store.blob_path(manifest.initramfs.digest),
        kernel_arguments: kernel_arguments.to_owned(),
    };
    part.report("booting the machine", 0.03);
    let boot = StartMode::Boot {
        memory: room.memory(),
    };
    let machine = request.vmm.start(spec, boot).await.map_err(failed("start"))?;
    let outcome = bring_up(&*machine, template, request.size.memory_mib, room, part).await;
    let outcome = match outcome {
        Err(VolumeError::Guest { step, what }) => {
            let console = machine.console().await;
            let console = console.trim();
            let from = console
                .char_indices()
                .rev()
                .nth(CONSOLE - 1)
                .map_or(0, |(at, _)| at);
            let what = if console.is_empty() {
                what
            } else {
                format!("{what}; end of the console:\n{}", &console[from..])
            };
            Err(VolumeError::Guest { step, what })
        }
        other => other,
    };
    let killed = machine.kill().await.map_err(failed("end"));
    outcome.and(killed)
}

async fn bring_up(
    machine: &dyn Machine,
    template: &Template,
    memory_mib: u32,
    room: &Room,
    part: &Part,
) -> Result<(), VolumeError> {
    let PortStream::Unix(stream) = machine
        .control_port()
        .await
        .map_err(failed("open its control port"))?;
    let mut exit = machine.exit();
    let greeted = async {
        let (control, ack) = HostControl::connect(stream, 0, BOOT)
            .await
            .map_err(|error| guest("boot")(error.to_string()))?;
        tracing::debug!(version = ack.daemon_version, "the daemon answered");
        Ok::<_, VolumeError>(control)
    };
    let control = tokio::select! {
        control = greeted => control?,
        reason = exit.wait_for(Option::is_some) => {
            let reason = reason.ok().and_then(|reason| reason.clone());
            return Err(guest("boot")(format!("the monitor ended: {reason:?}")));
        }
    };
    part.report("warming the machine up", 0.25);
    let PortStream::Unix(stream) = machine.data_port().await.map_err(failed("open its data port"))?;
    warm::warm_up(stream, control.nonce(), &template.manifest, memory_mib, part).await?;

    part.report("quiescing the machine", 0.82);
    if template.manifest.start.is_some() {
        // Started from the snapshot, it must not run an instruction before the machine has clock, entropy and identity:
        // the daemon thaws it when it has applied them.
        let report = control
            .freeze(FREEZE, ANSWER)
            .await
            .map_err(|error| guest("freeze its start command")(error.to_string()))?;
        if !report.frozen {
            return Err(guest("freeze its start command")(format!(
                "it did not stand still within {} s",
                FREEZE.as_secs()
            )));
        }
    }
    control
        .quiesce(ANSWER)
        .await
        .map_err(|error| guest("write its disks")(error.to_string()))?;
    machine.pause().await.map_err(failed("pause"))?;
    drop(control);
    part.report("saving the machine", 0.85);
    machine
        .save_template(&room.state())
        .await
        .map_err(failed("save its state"))
}

/// Copies what the monitor made into a directory ready to be published.
fn keep(
    memory: &Path,
    state: &Path,
    disk: &File,
    to: &Path,
    mut record: Record,
    owner: Owner,
) -> Result<(), VolumeError> {
    use std::os::unix::fs::MetadataExt as _;

    let step = "keep a machine's files";
    let open = |path: &Path| File::open(path).map_err(VolumeError::io(step));
    // The monitor's, and this process's.
    let (memory, state) = (open_plain(memory, step)?, open_plain(state, step)?);
    let _owner = owner.act();
    fs::create_dir(to).map_err(VolumeError::io(step))?;
    set_mode(to, 0o755, step)?;
    sparse::copy(&memory, &to.join("memory"))?;
    sparse::copy(&state, &to.join("state"))?;
    sparse::copy(disk, &to.join("disk.raw"))?;
    let kept = fs::metadata(to.join("memory")).map_err(VolumeError::io(step))?;
    record.memory_bytes_on_disk = kept.blocks() * 512;
    let text = serde_json::to_vec_pretty(&record).map_err(|error| VolumeError::io(step)(error.into()))?;
    fs::write(to.join("machine.json"), text).map_err(VolumeError::io(step))?;
    for name in ["memory", "state", "disk.raw", "machine.json"] {
        set_mode(&to.join(name), 0o444, step)?;
        open(&to.join(name))?.sync_all().map_err(VolumeError::io(step))?;
    }
    open(to)?.sync_all().map_err(VolumeError::io(step))
}

fn privilege(step: &'static str) -> impl FnOnce(PrivilegeError) -> VolumeError {
    move |source| VolumeError::Privilege { step, source }
}

fn failed(step: &'static str) -> impl FnOnce(VmmError) -> VolumeError {
    move |source| VolumeError::Machine { step, source }
}

pub(crate) fn guest(step: impl Into<String>) -> impl FnOnce(String) -> VolumeError {
    move |what| VolumeError::Guest {
        step: step.into(),
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_place_of_a_machines_file_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(directory.path()).unwrap();
        fs::create_dir(top.join("monitor")).unwrap();
        fs::write(top.join("monitor/memory"), "memory").unwrap();
        open_plain(&top.join("monitor/memory"), "open").unwrap();
        std::os::unix::fs::symlink("memory", top.join("monitor/state")).unwrap();
        std::os::unix::fs::symlink("monitor", top.join("other")).unwrap();
        for link in ["monitor/state", "other/memory"] {
            assert!(open_plain(&top.join(link), "open").is_err(), "{link}");
        }
    }

    #[tokio::test]
    async fn a_disk_is_made_in_the_file_that_was_opened() {
        let directory = tempfile::tempdir().unwrap();
        let store = TemplateStore::open(directory.path().join("store")).unwrap();
        let path = directory.path().join("disk");
        let size = SizeClass {
            vcpus: 1,
            memory_mib: 128,
            disk_mib: 64,
        };
        let disk = make_disk(&store, &path, size).await.unwrap();
        let mut magic = [0; 2];
        std::os::unix::fs::FileExt::read_exact_at(disk.file(), &mut magic, 1024 + 56).unwrap();
        assert_eq!(magic, [0x53, 0xef]);
        // Whatever is there already is not touched.
        assert!(make_disk(&store, &path, size).await.is_err());
    }
}
