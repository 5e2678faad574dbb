//! The machine that the floor starts: the files of the template `base`, and what each start has for itself.

use std::{
    collections::BTreeSet,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{
            fs::DirBuilderExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context as _, Result, ensure};
use rustix::io::FdFlags;
use space_api::size::SizeClass;
use space_node_manager::{LocalPrivileges, ObjectName, Privileges};
use space_vmm::{QemuConfig, QemuDriver, Vmm};
use space_volume::{MachineFiles, TemplateBuilder, VolumeConfig};

use crate::{
    memory,
    pattern::{self, Values},
};

const PATTERN: &str = include_str!("../floor.args");
/// Names the benchmark's own objects on the host.
const INSTALLATION: &str = "bench";
const RUN_DIRECTORY: &str = "/run/space-bench";
/// Below the ranges that platforms use.
pub(crate) const UID: u32 = 199_999;

/// A template's machine and the host's means to start it.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) files: MachineFiles,
    pub(crate) size: SizeClass,
    pub(crate) privileges: Arc<dyn Privileges>,
    pub(crate) vmm: Arc<dyn Vmm>,
    qemu: PathBuf,
    tap: OwnedFd,
    run: PathBuf,
    starts: AtomicU32,
}

impl Host {
    /// Takes the machine of `base` in its default size out of a template store.
    pub(crate) async fn open(templates: &Path) -> Result<Self> {
        let privileges: Arc<dyn Privileges> = Arc::new(
            LocalPrivileges::new(INSTALLATION, RUN_DIRECTORY)
                .context("the benchmark cannot manage machines here")?,
        );
        privileges
            .sweep(&BTreeSet::new())
            .await
            .context("cannot remove what an earlier run left")?;
        let run = Path::new(RUN_DIRECTORY).join("s");
        if run.exists() {
            fs_err::remove_dir_all(&run)?;
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(&run)
            .context("cannot make a directory for sockets")?;
        let vmm: Arc<dyn Vmm> =
            Arc::new(QemuDriver::probe(QemuConfig::default(), Arc::clone(&privileges)).await?);
        let directory = templates.to_owned();
        let builder = TemplateBuilder::new(VolumeConfig {
            cache_directory: directory.join("cache"),
            directory,
            daemon_program: PathBuf::new(),
        })?;
        let template = builder
            .store()
            .resolve("base")
            .context("there is no template `base` there")?;
        let size = template.manifest.default_size;
        let files = builder
            .machine(&template, size, vmm.capabilities())?
            .context("the template's machine is not made yet: start `space up` on that directory first")?;
        let network = privileges.create_network(&name("floor")?).await?;
        inheritable(&network.tap)?;
        let qemu = find_qemu()?;
        Ok(Self {
            files,
            size,
            privileges,
            vmm,
            qemu,
            tap: network.tap,
            run,
            starts: AtomicU32::new(0),
        })
    }

    /// Fails unless the machine of that name was started with the arguments that the floor uses.
    pub(crate) fn compare(&self, machine: &str) -> Result<()> {
        let theirs = command_line(&memory::monitor_of(machine)?)?;
        for (name, ours) in self.shared()? {
            let theirs = theirs.get(name).map(String::as_str);
            ensure!(
                theirs == Some(ours.as_str()),
                "the platform's <{name}> is {theirs:?}, the floor's {ours:?}"
            );
        }
        Ok(())
    }

    /// Makes what one machine has for itself. Its sockets listen when this returns, and we are connected to them.
    pub(crate) async fn prepare(&self) -> Result<Prepared> {
        let number = self.starts.fetch_add(1, Ordering::Relaxed);
        let directory = self.run.join(format!("f{number}"));
        fs_err::create_dir(&directory)?;
        let disk = directory.join("disk.qcow2");
        self.vmm.create_disk_layer(&self.files.disk_base, &disk).await?;
        let [monitor, control, data] =
            ["monitor", "control", "data"].map(|name| Socket::listen(&directory, name));
        let (monitor, control, data) = (monitor?, control?, data?);
        let mut values = self.shared()?;
        values.extend([
            ("name", format!("f{number}")),
            ("disk", text(&disk)?),
            ("tap", self.tap.as_raw_fd().to_string()),
            ("monitor", monitor.listener.as_raw_fd().to_string()),
            ("control", control.listener.as_raw_fd().to_string()),
            ("data", data.listener.as_raw_fd().to_string()),
        ]);
        let arguments = pattern::fill(&pattern::patterns(PATTERN), &values)?;
        Ok(Prepared {
            qemu: self.qemu.clone(),
            arguments,
            directory,
            monitor,
            control,
            data,
        })
    }

    /// Removes everything of the benchmark from the host.
    pub(crate) async fn close(self) -> Result<()> {
        drop(self.tap);
        self.privileges.sweep(&BTreeSet::new()).await?;
        fs_err::remove_dir_all(&self.run)?;
        Ok(())
    }

    /// Values that the floor shares with the platform's machines.
    fn shared(&self) -> Result<Values> {
        let capabilities = self.vmm.capabilities();
        ensure!(
            capabilities.accelerator == "tcg",
            "floor.args describes an emulated machine; under KVM there is no command line for the floor yet"
        );
        Ok(Values::from([
            ("accelerator", capabilities.accelerator.to_owned()),
            ("cpu", capabilities.cpu_model.clone()),
            ("vcpus", self.size.vcpus.to_string()),
            ("memory_mib", self.size.memory_mib.to_string()),
            (
                "memory_bytes",
                (u64::from(self.size.memory_mib) << 20).to_string(),
            ),
            ("memory", text(&self.files.template.memory)?),
            ("state", text(&self.files.template.state)?),
            ("root", text(&self.files.root)?),
            ("disk_base", text(&self.files.disk_base)?),
        ]))
    }
}

/// The files that all machines of a template and size share.
#[derive(Debug)]
pub(crate) struct BaseFiles {
    /// The guest's memory.
    pub(crate) memory: PathBuf,
    others: Vec<PathBuf>,
}

impl BaseFiles {
    /// Those that a running monitor was told to use.
    pub(crate) fn of_command_line(process: &Path) -> Result<Self> {
        let values = command_line(process)?;
        let path = |name: &str| {
            let path = values.get(name).map(PathBuf::from);
            path.with_context(|| format!("floor.args has no <{name}>"))
        };
        Ok(Self {
            memory: path("memory")?,
            others: vec![path("state")?, path("root")?, path("disk_base")?],
        })
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<&Path> {
        std::iter::once(&self.memory)
            .chain(&self.others)
            .map(PathBuf::as_path)
            .collect()
    }
}

/// What a monitor's command line has in the places of `floor.args`; fails if it is of another form.
fn command_line(process: &Path) -> Result<Values> {
    let line = fs_err::read(process.join("cmdline"))?;
    let line = String::from_utf8(line).context("the monitor's command line is no text")?;
    let arguments: Vec<String> = line
        .trim_end_matches('\0')
        .split('\0')
        .skip(1)
        .map(str::to_owned)
        .collect();
    pattern::learn(&pattern::patterns(PATTERN), &arguments)
        .context("crates/bench/floor.args is no longer the machine that the platform starts")
}

/// What one machine has for itself. Its directory is removed with it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) qemu: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) directory: PathBuf,
    pub(crate) monitor: Socket,
    pub(crate) control: Socket,
    pub(crate) data: Socket,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.directory));
    }
}

/// A listening socket that the monitor inherits, and a client that waits to be accepted.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: UnixListener,
    pub(crate) client: UnixStream,
}

impl Socket {
    fn listen(directory: &Path, name: &str) -> Result<Self> {
        let path = directory.join(name);
        let listener =
            UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        let client =
            UnixStream::connect(&path).with_context(|| format!("cannot connect to {}", path.display()))?;
        inheritable(&listener)?;
        Ok(Self { listener, client })
    }
}

/// The name of one of the benchmark's objects.
pub(crate) fn name(name: &str) -> Result<ObjectName> {
    Ok(ObjectName::new(name)?)
}

/// Lets the processes we start have a descriptor under its own number.
fn inheritable(descriptor: &impl AsFd) -> Result<()> {
    rustix::io::fcntl_setfd(descriptor, FdFlags::empty()).context("cannot pass a descriptor on")
}

fn text(path: &Path) -> Result<String> {
    path.to_str()
        .map(str::to_owned)
        .with_context(|| format!("the path {} is not UTF-8", path.display()))
}

fn find_qemu() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join("qemu-system-x86_64"))
        .find(|program| program.is_file())
        .context("qemu-system-x86_64 is not on the PATH")
}
