//! Many at once, room for few.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use serde_json::{Value, json};
use space_api::rest::Quotas;
use space_control::Limits;

use crate::{
    fake::{FakeNode, eventually},
    platform::Platform,
};

async fn a_hundred_creates(platform: &Platform) -> BTreeMap<u16, usize> {
    let body = json!({"templateID": "base"});
    let answers = join_all((0..100).map(|_| platform.post("/v2/sandboxes", &body))).await;
    let mut counts = BTreeMap::new();
    for answer in answers {
        let status = answer.status().as_u16();
        if status != 201 {
            assert_eq!(answer.headers()["should-retry"], "true");
            assert!(answer.headers().contains_key("retry-after"));
            let body: Value = answer.json().await.expect("json");
            assert!(
                body["hint"].is_string() && body["error_code"].is_string(),
                "{body}"
            );
        }
        *counts.entry(status).or_insert(0) += 1;
    }
    counts
}

#[tokio::test]
async fn a_project_gets_exactly_its_quota() {
    let quotas = Quotas {
        max_sandboxes: 10,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    assert_eq!(
        a_hundred_creates(&platform).await,
        BTreeMap::from([(201, 10), (429, 90)])
    );
    assert_eq!(platform.node.live_count(), 10);
    assert_eq!(
        platform.node.creates.lock().expect("not poisoned").len(),
        10,
        "the node is not even asked for the others"
    );
    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["usage"]["sandboxes"], 10);
}

#[tokio::test]
async fn a_node_gives_exactly_what_it_has() {
    let node = FakeNode::new();
    node.set_capacity(10);
    let platform = Platform::start_with(Quotas::default(), node, Limits::default()).await;
    assert_eq!(
        a_hundred_creates(&platform).await,
        BTreeMap::from([(201, 10), (429, 90)])
    );
    assert_eq!(
        platform.node.creates.lock().expect("not poisoned").len(),
        10,
        "room is reserved before the node is asked"
    );
}

#[tokio::test]
async fn a_node_that_has_less_than_it_said_refuses_in_the_same_way() {
    let platform = Platform::start().await;
    platform.node.set_capacity(10);
    assert_eq!(
        a_hundred_creates(&platform).await,
        BTreeMap::from([(201, 10), (429, 90)])
    );
    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["usage"]["sandboxes"], 10, "refused creates hold no place");
}

/// Creates with a queue; each sandbox is deleted as soon as it is there.
async fn passing_through(platform: &Platform, path: &str, body: &Value) -> u16 {
    let answer = platform.post(path, body).await;
    let status = answer.status().as_u16();
    let body: Value = answer.json().await.expect("json");
    if let Some(id) = body["sandboxID"].as_str().or(body["id"].as_str()) {
        assert_eq!(platform.delete(&format!("/sandboxes/{id}")).await.status(), 204);
    }
    status
}

#[tokio::test]
async fn with_a_queue_all_get_their_turn_as_places_are_freed() {
    // What the store knows, and what only the node knows.
    for known in [true, false] {
        let node = FakeNode::new();
        if known {
            node.set_capacity(10);
        }
        let platform = Platform::start_with(Quotas::default(), node, Limits::default()).await;
        platform.node.set_capacity(10);
        let e2b = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
        let own = json!({"template": "base", "queue": {"timeout_seconds": 60}});
        let all = (0..100).map(|at| {
            let (path, body) = if at % 2 == 0 {
                ("/v2/sandboxes", &e2b)
            } else {
                ("/v1/sandboxes", &own)
            };
            passing_through(&platform, path, body)
        });
        let statuses = join_all(all).await;
        assert!(
            statuses.iter().all(|status| *status == 201),
            "{known} {statuses:?}"
        );
        assert_eq!(platform.node.live_count(), 0);
    }
}

