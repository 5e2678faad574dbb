//! Templates on real machines: a tiny guest (busybox and the space daemon) is booted, warmed, snapshotted, started from.
//!
//! Needs root, QEMU, `mkfs.erofs`, a static `busybox`, a cloud kernel that apt offers, and `SPACE_TEST_DAEMON`, the path
//! of the static daemon.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "helpers of tests fail and skip as tests do"
)]

use std::{
    collections::BTreeSet,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fs_err as fs;
use space_api::size::SizeClass;
use space_channel::{GuestState, HostControl};
use space_node_manager::{GroupLimits, LocalPrivileges, ObjectName, Privileges, SweepReport};
use space_vmm::{DiskLayer, Machine, MachineSpec, PortStream, QemuConfig, QemuDriver, StartMode, Vmm};
use space_volume::{
    BuildOptions, MachineFiles, MachineRequest, Progress, Recipe, Template, TemplateBuilder, VolumeConfig,
    VolumeError, quiet,
};

/// Users that the machines run as: that of builds, and that of the restored one.
const UIDS: (u32, u32) = (40_421, 40_422);

struct Lab {
    directory: tempfile::TempDir,
    privileges: Arc<dyn Privileges>,
    vmm: Arc<dyn Vmm>,
    builder: Arc<TemplateBuilder>,
}

fn lacking() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    if std::env::var_os("SPACE_TEST_DAEMON").is_none() {
        return Some("SPACE_TEST_DAEMON names no daemon".to_owned());
    }
    [
        "/usr/bin/mkfs.erofs",
        "/usr/bin/qemu-system-x86_64",
        "/bin/busybox",
        "/usr/sbin/mkfs.ext4",
    ]
    .into_iter()
    .find(|program| !Path::new(program).exists())
    .map(|program| format!("{program} is not installed"))
}

fn skipped() -> bool {
    let lacking = lacking();
    if let Some(reason) = &lacking {
        println!("SKIPPED: {reason}");
        eprintln!("SKIPPED: {reason}");
    }
    lacking.is_some()
}

impl Lab {
    async fn open(name: &str) -> Self {
        // Short, for the sake of socket addresses, and open to the machines' users.
        let directory = tempfile::Builder::new().prefix("v").tempdir_in("/tmp").unwrap();
        open_to_all(directory.path());
        let run = directory.path().join("run");
        fs::create_dir(&run).unwrap();
        open_to_all(&run);
        let privileges: Arc<dyn Privileges> =
            Arc::new(LocalPrivileges::new(&format!("v{name}"), &run).unwrap());
        let vmm = QemuDriver::probe(QemuConfig::default(), Arc::clone(&privileges))
            .await
            .unwrap();
        // The kernel is shared by all tests of this file.
        let cache = std::env::temp_dir().join("space-test-volume-cache");
        let builder = TemplateBuilder::new(VolumeConfig {
            directory: directory.path().join("store"),
            cache_directory: cache,
            daemon_program: std::env::var_os("SPACE_TEST_DAEMON").unwrap().into(),
        })
        .unwrap();
        Self {
            directory,
            privileges,
            vmm: Arc::new(vmm),
            builder: Arc::new(builder),
        }
    }

    /// A recipe over a root of busybox alone.
    fn tiny(&self, more: &str) -> Recipe {
        let image = self.directory.path().join("tiny.erofs");
        if !image.exists() {
            tiny_root(&self.directory.path().join("tree"), &image);
        }
        Recipe::from_toml(&format!(
            "name = 'tiny'\ndefault_size = '1x128x256'\nimage = '{}'\n{more}",
            image.display()
        ))
        .unwrap()
    }

    fn request(&self, size: SizeClass) -> MachineRequest {
        MachineRequest {
            size,
            vmm: Arc::clone(&self.vmm),
            privileges: Arc::clone(&self.privileges),
            uid: UIDS.0,
            run_directory: self.directory.path().join("run"),
        }
    }

    async fn assert_nothing_is_left(&self) {
        let swept = self.privileges.sweep(&BTreeSet::new()).await.unwrap();
        assert_eq!(swept, SweepReport::default());
        let left: Vec<_> = names(&self.directory.path().join("store/work"));
        assert!(left.is_empty(), "{left:?}");
        let rooms: Vec<_> = names(&self.directory.path().join("run"))
            .into_iter()
            .filter(|name| name.starts_with("template-"))
            .collect();
        assert!(rooms.is_empty(), "{rooms:?}");
    }

