//! Running programs.

use std::time::{Duration, Instant};

use base64::Engine;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::harness::{Event, basic, guest, lives, until};

fn encode(data: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(data)
}

fn by_pid(pid: u32) -> Value {
    json!({ "pid": pid })
}

#[tokio::test]
async fn output_environment_directory_and_exit_code() {
    let Some(guest) = guest().await else { return };
    guest.services.set_environment(
        [
            ("GLOBAL".to_owned(), "g".to_owned()),
            ("BOTH".to_owned(), "global".to_owned()),
        ]
        .into(),
    );
    let odd = "line1\nline2 'quotes' \"$HOME\" = \u{1f600}";
    let big = "x".repeat(100_000);
    let request = json!({ "process": {
        "cmd": "bash", "cwd": "/usr",
        "args": ["-c", "echo $GLOBAL $BOTH $USER $HOME $(pwd); printf %s \"$ODD\" >&2; printf %s \"$BIG\" | wc -c; exit 3"],
        "envs": { "BOTH": "own", "ODD": odd, "BIG": big },
    }});
    let (_, mut events) = guest.bash("", request).await;
    let outcome = events.finish().await;
    assert_eq!(outcome.stdout(), "g own root /root /usr\n100000\n");
    assert_eq!(outcome.stderr, odd.as_bytes());
    assert_eq!(
        (outcome.end["exitCode"].as_i64(), outcome.end["exited"].as_bool()),
        (Some(3), Some(true))
    );
    assert_eq!(
        (outcome.end["status"].as_str(), outcome.cause()),
        (Some("exit status 3"), "CAUSE_EXIT")
    );
    assert!(outcome.error.is_none());
    assert_eq!(guest.services.process_count(), 0);
}

#[tokio::test]
async fn other_accounts() {
    let Some(guest) = guest().await else { return };
    let user = basic("nobody");
    let script = "id -u; id -G; cat /etc/shadow 2>&1 | tail -c 18; echo $USER; cd; pwd";
    let (_, mut events) = guest
        .bash_with(script, json!({}), &[("authorization", &user)])
        .await;
    let outcome = events.finish().await;
    let text = outcome.stdout();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines[1]), ("65534", "65534"));
    assert_eq!(lines[2], "Permission denied");
    assert_eq!(lines[3], "nobody");
}

#[tokio::test]
async fn bad_requests_say_what_is_wrong() {
    let Some(guest) = guest().await else { return };
    let start = |process: Value| json!({ "process": process });
    let unknown = basic("nope");
    let cases = [
        (
            start(json!({ "cmd": "true" })),
            Some(&unknown),
            "unauthenticated",
            "unknown user",
        ),
        (
            start(json!({ "cmd": "true", "cwd": "/nonexistent" })),
            None,
            "invalid_argument",
            "does not exist",
        ),
        (
            start(json!({ "cmd": "true", "cwd": "/etc/passwd" })),
            None,
            "invalid_argument",
            "not a directory",
        ),
        (
            start(json!({ "cmd": "no-such-program" })),
            None,
            "invalid_argument",
            "was not found",
        ),
        (
            start(json!({ "cmd": "/etc/passwd" })),
            None,
            "invalid_argument",
            "may not be executed",
        ),
        (
            start(json!({ "cmd": "" })),
            None,
            "invalid_argument",
            "no program",
        ),
        (
            start(json!({ "cmd": "true", "args": ["a\u{0}b"] })),
            None,
            "invalid_argument",
            "zero byte",
        ),
        (
            start(json!({ "cmd": "true", "envs": { "A=B": "c" } })),
            None,
            "invalid_argument",
            "environment name",
        ),
        (
            start(json!({ "cmd": "true", "args": ["x".repeat(3_000_000)] })),
            None,
            "invalid_argument",
            "more arguments",
        ),
        // The kernel's own bound on one value; what it does not take is refused, never cut.
        (
            start(json!({ "cmd": "true", "envs": { "A": "x".repeat(200_000) } })),
            None,
            "invalid_argument",
            "environment than the kernel takes",
        ),
    ];
    for (request, user, code, text) in cases {
        let headers: Vec<_> = user.iter().map(|user| ("authorization", user.as_str())).collect();
        let refusal = guest.refusal(request, &headers).await;
        assert_eq!(refusal.0, code, "{refusal:?}");
        assert!(refusal.1.contains(text), "{refusal:?}");
    }
    assert_eq!(guest.services.process_count(), 0);
    let missing = guest.call(
        "process.Process/SendSignal",
        "",
        json!({ "process": by_pid(1), "signal": "SIGNAL_SIGKILL" }),
    );
    assert_eq!(missing.await.unwrap_err().0, "not_found");
}

