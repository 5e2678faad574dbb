//! Ends of the platform itself: killed, stopped, started twice.

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    time::Duration,
};

use space_test_support::{Part, Platform, Remains, eventually, prerequisites};

const SPACE: &str = env!("CARGO_BIN_EXE_space");

/// A platform with three sandboxes, and the name of its installation.
fn with_three_sandboxes() -> Option<(Platform, String, Vec<String>)> {
    prerequisites()?;
    let platform = Platform::start(SPACE)?;
    let name = platform.installation();
    let ids = (0..3).map(|_| platform.succeed(&["sandbox", "create"])).collect();
    Some((platform, name, ids))
}

/// Killed in the middle of creates and deletes, at moments that differ, it always comes back: what had become usable is
/// usable still, everything else has ended with a cause, and nothing is left of it. The journal is written before the deed.
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
        // Whoever made it is gone, so a sandbox that was usable stays until it is deleted.
        let left = eventually("no sandbox on its way", Duration::from_secs(30), || {
            let list = platform.json(&["sandbox", "ls"]);
            let list = list.as_array().expect("a list").clone();
            let settled = list.iter().all(|sandbox| sandbox["state"] == "running");
            settled.then_some(list)
        });
        for sandbox in left {
            let id = sandbox["sandboxID"]
                .as_str()
                .or(sandbox["id"].as_str())
                .expect("an id");
            let said = platform.run(&["sandbox", "exec", id, "echo usable"]);
            assert_eq!(
                String::from_utf8_lossy(&said.stdout),
                "usable\n",
                "{delay} ms: {said:?}"
            );
            platform.succeed(&["sandbox", "rm", id]);
        }
    }
    let records = platform.json(&["sandbox", "ls", "--all"]);
    for record in records.as_array().expect("a list") {
        assert!(
            record["end_cause"]["kind"].is_string(),
            "an end without a cause: {record}"
        );
    }
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");
    assert!(platform.stop().success());
    let end = Remains::of(&name, &data);
    assert!(end.is_empty(), "{end:?}");
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

    // Not even one that does not use the same sockets.
    let elsewhere = platform
        .up()
        .arg("--run-dir")
        .arg("/run/space/elsewhere")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&elsewhere.stderr).into_owned();
    assert!(!elsewhere.status.success() && said.contains("another"), "{said}");

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

/// A data directory of the version before belongs to root, and is handed over with everything in it.
#[test]
fn a_data_directory_of_roots_is_handed_over() {
    let Some(mut platform) = Platform::start(SPACE) else {
        return;
    };
    let key = platform.key().to_owned();
    let sandbox = platform.succeed(&["sandbox", "create"]);
    platform.succeed(&["sandbox", "rm", &sandbox]);
    assert!(platform.stop().success());
    let data = platform.data_directory();
    let change = Command::new("chown").args(["-R", "0:0"]).arg(&data).status();
    assert!(change.expect("runs").success());
    let outside = platform.scratch().join("outside");
    fs_err::write(&outside, "root's").expect("written");
    std::os::unix::fs::symlink(&outside, data.join("link")).expect("linked");

    platform.start_again();
    assert_eq!(platform.key(), key);
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");
    let record = platform.json(&["sandbox", "inspect", &sandbox]);
    assert_eq!(record["state"], "ended", "{record}");
    let owner =
        |path: &std::path::Path| std::os::unix::fs::MetadataExt::uid(&fs_err::metadata(path).expect("there"));
    for path in ["", "key", "space.db", "node.db"] {
        assert_eq!(owner(&data.join(path)), 199_998, "{path}");
    }
    assert_eq!(owner(&outside), 0, "a link was followed");
}

/// Signals to the platform's own processes: SIGTERM lets go of the sandboxes, SIGINT ends them.
#[test]
fn the_node_by_itself_lets_go_or_ends() {
    let Some((platform, _, ids)) = with_three_sandboxes() else {
        return;
    };
    let monitors: Vec<_> = ids.iter().map(|id| platform.monitor_of(id)).collect();
    let node = platform.part(Part::Node);
    node.signal(rustix::process::Signal::TERM);
    eventually("another node", Duration::from_secs(30), || {
        (platform.part(Part::Node) != node).then_some(())
    });
    for (id, monitor) in ids.iter().zip(&monitors) {
        assert_eq!(platform.succeed(&["sandbox", "exec", id, "echo here"]), "here");
        assert_eq!(platform.monitor_of(id), *monitor);
    }
    platform.part(Part::Node).signal(rustix::process::Signal::INT);
    eventually("the end of the monitors", Duration::from_secs(30), || {
        (!monitors.iter().any(space_test_support::Process::lives)).then_some(())
    });
    let value = platform.json(&["sandbox", "inspect", &ids[0]]);
    assert_eq!(value["end_cause"]["kind"], "platform_shutdown", "{value}");
}
