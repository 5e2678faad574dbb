//! From the kernel's hand-over to serving.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use anyhow::Context;
use space_channel::{CONTROL_PORT, DATA_PORT};
use space_daemon_services::{GUEST_PORT, ServiceConfig, Services};

use crate::{
    RUN_DIRECTORY,
    cgroup::{self, AgentGroup},
    control::Control,
    identity::IdentityFiles,
    kernel::{Kernel, Linux},
    log, modules, mounts, network,
    port::Port,
    reaper::Reaper,
    say,
    serve::{self, Served},
};

/// Host name before the first identity.
const HOSTNAME: &str = "space";
/// Hosts file of images that have none.
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
/// Largest hosts file taken over from the image.
const MAX_HOSTS: u64 = 64 * 1024;
/// Kernel settings; one that a kernel does not have is skipped.
const SETTINGS: [(&str, &str); 9] = [
    ("fs/inotify/max_user_instances", "1024"),
    ("fs/inotify/max_user_watches", "131072"),
    ("kernel/dmesg_restrict", "1"),
    // A paused machine looks like one that hangs.
    ("kernel/hung_task_timeout_secs", "0"),
    ("kernel/watchdog", "0"),
    ("net/ipv4/ping_group_range", "0 2147483647"),
    // No neighbour speaks it; it would only add packets after each start.
    ("net/ipv6/conf/eth0/disable_ipv6", "1"),
    ("vm/max_map_count", "262144"),
    // Freed pages are the host's to know about, not to lose time with.
    ("vm/stat_interval", "10"),
];

/// Sets the machine up and serves; returns only if that fails. Must be called on the main thread of the first process.
pub fn run() -> anyhow::Result<std::convert::Infallible> {
    mounts::early()?;
    log::open_console();
    modules::load_all(Path::new("/modules")).context("cannot load the kernel's modules")?;
    mounts::switch_root()?;
    mounts::finish()?;
    let agent = cgroup::set_up().context("cannot set up the control groups")?;
    settle_network();
    for (name, value) in SETTINGS {
        drop(fs::write(Path::new("/proc/sys").join(name), value));
    }
    let kernel = Linux::new().context("cannot open the random generator")?;
    kernel
        .set_hostname(HOSTNAME)
        .context("cannot set the host name")?;
    let files = settle_files().context("cannot write the machine's identity files")?;
    raise_descriptor_limit();
    refuse_dumps();
    log::install_tracing();

    let reaper = Reaper::new().context("cannot prepare reaping")?;
    let config = ServiceConfig {
        agent_cgroup: Some(agent.directory.clone()),
        cgroup_namespace: Some(agent.namespace),
        ..ServiceConfig::default()
    };
    let services = Services::new(config);
    let control = Control {
        port: Port::open(CONTROL_PORT).context("cannot open the control port")?,
        kernel: Arc::new(kernel),
        group: Some(AgentGroup::open(&agent.directory).context("cannot open the agent's control group")?),
        files,
        gate: Arc::default(),
        services,
    };
    let data = Port::open(DATA_PORT).context("cannot open the data port")?;
    serve::start(Served {
        control,
        data,
        loopback: Some(GUEST_PORT),
    })
    .context("cannot serve")?;
    say!("serving");
    Err(reaper.run()).context("cannot reap")
}

/// Makes the daemon's memory and descriptors root's alone, whatever identity a thread of it borrows for a file.
fn refuse_dumps() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        say!("the daemon can be looked into: {error}");
    }
}

/// Brings the interfaces up. A machine without a network serves all the same.
fn settle_network() {
    if let Err(error) = network::up_loopback() {
        say!("no loopback interface: {error}");
    }
    if let Err(error) = network::up_ethernet() {
        say!("no network: {error}");
    }
}

/// Makes the identity files and points the usual places to them.
fn settle_files() -> io::Result<IdentityFiles> {
    let run = Path::new(RUN_DIRECTORY);
    fs::set_permissions(run, fs::Permissions::from_mode(0o755))?;
    let mut files = IdentityFiles::create(run)?;
    let small = |path: &str| fs::metadata(path).is_ok_and(|data| data.is_file() && data.len() <= MAX_HOSTS);
    let hosts = if small("/etc/hosts") {
        fs::read("/etc/hosts")?
    } else {
        Vec::new()
    };
    let hosts = if hosts.trim_ascii().is_empty() {
        HOSTS.as_bytes().to_vec()
    } else {
        hosts
    };
    files.begin(&fs::read("/proc/sys/kernel/random/boot_id")?, &hosts, HOSTNAME)?;

    fs::create_dir_all("/etc")?;
    for name in ["machine-id", "hostname", "hosts"] {
        mounts::replace_by_link(&format!("/etc/{name}"), &format!("{RUN_DIRECTORY}/{name}"))?;
    }
    mounts::cover(
        &format!("{RUN_DIRECTORY}/boot-id"),
        "/proc/sys/kernel/random/boot_id",
    )?;
    // A dangling link, as some images have, counts as missing too.
    if !Path::new("/etc/resolv.conf").exists() {
        drop(fs::remove_file("/etc/resolv.conf"));
        fs::write("/etc/resolv.conf", format!("nameserver {}\n", network::GATEWAY))?;
    }
    Ok(files)
}

/// Lets the daemon hold many connections. Programs that the agent starts get their own, lower limit from the services.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit {
        current: Some(65_536),
        maximum: Some(1_048_576),
    };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        say!("cannot raise the limit of open files: {error}");
    }
}
