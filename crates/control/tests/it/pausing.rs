//! Pausing in memory and running on, by our calls and by E2B's.

use jiff::{SignedDuration, Timestamp};
use reqwest::Method;
use serde_json::{Value, json};
use space_api::lifecycle::SandboxState;
use space_node::{Node as _, WakeReason};

use crate::{
    fake::eventually,
    platform::{Platform, Sandbox, error},
};

async fn kinds(platform: &Platform, sandbox: &Sandbox) -> Vec<(String, String)> {
    let events: Vec<Value> = platform
        .get(&format!("/v1/sandboxes/{}/events", sandbox.id))
        .await
        .json()
        .await
        .expect("json");
    let text = |event: &Value, key: &str| event[key].as_str().expect("text").to_owned();
    events
        .iter()
        .map(|event| (text(event, "kind"), text(event, "detail")))
        .collect()
}

async fn state(platform: &Platform, sandbox: &Sandbox) -> Value {
    let info: Value = platform
        .get(&format!("/sandboxes/{}", sandbox.id))
        .await
        .json()
        .await
        .expect("json");
    info["state"].clone()
}

#[tokio::test]
async fn pause_and_resume_are_idempotent_and_shown_everywhere() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let path = format!("/v1/sandboxes/{}", sandbox.id);
    for _ in 0..2 {
        let answer = platform.post(&format!("{path}/pause"), &json!({})).await;
        assert_eq!(answer.status(), 200);
        let record: Value = answer.json().await.expect("json");
        assert_eq!(record["state"], "paused");
        assert!(record["paused_at"].is_string());
    }
    assert_eq!(
        platform.node.status_of(&sandbox.id).expect("live").state,
        SandboxState::Paused
    );
    assert_eq!(state(&platform, &sandbox).await, "paused");
    for (query, wanted) in [
        ("", 1),
        ("state=paused", 1),
        ("state=running", 0),
        ("state=running,paused", 1),
    ] {
        let list: Vec<Value> = platform
            .get(&format!("/v2/sandboxes?{query}"))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(list.len(), wanted, "{query}");
        assert!(list.iter().all(|entry| entry["state"] == "paused"));
    }
    for _ in 0..2 {
        let answer = platform.post(&format!("{path}/resume"), &json!({})).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.json::<Value>().await.expect("json")["state"], "running");
    }
    assert_eq!(state(&platform, &sandbox).await, "running");
    let record: Value = platform.get(&path).await.json().await.expect("json");
    assert_eq!(record["machine"], "m000000000001");
    assert!(record["last_active_at"].is_string() && record["paused_at"].is_null());

    let events = kinds(&platform, &sandbox).await;
    let found: Vec<_> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(found, ["creating", "running", "paused", "resumed"]);
    assert_eq!(events[2].1, "asked for");

    // A paused one can be ended, and counts until then.
    platform.post(&format!("{path}/pause"), &json!({})).await;
    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["usage"]["sandboxes"], 1);
    assert_eq!(
        platform
            .delete(&format!("/sandboxes/{}", sandbox.id))
            .await
            .status(),
        204
    );
    for call in ["pause", "resume"] {
        let (status, body) = error(platform.post(&format!("{path}/{call}"), &json!({})).await).await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (404, Some("sandbox_not_found"))
        );
    }
}

#[tokio::test]
async fn e2bs_connect_and_resume_let_a_paused_one_run_on() {
    let platform = Platform::start().await;
    let sandbox = platform
        .create_with("/v2/sandboxes", json!({"timeout": 1000}))
        .await;
    let e2b = format!("/sandboxes/{}", sandbox.id);
    let pause = || async {
        let answer = platform.post(&format!("/v1{e2b}/pause"), &json!({})).await;
        assert_eq!(answer.status(), 200);
    };
    let left = || {
        let deadline = platform.node.status_of(&sandbox.id).expect("live").deadline;
        deadline.duration_since(Timestamp::now())
    };
    for connect in [format!("{e2b}/connect"), format!("/v2{e2b}/connect")] {
        let running = platform.post(&connect, &json!({"timeout": 10})).await;
        assert_eq!(running.status(), 200, "it ran");
        pause().await;
        let woken = platform.post(&connect, &json!({"timeout": 10})).await;
        assert_eq!(woken.status(), 201, "it was paused");
        let body: Value = woken.json().await.expect("json");
        assert_eq!(body["envdAccessToken"], sandbox.token.as_str());
        assert_eq!(state(&platform, &sandbox).await, "running");
        assert!(left() > SignedDuration::from_secs(900), "connect never shortens");
    }
    assert_eq!(
        *platform.node.wakes.lock().expect("not poisoned"),
        [WakeReason::Connect, WakeReason::Connect]
    );

    let resume = format!("{e2b}/resume");
    let (status, body) = error(platform.post(&resume, &json!({"timeout": 10})).await).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (409, Some("sandbox_already_running"))
    );
    pause().await;
    let (status, body) = error(platform.post(&resume, &json!({"autoPause": true})).await).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (501, Some("not_available_yet"))
    );
    let woken = platform.post(&resume, &json!({"timeout": 2000})).await;
    assert_eq!(woken.status(), 201);
    assert!(left() > SignedDuration::from_secs(1900));
}

