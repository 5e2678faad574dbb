//! The command line against a platform of its own, on real machines.

use std::{
    io::Write as _,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    process::Stdio,
    time::{Duration, Instant},
};

use space_test_support::{Platform, Terminal};

const SPACE: &str = env!("CARGO_BIN_EXE_space");

#[test]
fn run_is_like_running_it_here() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };

    let output = platform.run(&["run", "--", "sh", "-c", "echo out; echo err >&2; exit 42"]);
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );

    // Nothing is interpreted on the way: the arguments arrive as they are.
    let odd = ["run", "--", "printf", "%s|", "a b", "$HOME", "", "*", "ü\n"];
    assert_eq!(platform.succeed(&odd), "a b|$HOME||*|ü\n|".trim_end());

    let mut child = platform
        .space([
            "run",
            "--env",
            "GREETING=hello world",
            "--cwd",
            "/tmp",
            "--user",
            "root",
            "--",
        ])
        .args(["sh", "-c", "cat; echo $GREETING; pwd; id -un"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let stdin: Vec<u8> = (0..200_000_u32)
        .flat_map(|n| format!("{n}\n").into_bytes())
        .collect();
    let mut pipe = child.stdin.take().expect("a pipe");
    let content = stdin.clone();
    let writer = std::thread::spawn(move || pipe.write_all(&content));
    let output = child.wait_with_output().expect("ends");
    writer.join().expect("no panic").expect("everything was taken");
    let expected = [stdin.as_slice(), b"hello world\n/tmp\nroot\n"].concat();
    assert_eq!(output.stdout.len(), expected.len());
    assert!(
        output.stdout == expected,
        "standard input did not come back as it was"
    );

    let begin = Instant::now();
    let output = platform.run(&["run", "--timeout", "1s", "--", "sleep", "100"]);
    assert_eq!(output.status.code(), Some(124));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("deadline"),
        "{output:?}"
    );
    assert!(begin.elapsed() < Duration::from_secs(20));

    let output = platform.run(&["run", "--", "no-such-program"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");

    let value = platform.json(&[
        "run",
        "--",
        "sh",
        "-c",
        "head -c 3000000 /dev/zero | tr '\\0' x; echo end",
    ]);
    assert_eq!(
        (&value["exit_code"], &value["cause"]),
        (&0.into(), &"exit".into())
    );
    assert_eq!(value["stdout"]["total"], 3_000_004);
    assert_eq!(value["stdout"]["truncated"], true);
    assert!(
        value["stdout"]["tail"]
            .as_str()
            .expect("text")
            .ends_with("xend\n")
    );
    assert!(value["timings"]["create_ms"].as_f64().expect("a number") > 0.0);

    assert_eq!(
        platform.json(&["sandbox", "ls"]),
        serde_json::json!([]),
        "run leaves no sandbox"
    );
}

#[test]
fn a_hundred_mebibytes_of_standard_input_arrive_whole() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let path = platform.scratch().join("input");
    let line = [b"0123456789abcdef".repeat(4), b"\n".to_vec()].concat();
    let content = line.repeat((100 << 20) / line.len() + 1);
    fs_err::write(&path, &content).expect("written");
    let here = std::process::Command::new("cksum")
        .stdin(fs_err::File::open(&path).expect("there").into_file())
        .output();
    let inside = platform
        .space(["run", "--", "cksum"])
        .stdin(fs_err::File::open(&path).expect("there").into_file())
        .output();
    assert_eq!(inside.expect("runs").stdout, here.expect("runs").stdout);
}

#[test]
fn an_interrupted_run_leaves_no_sandbox() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let mut running = platform
        .space(["run", "--", "sleep", "1000"])
        .spawn()
        .expect("starts");
    space_test_support::eventually("the sandbox", Duration::from_secs(20), || {
        (platform.json(&["sandbox", "ls"]) != serde_json::json!([])).then_some(())
    });
    let pid = rustix::process::Pid::from_child(&running);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("signalled");
    let status = space_test_support::eventually("its end", Duration::from_secs(20), || {
        running.try_wait().expect("waits")
    });
    assert_eq!(status.code(), Some(130));
    assert_eq!(platform.json(&["sandbox", "ls"]), serde_json::json!([]));
}

