//! A cold boot of the same machine, through the driver: what every create would cost without snapshots.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use space_channel::HostControl;
use space_node_manager::GroupLimits;
use space_vmm::{DiskLayer, Machine, MachineSpec, PortStream, StartMode};

use crate::machine::{self, Host, UID};

/// How long a boot may take under emulation.
const LIMIT: Duration = Duration::from_secs(180);

/// Boots one and says how long it took from the start of its monitor to the daemon's first answer.
pub(crate) async fn boot(host: &Host) -> Result<Duration> {
    let name = machine::name("cold")?;
    let prepared = host.prepare().await?;
    // The monitor's user opens its disk and memory by name in it, and cannot list it.
    let directory = prepared.directory.join("m");
    let privileges = &host.privileges;
    let outcome = async {
        fs_err::create_dir(&directory)?;
        fs_err::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        let disk = directory.join("disk.qcow2");
        host.vmm.create_disk_layer(&host.files.disk_base, &disk).await?;
        let opened = fs_err::File::open(&disk)?.into_parts().0.into();
        privileges.give_file(opened, UID).await?;
        let limits = GroupLimits {
            memory_bytes: (u64::from(host.size.memory_mib) + 768) << 20,
            pids: 128,
            cpu_quota_micros: 100_000 * (u64::from(host.size.vcpus) + 1),
            cpu_weight: 100,
            io: None,
        };
        privileges.create_group(&name, &limits).await?;
        let network = privileges.create_network(&name).await?;
        let spec = MachineSpec {
            name: name.clone(),
            uid: UID,
            directory: directory.clone(),
            vcpus: host.size.vcpus,
            memory_mib: host.size.memory_mib,
            root: host.files.root.clone(),
            disk: vec![
                DiskLayer { path: disk },
                DiskLayer {
                    path: host.files.disk_base.clone(),
                },
            ],
            network_namespace: network.namespace,
            tap: network.tap,
            kernel: host.files.kernel.clone(),
            initramfs: host.files.initramfs.clone(),
            kernel_arguments: host.files.kernel_arguments.clone(),
        };
        let begin = Instant::now();
        let machine = host
            .vmm
            .start(
                spec,
                StartMode::Boot {
                    memory: directory.join("memory"),
                },
            )
            .await?;
        let answered = first_answer(&*machine).await;
        let took = begin.elapsed();
        let console = machine.console().await;
        machine.kill().await?;
        answered.with_context(|| format!("a cold boot failed; the end of its console: {console}"))?;
        anyhow::Ok(took)
    }
    .await;
    privileges.delete_group(&name).await?;
    privileges.delete_network(&name).await?;
    outcome
}

async fn first_answer(machine: &dyn Machine) -> Result<()> {
    let PortStream::Unix(stream) = machine.control_port().await?;
    HostControl::connect(stream, 0, LIMIT).await?;
    Ok(())
}
