//! Port 49983 through the edge: routing, tokens, streams.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use reqwest::{Body, Method};
use serde_json::{Value, json};
use space_api::{id::SandboxId, rest::Quotas};
use space_control::Limits;

use crate::{
    fake::{FakeNode, eventually},
    platform::{Platform, error},
};

#[tokio::test]
async fn all_three_ways_of_naming_a_sandbox_lead_to_it() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let by_headers = platform
        .guest(&sandbox, 49983, Method::GET, "/seen?a=b")
        .send()
        .await
        .expect("answers");
    assert_eq!(
        by_headers.json::<Value>().await.expect("json")["uri"],
        "http://localhost/seen?a=b"
    );

    for host in [
        format!("49983-{}.localhost:{}", sandbox.id, platform.port),
        format!("49983-{}-client.LOCALHOST", sandbox.id),
    ] {
        let request = platform
            .client
            .get(format!("{}/seen", platform.url))
            .header("host", &host)
            .header("x-access-token", &sandbox.token);
        let answer = request.send().await.expect("answers");
        assert_eq!(answer.status(), 200, "{host}");
    }
    let path = format!("{}/sandbox/{}/49983/seen?a=b", platform.url, sandbox.id);
    let by_path = platform
        .client
        .get(path)
        .header("x-access-token", &sandbox.token)
        .send()
        .await
        .expect("answers");
    assert!(
        by_path.headers()["content-security-policy"]
            .to_str()
            .expect("text")
            .starts_with("sandbox ")
    );
    assert_eq!(
        by_path.json::<Value>().await.expect("json")["uri"],
        "http://localhost/seen?a=b"
    );

    // Under any other host the headers mean nothing.
    let elsewhere = platform
        .guest(&sandbox, 49983, Method::GET, "/seen")
        .header("host", "other.example");
    assert_eq!(elsewhere.send().await.expect("answers").status(), 404);
}

#[tokio::test]
async fn without_the_token_only_health_is_answered() {
    let platform = Platform::start().await;
    let (sandbox, other) = (platform.create().await, platform.create().await);
    let health = platform
        .anonymous(&sandbox.id, 49983, Method::GET, "/health")
        .send()
        .await
        .expect("answers");
    assert_eq!(health.status(), 204);
    for token in [None, Some(""), Some("wrong"), Some(other.token.as_str())] {
        for (method, path) in [
            (Method::GET, "/seen"),
            (Method::POST, "/health"),
            (Method::GET, "/files?path=x"),
            (Method::POST, "/process.Process/Start"),
        ] {
            let mut request = platform.anonymous(&sandbox.id, 49983, method, path);
            if let Some(token) = token {
                request = request.header("x-access-token", token);
            }
            let (status, body) = error(request.send().await.expect("answers")).await;
            assert_eq!(status, 401, "{path} {token:?}");
            assert!(
                body["message"]
                    .as_str()
                    .expect("message")
                    .starts_with("unauthorized")
            );
        }
    }
    let open = platform.create_with("/sandboxes", json!({"secure": false})).await;
    assert_eq!(open.token, "");
    let seen = platform
        .anonymous(&open.id, 49983, Method::GET, "/seen")
        .send()
        .await
        .expect("answers");
    assert_eq!(seen.status(), 200, "v1 with secure=false asks for nothing");
    let secured = platform
        .create_with("/v2/sandboxes", json!({"secure": false}))
        .await;
    assert_eq!(secured.token.len(), 64, "v2 knows no such field");
}

#[tokio::test]
async fn calls_of_the_host_are_not_for_the_public() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    for path in [
        "/init",
        "/batch",
        "/freeze",
        "/unfreeze",
        "/fsfreeze",
        "/fsthaw",
        "/collapse",
        "/upgrade",
        "/init/",
        "//init",
        "/%69nit",
    ] {
        let (status, body) = error(
            platform
                .guest(&sandbox, 49983, Method::POST, path)
                .send()
                .await
                .expect("answers"),
        )
        .await;
        assert_eq!(status, 404, "{path}");
        assert_eq!(body["message"], "There is no such path");
    }
}

#[tokio::test]
async fn what_is_ours_does_not_reach_the_guest() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let request = platform
        .guest(&sandbox, 49983, Method::GET, "/seen")
        .header("x-api-key", platform.key())
        .header("e2b-traffic-access-token", "t")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("authorization", "Basic dXNlcjo=")
        .header("te", "trailers")
        .header("keepalive-ping-interval", "50");
    let seen: Value = request.send().await.expect("answers").json().await.expect("json");
    let headers = seen["headers"].as_object().expect("headers");
    for gone in [
        "x-access-token",
        "x-api-key",
        "e2b-sandbox-id",
        "e2b-sandbox-port",
        "e2b-traffic-access-token",
        "x-hop",
        "connection",
        "host",
    ] {
        assert!(!headers.contains_key(gone), "{gone}");
    }
    assert_eq!(headers["authorization"], "Basic dXNlcjo=");
    assert_eq!(headers["te"], "trailers");
    assert_eq!(headers["keepalive-ping-interval"], "50");
    let request = platform
        .guest(&sandbox, 49983, Method::GET, "/seen")
        .bearer_auth(platform.key());
    let text = request.send().await.expect("answers").text().await.expect("text");
    assert!(!text.contains(platform.key()));
}

