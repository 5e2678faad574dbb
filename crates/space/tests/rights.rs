//! What each process of the platform may do, as the kernel sees it.

use std::collections::BTreeSet;

use space_test_support::{Part, Platform, Process};

const SPACE: &str = env!("CARGO_BIN_EXE_space");
const NODE_UID: &str = "199998";
/// The bit of the capability that it takes to lower `oom_score_adj`.
const CAP_SYS_RESOURCE: u64 = 1 << 24;

/// The four ids of a field of `/proc/PID/status`.
fn ids(process: &Process, field: &str) -> Vec<String> {
    let status = process.status();
    status[field].split_whitespace().map(str::to_owned).collect()
}

#[test]
fn only_the_supervisor_and_the_node_manager_are_root() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let sandbox = platform.succeed(&["sandbox", "create"]);
    let node = platform.part(Part::Node);
    let manager = platform.part(Part::NodeManager);

    let status = node.status();
    for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!(status["NoNewPrivs"], "1");
    assert_eq!(status["Umask"], "0077");
    assert_eq!(status["Groups"], "", "it has further groups");
    for field in ["Uid", "Gid"] {
        assert_eq!(ids(&node, field), vec![NODE_UID; 4], "{field}");
    }
    assert_eq!(ids(&manager, "Uid"), vec!["0"; 4]);

    // Whatever else runs of this platform is a monitor.
    let own: BTreeSet<u32> = [platform.supervisor().pid, node.pid, manager.pid].into();
    let monitors: BTreeSet<u32> = platform.monitors().iter().map(|process| process.pid).collect();
    let of_platform = |process: &Process| own.contains(&process.parent) || own.contains(&process.pid);
    for process in Process::all().iter().filter(|process| of_platform(process)) {
        if !own.contains(&process.pid) {
            assert!(monitors.contains(&process.pid), "a further process: {process:?}");
        }
    }
    assert!(!monitors.is_empty());
    platform.succeed(&["sandbox", "rm", &sandbox]);
}

/// As the node's user, in the way that the supervisor makes it, nothing of root's can be read.
#[test]
fn the_node_cannot_read_what_is_roots() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let secret = platform.scratch().join("secret");
    fs_err::write(&secret, "secret").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs_err::set_permissions(&secret, mode).expect("closed");
    let read = |path: &std::path::Path| {
        use std::os::unix::process::CommandExt as _;
        let uid: u32 = NODE_UID.parse().expect("a number");
        let mut command = std::process::Command::new("cat");
        // A process of root's sets its groups itself; this is the same user with no group but its own.
        command.arg(path).uid(uid).gid(uid);
        command.output().expect("runs").status.success()
    };
    assert!(!read(&secret), "the node's user reads a file of root's");
    assert!(!read(std::path::Path::new("/etc/shadow")));
    assert!(
        read(&platform.data_directory().join("key")),
        "and its own it can read"
    );
    let node = platform.part(Part::Node);
    let manager = platform.part(Part::NodeManager);
    assert!(!read(std::path::Path::new(&format!(
        "/proc/{}/environ",
        manager.pid
    ))));
    // No descriptor of the node leads to a directory or file that is root's and closed to it.
    let descriptors = fs_err::read_dir(format!("/proc/{}/fd", node.pid)).expect("listed");
    for entry in descriptors.flatten() {
        let Ok(target) = fs_err::read_link(entry.path()) else {
            continue;
        };
        let allowed = [
            platform.data_directory(),
            "/run/space".into(),
            "/dev".into(),
            platform.scratch().to_owned(),
        ];
        if target.is_absolute() {
            let known = allowed.iter().any(|place| target.starts_with(place))
                || target.starts_with(std::env::var_os("SPACE_TEST_TEMPLATES").unwrap_or_default())
                || target.to_string_lossy().starts_with("/memfd:");
            let by_all = fs_err::metadata(&target).is_ok_and(|metadata| {
                std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o004 != 0
            });
            assert!(known || by_all, "the node holds {}", target.display());
        }
    }
}

#[test]
fn monitors_share_nothing_with_each_other_or_the_host() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let ids: Vec<String> = (0..3).map(|_| platform.succeed(&["sandbox", "create"])).collect();
    let monitors: Vec<Process> = ids.iter().map(|id| platform.monitor_of(id)).collect();
    let here = Process::of(std::process::id()).expect("we are there");
    for kind in ["mnt", "pid", "net", "ipc", "uts"] {
        let mut seen = BTreeSet::from([here.namespace(kind)]);
        for monitor in &monitors {
            // A monitor is a process in its pid namespace, not the one that made it.
            let namespace = monitor.namespace(kind);
            assert!(namespace.is_some(), "{kind}");
            assert!(seen.insert(namespace.clone()), "{kind} is shared: {namespace:?}");
        }
    }
    let mut users = BTreeSet::from(["0".to_owned(), NODE_UID.to_owned()]);
    for monitor in &monitors {
        let status = monitor.status();
        assert_eq!(status["Seccomp"], "2", "no seccomp filter");
        assert_eq!(status["NoNewPrivs"], "1");
        assert_eq!(status["Groups"], "");
        for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
            assert_eq!(status[set], "0000000000000000", "{set}");
        }
        let uids = self::ids(monitor, "Uid");
        assert!(uids.iter().all(|uid| *uid == uids[0]), "{uids:?}");
        assert!(users.insert(uids[0].clone()), "user {} is another's too", uids[0]);
    }
    // Priorities are the platform's alone.
    for monitor in &monitors {
        let score = fs_err::read_to_string(format!("/proc/{}/oom_score_adj", monitor.pid)).expect("read");
        assert!(score.trim().parse::<i32>().expect("a number") >= 0, "{score}");
    }
    let capabilities = here.status()["CapEff"].clone();
    let capabilities = u64::from_str_radix(&capabilities, 16).expect("a number");
    if capabilities & CAP_SYS_RESOURCE == 0 {
        println!("SKIPPED: the root of this machine may not lower oom_score_adj, so it stays what it was");
        return;
    }
    for part in [Part::Node, Part::NodeManager] {
        let process = platform.part(part);
        let score = fs_err::read_to_string(format!("/proc/{}/oom_score_adj", process.pid)).expect("read");
        assert_eq!(score.trim(), "-900", "{part:?}");
    }
}
