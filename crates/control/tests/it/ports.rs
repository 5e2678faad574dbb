//! Programs inside, reached through the edge.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use reqwest::{Method, redirect::Policy};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    fake::{GUEST_TOKEN, describe},
    platform::{Platform, Sandbox, error},
};

/// A web server as a guest might run one.
async fn program() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service_fn(serve))
                    .with_upgrades(),
            );
        }
    });
    address
}

async fn serve(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::new(Bytes::from(describe(
        request.method(),
        &request.uri().to_string(),
        request.headers(),
    ))));
    let headers = response.headers_mut();
    match request.uri().path() {
        "/page" => {
            for (name, value) in [
                ("content-type", "text/html"),
                ("set-cookie", "session=stolen; Path=/"),
                ("clear-site-data", "\"*\""),
                ("service-worker-allowed", "/"),
                ("strict-transport-security", "max-age=1"),
                ("content-security-policy", "img-src *"),
            ] {
                headers.append(name, value.parse().expect("valid"));
            }
        }
        "/moved" => {
            headers.insert("location", "/login?next=%2F".parse().expect("valid"));
            *response.status_mut() = http::StatusCode::FOUND;
        }
        "/ws" => {
            headers.insert("connection", "Upgrade".parse().expect("valid"));
            headers.insert("upgrade", "websocket".parse().expect("valid"));
            *response.status_mut() = http::StatusCode::SWITCHING_PROTOCOLS;
            tokio::spawn(async move {
                let upgraded = hyper::upgrade::on(request).await.expect("switches");
                let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
                let _ended = tokio::io::copy(&mut from, &mut to).await;
            });
            *response.body_mut() = Full::default();
        }
        _ => {}
    }
    Ok(response)
}

async fn platform_with_program() -> (Platform, Sandbox) {
    let platform = Platform::start().await;
    platform.node.open_port(8000, program().await);
    let sandbox = platform.create().await;
    (platform, sandbox)
}

#[tokio::test]
async fn a_port_is_reached_by_name_headers_and_path() {
    let (platform, sandbox) = platform_with_program().await;
    let name = format!("8000-{}.localhost:{}", sandbox.id, platform.port);
    let by_name = platform
        .client
        .get(format!("{}/a?b=c", platform.url))
        .header("host", &name)
        .header("cookie", "own=1");
    let seen: Value = by_name.send().await.expect("answers").json().await.expect("json");
    assert_eq!(seen["uri"], "/a?b=c");
    assert_eq!(seen["headers"]["host"], name.as_str());
    assert_eq!(
        seen["headers"]["cookie"], "own=1",
        "an origin of its own has its own cookies"
    );
    assert_eq!(seen["headers"]["x-forwarded-host"], name.as_str());
    assert_eq!(seen["headers"]["x-forwarded-proto"], "http");
    assert_eq!(seen["headers"]["x-forwarded-for"], "127.0.0.1");

    let by_headers = platform
        .anonymous(&sandbox.id, 8000, Method::POST, "/a")
        .header("x-forwarded-for", "6.6.6.6")
        .body("x");
    let seen: Value = by_headers
        .send()
        .await
        .expect("answers")
        .json()
        .await
        .expect("json");
    assert_eq!(seen["method"], "POST");
    assert_eq!(seen["headers"]["host"], "localhost:8000");
    assert_eq!(
        seen["headers"]["x-forwarded-for"], "127.0.0.1",
        "not what the client claims"
    );

    let path = format!("{}/sandbox/{}/8000/a%2Fb?c", platform.url, sandbox.id);
    let seen: Value = platform
        .client
        .get(path)
        .header("cookie", "ours=1")
        .send()
        .await
        .expect("answers")
        .json()
        .await
        .expect("json");
    assert_eq!(seen["uri"], "/a%2Fb?c");
    assert_eq!(
        seen["headers"]["x-forwarded-prefix"],
        format!("/sandbox/{}/8000", sandbox.id)
    );
    assert_eq!(seen["headers"].get("cookie"), None);
}

#[tokio::test]
async fn a_page_under_a_shared_origin_can_do_nothing_in_its_name() {
    let (platform, sandbox) = platform_with_program().await;
    let base = format!("{}/sandbox/{}/8000", platform.url, sandbox.id);
    let page = platform
        .client
        .get(format!("{base}/page"))
        .send()
        .await
        .expect("answers");
    for gone in [
        "set-cookie",
        "clear-site-data",
        "service-worker-allowed",
        "strict-transport-security",
    ] {
        assert!(!page.headers().contains_key(gone), "{gone}");
    }
    let policies: Vec<_> = page
        .headers()
        .get_all("content-security-policy")
        .iter()
        .map(|v| v.to_str().expect("text"))
        .collect();
    assert_eq!(policies[0], "img-src *", "its own policy is kept beside ours");
    assert!(policies[1].starts_with("sandbox allow-scripts") && !policies[1].contains("allow-same-origin"));
    let worker = platform
        .client
        .get(format!("{base}/sw.js"))
        .header("service-worker", "script")
        .send()
        .await
        .expect("answers");
    assert_eq!(worker.status(), 403);
    // A file that is not called a page can be one.
    let other = platform
        .client
        .get(format!("{base}/x.bin"))
        .send()
        .await
        .expect("answers");
    assert!(other.headers().contains_key("content-security-policy"));

    let client = reqwest::Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .build()
        .expect("client");
    let moved = client.get(format!("{base}/moved")).send().await.expect("answers");
    assert_eq!(
        moved.headers()["location"],
        format!("/sandbox/{}/8000/login?next=%2F", sandbox.id)
    );
    let bare = client.get(format!("{base}?q")).send().await.expect("answers");
    assert_eq!(
        (
            bare.status().as_u16(),
            bare.headers()["location"].to_str().expect("text")
        ),
        (307, format!("/sandbox/{}/8000/?q", sandbox.id).as_str())
    );

    // Under its own host name nothing is taken away.
    let own = platform
        .client
        .get(format!("{}/page", platform.url))
        .header("host", format!("8000-{}.localhost", sandbox.id));
    let own = own.send().await.expect("answers");
    assert!(own.headers().contains_key("set-cookie"));
    assert_eq!(own.headers().get_all("content-security-policy").iter().count(), 1);
}