#[tokio::test]
async fn signals_and_kills_are_told_apart() {
    let Some(guest) = guest().await else { return };
    let (_, mut events) = guest.bash("kill -SEGV $$", json!({})).await;
    let outcome = events.finish().await;
    assert_eq!(
        (outcome.cause(), outcome.end["signal"].as_i64()),
        ("CAUSE_SIGNAL", Some(11))
    );
    assert_eq!(outcome.end["exitCode"].as_i64(), Some(-1));

    let (pid, mut events) = guest
        .bash(
            "trap 'echo got; exit 4' TERM; echo ready; while :; do sleep 0.05; done",
            json!({}),
        )
        .await;
    let Event::Message(_) = events.next().await else {
        panic!("no output")
    };
    let signal = json!({ "process": by_pid(pid), "signal": "SIGNAL_SIGTERM" });
    guest
        .call("process.Process/SendSignal", "", signal.clone())
        .await
        .unwrap();
    let outcome = events.finish().await;
    assert_eq!(
        (outcome.stdout().as_str(), outcome.end["exitCode"].as_i64()),
        ("got\n", Some(4))
    );
    assert_eq!(
        guest
            .call("process.Process/SendSignal", "", signal)
            .await
            .unwrap_err()
            .0,
        "not_found"
    );

    let (pid, mut events) = guest.bash("sleep 1000", json!({ "tag": "mine" })).await;
    let kill = json!({ "process": { "tag": "mine" }, "signal": 9 });
    guest.call("process.Process/SendSignal", "", kill).await.unwrap();
    let outcome = events.finish().await;
    assert_eq!(
        (outcome.cause(), outcome.end["status"].as_str()),
        ("CAUSE_KILLED", Some("signal: killed"))
    );
    assert!(!lives(pid));
}

