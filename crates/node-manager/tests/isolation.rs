//! A process with a monitor's rights reaches nothing but its own machine's files.
//!
//! Every attempt is made three times: as root outside, where it succeeds (so it is one that can); in a monitor's
//! namespaces without the filter of system calls, and with it, where it fails.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests too"
)]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use common::{Installation, LIMIT, UID, ended, limits, name};
use fs_err as fs;
use space_node_manager::{
    Confinement, ExitStatus, LocalOptions, LocalPrivileges, ObjectName, Privileges, View, VmmProcess,
};

const PROBE: &str = env!("CARGO_BIN_EXE_isolation-probe");

/// The user of the machine that is attacked.
const VICTIM: u32 = UID + 1;

fn socket(installation: &Installation) -> std::path::PathBuf {
    installation.directory.path().join("manager.sock")
}

fn opened(path: impl AsRef<Path>) -> OwnedFd {
    fs::File::open(path.as_ref()).unwrap().into_parts().0.into()
}

/// What lies around a monitor.
struct Scene {
    installation: Installation,
    /// The attacker's own directory, which it sees and may write to.
    own: PathBuf,
    /// A template's file, which it sees and may read.
    base: PathBuf,
    /// The other machine's disk.
    disk: PathBuf,
    /// The other machine's channel, bound in its directory.
    channel: PathBuf,
    abstract_name: String,
    victim: u32,
    _listeners: (UnixListener, UnixListener, OwnedFd),
}

impl Scene {
    async fn new(installation: Installation, privileges: &LocalPrivileges) -> Self {
        let at = |n: &str| installation.directory.path().join(n);
        for (directory, mode) in [
            ("own", 0o711),
            ("template", 0o755),
            ("other", 0o711),
            ("run", 0o700),
        ] {
            fs::create_dir(at(directory)).unwrap();
            set_mode(&at(directory), mode);
        }
        let (own, base, disk) = (at("own"), at("template/memory"), at("other/0.qcow2"));
        fs::write(&base, "base").unwrap();
        set_mode(&base, 0o444);
        for (file, user) in [(own.join("0.qcow2"), UID), (disk.clone(), VICTIM)] {
            fs::write(&file, "disk").unwrap();
            privileges.give_file(opened(&file), user).await.unwrap();
        }
        let channel = at("run/control.sock");
        let abstract_name = format!("space-test-{}", installation.name);
        let listeners = (
            UnixListener::bind(&channel).unwrap(),
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&abstract_name).unwrap()).unwrap(),
            listen(&socket(&installation)),
        );
        let other = name("victim");
        privileges.create_group(&other, &limits()).await.unwrap();
        let mut process = installation.sleeper(&other);
        process.uid = VICTIM;
        let victim = privileges.spawn(process).await.unwrap().identity.pid;
        Self {
            installation,
            own,
            base,
            disk,
            channel,
            abstract_name,
            victim,
            _listeners: listeners,
        }
    }

    /// What must fail inside and succeeds outside.
    fn attempts(&self) -> Vec<String> {
        let (victim, base) = (self.victim, self.base.display());
        let disk_device = ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/mem", "/dev/kmsg"]
            .into_iter()
            // Hosts differ in what even root may open.
            .find(|device| fs::File::open(device).is_ok())
            .expect("there is a device that root can open");
        let inside = self.own.display();
        vec![
            // Another machine's files, memory, channel.
            format!("read={}", self.disk.display()),
            format!("write={}", self.disk.display()),
            format!("list={}", self.disk.parent().unwrap().display()),
            format!("read=/proc/{victim}/mem"),
            format!("read=/proc/{victim}/maps"),
            format!("read-memory={victim}"),
            format!("trace={victim}"),
            format!("see={victim}"),
            format!("connect={}", self.channel.display()),
            format!("connect-abstract={}", self.abstract_name),
            // The node and its manager.
            format!("connect-packets={}", socket(&self.installation).display()),
            "list=/proc".to_owned(),
            "list=/sys".to_owned(),
            "read=/etc/passwd".to_owned(),
            "list=/run".to_owned(),
            // What is shared.
            format!("write={base}"),
            format!("create={}/new", self.base.parent().unwrap().display()),
            "create=/usr/bin/space-test-new".to_owned(),
            "create=/space-test-new".to_owned(),
            format!("create={inside}/new"),
            // Rights.
            "become=0".to_owned(),
            format!("mount={inside}"),
            format!("device={inside}/device"),
            format!("read={disk_device}"),
            "namespace=".to_owned(),
            "chroot=/usr".to_owned(),
        ]
    }

    /// What a monitor needs, so that a failure of the others says something.
    fn allowed(&self) -> Vec<String> {
        vec![
            format!("read={}", self.base.display()),
            format!("write={}/0.qcow2", self.own.display()),
            "read=/usr/bin/env".to_owned(),
            "write=/dev/null".to_owned(),
            "read=/dev/urandom".to_owned(),
            "read=/etc/ld.so.cache".to_owned(),
        ]
    }

    fn process(&self, name: &ObjectName, arguments: &[String], log: &Path) -> VmmProcess {
        let view = |path: &Path, writable| View {
            path: path.to_owned(),
            source: rustix::fs::open(
                path,
                rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )
            .unwrap(),
            writable,
        };
        let log = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        VmmProcess {
            name: name.clone(),
            program: PROBE.into(),
            arguments: arguments.iter().map(Into::into).collect(),
            uid: UID,
            network_namespace: None,
            descriptors: BTreeMap::new(),
            log: Some(OwnedFd::from(log.into_parts().0)),
            file_size_limit: 1 << 20,
            views: vec![view(&self.base, false), view(&self.own, true)],
        }
    }

    /// Runs the attempts with a monitor's rights.
    async fn inside(&self, privileges: &LocalPrivileges, arguments: &[String]) -> BTreeMap<String, String> {
        let attacker = name("attacker");
        privileges.create_group(&attacker, &limits()).await.unwrap();
        let log = self.installation.directory.path().join("attempts");
        fs::write(&log, "").unwrap();
        let spawned = privileges
            .spawn(self.process(&attacker, arguments, &log))
            .await
            .unwrap();
        let status = ended(spawned.exit).await;
        let output = fs::read_to_string(&log).unwrap();
        assert_eq!(status, ExitStatus::Code(0), "{output}");
        privileges.delete_group(&attacker).await.unwrap();
        results(&output)
    }
}