#[tokio::test]
async fn who_waits_in_vain_gets_the_same_refusal_and_nobody_goes_past() {
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    let holder = platform.create().await;
    let began = std::time::Instant::now();
    let answer = platform
        .request(reqwest::Method::POST, "/v2/sandboxes")
        .header("x-queue-timeout", "1")
        .json(&json!({"templateID": "base"}))
        .send()
        .await
        .expect("answers");
    assert!(began.elapsed() >= std::time::Duration::from_secs(1));
    assert_eq!(answer.status(), 429);
    assert_eq!(answer.headers()["should-retry"], "true");
    let body: Value = answer.json().await.expect("json");
    assert_eq!(body["error_code"], "quota_exceeded");

    let waiting = {
        let body = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
        let request = platform
            .request(reqwest::Method::POST, "/v2/sandboxes")
            .json(&body);
        tokio::spawn(async move { request.send().await.expect("answers") })
    };
    eventually("one waits", async || {
        let body: Value = platform
            .post("/v2/sandboxes", &json!({"templateID": "base"}))
            .await
            .json()
            .await
            .expect("json");
        body["message"].as_str().expect("text").contains("others wait")
    })
    .await;
    assert_eq!(
        platform
            .delete(&format!("/sandboxes/{}", holder.id))
            .await
            .status(),
        204
    );
    assert_eq!(waiting.await.expect("joins").status(), 201);
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_the_queue() {
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    let holder = platform.create().await;
    let plain = json!({"templateID": "base"});
    let refusal = async || {
        let body: Value = platform
            .post("/v2/sandboxes", &plain)
            .await
            .json()
            .await
            .expect("json");
        body["message"].as_str().unwrap_or_default().to_owned()
    };
    let body = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
    let gone = tokio::spawn(
        platform
            .request(reqwest::Method::POST, "/v2/sandboxes")
            .json(&body)
            .send(),
    );
    eventually("it waits", async || refusal().await.contains("others wait")).await;
    gone.abort();
    eventually("it has left", async || !refusal().await.contains("others wait")).await;
    assert_eq!(
        platform
            .delete(&format!("/sandboxes/{}", holder.id))
            .await
            .status(),
        204
    );
    assert_eq!(platform.node.live_count(), 0, "nothing is made for who is gone");
    assert_eq!(platform.post("/v2/sandboxes", &plain).await.status(), 201);
}

#[tokio::test]
async fn nobody_goes_past_one_whom_the_node_itself_has_refused() {
    let platform = Platform::start().await;
    let holder = platform.create().await;
    // The store believes that there is room.
    platform.node.set_capacity(1);
    let queued = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
    let request = platform
        .request(reqwest::Method::POST, "/v2/sandboxes")
        .json(&queued);
    let waiting = tokio::spawn(async move { request.send().await.expect("answers") });
    let newcomer = async || {
        let answer = platform
            .post("/v2/sandboxes", &json!({"templateID": "base"}))
            .await;
        assert_eq!(answer.status(), 429);
        let body: Value = answer.json().await.expect("json");
        body["message"].as_str().expect("text").contains("others wait")
    };
    eventually("it waits", newcomer).await;
    let began = std::time::Instant::now();
    while began.elapsed() < std::time::Duration::from_secs(2) {
        assert!(newcomer().await, "also between its tries");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    platform.delete(&format!("/sandboxes/{}", holder.id)).await;
    assert_eq!(waiting.await.expect("joins").status(), 201);
}

#[tokio::test]
async fn a_project_at_its_own_limit_holds_no_other_up() {
    use space_api::rest::KeyRole;
    use space_store::Store as _;
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    platform.create().await;
    let queued = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
    let post = || {
        platform
            .request(reqwest::Method::POST, "/v2/sandboxes")
            .json(&queued)
            .send()
    };
    let waiting = [tokio::spawn(post()), tokio::spawn(post())];
    eventually("they wait", async || {
        let answer = platform
            .post("/v2/sandboxes", &json!({"templateID": "base"}))
            .await;
        let body: Value = answer.json().await.expect("json");
        assert_eq!(body["error_code"], "quota_exceeded");
        body["message"].as_str().expect("text").contains("others wait")
    })
    .await;
    let other = platform
        .store
        .create_project("other", Quotas::default())
        .await
        .expect("project");
    let (_, key) = platform
        .store
        .create_key(&other.id, "k", KeyRole::Project)
        .await
        .expect("key");
    let answer = platform
        .client
        .post(format!("{}/v2/sandboxes", platform.url))
        .header("x-api-key", key.expose())
        .json(&json!({"templateID": "base"}))
        .send()
        .await
        .expect("answers");
    assert_eq!(answer.status(), 201);
    for each in waiting {
        each.abort();
    }
}

#[tokio::test]
async fn a_revoked_key_waits_no_longer() {
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    platform.create().await;
    let made: Value = platform
        .post("/v1/keys", &json!({"name": "ci"}))
        .await
        .json()
        .await
        .expect("json");
    let request = platform
        .client
        .post(format!("{}/v2/sandboxes", platform.url))
        .header("x-api-key", made["key"].as_str().expect("secret"))
        .json(&json!({"templateID": "base", "queue": {"timeoutSeconds": 60}}));
    let waiting = tokio::spawn(async move { request.send().await.expect("answers") });
    eventually("it waits", async || {
        let answer = platform
            .post("/v2/sandboxes", &json!({"templateID": "base"}))
            .await;
        let body: Value = answer.json().await.expect("json");
        body["message"].as_str().expect("text").contains("others wait")
    })
    .await;
    let id = made["id"].as_str().expect("id");
    assert_eq!(platform.delete(&format!("/v1/keys/{id}")).await.status(), 204);
    let answer = tokio::time::timeout(std::time::Duration::from_secs(10), waiting)
        .await
        .expect("at once")
        .expect("joins");
    assert_eq!(answer.status(), 401);
}
