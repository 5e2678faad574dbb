//! The daemon's protocol, outside a guest.

#![expect(clippy::unwrap_used, reason = "also in the tests' helpers")]

mod stand;

use std::{
    fs,
    time::{Duration, Instant},
};

use bytes::Bytes;
use space_channel::{ChannelError, GuestState, HostMessage, IdentityMode, Nonce, Status};
use stand::{LIMIT, Stand, connect, get, identity, run, tunnel};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

#[tokio::test]
async fn hello_identity_health_and_clock_are_answered() {
    let stand = Stand::start(None);
    let (control, ack) = stand.control().await;
    assert_eq!(
        (ack.protocol, ack.generation, ack.state),
        (1, 0, GuestState::Ready)
    );
    control
        .identity(identity(IdentityMode::New), LIMIT)
        .await
        .unwrap();
    assert_eq!(
        fs::read_to_string(stand.path("machine-id")).unwrap(),
        format!("{}\n", "cd".repeat(16))
    );
    assert_eq!(
        fs::read_to_string(stand.path("token")).unwrap().trim_end(),
        "secret"
    );
    control.clock(5, LIMIT).await.unwrap();
    control.quiesce(LIMIT).await.unwrap();
    assert_eq!(control.health(LIMIT).await.unwrap().processes, 0);
    let error = control
        .freeze(Duration::from_millis(20), LIMIT)
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            ChannelError::Refused {
                status: Status::WrongState,
                ..
            }
        ),
        "{error}"
    );
    drop(control);
    let (_control, ack) = stand.control().await;
    assert_eq!(ack.generation, 4);
}

#[tokio::test]
async fn garbage_and_unknown_messages_are_survived() {
    let stand = Stand::start(None);
    let mut stream = stand.stream("control").await;
    let mut bytes = vec![0x53; 70_000];
    space_channel::Frame {
        kind: 77,
        flags: 0,
        sequence: 5,
        payload: Bytes::new(),
    }
    .encode(&mut bytes);
    HostMessage::Shutdown.encode(9, &mut bytes).unwrap();
    // Not greeted: neither the unknown message nor the shutdown may count. Then half a frame, then another host.
    bytes.extend_from_slice(b"SPC1\x01\x00");
    stream.write_all(&bytes).await.unwrap();
    drop(stream);
    let (control, _) = stand.control().await;
    control.health(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_new_hello_ends_the_old_data_session_and_no_stale_byte_reaches_the_next() {
    let stand = Stand::start(None);
    let (first, _) = stand.control().await;
    let mut old = stand.session(&first).await;
    assert_eq!(get(&mut old, "/health").await.unwrap().status(), 204);
    drop(first);

    let (second, _) = stand.control().await;
    let outcome = tokio::time::timeout(Duration::from_millis(300), get(&mut old, "/health")).await;
    assert!(!matches!(outcome, Ok(Ok(_))), "the old session still answers");
    drop(old);

    // A host that dies half-way: stale bytes, parts of the nonce and of HTTP/2 among them.
    let mut stale = stand.stream("data").await;
    stale.write_all(&second.nonce().as_bytes()[..20]).await.unwrap();
    stale
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    stale
        .write_all(Nonce::from_bytes([3; 32]).as_bytes())
        .await
        .unwrap();
    drop(stale);
    let mut new = stand.session(&second).await;
    assert_eq!(get(&mut new, "/health").await.unwrap().status(), 204);
}

#[tokio::test]
async fn a_data_port_without_a_hello_is_not_served() {
    let stand = Stand::start(None);
    let outcome = space_channel::open_data(
        stand.stream("data").await,
        &Nonce::from_bytes([0; 32]),
        Duration::from_millis(200),
    )
    .await;
    assert!(
        matches!(outcome, Err(ChannelError::TimedOut { .. })),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn tunnels_reach_loopback_listeners_and_say_when_nothing_listens() {
    let stand = Stand::start(None);
    let (control, _) = stand.control().await;
    let mut sender = stand.session(&control).await;
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let listener = match TcpListener::bind(address).await {
            Ok(listener) => listener,
            Err(error) => {
                println!("SKIPPED: no {address} here: {error}");
                continue;
            }
        };
        let port = listener.local_addr().unwrap().port();
        let echo = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            stream.write_all(&all).await.unwrap();
        });
        let mut tunnel = tunnel(&mut sender, port).await;
        let sent = vec![7; 1_000_000];
        tunnel.write_all(&sent).await.unwrap();
        // The half-close must reach the listener, or it would read for ever.
        tunnel.shutdown().await.unwrap();
        let mut back = Vec::new();
        tunnel.read_to_end(&mut back).await.unwrap();
        assert_eq!(back, sent);
        echo.await.unwrap();
    }
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let response = connect(&mut sender, &format!("localhost:{closed}")).await;
    assert_eq!(response.status(), 502);
    assert_eq!(response.headers()["space-port-closed"], "1");
    assert_eq!(connect(&mut sender, "10.9.9.9:80").await.status(), 400);
    assert_eq!(get(&mut sender, "/health").await.unwrap().status(), 204);
}

#[tokio::test]
async fn a_hundred_unread_streams_hold_up_neither_control_nor_another_stream() {
    let stand = Stand::start(None);
    let (control, _) = stand.control().await;
    let mut sender = stand.session(&control).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move { while stream.write_all(&[1; 65536]).await.is_ok() {} });
        }
    });
    let mut unread = Vec::new();
    for _ in 0..100 {
        let mut stream = tunnel(&mut sender, port).await;
        // One byte shows that it flows; the rest stays unread and fills its window.
        stream.read_u8().await.unwrap();
        unread.push(stream);
    }
    let begun = Instant::now();
    control.health(LIMIT).await.unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "control took {:?}",
        begun.elapsed()
    );
    let begun = Instant::now();
    assert_eq!(get(&mut sender, "/health").await.unwrap().status(), 204);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "data took {:?}",
        begun.elapsed()
    );
    drop(unread);
    assert_eq!(get(&mut sender, "/health").await.unwrap().status(), 204);
}

