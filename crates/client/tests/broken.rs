//! What a client does when its connection breaks: against a server that says what it is told, one connection after another.

use serde_json::json;
use space_client::{Client, ClientError, Endpoint, SandboxOptions};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinHandle,
};

/// Serves each connection one answer, in order; gives back the heads of the requests, lower case.
async fn serve(answers: Vec<String>) -> (Client, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let server = tokio::spawn(async move {
        let mut heads = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.expect("accepts");
            let mut bytes = Vec::new();
            // With its body: one that is left unread would break the answer off.
            while !is_complete(&bytes) {
                assert_ne!(stream.read_buf(&mut bytes).await.expect("reads"), 0);
            }
            heads.push(head(&bytes).expect("complete").0);
            stream.write_all(answer.as_bytes()).await.expect("writes");
        }
        heads
    });
    let key = format!("space_{}", "0".repeat(40));
    let endpoint = Endpoint::new(&url, &key).expect("usable");
    (Client::new(endpoint).expect("client"), server)
}

/// The head, lower case, and how long it is.
fn head(bytes: &[u8]) -> Option<(String, usize)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    Some((String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase(), end))
}

fn is_complete(bytes: &[u8]) -> bool {
    head(bytes).is_some_and(|(head, end)| {
        let body = header(&head, "content-length").map_or(0, |length| length.parse().expect("number"));
        bytes.len() >= end + body
    })
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn sandbox() -> String {
    json!({
        "templateID": "base:latest", "sandboxID": "abcdefghij0123456789", "clientID": "local", "envdVersion": "0.1.0",
    })
    .to_string()
}

fn header(head: &str, name: &str) -> Option<String> {
    let prefix = format!("{name}: ");
    head.lines()
        .find_map(|line| line.strip_prefix(&prefix))
        .map(str::to_owned)
}

#[tokio::test]
async fn a_create_whose_answer_was_lost_is_asked_for_again_under_its_key() {
    let under_way = json!({"code": 409, "message": "in progress", "error_code": "idempotency_in_progress"});
    let (client, server) = serve(vec![
        String::new(),
        answer("409 Conflict", "", &under_way.to_string()),
        answer("201 Created", "", &sandbox()),
    ])
    .await;
    let options = SandboxOptions {
        idempotency_key: Some("k-1".into()),
        ..SandboxOptions::default()
    };
    let made = client.create(&options).await.expect("is made");
    assert_eq!(made.id().as_str(), "abcdefghij0123456789");
    let heads = server.await.expect("serves");
    for head in &heads {
        assert_eq!(header(head, "idempotency-key").as_deref(), Some("k-1"), "{head}");
    }
    assert_eq!(heads.len(), 3);
}

#[tokio::test]
async fn without_a_key_it_is_asked_for_once() {
    let (client, server) = serve(vec![String::new()]).await;
    let error = client
        .create(&SandboxOptions::default())
        .await
        .expect_err("broke off");
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    assert_eq!(server.await.expect("serves").len(), 1);
}

#[tokio::test]
async fn who_follows_events_misses_none_before_the_first() {
    let event = json!({
        "id": 9, "sandbox_id": "abcdefghij0123456789", "at": "2026-01-01T00:00:00Z", "kind": "running", "detail": "",
    });
    let (client, server) = serve(vec![
        answer("200 OK", "last-event-id: 7\r\n", ""),
        answer("200 OK", "last-event-id: 7\r\n", &format!("data: {event}\n\n")),
    ])
    .await;
    let mut stream = client.follow_events(None).await.expect("follows");
    assert_eq!(stream.next().await.expect("goes on").id, 9);
    let heads = server.await.expect("serves");
    assert_eq!(header(&heads[0], "last-event-id"), None);
    assert_eq!(header(&heads[1], "last-event-id").as_deref(), Some("7"));
}