#[tokio::test]
async fn gone_and_impossible_sandboxes_are_answered_as_sdks_expect() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    platform.delete(&format!("/sandboxes/{}", sandbox.id)).await;
    for id in [
        sandbox.id.to_string(),
        SandboxId::random().to_string(),
        "<b>nope</b>".to_owned(),
    ] {
        let request = platform
            .client
            .get(format!("{}/health", platform.url))
            .header("e2b-sandbox-id", &id)
            .header("e2b-sandbox-port", "49983");
        let (status, body) = error(request.send().await.expect("answers")).await;
        assert_eq!(
            (status, body["message"].as_str(), body["code"].as_u64()),
            (502, Some("The sandbox was not found"), Some(502))
        );
        assert!(body["sandboxId"].is_string());
        let request = platform
            .client
            .get(format!("{}/health", platform.url))
            .header("accept", "text/html,*/*")
            .header("e2b-sandbox-id", &id)
            .header("e2b-sandbox-port", "49983");
        let page = request.send().await.expect("answers");
        assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
        let page = page.text().await.expect("text");
        assert!(
            page.contains("The sandbox was not found") && !page.contains("<b>"),
            "{page}"
        );
    }
    let request = platform
        .client
        .get(format!("{}/health", platform.url))
        .header("e2b-sandbox-id", sandbox.id.as_str())
        .header("e2b-sandbox-port", "0");
    assert_eq!(request.send().await.expect("answers").status(), 400);
}

#[tokio::test]
async fn a_machine_that_died_unheard_is_not_found_at_once() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let health = || async {
        platform
            .anonymous(&sandbox.id, 49983, Method::GET, "/health")
            .send()
            .await
            .expect("answers")
            .status()
            .as_u16()
    };
    assert_eq!(health().await, 204);
    platform.node.crash(&sandbox.id, false);
    assert_eq!(health().await, 502);
}

#[tokio::test]
async fn a_sandbox_that_is_being_ended_is_gone() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    platform.node.stopping(&sandbox.id);
    let (status, body) = error(
        platform
            .anonymous(&sandbox.id, 49983, Method::GET, "/health")
            .send()
            .await
            .expect("answers"),
    )
    .await;
    assert_eq!(
        (status, body["message"].as_str()),
        (502, Some("The sandbox was not found"))
    );
}

#[tokio::test]
async fn a_broken_channel_is_opened_again_for_the_next_request() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    for round in 0..20 {
        let response = platform
            .guest(&sandbox, 49983, Method::POST, "/echo")
            .body("hello")
            .send()
            .await
            .expect("answers");
        assert_eq!(response.text().await.expect("text"), "hello", "round {round}");
        platform.node.break_channel(&sandbox.id);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_first_part_arrives_before_there_is_a_second() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let response = platform
        .guest(&sandbox, 49983, Method::GET, "/drip")
        .send()
        .await
        .expect("answers");
    let mut parts = response.bytes_stream();
    let limit = Duration::from_secs(5);
    let first = tokio::time::timeout(limit, parts.next())
        .await
        .expect("not held back")
        .expect("a part")
        .expect("data");
    assert_eq!(first, "first");
    platform.node.guest.go_on.notify_one();
    let second = tokio::time::timeout(limit, parts.next())
        .await
        .expect("arrives")
        .expect("a part")
        .expect("data");
    assert_eq!(second, "second");
    assert!(parts.next().await.is_none());
}

const PART: usize = 64 << 10;
const PARTS: usize = (64 << 20) / PART;

fn counted(sent: Arc<AtomicUsize>) -> Body {
    let part = Bytes::from(vec![7; PART]);
    Body::wrap_stream(futures_util::stream::iter(0..PARTS).map(move |_| {
        sent.fetch_add(PART, Ordering::Relaxed);
        Ok::<_, std::io::Error>(part.clone())
    }))
}

#[tokio::test]
async fn sixty_four_mebibytes_go_through_both_ways() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let sink = platform
        .guest(&sandbox, 49983, Method::POST, "/sink")
        .body(counted(Arc::default()));
    assert_eq!(
        sink.send().await.expect("answers").text().await.expect("text"),
        (64 << 20).to_string()
    );
    let echo = platform
        .guest(&sandbox, 49983, Method::POST, "/echo")
        .body(counted(Arc::default()));
    let mut back = echo.send().await.expect("answers").bytes_stream();
    let mut total = 0;
    while let Some(part) = back.next().await {
        total += part.expect("data").len();
    }
    assert_eq!(total, 64 << 20);
}

