//! What the driver's tests and examples share: a node of their own, the lab guest, a template made from it.

#![expect(unreachable_pub, reason = "included by several test and example programs")]

mod guest;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use space_node_manager::{GroupLimits, LocalPrivileges, ObjectName, Privileges};
use space_vmm::{
    AcceleratorChoice, DiskLayer, ExitReason, Machine, MachineSpec, MachineTemplate, MemoryDelta, PortStream,
    QemuConfig, QemuDriver, StartMode, Vmm,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

pub use guest::{Guest, KERNEL_ARGUMENTS};

/// The user that machines run as.
pub const UID: u32 = 40_322;

/// Memory of a lab machine.
pub const MEMORY_MIB: u32 = 192;

/// Size of a lab machine's disk, bytes.
pub const DISK: u64 = 64 << 20;

/// How long the guest may take over one answer, emulated, on a busy host.
const ANSWER: Duration = Duration::from_secs(90);

/// A node with a driver, in a directory of its own.
pub struct Lab {
    pub driver: QemuDriver,
    pub privileges: Arc<dyn Privileges>,
    pub guest: Guest,
    pub directory: PathBuf,
    /// Removed with the lab that made it.
    _own: Option<TempDir>,
    next: AtomicU32,
}

/// A machine and its name.
pub struct Running {
    pub machine: Box<dyn Machine>,
    pub name: ObjectName,
    /// Its top disk layer at the start.
    pub disk: PathBuf,
    /// What was done to start it, and how long each step took.
    pub steps: Vec<(&'static str, Duration)>,
}

/// A lab template: memory, state, and the disk as it was then.
#[derive(Debug, Clone)]
pub struct Template {
    pub saved: MachineTemplate,
    pub disk: Vec<DiskLayer>,
}

/// What a lab machine differs in.
pub struct Wish {
    pub memory_limit: u64,
    pub delta: Option<MemoryDelta>,
}

impl Default for Wish {
    fn default() -> Self {
        Self {
            memory_limit: 2 << 30,
            delta: None,
        }
    }
}

/// A lab, or why there is none.
pub async fn lab(installation: &str) -> Result<Lab> {
    ensure!(rustix::process::geteuid().is_root(), "needs root");
    let directory = tempfile::Builder::new().prefix("space-lab").tempdir()?;
    // The monitor's user passes through here.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.path(), open)?;
    let lab = Lab::at(installation, directory.path()).await?;
    lab.privileges.sweep(&BTreeSet::new()).await?;
    Ok(Lab {
        _own: Some(directory),
        ..lab
    })
}

/// A driver as a node has one.
pub async fn driver(privileges: Arc<dyn Privileges>) -> Result<QemuDriver> {
    let config = QemuConfig {
        accelerator: AcceleratorChoice::Auto,
        ..QemuConfig::default()
    };
    Ok(QemuDriver::probe(config, privileges).await?)
}

impl Lab {
    /// A lab in a directory that another has made; what that one left is kept.
    pub async fn at(installation: &str, directory: &Path) -> Result<Self> {
        let guest = tokio::task::spawn_blocking(guest::guest).await??;
        let privileges: Arc<dyn Privileges> =
            Arc::new(LocalPrivileges::new(installation, directory.join("run"))?);
        Ok(Self {
            driver: driver(privileges.clone()).await?,
            privileges,
            guest,
            directory: directory.to_owned(),
            _own: None,
            next: AtomicU32::new(std::process::id()),
        })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Gives a file to the user that machines run as.
    pub async fn give(&self, path: &Path) -> Result<()> {
        let file = fs::File::open(path)?.into_parts().0.into();
        Ok(self.privileges.give_file(file, UID).await?)
    }

    fn name(&self, kind: &str) -> ObjectName {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        ObjectName::new(&format!("{kind}-{number}")).expect("a valid name")
    }

    async fn spec(
        &self,
        name: &ObjectName,
        disk: Vec<DiskLayer>,
        memory_limit: u64,
        steps: &mut Vec<(&'static str, Duration)>,
    ) -> Result<MachineSpec> {
        let mut start = Instant::now();
        let mut step = |name| {
            steps.push((name, start.elapsed()));
            start = Instant::now();
        };
        let limits = GroupLimits {
            memory_bytes: memory_limit,
            pids: 200,
            cpu_quota_micros: 200_000,
            cpu_weight: 100,
            io: None,
        };
        self.privileges.create_group(name, &limits).await?;
        step("cgroup");
        let network = self.privileges.create_network(name).await?;
        step("network (made ahead by a node)");
        let directory = self.path(name.as_str());
        make_directory(&directory, 0o700)?;
        step("directory");
        Ok(MachineSpec {
            name: name.clone(),
            uid: UID,
            directory,
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            root: self.guest.root.clone(),
            disk,
            network_namespace: network.namespace,
            tap: network.tap,
            kernel: self.guest.kernel.clone(),
            initramfs: self.guest.initramfs.clone(),
            kernel_arguments: KERNEL_ARGUMENTS.to_owned(),
        })
    }

    /// The directory of a machine's disk layers: its user may pass, not write.
    pub fn disks(&self, name: &ObjectName) -> Result<PathBuf> {
        let directory = self.path(&format!("{name}.disks"));
        if !directory.exists() {
            make_directory(&directory, 0o711)?;
        }
        Ok(directory)
    }

    /// Boots a machine on a new raw disk.
    pub async fn boot(&self) -> Result<Running> {
        let name = self.name("boot");
        let disk = self.disks(&name)?.join("disk");
        fs::File::create(&disk)?.set_len(DISK)?;
        self.give(&disk).await?;
        let mut steps = Vec::new();
        let base = vec![DiskLayer { path: disk.clone() }];
        let spec = self.spec(&name, base, 2 << 30, &mut steps).await?;
        let memory = self.path(&format!("{name}.memory"));
        let machine = self.driver.start(spec, StartMode::Boot { memory }).await?;
        Ok(Running {
            machine,
            name,
            disk,
            steps,
        })
    }

    /// Boots a machine and saves it.
    pub async fn template(&self) -> Result<Template> {
        let booted = self.boot().await?;
        let mut port = Talk::control(&booted).await?;
        ensure!(port.ask("hello template").await? == "hello template");
        ensure!(port.ask("write 3 from the template").await? == "written");
        booted.machine.pause().await?;
        let state = self.path(&format!("{}.state", booted.name));
        booted.machine.save_template(&state).await?;
        booted.machine.kill().await?;
        let memory = self.path(&format!("{}.memory", booted.name));
        let disk = booted.disk.clone();
        self.remove(booted).await?;
        for file in [&state, &memory, &disk] {
            std::os::unix::fs::chown(file, Some(0), Some(0))?;
            fs::set_permissions(file, std::os::unix::fs::PermissionsExt::from_mode(0o444))?;
        }
        Ok(Template {
            saved: MachineTemplate { memory, state },
            disk: vec![DiskLayer { path: disk }],
        })
    }

    /// Restores a machine, paused, on a new layer over the template's disk.
    pub async fn restore(&self, template: &Template, wish: Wish) -> Result<Running> {
        let name = self.name("clone");
        let layer = self.disks(&name)?.join("0.qcow2");
        let below = &template.disk[0].path;
        let start = Instant::now();
        self.driver.create_disk_layer(below, &layer).await?;
        self.give(&layer).await?;
        let mut steps = vec![("disk layer", start.elapsed())];
        let mut disk = vec![DiskLayer { path: layer.clone() }];
        disk.extend(template.disk.iter().cloned());
        let spec = self.spec(&name, disk, wish.memory_limit, &mut steps).await?;
        let mode = StartMode::Restore {
            template: template.saved.clone(),
            delta: wish.delta,
        };
        let start = Instant::now();
        let machine = self.driver.start(spec, mode).await?;
        steps.push(("monitor: from spawn to state loaded", start.elapsed()));
        Ok(Running {
            machine,
            name,
            disk: layer,
            steps,
        })
    }

    /// Restores a machine and lets it run.
    pub async fn run(&self, template: &Template) -> Result<(Running, Talk)> {
        let running = self.restore(template, Wish::default()).await?;
        let port = Talk::control(&running).await?;
        running.machine.resume().await?;
        Ok((running, port))
    }

    /// Removes what was made for a machine.
    pub async fn remove(&self, running: Running) -> Result<()> {
        running.machine.kill().await?;
        self.privileges.delete_group(&running.name).await?;
        self.privileges.delete_network(&running.name).await?;
        Ok(())
    }

    /// Removes everything.
    pub async fn done(self) -> Result<()> {
        self.privileges.sweep(&BTreeSet::new()).await?;
        Ok(())
    }
}

fn make_directory(path: &Path, mode: u32) -> Result<()> {
    fs::create_dir(path)?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    Ok(())
}

/// A conversation with the guest over one port.
pub struct Talk {
    stream: BufReader<UnixStream>,
}

impl Talk {
    pub async fn control(running: &Running) -> Result<Self> {
        let PortStream::Unix(stream) = running.machine.control_port().await?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    pub async fn data(running: &Running) -> Result<Self> {
        let PortStream::Unix(stream) = running.machine.data_port().await?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a line.
    pub async fn say(&mut self, line: &str) -> Result<()> {
        self.stream
            .get_mut()
            .write_all(format!("{line}\n").as_bytes())
            .await?;
        Ok(())
    }

    /// Receives a line.
    pub async fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = tokio::time::timeout(ANSWER, self.stream.read_line(&mut line)).await;
        if read.context("the guest does not answer")?? == 0 {
            bail!("the port was closed");
        }
        Ok(line.trim_end().to_owned())
    }

    pub async fn ask(&mut self, line: &str) -> Result<String> {
        self.say(line).await?;
        self.hear().await
    }
}

/// Waits for the end of a machine.
pub async fn end(machine: &dyn Machine) -> Result<ExitReason> {
    let mut exit = machine.exit();
    let reason = tokio::time::timeout(ANSWER, exit.wait_for(Option::is_some))
        .await
        .context("it does not end")??;
    reason.clone().context("no reason")
}

/// SHA-256 of a file.
pub fn digest(path: &Path) -> Result<String> {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(fs::read(path)?);
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}