/// A host that stops reading the data port altogether must not hold up control.
#[tokio::test]
async fn control_is_answered_while_nobody_reads_the_data_port() {
    let stand = Stand::start(None);
    let (control, _) = stand.control().await;
    let mut stream = stand.stream("data").await;
    stream.write_all(control.nonce().as_bytes()).await.unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    // Pings, whose answers nobody reads, until the port takes no more.
    let ping = b"\0\0\x08\x06\0\0\0\0\0pingping".repeat(1000);
    let mut sent = 0;
    while let Ok(written) = tokio::time::timeout(Duration::from_millis(300), stream.write(&ping)).await {
        match written {
            Ok(length) => sent += length,
            // The server may also hang up on such a peer.
            Err(_) => break,
        }
        assert!(sent < 1 << 30);
    }
    let begun = Instant::now();
    control.health(LIMIT).await.unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "control took {:?}",
        begun.elapsed()
    );
    drop((control, stream));
    let (again, _) = stand.control().await;
    let mut sender = stand.session(&again).await;
    assert_eq!(get(&mut sender, "/health").await.unwrap().status(), 204);
}

fn children_of(pid: u32) -> Vec<String> {
    let mut states = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let Some((_, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = rest.split_whitespace();
        let (state, parent) = (
            fields.next().unwrap_or_default(),
            fields.next().unwrap_or_default(),
        );
        if parent == pid.to_string() {
            states.push(state.to_owned());
        }
    }
    states
}

/// Orphans and the services' own children end at the same time, thousands of them; every status must arrive all the same.
#[tokio::test]
async fn thousands_of_orphans_leave_no_zombie_and_take_no_status() {
    let stand = Stand::start(None);
    let (control, _) = stand.control().await;
    let mut sender = stand.session(&control).await;
    let script = "i=0; while [ $i -lt 500 ]; do (true &) ; i=$((i+1)); done; exit 7";
    let mut runs = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let mut sender = sender.clone();
        runs.spawn(async move { run(&mut sender, script).await });
    }
    for output in runs.join_all().await {
        let text = String::from_utf8_lossy(&output).into_owned();
        assert!(text.contains("exitCode\":7"), "{text}");
    }
    let begun = Instant::now();
    loop {
        let left = children_of(stand.pid());
        if left.is_empty() {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "{} left behind", left.len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(control.health(LIMIT).await.unwrap().processes, 0);
    assert_eq!(get(&mut sender, "/health").await.unwrap().status(), 204);
}