#[tokio::test]
async fn e2bs_pause_and_auto_pause_are_refused_with_what_to_do_instead() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    for answer in [
        platform
            .post(&format!("/sandboxes/{}/pause", sandbox.id), &json!({}))
            .await,
        platform
            .post("/v2/sandboxes", &json!({"templateID": "base", "autoPause": true}))
            .await,
    ] {
        let (status, body) = error(answer).await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (501, Some("not_available_yet"))
        );
        assert!(
            body["hint"]
                .as_str()
                .expect("hint")
                .contains("/v1/sandboxes/{id}/pause"),
            "{body}"
        );
    }
    assert_eq!(state(&platform, &sandbox).await, "running");
}

#[tokio::test]
async fn a_deadline_counts_on_while_paused_and_can_be_moved() {
    let platform = Platform::start().await;
    let sandbox = platform
        .create_with("/v2/sandboxes", json!({"timeout": 600}))
        .await;
    let own = format!("/v1/sandboxes/{}", sandbox.id);
    let before = platform.node.status_of(&sandbox.id).expect("live").deadline;
    platform.post(&format!("{own}/pause"), &json!({})).await;
    assert_eq!(
        platform.node.status_of(&sandbox.id).expect("live").deadline,
        before
    );
    let extend = async |seconds: u64| {
        let body = json!({"timeout_seconds": seconds});
        let record: Value = platform
            .post(&format!("{own}/extend"), &body)
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(record["state"], "paused", "it sleeps on");
        let at: Timestamp = record["deadline"].as_str().expect("text").parse().expect("time");
        at
    };
    let later = extend(3000).await;
    assert!(later > before + SignedDuration::from_secs(2000));
    assert_eq!(extend(10).await, later, "extend never shortens");
    let timeout = format!("/sandboxes/{}/timeout", sandbox.id);
    assert_eq!(
        platform.post(&timeout, &json!({"timeout": 60})).await.status(),
        204
    );
    let deadline = platform.node.status_of(&sandbox.id).expect("live").deadline;
    assert!(
        deadline.duration_since(Timestamp::now()) <= SignedDuration::from_secs(60),
        "set_timeout does"
    );
}

#[tokio::test]
async fn what_the_node_does_unasked_is_recorded_with_its_reason() {
    let platform = Platform::start().await;
    let body = json!({"template": "base", "on_idle": {"after_seconds": 60, "action": "pause"}});
    let made: Value = platform
        .post("/v1/sandboxes", &body)
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(made["on_idle"]["after_seconds"], 60);
    assert!(made["access_token"].is_string());
    let asked = platform
        .node
        .creates
        .lock()
        .expect("not poisoned")
        .last()
        .cloned()
        .expect("asked");
    assert_eq!(asked.on_idle.map(|policy| policy.after_seconds), Some(60));
    let id = asked.id;
    platform.node.pause(&id).await.expect("pauses");
    let path = format!("/v1/sandboxes/{id}/events");
    eventually("it is recorded", async || {
        let events: Vec<Value> = platform.get(&path).await.json().await.expect("json");
        events
            .last()
            .is_some_and(|event| event["kind"] == "paused" && event["detail"] == "no work")
    })
    .await;
    // E2B's body takes it as an extension; what is too short is refused in either.
    let body = json!({"templateID": "base", "onIdle": {"afterSeconds": 90}});
    assert_eq!(platform.post("/v2/sandboxes", &body).await.status(), 201);
    for (path, body) in [
        (
            "/v2/sandboxes",
            json!({"templateID": "base", "onIdle": {"afterSeconds": 1}}),
        ),
        (
            "/v1/sandboxes",
            json!({"template": "base", "on_idle": {"after_seconds": 1}}),
        ),
        ("/v1/sandboxes", json!({"template": "base", "unknown": 1})),
    ] {
        let (status, _) = error(platform.post(path, &body).await).await;
        assert_eq!(status, 400, "{body}");
    }
}

#[tokio::test]
async fn many_pauses_and_resumes_at_once_leave_store_and_node_of_one_mind() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let calls = (0..40).map(|at| {
        let call = if at % 2 == 0 { "pause" } else { "resume" };
        let request = platform.request(Method::POST, &format!("/v1/sandboxes/{}/{call}", sandbox.id));
        async move { request.send().await.expect("answers").status() }
    });
    let statuses = futures_util::future::join_all(calls).await;
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    let really = platform.node.status_of(&sandbox.id).expect("live").state;
    assert_eq!(state(&platform, &sandbox).await, really.as_str());
}
