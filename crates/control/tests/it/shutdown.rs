//! Stopping in order: nothing new, what is under way finishes or is ended in bounded time.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;
use space_api::rest::Quotas;
use space_control::Limits;

use crate::{
    fake::{FakeNode, eventually},
    platform::Platform,
};

#[tokio::test]
async fn a_connection_on_which_nothing_is_asked_is_closed() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let limits = Limits {
        head: Duration::from_millis(200),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    // Nothing at all; half of what an HTTP/2 client begins with; half a head.
    for begin in [&b""[..], b"PRI * HTTP/2.0", b"GET / HTTP/1.1\r\nHost: "] {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", platform.port))
            .await
            .expect("connects");
        stream.write_all(begin).await.expect("writes");
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "still open after {begin:?}");
    }
}

#[tokio::test]
async fn a_create_under_way_is_answered_and_an_endless_stream_is_ended() {
    let limits = Limits {
        drain: Duration::from_millis(500),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    let sandbox = platform.create().await;
    let endless = platform
        .guest(&sandbox, 49983, Method::GET, "/drip")
        .send()
        .await
        .expect("begins");
    let create = tokio::spawn(
        platform
            .request(Method::POST, "/v2/sandboxes")
            .json(&json!({"templateID": "gated"}))
            .send(),
    );
    eventually("the node is asked", async || {
        platform.node.creates.lock().expect("not poisoned").len() == 2
    })
    .await;
    let (node, port) = (platform.node.clone(), platform.port);
    let stopping = tokio::spawn(platform.stop());
    eventually("nothing new is accepted", async || {
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err()
    })
    .await;
    node.gate.notify_one();
    let answer = create.await.expect("joins").expect("answers");
    assert_eq!(answer.status(), 201, "what had begun was finished");
    stopping.await.expect("stops");
    assert!(endless.bytes().await.is_err(), "cut, not taken for complete");
    assert_eq!(node.live_count(), 2, "sandboxes are not the server's to end");
}
