//! The node on real machines: needs root, QEMU, and a template store with `base` (`SPACE_TEST_TEMPLATES`).

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "measurements and skips are told"
)]

mod machines {
    mod guest;
    mod pool;
    pub(crate) mod stack;
}

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use jiff::Timestamp;
use machines::stack::{Stack, request, until, within};
use space_api::lifecycle::{EndCause, SandboxState};
use space_node::{DataStream, Node as _, NodeError, TunnelError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// The daemon's own service on the guest's loopback.
const LOOPBACK_SERVICE: u16 = 49983;

async fn send(mut data: DataStream, request: http::request::Builder, body: Vec<u8>) -> StatusCode {
    data.ready().await.expect("ready");
    let body = Full::from(body).map_err(|never| match never {}).boxed();
    data.send_request(request.body(body).expect("valid"))
        .await
        .expect("answers")
        .status()
}

/// Starts a shell command inside as root, without waiting for its end.
async fn start(data: DataStream, command: &str) {
    let message = serde_json::json!({ "process": { "cmd": "/bin/sh", "args": ["-c", command] } }).to_string();
    let mut body = vec![0];
    body.extend_from_slice(&u32::try_from(message.len()).expect("short").to_be_bytes());
    body.extend_from_slice(message.as_bytes());
    let request = Request::builder()
        .method(Method::POST)
        .uri("http://space/process.Process/Start")
        .header("authorization", "Basic cm9vdDo=")
        .header("connect-protocol-version", "1")
        .header("content-type", "application/connect+json");
    assert_eq!(send(data, request, body).await, StatusCode::OK);
}

async fn ended(stack: &Stack, id: &space_api::id::SandboxId) -> EndCause {
    let start = std::time::Instant::now();
    loop {
        match stack.node.status(id).await {
            Err(NodeError::NotFound { end: Some(end), .. }) => return end.cause,
            Err(other) => panic!("{other:?}"),
            Ok(_) => assert!(start.elapsed() < Duration::from_secs(30), "it does not end"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_lives_from_create_to_delete_and_leaves_nothing() {
    let Some(stack) = Stack::open("life").await else {
        return;
    };
    let mut request = request();
    request
        .environment
        .insert("GREETING".to_owned(), "hello \"world\"\n\u{1f600}".to_owned());
    let id = request.id.clone();
    let status = within(stack.node.create(request)).await.expect("is created");
    assert_eq!(status.state, SandboxState::Running);
    println!("create to ready: {:?} ms", status.ready_ms);

    let data = within(stack.node.data(&id)).await.expect("opens");
    let health = within(send(data, Request::get("http://space/health"), Vec::new())).await;
    assert_eq!(health, StatusCode::NO_CONTENT);

    let mut tunnel = within(stack.node.tunnel(&id, LOOPBACK_SERVICE))
        .await
        .expect("something listens there");
    let mut answer = Vec::new();
    within(async {
        tunnel
            .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .expect("writes");
        tunnel.flush().await.expect("writes");
        tunnel.read_to_end(&mut answer).await.expect("reads");
    })
    .await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    let closed = within(stack.node.tunnel(&id, 9))
        .await
        .expect_err("nothing listens there");
    assert!(
        matches!(closed, TunnelError::PortClosed { port: 9 }),
        "{closed:?}"
    );

    let usage = within(stack.node.usage(&id)).await.expect("lives");
    let last = usage.last().expect("a fresh one");
    assert!(
        last.mem_total > 256 << 20 && last.host_cpu_micros > 0 && last.host_memory_bytes > 0,
        "{last:?}"
    );

    let end = within(stack.node.delete(&id)).await.expect("is deleted");
    assert_eq!(end.cause, EndCause::Deleted);
    assert!(end.cpu_micros > 0);
    stack.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_monitor_and_a_guest_that_powers_off_are_told_apart() {
    let Some(stack) = Stack::open("ends").await else {
        return;
    };
    let (killed, off) = (request(), request());
    within(stack.node.create(killed.clone()))
        .await
        .expect("is created");
    within(stack.node.create(off.clone())).await.expect("is created");
    let data = within(stack.node.data(&killed.id)).await.expect("opens");

    let monitor = stack.monitor(&killed.id).await.expect("it runs");
    rustix::process::kill_process(monitor, rustix::process::Signal::KILL).expect("ours");
    let cause = ended(&stack, &killed.id).await;
    assert!(
        matches!(&cause, EndCause::VmmFailed { detail } if detail.contains('9') || detail.contains("kill")),
        "{cause:?}"
    );
    until("its data session ends", || data.is_closed()).await;

    let data = within(stack.node.data(&off.id)).await.expect("opens");
    // The answer may or may not come before the end.
    drop(
        tokio::time::timeout(
            Duration::from_secs(5),
            start(data, "echo o > /proc/sysrq-trigger"),
        )
        .await,
    );
    assert_eq!(ended(&stack, &off.id).await, EndCause::GuestShutdown);
    stack.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_at_once_all_work_and_share_no_secret() {
    let Some(stack) = Stack::open("many").await else {
        return;
    };
    let requests: Vec<_> = (0..16).map(|_| request()).collect();
    let started = std::time::Instant::now();
    let created = within(join_all(
        requests.iter().map(|request| stack.node.create(request.clone())),
    ))
    .await;
    let mut ready: Vec<_> = created
        .iter()
        .map(|one| one.as_ref().expect("is created").ready_ms)
        .collect();
    ready.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
    println!("16 at once in {:?}; ready ms: {ready:?}", started.elapsed());
    let mut tokens = BTreeSet::new();
    for request in &requests {
        tokens.insert(stack.node.guest_token(&request.id).await.expect("lives"));
        let data = within(stack.node.data(&request.id)).await.expect("opens");
        let health = within(send(data, Request::get("http://space/health"), Vec::new())).await;
        assert_eq!(health, StatusCode::NO_CONTENT);
    }
    assert_eq!(tokens.len(), 16);
    let deleted = within(join_all(
        requests.iter().map(|request| stack.node.delete(&request.id)),
    ))
    .await;
    assert!(deleted.iter().all(Result::is_ok), "{deleted:?}");
    stack.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creates_and_deletes_with_random_kills_leave_nothing() {
    let Some(stack) = Stack::open("churn").await else {
        return;
    };
    let lives = join_all((0..4).map(|lane| {
        let stack = &stack;
        async move {
            for round in 0..6 {
                let request = request();
                let id = request.id.clone();
                let creating = stack.node.create(request);
                let killing = async {
                    if (lane + round) % 3 == 0 {
                        let at = rand::random::<u64>() % 120;
                        tokio::time::sleep(Duration::from_millis(at)).await;
                        if let Some(monitor) = stack.monitor(&id).await {
                            // It may have ended by itself just now.
                            rustix::process::kill_process(monitor, rustix::process::Signal::KILL).ok();
                        }
                    }
                };
                let (created, ()) = tokio::join!(creating, killing);
                match created {
                    Ok(_) | Err(NodeError::CreateFailed { .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
                match stack.node.delete(&id).await {
                    Ok(_) | Err(NodeError::NotFound { end: Some(_), .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
    }));
    tokio::time::timeout(Duration::from_secs(120), lives)
        .await
        .expect("in time");
    stack.close().await;
}

/// The processes that a daemon runs, as it lists them.
async fn list(mut data: DataStream) -> String {
    data.ready().await.expect("ready");
    let body = Full::from(&b"{}"[..]).map_err(|never| match never {}).boxed();
    let request = Request::builder()
        .method(Method::POST)
        .uri("http://space/process.Process/List")
        .header("connect-protocol-version", "1")
        .header("content-type", "application/json");
    let request = request.body(body).expect("valid");
    let response = data.send_request(request).await.expect("answers");
    let body = response.into_body().collect().await.expect("whole").to_bytes();
    String::from_utf8_lossy(&body).into_owned()
}

/// Not a test of its own: what [`after_a_kill_of_the_platform_the_next_one_goes_on_with_its_machines`] runs in a process and
/// kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn victim() {
    let Some(stack) = Stack::victim().await else {
        return;
    };
    let requests: Vec<_> = (0..3).map(|_| request()).collect();
    let made = requests.iter().map(|request| stack.node.create(request.clone()));
    let made = within(join_all(made)).await;
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    let data = within(stack.node.data(&requests[0].id)).await.expect("opens");
    within(start(data, "exec sleep 4321")).await;
    within(stack.node.pause(&requests[2].id))
        .await
        .expect("is paused");
    let mut lines = String::new();
    for request in &requests {
        let monitor = stack.monitor(&request.id).await.expect("it runs");
        lines.push_str(&format!("{} {}\n", request.id, monitor.as_raw_nonzero()));
    }
    let file = stack.directory().join("promised");
    fs_err::write(file.with_extension("part"), lines).expect("writable");
    fs_err::rename(file.with_extension("part"), file).expect("writable");
    // And one more under way.
    drop(stack.node.create(request()).await);
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_kill_of_the_platform_the_next_one_goes_on_with_its_machines() {
    let Some((directory, mut victim)) = Stack::spawn_victim("victim") else {
        return;
    };
    let file = directory.path().join("promised");
    until("the victim has made its sandboxes", || {
        assert!(
            victim.try_wait().expect("ours").is_none(),
            "the victim ended early"
        );
        file.exists()
    })
    .await;
    victim.kill().expect("ours");
    victim.wait().expect("ours");
    let promised: Vec<(space_api::id::SandboxId, i32)> = fs_err::read_to_string(file)
        .expect("is there")
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(id, pid)| (id.parse().expect("an id"), pid.parse().expect("a pid")))
        .collect();
    assert_eq!(promised.len(), 3);

    let started = std::time::Instant::now();
    let stack = Stack::reopen("victim", directory).await;
    println!("taken over in {:?}", started.elapsed());
    let ends = stack.node.ends_since(Timestamp::UNIX_EPOCH).await.expect("reads");
    assert!(
        ends.iter().all(|end| end.cause == EndCause::PlatformRestarted),
        "{ends:?}"
    );
    for (at, (id, pid)) in promised.iter().enumerate() {
        let status = stack.node.status(id).await.expect("lives");
        let monitor = stack.monitor(id).await.expect("it runs");
        assert_eq!(monitor.as_raw_nonzero().get(), *pid, "it is the same machine");
        if at == 2 {
            assert_eq!(status.state, SandboxState::Paused);
            within(stack.node.resume(id)).await.expect("is resumed");
        } else {
            assert_eq!(status.state, SandboxState::Running);
        }
        let data = within(stack.node.data(id)).await.expect("opens");
        let health = within(send(data, Request::get("http://space/health"), Vec::new())).await;
        assert_eq!(health, StatusCode::NO_CONTENT);
    }
    let data = within(stack.node.data(&promised[0].0)).await.expect("opens");
    let processes = within(list(data)).await;
    assert!(
        processes.contains("sleep 4321"),
        "its command still runs: {processes}"
    );

    // Let go in order, and taken over once more.
    let Some(directory) = stack.let_go().await else {
        return;
    };
    let stack = Stack::reopen("victim", directory).await;
    let data = within(stack.node.data(&promised[0].0)).await.expect("opens");
    let processes = within(list(data)).await;
    assert!(
        processes.contains("sleep 4321"),
        "it runs all the time: {processes}"
    );
    for (id, _) in &promised {
        within(stack.node.delete(id)).await.expect("is deleted");
    }
    within(stack.node.create(request())).await.expect("goes on");
    stack.close().await;
}