    /// Starts a machine from the snapshot, lets it run, and greets its daemon.
    async fn restore(
        &self,
        files: &MachineFiles,
        size: SizeClass,
    ) -> (Box<dyn Machine>, HostControl, GuestState, ObjectName) {
        let name = ObjectName::new("restored").unwrap();
        let run = self.directory.path().join("run/restored");
        fs::create_dir(&run).unwrap();
        let layer = self.directory.path().join("layer.qcow2");
        self.vmm
            .create_disk_layer(&files.disk_base, &layer)
            .await
            .unwrap();
        let opened = fs::File::open(&layer).unwrap().into_parts().0.into();
        self.privileges.give_file(opened, UIDS.1).await.unwrap();
        let limits = GroupLimits {
            memory_bytes: 2 << 30,
            pids: 64,
            cpu_quota_micros: 200_000,
            cpu_weight: 100,
            io: None,
        };
        self.privileges.create_group(&name, &limits).await.unwrap();
        let network = self.privileges.create_network(&name).await.unwrap();
        let spec = MachineSpec {
            name: name.clone(),
            uid: UIDS.1,
            directory: run,
            vcpus: size.vcpus,
            memory_mib: size.memory_mib,
            root: files.root.clone(),
            disk: vec![
                DiskLayer { path: layer },
                DiskLayer {
                    path: files.disk_base.clone(),
                },
            ],
            network_namespace: network.namespace,
            tap: network.tap,
            kernel: files.kernel.clone(),
            initramfs: files.initramfs.clone(),
            kernel_arguments: files.kernel_arguments.clone(),
        };
        let mode = StartMode::Restore {
            template: files.template.clone(),
            delta: None,
        };
        let machine = self.vmm.start(spec, mode).await.unwrap();
        let PortStream::Unix(stream) = machine.control_port().await.unwrap();
        machine.resume().await.unwrap();
        let (control, ack) = HostControl::connect(stream, 0, Duration::from_secs(60))
            .await
            .unwrap();
        assert_eq!(ack.generation, 0, "no identity is part of a template");
        (machine, control, ack.state, name)
    }

    async fn end(&self, machine: Box<dyn Machine>, name: &ObjectName) {
        machine.kill().await.unwrap();
        self.privileges.delete_group(name).await.unwrap();
        self.privileges.delete_network(name).await.unwrap();
    }
}