/// A socket such as the node manager's.
fn listen(path: &Path) -> OwnedFd {
    let (kind, flags) = (
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
    );
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    set_mode(path, 0o600);
    socket
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

fn results(output: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let (attempt, result) = line.rsplit_once(' ').unwrap();
        (attempt.to_owned(), result.to_owned())
    };
    output.lines().map(line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_reaches_nothing_but_its_own() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let options = |confinement| LocalOptions {
        confinement,
        ..LocalOptions::default()
    };
    let privileges = installation.local_with(options(Confinement::Full));
    let scene = Scene::new(installation, &privileges).await;
    let (attempts, allowed) = (scene.attempts(), scene.allowed());

    for attempt in &attempts {
        // One process each: some change what the next would find.
        let output = Command::new(PROBE).arg(attempt).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output, format!("{attempt} ok\n"), "outside, as root");
    }
    let check = |results: BTreeMap<String, String>, how: &str| {
        for attempt in &attempts {
            assert_ne!(results[attempt], "ok", "{how}: {attempt}");
            // -1: the probe itself failed.
            assert_ne!(results[attempt], "-1", "{how}: {attempt}");
        }
        for allowed in &allowed {
            assert_eq!(results[allowed], "ok", "{how}: {allowed}");
        }
    };
    let all = [attempts.clone(), allowed.clone()].concat();
    let filtered = scene.inside(&privileges, &all).await;
    check(filtered, "with the filter");
    // What the filter alone stops.
    let extra = ["user-namespace=".to_owned(), "fork=".to_owned()];
    for (attempt, result) in scene.inside(&privileges, &extra).await {
        assert_ne!(result, "ok", "{attempt}");
    }
    privileges.sweep(&BTreeSet::new()).await.unwrap();
    drop(privileges);

    let privileges = scene
        .installation
        .local_with(options(Confinement::DangerUnfiltered));
    let victim = name("victim");
    privileges.create_group(&victim, &limits()).await.unwrap();
    let mut process = scene.installation.sleeper(&victim);
    process.uid = VICTIM;
    let pid = privileges.spawn(process).await.unwrap().identity.pid;
    let scene = Scene { victim: pid, ..scene };
    let (attempts, allowed) = (scene.attempts(), scene.allowed());
    let all = [attempts.clone(), allowed.clone(), extra.to_vec()].concat();
    let results = scene.inside(&privileges, &all).await;
    for attempt in &attempts {
        assert_ne!(results[attempt], "ok", "without the filter: {attempt}");
    }
    for allowed in &allowed {
        assert_eq!(results[allowed], "ok", "without the filter: {allowed}");
    }
    assert_eq!(results["fork="], "ok", "the filter is what stops it");
    privileges.sweep(&BTreeSet::new()).await.unwrap();
}