#[tokio::test]
async fn a_closed_port_is_answered_as_sdks_expect() {
    let (platform, sandbox) = platform_with_program().await;
    let (status, body) = error(
        platform
            .anonymous(&sandbox.id, 8001, Method::GET, "/")
            .send()
            .await
            .expect("answers"),
    )
    .await;
    assert_eq!(status, 502);
    assert_eq!(body["message"], "The sandbox is running but port is not open");
    assert_eq!(body["port"], 8001);
    assert_eq!(body["sandboxId"], sandbox.id.as_str());
    let page = platform
        .anonymous(&sandbox.id, 8001, Method::GET, "/")
        .header("accept", "text/html")
        .send()
        .await
        .expect("answers");
    assert!(page.text().await.expect("text").contains("port is not open"));
}

#[tokio::test]
async fn the_owners_token_becomes_the_guests_and_a_wrong_one_nothing() {
    let (platform, sandbox) = platform_with_program().await;
    let token = |token: &str| {
        let request = platform
            .anonymous(&sandbox.id, 8000, Method::GET, "/")
            .header("x-access-token", token);
        async {
            request
                .send()
                .await
                .expect("answers")
                .json::<Value>()
                .await
                .expect("json")["headers"]["x-access-token"]
                .clone()
        }
    };
    assert_eq!(token(&sandbox.token).await, GUEST_TOKEN);
    assert_eq!(token("wrong").await, Value::Null);
}

#[tokio::test]
async fn ports_that_are_not_public_ask_for_the_traffic_token() {
    let (platform, _) = platform_with_program().await;
    let sandbox = platform
        .create_with(
            "/v2/sandboxes",
            json!({"network": {"allowPublicTraffic": false, "maskRequestHost": "app.test:${PORT}"}}),
        )
        .await;
    let token = sandbox.body["trafficAccessToken"].as_str().expect("token");
    for wrong in [None, Some("x"), Some(sandbox.token.as_str())] {
        let mut request = platform.anonymous(&sandbox.id, 8000, Method::GET, "/");
        if let Some(wrong) = wrong {
            request = request.header("e2b-traffic-access-token", wrong);
        }
        let (status, body) = error(request.send().await.expect("answers")).await;
        assert_eq!(status, 403);
        assert!(
            body["message"]
                .as_str()
                .expect("message")
                .contains("traffic access token")
        );
    }
    let request = platform
        .anonymous(&sandbox.id, 8000, Method::GET, "/")
        .header("e2b-traffic-access-token", token);
    let seen: Value = request.send().await.expect("answers").json().await.expect("json");
    assert_eq!(seen["headers"]["host"], "app.test:8000");
    assert_eq!(seen["headers"].get("e2b-traffic-access-token"), None);
    let info: Value = platform
        .get(&format!("/sandboxes/{}", sandbox.id))
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(info["network"]["allowPublicTraffic"], false);
}

#[tokio::test]
async fn a_websocket_is_carried_both_ways() {
    let (platform, sandbox) = platform_with_program().await;
    let mut stream = TcpStream::connect(("127.0.0.1", platform.port))
        .await
        .expect("connects");
    let head = format!(
        "GET /ws HTTP/1.1\r\nHost: 8000-{}.localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        sandbox.id
    );
    stream.write_all(head.as_bytes()).await.expect("writes");
    let mut answer = Vec::new();
    let limit = Duration::from_secs(5);
    while !answer.ends_with(b"\r\n\r\n") {
        let byte = tokio::time::timeout(limit, stream.read_u8())
            .await
            .expect("in time")
            .expect("reads");
        answer.push(byte);
    }
    let answer = String::from_utf8_lossy(&answer).to_lowercase();
    assert!(
        answer.starts_with("http/1.1 101") && answer.contains("upgrade: websocket"),
        "{answer}"
    );
    for message in [&b"\x81\x05hello"[..], b"\x82\x03\0\x01\x02"] {
        stream.write_all(message).await.expect("writes");
        let mut echo = vec![0; message.len()];
        tokio::time::timeout(limit, stream.read_exact(&mut echo))
            .await
            .expect("in time")
            .expect("reads");
        assert_eq!(echo, message);
    }
    drop(stream);
    platform.stop().await;
}

#[tokio::test]
async fn a_program_that_answers_nonsense_breaks_nothing_else() {
    let (platform, sandbox) = platform_with_program().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    platform
        .node
        .open_port(8002, listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _written = stream.write_all(b"SSH-2.0-what\r\n\r\n").await;
        }
    });
    let (status, body) = error(
        platform
            .anonymous(&sandbox.id, 8002, Method::GET, "/")
            .send()
            .await
            .expect("answers"),
    )
    .await;
    assert_eq!(status, 503, "{body}");
    let fine = platform
        .anonymous(&sandbox.id, 8000, Method::GET, "/")
        .send()
        .await
        .expect("answers");
    assert_eq!(fine.status(), 200);
}