#[tokio::test]
async fn a_deadline_reaches_what_left_the_session() {
    let Some(guest) = guest().await else { return };
    let file = guest.path("pid");
    // A double fork in a session of its own, as daemons do it, that ignores polite signals.
    let script = format!(
        "(setsid bash -c 'trap \"\" TERM HUP; echo $$ > {file}; exec sleep 1000' >/dev/null 2>&1 &) ; sleep 1000"
    );
    let begun = Instant::now();
    let (_, mut events) = guest
        .bash_with(&script, json!({}), &[("connect-timeout-ms", "1500")])
        .await;
    let outcome = events.finish().await;
    assert_eq!(outcome.cause(), "CAUSE_DEADLINE");
    assert_eq!(outcome.error.unwrap().0, "deadline_exceeded");
    assert!(begun.elapsed() >= Duration::from_millis(1500));
    let daemon: u32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
    until("the daemon dies", || (!lives(daemon)).then_some(())).await;
    until("nothing is listed", || {
        (guest.services.process_count() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_command_ends_with_its_leader() {
    let Some(guest) = guest().await else { return };
    let begun = Instant::now();
    let (pid, mut events) = guest
        .bash("sleep 1000 & yes >/dev/null & echo started", json!({}))
        .await;
    let outcome = events.finish().await;
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(
        (outcome.stdout().as_str(), outcome.end["leftBehind"].as_u64()),
        ("started\n", Some(2))
    );
    // What was left behind is still listed, and can still be killed.
    let list = guest.call("process.Process/List", "", json!({})).await.unwrap();
    assert_eq!(
        (
            list["processes"][0]["pid"].as_u64(),
            list["processes"][0]["members"].as_u64()
        ),
        (Some(pid.into()), Some(2))
    );
    let kill = json!({ "process": by_pid(pid), "signal": "SIGNAL_SIGKILL" });
    guest.call("process.Process/SendSignal", "", kill).await.unwrap();
    until("nothing is listed", || {
        (guest.services.process_count() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_noisy_child_does_not_hold_the_command() {
    let Some(guest) = guest().await else { return };
    let (pid, mut events) = guest
        .bash(
            "(while :; do echo noise; sleep 0.01; done) & echo leader",
            json!({}),
        )
        .await;
    let outcome = events.finish().await;
    assert!(outcome.stdout().contains("leader\n"));
    assert_eq!(outcome.cause(), "CAUSE_EXIT");
    let kill = json!({ "process": by_pid(pid), "signal": "SIGNAL_SIGKILL" });
    guest.call("process.Process/SendSignal", "", kill).await.unwrap();
}

#[tokio::test]
async fn a_slow_reader_gets_every_byte() {
    let Some(guest) = guest().await else { return };
    let script = "for i in $(seq 5); do head -c 1000000 /dev/zero | tr '\\0' $i; done";
    let (_, mut events) = guest.bash(script, json!({})).await;
    let outcome = events.outcome(Duration::from_millis(5)).await;
    assert_eq!((outcome.stdout.len(), outcome.dropped), (5_000_000, 0));
    for (index, block) in (b'1'..).zip(outcome.stdout.chunks(1_000_000)) {
        assert!(block.iter().all(|byte| *byte == index));
    }
    assert_eq!(outcome.end["stdoutBytes"].as_str(), Some("5000000"));
}

#[tokio::test]
async fn large_input_arrives_whole() {
    let Some(guest) = guest().await else { return };
    let piece: Vec<u8> = (0..1 << 20).map(|n: u32| n.to_le_bytes()[1]).collect();
    let (pid, mut events) = guest.bash("sha256sum", json!({ "stdin": true })).await;
    let mut messages = vec![json!({ "start": { "process": by_pid(pid) } })];
    messages.extend((0..20).map(|_| json!({ "data": { "input": { "stdin": encode(&piece) } } })));
    guest.feed("process.Process/StreamInput", messages).await.unwrap();
    let input = json!({ "process": by_pid(pid), "input": { "stdin": encode(&piece) } });
    guest
        .call("process.Process/SendInput", "", input.clone())
        .await
        .unwrap();
    guest
        .call(
            "process.Process/CloseStdin",
            "",
            json!({ "process": by_pid(pid) }),
        )
        .await
        .unwrap();
    let outcome = events.finish().await;
    let digest: String = Sha256::digest(piece.repeat(21))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(outcome.stdout(), format!("{digest}  -\n"));
    assert_eq!(
        guest
            .call("process.Process/SendInput", "", input)
            .await
            .unwrap_err()
            .0,
        "not_found"
    );
}

#[tokio::test]
async fn without_stdin_there_is_an_end_of_file() {
    let Some(guest) = guest().await else { return };
    let (pid, mut events) = guest.bash("cat; echo done; read; sleep 1000", json!({})).await;
    let Event::Message(_) = events.next().await else {
        panic!("no output")
    };
    let input = json!({ "process": by_pid(pid), "input": { "stdin": encode(b"x") } });
    assert_eq!(
        guest
            .call("process.Process/SendInput", "", input)
            .await
            .unwrap_err()
            .0,
        "failed_precondition"
    );
}

#[tokio::test]
async fn a_writer_is_let_go_when_the_process_ends() {
    let Some(guest) = guest().await else { return };
    let (pid, mut events) = guest.bash("sleep 0.5", json!({ "stdin": true })).await;
    let input = json!({ "process": by_pid(pid), "input": { "stdin": encode(&vec![0; 1_000_000]) } });
    let code = guest
        .call("process.Process/SendInput", "", input)
        .await
        .unwrap_err()
        .0;
    assert!(code == "not_found" || code == "failed_precondition", "{code}");
    assert_eq!(events.finish().await.cause(), "CAUSE_EXIT");
}

#[tokio::test]
async fn terminals() {
    let Some(guest) = guest().await else { return };
    let pty = json!({ "pty": { "size": { "cols": 80, "rows": 24 } } });
    let (pid, mut events) = guest
        .bash("stty size; tty; read line; stty size; echo got $line", pty)
        .await;
    let Event::Message(_) = events.next().await else {
        panic!("no output")
    };
    let resize = json!({ "process": by_pid(pid), "pty": { "size": { "cols": 133, "rows": 43 } } });
    guest
        .call("process.Process/Update", "", resize.clone())
        .await
        .unwrap();
    let input = json!({ "process": by_pid(pid), "input": { "pty": encode(b"hello\n") } });
    guest.call("process.Process/SendInput", "", input).await.unwrap();
    let outcome = events.finish().await;
    let text = String::from_utf8_lossy(&outcome.pty).into_owned();
    assert!(text.contains("43 133") && text.contains("got hello"), "{text}");

    let (pid, _events) = guest.bash("sleep 1000", json!({})).await;
    let mut plain = resize;
    plain["process"] = by_pid(pid);
    assert_eq!(
        guest
            .call("process.Process/Update", "", plain)
            .await
            .unwrap_err()
            .0,
        "failed_precondition"
    );
}

#[tokio::test]
async fn output_and_end_outlive_the_connection() {
    let Some(guest) = guest().await else { return };
    let (pid, events) = guest
        .bash("echo one; sleep 0.5; echo two; exit 9", json!({ "tag": "late" }))
        .await;
    // The client goes; the command does not.
    drop(events);
    until("the command ends", || {
        (guest.services.process_count() == 0).then_some(())
    })
    .await;

    let plain = json!({ "process": by_pid(pid) });
    let outcome = guest
        .stream("process.Process/Connect", &[], plain)
        .await
        .finish()
        .await;
    assert_eq!(
        (outcome.stdout().as_str(), outcome.end["exitCode"].as_i64()),
        ("", Some(9))
    );
    let replay = json!({ "process": { "tag": "late" }, "replay": { "stdoutOffset": "2" } });
    let outcome = guest
        .stream("process.Process/Connect", &[], replay)
        .await
        .finish()
        .await;
    assert_eq!(
        (outcome.stdout().as_str(), outcome.end["exitCode"].as_i64()),
        ("e\ntwo\n", Some(9))
    );
    let ended = guest
        .call("process.Process/List", "", json!({ "includeEnded": true }))
        .await
        .unwrap();
    assert_eq!(ended["processes"][0]["end"]["exitCode"].as_i64(), Some(9));
}

#[tokio::test]
async fn lost_output_is_told() {
    let Some(guest) = guest().await else { return };
    let (pid, events) = guest
        .bash("sleep 0.3; head -c 3000000 /dev/zero", json!({}))
        .await;
    drop(events);
    until("the command ends", || {
        (guest.services.process_count() == 0).then_some(())
    })
    .await;
    let replay = json!({ "process": by_pid(pid), "replay": {} });
    let outcome = guest
        .stream("process.Process/Connect", &[], replay)
        .await
        .finish()
        .await;
    assert_eq!(outcome.stdout.len() as u64 + outcome.dropped, 3_000_000);
    assert!(outcome.dropped > 0 && outcome.stdout.len() > 500_000);
}

#[tokio::test]
async fn two_clients_see_the_same() {
    let Some(guest) = guest().await else { return };
    let (pid, mut first) = guest
        .bash("read; echo hello; read; exit 1", json!({ "stdin": true }))
        .await;
    let mut second = guest
        .stream(
            "process.Process/Connect",
            &[("keepalive-ping-interval", "1")],
            json!({ "process": by_pid(pid) }),
        )
        .await;
    let Event::Message(_) = second.next().await else {
        panic!("no start")
    };
    let Event::Message(keepalive) = second.next().await else {
        panic!("no keepalive")
    };
    assert!(keepalive["event"]["keepalive"].is_object(), "{keepalive}");
    let input = json!({ "process": by_pid(pid), "input": { "stdin": encode(b"\n\n") } });
    guest.call("process.Process/SendInput", "", input).await.unwrap();
    let (first, second) = tokio::join!(first.finish(), second.finish());
    assert_eq!(
        (first.stdout(), first.end.clone()),
        (second.stdout(), second.end.clone())
    );
    assert_eq!(first.stdout(), "hello\n");
}

#[tokio::test]
async fn many_at_once() {
    let Some(guest) = guest().await else { return };
    let all = (0..40).map(|n| {
        let guest = &guest;
        async move {
            let (_, mut events) = guest.bash(&format!("echo {n}; exit {n}"), json!({})).await;
            let outcome = events.finish().await;
            assert_eq!(
                (outcome.stdout(), outcome.end["exitCode"].as_i64().unwrap_or(0)),
                (format!("{n}\n"), n)
            );
        }
    });
    futures_util::future::join_all(all).await;
    until("nothing is listed", || {
        (guest.services.process_count() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn too_large_input_is_refused_not_lost() {
    let Some(mut guest) = guest().await else { return };
    // As over the channel: HTTP/2 delivers an answer that comes before the request is complete.
    guest.http = reqwest::Client::builder()
        .no_proxy()
        .http2_prior_knowledge()
        .build()
        .unwrap();
    let (pid, mut events) = guest.bash("wc -c", json!({ "stdin": true })).await;
    let input = json!({ "process": by_pid(pid), "input": { "stdin": encode(&vec![0; 70 << 20]) } });
    let refused = guest
        .call("process.Process/SendInput", "", input)
        .await
        .unwrap_err();
    assert_eq!(refused.0, "resource_exhausted", "{refused:?}");
    guest
        .call(
            "process.Process/CloseStdin",
            "",
            json!({ "process": by_pid(pid) }),
        )
        .await
        .unwrap();
    assert_eq!(events.finish().await.stdout(), "0\n");
}