/// Nothing grows with the number of machines that were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_lives_leave_nothing() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let privileges = installation.local_with(LocalOptions::default());
    let count = || {
        let entries = |path: &str| fs::read_dir(path).map_or(0, Iterator::count);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mark = format!("space-{}", installation.name);
        let groups = ["memory", "cpu", "pids", "cpuacct", "unified", "."]
            .map(|h| entries(&format!("/sys/fs/cgroup/{h}/{mark}")));
        (
            entries("/proc/self/fd"),
            mounts.matches(&mark).count(),
            groups.iter().sum::<usize>(),
            children(),
        )
    };
    let mut before = (usize::MAX, 0, 0, 0);
    let mut steps: BTreeMap<&str, Vec<(Duration, Duration)>> = BTreeMap::new();
    let mut cpu = Duration::ZERO;
    for round in 0..110 {
        let name = name(&format!("m{round}"));
        let mut start = (Instant::now(), cpu_time());
        let mut step = |name| {
            let took = (start.0.elapsed(), cpu_time() - start.1);
            steps.entry(name).or_default().push(took);
            start = (Instant::now(), cpu_time());
        };
        let network = privileges.create_network(&name).await.unwrap();
        step("1 network");
        privileges.create_group(&name, &limits()).await.unwrap();
        step("2 group");
        let mut process = installation.sleeper(&name);
        process.network_namespace = Some(network.namespace);
        let spawned = privileges.spawn(process).await.unwrap();
        step("3 spawn");
        privileges.kill(spawned.identity).await.unwrap();
        ended(spawned.exit).await;
        step("4 kill and end");
        privileges.delete_group(&name).await.unwrap();
        step("5 delete group");
        drop(network.tap);
        privileges.delete_network(&name).await.unwrap();
        step("6 delete network");
        // The first rounds make what stays: threads and what they hold.
        if round == 9 {
            before = count();
            cpu = cpu_time();
        }
    }
    println!("CPU of this process for a life: {:?}", (cpu_time() - cpu) / 100);
    for (step, times) in &mut steps {
        times.sort();
        let cpu = times.iter().map(|(_, cpu)| *cpu).sum::<Duration>() / 110;
        println!(
            "{step}: p50 {:?}, p90 {:?}, CPU {cpu:?}",
            times[55].0, times[99].0
        );
    }
    let deadline = Instant::now() + LIMIT;
    loop {
        let after = count();
        let grown = after.0 > before.0 || after.1 > before.1 || after.2 > before.2 || after.3 > before.3;
        if !grown {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "descriptors, mounts, groups, children: {before:?} before, {after:?} after"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Children of this process, also those nobody waits for.
fn children() -> usize {
    let own = std::process::id().to_string();
    let is_child = |entry: std::io::Result<fs::DirEntry>| {
        let stat = fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
        let (_, rest) = stat.rsplit_once(')')?;
        (rest.split_ascii_whitespace().nth(1)? == own).then_some(())
    };
    fs::read_dir("/proc").unwrap().filter_map(is_child).count()
}

/// CPU time of this process so far, user and system.
fn cpu_time() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(clock.tv_sec.unsigned_abs(), u32::try_from(clock.tv_nsec).unwrap())
}