#[test]
fn a_sandbox_lives_from_create_to_inspect_after_its_end() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let id = platform.succeed(&[
        "sandbox",
        "create",
        "--label",
        "who=me",
        "--env",
        "A=b",
        "--timeout",
        "10m",
    ]);
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "--", "printenv", "A"]),
        "b"
    );
    assert_eq!(
        platform.succeed(&["sandbox", "exec", "-e", "A=c", &id, "--", "printenv", "A"]),
        "c"
    );
    assert_eq!(
        platform.run(&["sandbox", "exec", &id, "exit 7"]).status.code(),
        Some(7)
    );

    let table = platform.succeed(&["sandbox", "ls"]);
    assert!(
        table.contains(&id) && table.contains("running") && table.contains("base"),
        "{table}"
    );
    let value = platform.json(&["sandbox", "inspect", &id]);
    assert_eq!(
        (&value["state"], &value["labels"]["who"]),
        (&"running".into(), &"me".into())
    );

    assert_eq!(platform.succeed(&["sandbox", "rm", &id]), id);
    let value = platform.json(&["sandbox", "inspect", &id]);
    assert_eq!(
        (&value["state"], &value["end_cause"]["kind"]),
        (&"ended".into(), &"deleted".into())
    );
    assert!(platform.succeed(&["sandbox", "inspect", &id]).contains("deleted"));
    assert!(!platform.succeed(&["sandbox", "ls"]).contains(&id));
    assert!(platform.succeed(&["sandbox", "ls", "--all"]).contains(&id));

    // Gone is gone, and said so.
    for arguments in [&["sandbox", "exec", &id, "true"][..], &["sandbox", "rm", &id]] {
        let output = platform.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("was not found") && said.contains("Hint:"), "{said}");
        assert!(!output.status.success());
    }
    assert!(platform.run(&["sandbox", "rm", "--force", &id]).status.success());

    let output = platform.run(&["run", "--template", "no-such-template", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("no-such-template") && said.contains("Hint:"),
        "{said}"
    );
}

#[test]
fn sandboxes_that_end_by_themselves_tell_why() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let ended = |id: &str| {
        space_test_support::eventually("the end", Duration::from_secs(20), || {
            let value = platform.json(&["sandbox", "inspect", id]);
            (value["state"] == "ended")
                .then(|| value["end_cause"]["kind"].as_str().unwrap_or_default().to_owned())
        })
    };
    let late = platform.succeed(&["sandbox", "create", "--timeout", "1s"]);
    assert_eq!(ended(&late), "deadline");

    let off = platform.succeed(&["sandbox", "create"]);
    // However the guest goes down, the stream must end.
    drop(platform.run(&[
        "sandbox",
        "exec",
        "--user",
        "root",
        &off,
        "--",
        "sh",
        "-c",
        "echo o > /proc/sysrq-trigger; sleep 5",
    ]));
    assert_eq!(ended(&off), "guest_shutdown");

    let crashed = platform.succeed(&["sandbox", "create"]);
    let begin = Instant::now();
    drop(platform.run(&[
        "sandbox",
        "exec",
        "--user",
        "root",
        &crashed,
        "--",
        "sh",
        "-c",
        "echo c > /proc/sysrq-trigger; sleep 60",
    ]));
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "the stream did not end with its machine"
    );
    assert_eq!(ended(&crashed), "guest_failed");
}

