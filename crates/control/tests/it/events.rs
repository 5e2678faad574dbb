//! What happened: in pages, and as a stream that can be taken up where it broke off.

use std::time::Duration;

use reqwest::Response;
use serde_json::{Value, json};

use crate::platform::{Platform, error};

/// Reads until the stream has given `count` events; ids and kinds.
async fn read(stream: &mut Response, count: usize) -> Vec<(u64, String)> {
    let mut text = String::new();
    let complete = |text: &str| text.matches("\n\n").count();
    let reading = async {
        while complete(&text) < count {
            let chunk = stream.chunk().await.expect("goes on").expect("does not end");
            text.push_str(std::str::from_utf8(&chunk).expect("text"));
        }
    };
    tokio::time::timeout(Duration::from_secs(10), reading)
        .await
        .expect("in time");
    text.split("\n\n")
        .filter(|message| !message.is_empty())
        .map(|message| {
            let field = |name: &str| {
                let line = message.lines().find_map(|line| line.strip_prefix(name));
                line.expect("is there").trim().to_owned()
            };
            let data: Value = serde_json::from_str(&field("data:")).expect("json");
            assert_eq!(data["kind"], field("event:").as_str());
            assert_eq!(data["id"].to_string(), field("id:"));
            (field("id:").parse().expect("number"), field("event:"))
        })
        .collect()
}

async fn follow(platform: &Platform, after: Option<u64>) -> Response {
    let mut request = platform.request(reqwest::Method::GET, "/v1/events?follow");
    if let Some(after) = after {
        request = request.header("last-event-id", after.to_string());
    }
    let stream = request.send().await.expect("answers");
    assert_eq!(stream.status(), 200);
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    stream
}

#[tokio::test]
async fn events_come_in_pages_also_after_the_end() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    platform
        .post(&format!("/v1/sandboxes/{}/pause", sandbox.id), &json!({}))
        .await;
    platform.delete(&format!("/sandboxes/{}", sandbox.id)).await;
    platform.create().await;
    let path = format!("/v1/sandboxes/{}/events", sandbox.id);
    let mut kinds = Vec::new();
    let mut token = "0".to_owned();
    loop {
        let page = platform.get(&format!("{path}?limit=2&nextToken={token}")).await;
        let next = page
            .headers()
            .get("x-next-token")
            .map(|value| value.to_str().expect("text").to_owned());
        let events: Vec<Value> = page.json().await.expect("json");
        assert!(
            events
                .iter()
                .all(|event| event["sandbox_id"] == sandbox.id.as_str())
        );
        kinds.extend(
            events
                .iter()
                .map(|event| event["kind"].as_str().expect("text").to_owned()),
        );
        match next {
            Some(next) => token = next,
            None => break,
        }
    }
    assert_eq!(kinds, ["creating", "running", "paused", "ended"]);
    let all: Vec<Value> = platform.get("/v1/events").await.json().await.expect("json");
    assert_eq!(all.len(), 6);
    for bad in ["after=x", "limit=0", "limit=1001"] {
        assert_eq!(
            error(platform.get(&format!("{path}?{bad}")).await).await.0,
            400,
            "{bad}"
        );
    }
}

#[tokio::test]
async fn a_stream_begins_now_and_is_taken_up_after_the_last_event() {
    let platform = Platform::start().await;
    platform.create().await;
    let mut stream = follow(&platform, None).await;
    let begins: u64 = stream.headers()["last-event-id"]
        .to_str()
        .expect("text")
        .parse()
        .expect("number");
    assert_eq!(begins, 2, "for who has to take it up before the first event");
    let sandbox = platform.create().await;
    let first = read(&mut stream, 2).await;
    assert_eq!(
        first.iter().map(|(_, kind)| kind.as_str()).collect::<Vec<_>>(),
        ["creating", "running"]
    );
    drop(stream);
    // While nobody listens.
    platform.delete(&format!("/sandboxes/{}", sandbox.id)).await;
    let mut stream = follow(&platform, Some(first[1].0)).await;
    let missed = read(&mut stream, 1).await;
    assert_eq!(missed[0].1, "ended");
    platform.create().await;
    let more = read(&mut stream, 2).await;
    assert!(more.iter().all(|(id, _)| *id > missed[0].0));
    // It holds up nothing when the server stops.
    let stopping = tokio::spawn(platform.stop());
    let ended = tokio::time::timeout(Duration::from_secs(3), stream.chunk()).await;
    assert_eq!(ended.expect("at once").expect("in order"), None);
    stopping.await.expect("stops");
}

#[tokio::test]
async fn streams_show_only_the_own_project_and_are_bounded() {
    use space_api::rest::{KeyRole, Quotas};
    use space_store::Store as _;
    let platform = Platform::start().await;
    let stranger = platform
        .store
        .create_project("stranger", Quotas::default())
        .await
        .expect("project");
    let (_, key) = platform
        .store
        .create_key(&stranger.id, "k", KeyRole::Project)
        .await
        .expect("key");
    let mut stream = platform
        .client
        .get(format!("{}/v1/events?follow=true&after=0", platform.url))
        .header("x-api-key", key.expose())
        .send()
        .await
        .expect("answers");
    platform.create().await;
    let theirs = platform
        .client
        .post(format!("{}/v2/sandboxes", platform.url))
        .header("x-api-key", key.expose())
        .json(&json!({"templateID": "base"}))
        .send()
        .await
        .expect("answers");
    let theirs: Value = theirs.json().await.expect("json");
    assert_eq!(read(&mut stream, 2).await.len(), 2);
    let seen: Vec<Value> = platform.get("/v1/events").await.json().await.expect("json");
    assert!(
        seen.iter()
            .all(|event| event["sandbox_id"] != theirs["sandboxID"])
    );

    let mut open = vec![stream];
    let refused = loop {
        let answer = platform.get("/v1/events?follow").await;
        if answer.status() != 200 {
            break answer;
        }
        open.push(answer);
        assert!(open.len() < 1000, "there is a bound");
    };
    let (status, body) = error(refused).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (429, Some("too_many_requests"))
    );
}

#[tokio::test]
async fn a_stream_ends_with_the_key_it_was_opened_with() {
    let platform = Platform::start().await;
    let made: Value = platform
        .post("/v1/keys", &json!({"name": "ci"}))
        .await
        .json()
        .await
        .expect("json");
    let mut stream = platform
        .client
        .get(format!("{}/v1/events?follow", platform.url))
        .header("x-api-key", made["key"].as_str().expect("secret"))
        .send()
        .await
        .expect("answers");
    let mut other = follow(&platform, None).await;
    platform.create().await;
    assert_eq!(read(&mut stream, 2).await.len(), 2);
    let id = made["id"].as_str().expect("id");
    assert_eq!(platform.delete(&format!("/v1/keys/{id}")).await.status(), 204);
    let ended = tokio::time::timeout(Duration::from_secs(5), stream.chunk()).await;
    assert_eq!(ended.expect("at once").expect("in order"), None);
    assert_eq!(read(&mut other, 2).await.len(), 2, "others go on");
}