#[tokio::test]
async fn a_guest_that_does_not_read_stops_the_sender_and_no_one_keeps_the_data() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let upload = tokio::spawn(
        platform
            .guest(&sandbox, 49983, Method::POST, "/stall")
            .body(counted(sent.clone()))
            .send(),
    );
    let mut before = usize::MAX;
    eventually("the sender stops", async || {
        let now = sent.load(Ordering::Relaxed);
        let stopped = now > 0 && now == before;
        before = now;
        tokio::time::sleep(Duration::from_millis(100)).await;
        stopped
    })
    .await;
    let held = sent.load(Ordering::Relaxed);
    assert!(held < 32 << 20, "{held} bytes are kept somewhere");
    // Others are not held up by it.
    let other = platform
        .guest(&sandbox, 49983, Method::POST, "/echo")
        .body("hello")
        .send()
        .await
        .expect("answers");
    assert_eq!(other.text().await.expect("text"), "hello");
    platform.node.guest.go_on.notify_one();
    let answer = upload
        .await
        .expect("joins")
        .expect("answers")
        .text()
        .await
        .expect("text");
    assert_eq!(answer, (64 << 20).to_string());
}

#[tokio::test]
async fn trailers_are_kept() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", platform.port))
        .await
        .expect("connects");
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .handshake(TokioIo::new(stream))
        .await
        .expect("h2");
    tokio::spawn(connection);
    let request = http::Request::get(format!("http://localhost:{}/trailers", platform.port))
        .header("e2b-sandbox-id", sandbox.id.as_str())
        .header("e2b-sandbox-port", "49983")
        .header("x-access-token", &sandbox.token)
        .body(http_body_util::Empty::<Bytes>::new())
        .expect("valid");
    let collected = sender
        .send_request(request)
        .await
        .expect("answers")
        .into_body()
        .collect()
        .await
        .expect("whole");
    assert_eq!(collected.trailers().expect("trailers")["grpc-status"], "0");
    assert_eq!(collected.to_bytes(), "body");
}

#[tokio::test]
async fn a_command_that_outlives_its_deadline_is_ended_in_words() {
    let limits = Limits {
        command_grace: Duration::from_millis(200),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    let sandbox = platform.create().await;
    for mute in [false, true] {
        let began = Instant::now();
        let mut request = platform
            .guest(&sandbox, 49983, Method::POST, "/process.Process/Start")
            .header("content-type", "application/connect+json")
            .header("connect-timeout-ms", "300")
            .body("\0\0\0\0\u{2}{}");
        if mute {
            request = request.header("x-test", "mute");
        }
        let response = request.send().await.expect("answers");
        assert_eq!(response.headers()["content-type"], "application/connect+json");
        let body = response.bytes().await.expect("ends cleanly");
        assert!(
            began.elapsed() >= Duration::from_millis(500),
            "not before the guest had its chance"
        );
        let text = String::from_utf8_lossy(&body);
        assert!(text.contains("deadline_exceeded"), "{text}");
        assert_eq!(text.contains("\"pid\":7"), !mute, "{text}");
    }
}

#[tokio::test]
async fn a_command_stream_says_so_when_the_machine_dies() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let request = platform
        .guest(&sandbox, 49983, Method::POST, "/process.Process/Start")
        .header("content-type", "application/connect+json");
    let response = request.body("").send().await.expect("answers");
    let mut parts = response.bytes_stream();
    parts.next().await.expect("start event").expect("data");
    platform.node.crash(&sandbox.id, true);
    let last = tokio::time::timeout(Duration::from_secs(5), parts.next())
        .await
        .expect("soon")
        .expect("last words")
        .expect("data");
    assert_eq!(last[0], 2);
    assert!(String::from_utf8_lossy(&last).contains("unavailable"));
}

#[tokio::test]
async fn browsers_may_call_the_daemon() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let preflight = platform
        .client
        .request(Method::OPTIONS, format!("{}/files", platform.url))
        .header("host", format!("49983-{}.localhost", sandbox.id))
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "x-access-token")
        .send()
        .await
        .expect("answers");
    assert_eq!(preflight.status(), 204);
    assert_eq!(
        preflight.headers()["access-control-allow-headers"],
        "x-access-token"
    );
    let seen = platform
        .guest(&sandbox, 49983, Method::GET, "/seen")
        .send()
        .await
        .expect("answers");
    assert_eq!(seen.headers()["access-control-allow-origin"], "*");
}
