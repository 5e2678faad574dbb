//! The units in `deploy/systemd` say what the platform depends on.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd")
}

/// A unit's directives by section and name, in order.
fn unit(name: &str) -> BTreeMap<String, Vec<String>> {
    let text = fs_err::read_to_string(directory().join(name)).expect("the unit is there");
    let mut section = String::new();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name.clone_into(&mut section);
            continue;
        }
        let (name, value) = line
            .split_once('=')
            .unwrap_or_else(|| panic!("no directive: {line}"));
        found
            .entry(format!("{section}.{name}"))
            .or_default()
            .push(value.to_owned());
    }
    found
}

fn says(unit: &BTreeMap<String, Vec<String>>, directives: &[(&str, &str)]) {
    for (name, value) in directives {
        let values = unit.get(*name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(values, &[(*value).to_owned()], "{name}");
    }
}

#[test]
fn machines_outlive_the_node_manager() {
    let manager = unit("space-node-manager.service");
    says(
        &manager,
        &[
            ("Service.KillMode", "process"),
            ("Service.Delegate", "yes"),
            ("Service.TasksMax", "infinity"),
            ("Service.NoNewPrivileges", "yes"),
            ("Service.Restart", "always"),
        ],
    );
    assert!(!manager.contains_key("Service.User"), "it is root");
    assert!(manager["Service.ExecStart"][0].contains(" node-manager --user space"));
    // A mount namespace of its own would take the machines' networks away with it, and a ban on code made at run time
    // would keep guests from running without KVM.
    for fatal in [
        "ProtectSystem",
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "InaccessiblePaths",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "RootDirectory",
        "RestrictNamespaces",
        "MemoryDenyWriteExecute",
    ] {
        assert!(!manager.contains_key(&format!("Service.{fatal}")), "{fatal}");
    }
    // What it does needs these; each stands for an act that fails without it.
    let capabilities = &manager["Service.CapabilityBoundingSet"][0];
    for needed in [
        "SYS_ADMIN",
        "NET_ADMIN",
        "SETUID",
        "SETGID",
        "SETPCAP",
        "CHOWN",
        "KILL",
        "SYS_PTRACE",
    ] {
        assert!(
            capabilities
                .split(' ')
                .any(|each| each == format!("CAP_{needed}")),
            "{needed}"
        );
    }
}

#[test]
fn the_node_is_an_ordinary_user_and_lives_through_a_restart_of_the_manager() {
    let node = unit("space-node.service");
    says(
        &node,
        &[
            ("Service.User", "space"),
            ("Service.Type", "notify"),
            ("Service.NoNewPrivileges", "yes"),
            ("Service.CapabilityBoundingSet", ""),
            ("Service.AmbientCapabilities", ""),
            ("Service.ProtectSystem", "strict"),
            ("Service.MemoryDenyWriteExecute", "yes"),
            ("Service.KillSignal", "SIGTERM"),
            ("Service.UMask", "0077"),
            ("Unit.Wants", "space-node-manager.service"),
        ],
    );
    assert_eq!(node["Service.SystemCallFilter"][0], "@system-service");
    for binding in ["Unit.BindsTo", "Unit.Requires", "Unit.PartOf"] {
        let bound = node
            .get(binding)
            .is_some_and(|values| values.iter().any(|value| value.contains("space-node-manager")));
        assert!(!bound, "{binding} would stop the node with the manager");
    }
    let after = &node["Unit.After"][0];
    assert!(after.contains("space-node-manager.service") && after.contains("space-node.socket"));
    let paths = &node["Service.ReadWritePaths"][0];
    assert_eq!(paths, "/var/lib/space /run/space/local");
}

#[test]
fn the_user_of_the_units_is_the_one_that_the_program_expects() {
    let users = fs_err::read_to_string(directory().join("sysusers.conf")).expect("it is there");
    assert!(users.lines().any(|line| line.starts_with("u space 199998 ")));
    let output = Command::new(env!("CARGO_BIN_EXE_space"))
        .args(["up", "--help"])
        .output()
        .expect("runs");
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(help.contains("199998"), "{help}");
}

#[test]
fn every_command_in_the_units_exists() {
    for name in [
        "space-prepare.service",
        "space-node-manager.service",
        "space-node.service",
    ] {
        let unit = unit(name);
        let mut words = unit["Service.ExecStart"][0].split(' ');
        assert_eq!(words.next(), Some("/usr/local/lib/space/space"), "{name}");
        let arguments: Vec<_> = words.collect();
        // With --help, the command line is parsed and nothing is done.
        let output = Command::new(env!("CARGO_BIN_EXE_space"))
            .args(&arguments)
            .arg("--help")
            .output()
            .expect("runs");
        assert!(output.status.success(), "{name}: {arguments:?}");
    }
}

/// systemd's own judgement, where it is installed.
#[test]
fn systemd_understands_the_units() {
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        println!("SKIPPED: systemd-analyze is not installed");
        return;
    };
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let number = version
        .split_whitespace()
        .nth(1)
        .and_then(|number| number.parse::<u32>().ok());
    if number.is_none_or(|number| number < 250) {
        println!("SKIPPED: this systemd-analyze cannot check units of another root");
        return;
    }
    let root = tempfile::tempdir().expect("a directory");
    let units = root.path().join("etc/systemd/system");
    let program = root.path().join("usr/local/lib/space/space");
    fs_err::create_dir_all(&units).expect("made");
    fs_err::create_dir_all(program.parent().expect("a parent")).expect("made");
    fs_err::copy("/bin/true", &program).expect("copied");
    fs_err::create_dir_all(root.path().join("usr/lib/systemd/system")).expect("made");
    // Targets of the system that ours refer to.
    for target in [
        "multi-user",
        "sysinit",
        "basic",
        "shutdown",
        "sockets",
        "paths",
        "timers",
        "slices",
        "network",
        "local-fs",
    ] {
        let path = root
            .path()
            .join(format!("usr/lib/systemd/system/{target}.target"));
        fs_err::write(path, "[Unit]\nDescription=x\n").expect("written");
    }
    fs_err::write(
        root.path().join("etc/passwd"),
        "root:x:0:0::/:/bin/sh\nspace:x:199998:199998::/:/bin/false\n",
    )
    .expect("written");
    fs_err::write(root.path().join("etc/group"), "root:x:0:\nspace:x:199998:\n").expect("written");
    let mut names = Vec::new();
    for entry in fs_err::read_dir(directory()).expect("listed") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("space") {
            fs_err::copy(entry.path(), units.join(&name)).expect("copied");
            names.push(name);
        }
    }
    assert_eq!(names.len(), 5, "{names:?}");
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(format!("--root={}", root.path().display()))
        .args(&names)
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let ours: Vec<_> = said
        .lines()
        .filter(|line| names.iter().any(|name| line.contains(name.as_str())))
        .collect();
    assert!(ours.is_empty() && output.status.success(), "{said}");
}
