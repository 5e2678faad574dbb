//! Ends of the platform itself: killed, stopped, started twice.

use std::{
    collections::BTreeSet,
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    time::Duration,
};

use space_test_support::{Platform, Remains, eventually, prerequisites};

const SPACE: &str = env!("CARGO_BIN_EXE_space");

/// A platform with three sandboxes, and the name of its installation.
fn with_three_sandboxes() -> Option<(Platform, String, Vec<String>)> {
    prerequisites()?;
    let platform = Platform::start(SPACE)?;
    let name = platform.installation();
    let ids = (0..3).map(|_| platform.succeed(&["sandbox", "create"])).collect();
    Some((platform, name, ids))
}

#[test]
fn after_a_kill_the_next_start_leaves_nothing_and_knows_each_end() {
    let Some((mut platform, name, ids)) = with_three_sandboxes() else {
        return;
    };
    let data = platform.data_directory();
    let before = Remains::of(&name, &data);
    assert_eq!(before.monitors.len(), 3, "{before:?}");
    platform.kill();

    platform.start_again();
    let after = Remains::of(&name, &data);
    assert!(after.monitors.is_disjoint(&before.monitors), "{after:?}");
    let sandbox_groups = |remains: &Remains| -> BTreeSet<String> {
        let of_sandbox = |path: &&String| ids.iter().any(|id| path.contains(id.as_str()));
        remains.groups.iter().filter(of_sandbox).cloned().collect()
    };
    assert!(!sandbox_groups(&before).is_empty());
    assert!(sandbox_groups(&after).is_empty(), "{after:?}");
    assert!(after.networks.is_disjoint(&before.networks), "{after:?}");
    assert!(after.directories.is_empty(), "{after:?}");
    for id in &ids {
        let value = eventually("the record of its end", Duration::from_secs(30), || {
            let value = platform.json(&["sandbox", "inspect", id]);
            (value["state"] == "ended").then_some(value)
        });
        assert_eq!(value["end_cause"]["kind"], "platform_restarted", "{value}");
    }
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");

    assert!(platform.stop().success());
    let end = Remains::of(&name, &data);
    assert!(end.is_empty(), "{end:?}");
}

/// Killed in the middle of creates and deletes, at moments that differ, it always comes back clean: the journal is written
/// before the deed.
#[test]
fn a_kill_at_any_moment_converges() {
    let Some(mut platform) = Platform::start(SPACE) else {
        return;
    };
    let (name, data) = (platform.installation(), platform.data_directory());
    for delay in [5, 45, 90, 160, 280, 500] {
        let mut busy: Vec<_> = (0..4)
            .map(|_| {
                let mut command = platform.space(["run", "--", "true"]);
                command
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("starts")
            })
            .collect();
        std::thread::sleep(Duration::from_millis(delay));
        platform.kill();
        for each in &mut busy {
            eventually("the end of a client", Duration::from_secs(20), || {
                each.try_wait().expect("waits")
            });
        }
        platform.start_again();
        let after = Remains::of(&name, &data);
        assert!(after.monitors.is_empty(), "{delay} ms: {after:?}");
        assert!(after.groups.is_empty(), "{delay} ms: {after:?}");
        assert!(after.directories.is_empty(), "{delay} ms: {after:?}");
        let left = eventually("no sandbox on its way", Duration::from_secs(30), || {
            let list = platform.json(&["sandbox", "ls"]);
            (list == serde_json::json!([])).then_some(list)
        });
        assert_eq!(left, serde_json::json!([]));
    }
    let records = platform.json(&["sandbox", "ls", "--all"]);
    for record in records.as_array().expect("a list") {
        assert!(
            record["end_cause"]["kind"].is_string(),
            "an end without a cause: {record}"
        );
    }
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");
}

#[test]
fn an_orderly_stop_ends_everything_and_says_so_afterwards() {
    let Some((mut platform, name, ids)) = with_three_sandboxes() else {
        return;
    };
    let data = platform.data_directory();
    // A command that runs meanwhile must not hold the end up, and must learn of it.
    let mut running = platform
        .space(["sandbox", "exec", &ids[0], "--", "sleep", "1000"])
        .spawn()
        .expect("starts");
    let status = platform.stop();
    assert!(status.success(), "{status}\n{}", platform.log());
    let end = Remains::of(&name, &data);
    assert!(end.is_empty(), "{end:?}");
    eventually("the end of the command", Duration::from_secs(10), || {
        running.try_wait().expect("waits")
    });

    let key = platform.key().to_owned();
    platform.start_again();
    assert_eq!(platform.key(), key, "the key changed with a restart");
    for id in &ids {
        let value = platform.json(&["sandbox", "inspect", id]);
        assert_eq!(value["end_cause"]["kind"], "platform_shutdown", "{value}");
    }
}

#[test]
fn what_is_missing_is_said_before_anything_is_made() {
    if prerequisites().is_none() {
        return;
    }
    let data = tempfile::tempdir().expect("a directory");
    let up = || {
        let mut command = Command::new(SPACE);
        command
            .args(["up", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(data.path());
        command
    };
    let refused = |command: &mut Command, words: &[&str]| {
        let output = command.output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("Hint:"), "{said}");
        for word in words {
            assert!(said.contains(word), "{word} is missing: {said}");
        }
    };
    refused(up().uid(65_534), &["root", "sudo"]);
    refused(
        up().args(["--daemon", "/no/such/daemon"]),
        &["/no/such/daemon", "--daemon"],
    );
    // Whatever the daemon is, QEMU is looked for before it is used.
    refused(
        up().args(["--daemon", SPACE]).env("PATH", "/nowhere"),
        &["qemu-system-x86_64", "space doctor"],
    );
    let long = format!("/run/space/{}", "x".repeat(60));
    refused(
        up().args(["--daemon", SPACE, "--run-dir", &long]),
        &["run directory"],
    );
    drop(std::fs::remove_dir_all(long));
    refused(
        up().args(["--listen", "203.0.113.1:80"]),
        &["203.0.113.1:80", "--listen"],
    );
}

#[test]
fn two_platforms_never_share_a_directory() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let output = platform.up().output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("another") && said.contains("Hint:"), "{said}");

    let taken = platform.url().trim_start_matches("http://").to_owned();
    let elsewhere = tempfile::tempdir().expect("a directory");
    let output = platform
        .space(["up", "--listen", &taken, "--data-dir"])
        .arg(elsewhere.path())
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("--listen"), "{said}");
    assert_eq!(
        platform.succeed(&["run", "--", "echo", "undisturbed"]),
        "undisturbed"
    );
}