#[test]
fn files_and_directories_are_copied_both_ways() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let id = platform.succeed(&["sandbox", "create"]);
    let tree = platform.scratch().join("tree");
    let deep = tree.join("a dir/ü");
    fs_err::create_dir_all(&deep).expect("made");
    fs_err::write(tree.join("plain"), "content").expect("made");
    fs_err::write(deep.join("new\nline"), vec![7; 3 << 20]).expect("made");
    fs_err::write(tree.join(std::ffi::OsStr::from_bytes(b"bad\xffname")), "bytes").expect("made");
    fs_err::write(tree.join("tool"), "#!/bin/sh\necho it runs\n").expect("made");
    fs_err::set_permissions(tree.join("tool"), std::fs::Permissions::from_mode(0o755)).expect("made");
    std::os::unix::fs::symlink("plain", tree.join("link")).expect("made");
    let tree_path = tree.to_str().expect("UTF-8");

    let value = platform.json(&["sandbox", "cp", tree_path, &format!("{id}:/home/user/")]);
    assert_eq!(
        (&value["files"], &value["links"]),
        (&4.into(), &1.into()),
        "{value}"
    );
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "--", "/home/user/tree/tool"]),
        "it runs"
    );
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "cat tree/link"]),
        "content"
    );
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "cat tree/bad*"]),
        "bytes"
    );

    let back = platform.scratch().join("back");
    platform.succeed(&[
        "sandbox",
        "cp",
        &format!("{id}:tree"),
        back.to_str().expect("UTF-8"),
    ]);
    let same = std::process::Command::new("diff")
        .args(["-r", "--no-dereference"])
        .args([&tree, &back])
        .output()
        .expect("diff runs");
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
    assert!(
        fs_err::metadata(back.join("tool"))
            .expect("there")
            .permissions()
            .mode()
            & 0o111
            != 0
    );

    let value = platform.json(&[
        "sandbox",
        "cp",
        &format!("{tree_path}/plain"),
        &format!("{id}:/tmp/renamed"),
    ]);
    // SHA-256 of "content".
    assert_eq!(
        value["sha256"],
        "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    );
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "cat /tmp/renamed"]),
        "content"
    );

    let output = platform.run(&["sandbox", "cp", &format!("{id}:/no/such"), "/tmp/x"]);
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let output = platform.run(&["sandbox", "cp", "/no/such", &format!("{id}:/tmp/x")]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn a_shell_is_a_terminal_and_gives_ours_back() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let id = platform.succeed(&["sandbox", "create"]);
    let mut terminal = Terminal::start(&platform.space(["sandbox", "shell", &id]));
    let before = terminal.settings();
    terminal.send("stty size; tty\n");
    terminal.wait_for("/dev/pts/");
    terminal.wait_for("24 80");
    terminal.resize(50, 132);
    // The new size takes a moment to get through.
    terminal.send("until [ \"$(stty size)\" = '50 132' ]; do sleep 0.1; done; echo re''sized\n");
    terminal.wait_for("resized");
    terminal.send("echo be''gun; sleep 100\n");
    terminal.wait_for("begun");
    // Only once it has become `sleep` is the job surely in the foreground; before, the shell may be the one interrupted.
    space_test_support::eventually("the job in the foreground", Duration::from_secs(20), || {
        let found = platform.run(&["sandbox", "exec", &id, "--", "pgrep", "-f", "^sleep 100$"]);
        found.status.success().then_some(())
    });
    terminal.send("\u{3}");
    terminal.send("echo aft''er; exit 3\n");
    terminal.wait_for("after");
    assert_eq!(terminal.wait().code(), Some(3));
    let after = terminal.settings();
    assert_eq!(
        before.local_modes, after.local_modes,
        "the terminal was not given back as it was"
    );
    assert_eq!(before.input_modes, after.input_modes);

    let output = platform.run(&["sandbox", "shell", &id]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("space sandbox exec"));
}

#[test]
fn keys_open_and_close() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let made = platform.json(&["key", "create", "second"]);
    let (key, id) = (
        made["key"].as_str().expect("a key"),
        made["id"].as_str().expect("an id"),
    );
    let with = |key: &str| {
        platform
            .space(["sandbox", "ls"])
            .env("SPACE_API_KEY", key)
            .output()
            .expect("runs")
    };
    assert!(with(key).status.success());
    assert!(platform.succeed(&["key", "ls"]).contains("second"));
    platform.succeed(&["key", "revoke", id]);
    let output = with(key);
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Hint:"));
    let log = platform.log();
    assert!(
        !log.contains(key) && !log.contains(platform.key()),
        "a key is in the log"
    );
    assert!(platform.succeed(&["template", "ls"]).contains("base:latest"));
}
