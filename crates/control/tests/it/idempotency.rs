//! A create that is repeated with its idempotency key is made once.

use reqwest::{Method, Response};
use serde_json::{Value, json};

use jiff::Timestamp;
use space_api::{lifecycle::EndCause, rest::Quotas};
use space_control::Limits;
use space_store::{End, Store as _};

use crate::{
    fake::{FakeNode, eventually},
    platform::{Platform, error},
};

async fn create(platform: &Platform, key: &str, body: &Value) -> Response {
    platform
        .request(Method::POST, "/v2/sandboxes")
        .header("idempotency-key", key)
        .json(body)
        .send()
        .await
        .expect("answers")
}

#[tokio::test]
async fn the_same_request_has_the_same_answer() {
    let platform = Platform::start().await;
    let body = json!({"templateID": "base", "envVars": {"A": "1", "B": "2"}, "metadata": {"x": "y"}});
    let first = create(&platform, "key-1", &body).await;
    assert_eq!(first.status(), 201);
    let first: Value = first.json().await.expect("json");
    // The order of fields is of no meaning.
    let same = json!({"metadata": {"x": "y"}, "envVars": {"B": "2", "A": "1"}, "templateID": "base"});
    let second = create(&platform, "key-1", &same).await;
    assert_eq!(second.status(), 201);
    assert_eq!(second.json::<Value>().await.expect("json"), first);
    assert_eq!(platform.node.live_count(), 1);

    let other = json!({"templateID": "base", "envVars": {"A": "2", "B": "2"}});
    let (status, body) = error(create(&platform, "key-1", &other).await).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (422, Some("idempotency_request_mismatch"))
    );
    let (status, body) = error(create(&platform, "not a key!", &other).await).await;
    assert_eq!((status, body["error_code"].as_str()), (400, Some("bad_request")));
}

#[tokio::test]
async fn while_the_first_is_under_way_the_second_is_told_so() {
    let platform = Platform::start().await;
    let body = json!({"templateID": "gated"});
    let first = tokio::spawn({
        let request = platform
            .request(Method::POST, "/v2/sandboxes")
            .header("idempotency-key", "k")
            .json(&body);
        async move { request.send().await.expect("answers") }
    });
    eventually("the node is asked", async || {
        !platform.node.creates.lock().expect("not poisoned").is_empty()
    })
    .await;
    let (status, answer) = error(create(&platform, "k", &body).await).await;
    assert_eq!(
        (status, answer["error_code"].as_str()),
        (409, Some("idempotency_in_progress"))
    );
    platform.node.gate.notify_one();
    let first: Value = first.await.expect("joins").json().await.expect("json");
    let second: Value = create(&platform, "k", &body).await.json().await.expect("json");
    assert_eq!(first, second);
    assert_eq!(platform.node.creates.lock().expect("not poisoned").len(), 1);
}

#[tokio::test]
async fn a_failed_create_may_be_tried_again_with_its_key() {
    let platform = Platform::start().await;
    platform.node.set_capacity(0);
    let body = json!({"templateID": "base"});
    assert_eq!(create(&platform, "k", &body).await.status(), 429);
    platform.node.set_capacity(1);
    assert_eq!(create(&platform, "k", &body).await.status(), 201);
}

#[tokio::test]
async fn a_client_that_goes_away_does_not_stop_its_create() {
    let platform = Platform::start().await;
    let body = json!({"templateID": "gated"});
    let request = platform
        .request(Method::POST, "/v2/sandboxes")
        .header("idempotency-key", "k")
        .json(&body);
    let gone = tokio::spawn(request.send());
    eventually("the node is asked", async || {
        !platform.node.creates.lock().expect("not poisoned").is_empty()
    })
    .await;
    gone.abort();
    platform.node.gate.notify_one();
    eventually("it is made all the same", async || {
        platform.node.live_count() == 1
    })
    .await;
    eventually("its answer can be had", async || {
        create(&platform, "k", &body).await.status() == 201
    })
    .await;
    assert_eq!(platform.node.creates.lock().expect("not poisoned").len(), 1);
}

#[tokio::test]
async fn an_answer_is_given_again_past_all_who_wait_and_without_its_template() {
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    let body = json!({"templateID": "base"});
    let first: Value = create(&platform, "k", &body).await.json().await.expect("json");
    let queued = json!({"templateID": "base", "queue": {"timeoutSeconds": 60}});
    let waiting = tokio::spawn(
        platform
            .request(Method::POST, "/v2/sandboxes")
            .json(&queued)
            .send(),
    );
    eventually("one waits", async || {
        let (_, answer) = error(platform.post("/v2/sandboxes", &body).await).await;
        answer["message"].as_str().expect("text").contains("others wait")
    })
    .await;
    // With and without a queue of its own, which is no part of what was asked for.
    for body in [&body, &queued] {
        let again = create(&platform, "k", body).await;
        assert_eq!(again.status(), 201);
        assert_eq!(again.json::<Value>().await.expect("json"), first);
    }
    waiting.abort();
    assert_eq!(platform.delete("/templates/base").await.status(), 204);
    assert_eq!(platform.post("/v2/sandboxes", &body).await.status(), 404);
    let again = create(&platform, "k", &body).await;
    assert_eq!(again.json::<Value>().await.expect("json"), first);
}

#[tokio::test]
async fn one_that_was_ended_in_the_books_while_it_was_made_is_taken_apart() {
    let platform = Platform::start().await;
    let body = json!({"templateID": "gated"});
    let request = platform
        .request(Method::POST, "/v2/sandboxes")
        .header("idempotency-key", "k")
        .json(&body);
    let under_way = tokio::spawn(request.send());
    eventually("the node is asked", async || {
        !platform.node.creates.lock().expect("not poisoned").is_empty()
    })
    .await;
    let id = platform.node.creates.lock().expect("not poisoned")[0].id.clone();
    let end = End {
        generation: 1,
        cause: EndCause::Deleted,
        ended_at: Timestamp::now(),
        cpu_micros: None,
    };
    assert!(platform.store.end(&id, &end, false).await.expect("ends"));
    platform.node.gate.notify_one();
    let (status, answer) = error(under_way.await.expect("joins").expect("answers")).await;
    assert_eq!(
        (status, answer["error_code"].as_str()),
        (500, Some("sandbox_create_failed"))
    );
    assert_eq!(
        platform.node.live_count(),
        0,
        "no machine is left that nobody knows"
    );
    platform.node.gate.notify_one();
    assert_eq!(
        create(&platform, "k", &body).await.status(),
        201,
        "the key is free"
    );
}