fn open_to_all(path: &Path) {
    fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

fn tiny_root(tree: &Path, image: &Path) {
    for directory in [
        "bin",
        "etc",
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "root",
        "home/user",
        "var/tmp",
    ] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    fs::copy("/bin/busybox", tree.join("bin/busybox")).unwrap();
    for applet in [
        "sh", "cat", "sleep", "pidof", "test", "true", "mkdir", "rm", "echo",
    ] {
        symlink("busybox", tree.join("bin").join(applet)).unwrap();
    }
    fs::write(tree.join("bin/bash"), "#!/bin/sh\nexec /bin/sh \"$@\"\n").unwrap();
    fs::set_permissions(tree.join("bin/bash"), std::fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(
        tree.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    )
    .unwrap();
    fs::write(tree.join("etc/group"), "root:x:0:\nuser:x:1000:\n").unwrap();
    let status = std::process::Command::new("mkfs.erofs")
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .args(["--quiet", "-U", "5f0d2c1e-8a4b-4f6e-9d3c-7b1a2e4c6d80"])
        .args([image, tree])
        .status()
        .unwrap();
    assert!(status.success());
}

async fn build(lab: &Lab, recipe: &Recipe) -> Template {
    lab.builder
        .build(recipe, &BuildOptions::default(), &quiet())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_built_once_for_all_who_ask_and_starts_from_its_snapshot() {
    if skipped() {
        return;
    }
    let lab = Lab::open("once").await;
    let recipe = lab.tiny(
        "run = ['echo made by root > /built', 'test $COLOUR = green']\n\
         environment = { COLOUR = 'green' }\n\
         start = { command = 'echo up > /tmp/up; exec sleep 100000' }\n\
         ready = { command = 'test -f /tmp/up && test -f /built', deadline_seconds = 30 }\n",
    );
    let template = build(&lab, &recipe).await;
    let size = template.manifest.default_size;
    assert!(
        lab.builder
            .ready_sizes(&template, lab.vmm.capabilities())
            .is_empty()
    );

    let boots = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&boots);
    let progress: Progress = Arc::new(move |step| {
        if step.name == "booting the machine" {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    let ask = || {
        lab.builder
            .ensure_machine(&template, lab.request(size), &progress)
    };
    let (one, two, three) = tokio::join!(ask(), ask(), ask());
    let files = one.unwrap();
    assert_eq!(two.unwrap().template, files.template);
    assert_eq!(three.unwrap().template, files.template);
    assert_eq!(boots.load(Ordering::Relaxed), 1);
    assert_eq!(lab.builder.ready_sizes(&template, lab.vmm.capabilities()), [size]);
    lab.assert_nothing_is_left().await;

    for file in [&files.template.memory, &files.template.state, &files.disk_base] {
        let mode = fs::metadata(file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o444, "{}", file.display());
    }
    assert_eq!(
        fs::metadata(&files.template.memory).unwrap().len(),
        u64::from(size.memory_mib) << 20
    );
    let before = fs::read(&files.template.memory).unwrap();
    let (machine, control, state, name) = lab.restore(&files, size).await;
    let health = control.health(Duration::from_secs(30)).await.unwrap();
    assert_eq!(health.processes, 1, "the start command is part of the snapshot");
    assert_eq!(
        state,
        GuestState::Frozen,
        "and waits there for the machine's identity"
    );
    lab.end(machine, &name).await;
    assert!(
        fs::read(&files.template.memory).unwrap() == before,
        "the base changed"
    );

    // In use, so its files stay although its name goes.
    lab.builder.store().remove("tiny").unwrap();
    assert!(files.template.memory.exists());
    drop(files);
    lab.builder.store().collect().unwrap();
    assert!(names(&lab.directory.path().join("store/blobs")).is_empty());
    assert!(names(&lab.directory.path().join("store/machines")).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recipe_that_fails_says_where_and_leaves_nothing() {
    if skipped() {
        return;
    }
    let lab = Lab::open("fails").await;
    let template = build(&lab, &lab.tiny("run = ['echo the reason >&2; exit 7']\n")).await;
    let size = template.manifest.default_size;
    let error = lab
        .builder
        .ensure_machine(&template, lab.request(size), &quiet())
        .await
        .unwrap_err();
    assert!(matches!(*error, VolumeError::Guest { .. }), "{error:?}");
    let shown = error.chain();
    assert!(
        shown.contains("exit 7") && shown.contains("code 7") && shown.contains("the reason"),
        "{shown}"
    );
    lab.assert_nothing_is_left().await;
    assert!(
        lab.builder
            .ready_sizes(&template, lab.vmm.capabilities())
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_a_daemon_fails_with_the_end_of_its_console() {
    if skipped() {
        return;
    }
    let lab = Lab::open("nodaemon").await;
    // No program at all, so the kernel finds nothing to start and panics.
    let no_program = lab.directory.path().join("no-program");
    fs::write(&no_program, "nothing that could run").unwrap();
    let builder = TemplateBuilder::new(VolumeConfig {
        directory: lab.directory.path().join("other"),
        cache_directory: std::env::temp_dir().join("space-test-volume-cache"),
        daemon_program: no_program,
    })
    .unwrap();
    let template = builder
        .build(&lab.tiny(""), &BuildOptions::default(), &quiet())
        .await
        .unwrap();
    let size = template.manifest.default_size;
    let error = builder
        .ensure_machine(&template, lab.request(size), &quiet())
        .await
        .unwrap_err();
    let shown = error.chain();
    assert!(shown.contains("boot"), "{shown}");
    assert!(shown.to_lowercase().contains("panic"), "{shown}");
    lab.assert_nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_packages_give_the_same_bits() {
    if skipped() {
        return;
    }
    if !Path::new("/usr/bin/mmdebstrap").exists() {
        println!("SKIPPED: mmdebstrap is not installed");
        return;
    }
    let recipe =
        Recipe::from_toml("name = 'small'\nminimal = true\npackages = ['python3-minimal']\n").unwrap();
    let mut digests = Vec::new();
    for _ in 0..2 {
        let directory = tempfile::tempdir().unwrap();
        let builder = TemplateBuilder::new(VolumeConfig {
            directory: directory.path().join("store"),
            cache_directory: directory.path().join("cache"),
            daemon_program: std::env::var_os("SPACE_TEST_DAEMON").unwrap().into(),
        })
        .unwrap();
        let template = builder
            .build(&recipe, &BuildOptions::default(), &quiet())
            .await
            .unwrap();
        assert!(template.manifest.packages.contains_key("python3-minimal"));
        digests.push((template.manifest.root.digest, template.digest));
    }
    assert_eq!(digests[0], digests[1]);
}
