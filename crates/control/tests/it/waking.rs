//! Requests that meet a paused sandbox: who wakes it, who does not, and that all wait for one wake.

use std::sync::Arc;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use space_api::lifecycle::SandboxState;
use space_node::{Node as _, WakeReason};
use space_store::Store as _;
use tokio::sync::Notify;

use crate::{
    fake::eventually,
    platform::{Platform, Sandbox, error},
};

/// Unasked, as a node does that finds it idle; and until the store has heard of it.
async fn pause(platform: &Platform, sandbox: &Sandbox) {
    platform.node.pause(&sandbox.id).await.expect("pauses");
    eventually("the store follows", async || {
        let row = platform.store.sandbox(&sandbox.id).await.expect("reads");
        row.is_some_and(|row| row.state == SandboxState::Paused)
    })
    .await;
}

fn is_paused(platform: &Platform, sandbox: &Sandbox) -> bool {
    platform.node.status_of(&sandbox.id).expect("live").state == SandboxState::Paused
}

fn wakes(platform: &Platform) -> usize {
    platform.node.wakes.lock().expect("not poisoned").len()
}

#[tokio::test]
async fn a_call_with_the_token_wakes_it_and_is_answered() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    pause(&platform, &sandbox).await;
    let answer = platform
        .guest(&sandbox, 49983, Method::POST, "/echo")
        .body("still here")
        .send()
        .await
        .expect("answers");
    assert_eq!(answer.text().await.expect("body"), "still here");
    assert_eq!(
        *platform.node.wakes.lock().expect("not poisoned"),
        [WakeReason::Traffic]
    );
    let events: Vec<Value> = platform
        .get(&format!("/v1/sandboxes/{}/events", sandbox.id))
        .await
        .json()
        .await
        .expect("json");
    let last = events.last().expect("some");
    assert_eq!(
        (&last["kind"], &last["detail"]),
        (&json!("resumed"), &json!("traffic"))
    );
}

#[tokio::test]
async fn neither_a_wrong_token_nor_a_health_check_wakes_it() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    pause(&platform, &sandbox).await;
    let wrong = platform
        .anonymous(&sandbox.id, 49983, Method::GET, "/seen")
        .header("x-access-token", "wrong");
    assert_eq!(wrong.send().await.expect("answers").status(), 401);
    for request in [
        platform.anonymous(&sandbox.id, 49983, Method::GET, "/health"),
        platform.guest(&sandbox, 49983, Method::GET, "/health"),
    ] {
        let (status, body) = error(request.send().await.expect("answers")).await;
        // By 502 E2B's SDKs know that it does not run.
        assert_eq!(
            (status, body["error_code"].as_str()),
            (502, Some("sandbox_paused"))
        );
    }
    assert!(is_paused(&platform, &sandbox));
    assert_eq!(wakes(&platform), 0);
}

#[tokio::test]
async fn traffic_to_a_port_wakes_only_what_was_made_so() {
    let platform = Platform::start().await;
    let plain = platform.create().await;
    let waking = platform
        .create_with("/v2/sandboxes", json!({"autoResume": {"enabled": true}}))
        .await;
    let own: Value = platform
        .post(
            "/v1/sandboxes",
            &json!({"template": "base", "wake_on_traffic": true}),
        )
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(own["wake_on_traffic"], true);
    let info: Value = platform
        .get(&format!("/sandboxes/{}", waking.id))
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(info["lifecycle"]["autoResume"], true);
    for sandbox in [&plain, &waking] {
        pause(&platform, sandbox).await;
    }
    let ask = async |sandbox: &Sandbox| {
        let request = platform.anonymous(&sandbox.id, 8000, Method::GET, "/");
        error(request.send().await.expect("answers")).await
    };
    let (status, body) = ask(&plain).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (409, Some("sandbox_paused"))
    );
    assert!(body["hint"].as_str().expect("hint").contains("/resume"), "{body}");
    assert!(is_paused(&platform, &plain));
    // It was woken and reached: nothing listens there.
    let (status, body) = ask(&waking).await;
    assert_eq!((status, body["port"].as_u64()), (502, Some(8000)), "{body}");
    assert!(!is_paused(&platform, &waking));
    // Its owner's pause counts for a moment at least.
    pause(&platform, &waking).await;
    let (status, body) = ask(&waking).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (409, Some("sandbox_paused"))
    );
    eventually("later it is woken again", async || ask(&waking).await.0 == 502).await;
}

#[tokio::test]
async fn requests_at_the_same_time_share_one_wake() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    pause(&platform, &sandbox).await;
    let gate = Arc::new(Notify::new());
    *platform.node.wake_gate.lock().expect("not poisoned") = Some(gate.clone());
    let requests = join_all((0..20).map(|_| async {
        let request = platform.guest(&sandbox, 49983, Method::GET, "/seen");
        request.send().await.expect("answers").status()
    }));
    let release = async {
        eventually("the wake is under way", async || wakes(&platform) == 1).await;
        gate.notify_one();
    };
    let (statuses, ()) = tokio::join!(requests, release);
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(wakes(&platform), 1);
}

#[tokio::test]
async fn a_wake_goes_on_when_its_client_goes_away() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    pause(&platform, &sandbox).await;
    let gate = Arc::new(Notify::new());
    *platform.node.wake_gate.lock().expect("not poisoned") = Some(gate.clone());
    let gone = tokio::spawn(platform.guest(&sandbox, 49983, Method::GET, "/seen").send());
    eventually("the wake is under way", async || wakes(&platform) == 1).await;
    gone.abort();
    assert!(gone.await.expect_err("aborted").is_cancelled());
    gate.notify_one();
    eventually("it runs and that is recorded", async || {
        let info: Value = platform
            .get(&format!("/sandboxes/{}", sandbox.id))
            .await
            .json()
            .await
            .expect("json");
        info["state"] == "running" && !is_paused(&platform, &sandbox)
    })
    .await;
}
