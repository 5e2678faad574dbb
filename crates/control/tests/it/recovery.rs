//! What the store says and what the node does are made to agree.

use std::{sync::atomic::Ordering, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
    rest::Quotas,
    size::SizeClass,
};
use space_control::Limits;
use space_node::{Node as _, SandboxStatus};
use space_store::{Claim, NewSandbox, Prior, Reservation, SqliteStore, Store as _};

use crate::{
    fake::{FakeNode, eventually},
    platform::Platform,
};

async fn cause(platform: &Platform, id: &SandboxId) -> Value {
    let record: Value = platform
        .get(&format!("/v1/sandboxes/{id}"))
        .await
        .json()
        .await
        .expect("json");
    record["end_cause"]["kind"].clone()
}

#[tokio::test]
async fn a_machine_that_dies_is_recorded_when_the_node_tells() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    platform.node.crash(&sandbox.id, true);
    eventually("recorded", async || {
        cause(&platform, &sandbox.id).await == "vmm_failed"
    })
    .await;
    assert_eq!(
        platform.get(&format!("/sandboxes/{}", sandbox.id)).await.status(),
        404
    );
}

#[tokio::test]
async fn a_machine_that_dies_unheard_is_found_by_comparison() {
    let limits = Limits {
        reconcile: Duration::from_millis(50),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    let (journalled, lost) = (platform.create().await, platform.create().await);
    platform.node.crash(&journalled.id, false);
    platform.node.lose(&lost.id);
    eventually("from the journal", async || {
        cause(&platform, &journalled.id).await == "vmm_failed"
    })
    .await;
    eventually("without one", async || {
        cause(&platform, &lost.id).await == "platform_restarted"
    })
    .await;
}

#[tokio::test]
async fn the_next_start_settles_what_a_killed_platform_has_left() {
    let node = FakeNode::new();
    let first = Platform::start_with(Quotas::default(), node.clone(), Limits::default()).await;
    let (kept, lost) = (first.create().await, first.create().await);
    let (directory, key) = (first.directory.clone(), first.owner.key.clone());
    // As after a kill: nobody is told to stop. A create was under way, and one was made and not yet recorded.
    first.server.abort();
    node.lose(&lost.id);
    let store = SqliteStore::open(&directory.path().join("control.db"))
        .await
        .expect("opens");
    let half = |name: &str| {
        let sandbox = NewSandbox {
            id: SandboxId::random(),
            project: first.owner.project.id.clone(),
            template: "base".into(),
            size: SizeClass::DEFAULT,
            generation: 1,
            node: "local".into(),
            metadata: std::collections::BTreeMap::new(),
            labels: std::collections::BTreeMap::new(),
            access_token: None,
            traffic_token: None,
            mask_request_host: None,
            wake_on_traffic: false,
            on_idle: None,
            started_at: Timestamp::now(),
            deadline: Timestamp::now() + SignedDuration::from_secs(300),
        };
        let claim = Claim {
            key: name.into(),
            request_hash: "h".into(),
            now: Timestamp::now(),
        };
        (sandbox, claim)
    };
    let (interrupted, interrupted_claim) = half("interrupted");
    let (finished, finished_claim) = half("finished");
    store
        .reserve(&interrupted, Some(&interrupted_claim))
        .await
        .expect("reserves");
    store
        .reserve(&finished, Some(&finished_claim))
        .await
        .expect("reserves");
    let status = |id: &SandboxId| SandboxStatus {
        id: id.clone(),
        project: first.owner.project.id.clone(),
        state: SandboxState::Running,
        template: "base:latest".into(),
        template_digest: "sha256:00".into(),
        size: SizeClass::DEFAULT,
        generation: 1,
        started_at: Timestamp::now(),
        deadline: Timestamp::now() + SignedDuration::from_secs(300),
        ready_ms: Some(1.0),
        machine: "m000000000001".into(),
        paused_at: None,
        last_active_at: Timestamp::now(),
        idle_since: None,
    };
    node.stray(status(&finished.id));
    let stray = SandboxId::random();
    node.stray(status(&stray));

    let second = Platform::start_in(
        directory,
        Quotas::default(),
        node.clone(),
        Limits::default(),
        Some(key),
    )
    .await;
    assert!(!second.owner.key_is_new);
    assert_eq!(second.get(&format!("/sandboxes/{}", kept.id)).await.status(), 200);
    assert_eq!(
        second.get(&format!("/sandboxes/{}", finished.id)).await.status(),
        200
    );
    assert_eq!(cause(&second, &lost.id).await, "platform_restarted");
    assert_eq!(cause(&second, &interrupted.id).await, "platform_restarted");
    assert!(node.status_of(&stray).is_none(), "what nobody wants is deleted");
    let again = async |claim: Claim| {
        let (other, _) = half("x");
        store.reserve(&other, Some(&claim)).await.expect("answers")
    };
    let outcome = again(interrupted_claim).await;
    assert_eq!(outcome, Reservation::Used(Prior::Unknown));
    let Reservation::Used(Prior::Done(row)) = again(finished_claim).await else {
        panic!("the answer of a create that succeeded can be had");
    };
    assert_eq!(row.sandbox.id, finished.id);
}

#[tokio::test]
async fn a_sandbox_that_is_being_created_is_let_be() {
    let limits = Limits {
        reconcile: Duration::from_millis(10),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    let request = platform
        .request(reqwest::Method::POST, "/v2/sandboxes")
        .json(&serde_json::json!({"templateID": "gated"}));
    let create = tokio::spawn(request.send());
    eventually("the node is asked", async || {
        !platform.node.creates.lock().expect("not poisoned").is_empty()
    })
    .await;
    let id = platform.node.creates.lock().expect("not poisoned")[0].id.clone();
    let before = platform.node.lists.load(Ordering::SeqCst);
    eventually("several comparisons go by", async || {
        platform.node.lists.load(Ordering::SeqCst) >= before + 3
    })
    .await;
    let row = platform
        .store
        .sandbox(&id)
        .await
        .expect("reads")
        .expect("is there");
    assert_eq!(
        (row.state, row.end_cause),
        (SandboxState::Creating, None::<EndCause>)
    );
    platform.node.gate.notify_one();
    assert_eq!(create.await.expect("joins").expect("answers").status(), 201);
}

#[tokio::test]
async fn what_the_node_has_adopted_lives_on_as_the_node_says() {
    let node = FakeNode::new();
    let first = Platform::start_with(Quotas::default(), node.clone(), Limits::default()).await;
    let (running, paused, moved) = (first.create().await, first.create().await, first.create().await);
    let (directory, key) = (first.directory.clone(), first.owner.key.clone());
    // As after a kill; what happens from now on is in no store.
    first.server.abort();
    node.pause(&paused.id).await.expect("pauses");
    let later = Timestamp::now() + SignedDuration::from_secs(3000);
    node.set_deadline(&moved.id, later).await.expect("moves");
    node.crash(&running.id, false);

    let second = Platform::start_in(
        directory,
        Quotas::default(),
        node.clone(),
        Limits::default(),
        Some(key),
    )
    .await;
    assert_eq!(cause(&second, &running.id).await, "vmm_failed");
    let info = async |id: &SandboxId| {
        let info: Value = second
            .get(&format!("/sandboxes/{id}"))
            .await
            .json()
            .await
            .expect("json");
        info
    };
    assert_eq!(info(&paused.id).await["state"], "paused");
    let moved_info = info(&moved.id).await;
    assert_eq!(moved_info["state"], "running");
    let end: Timestamp = moved_info["endAt"].as_str().expect("text").parse().expect("time");
    assert_eq!(end.as_microsecond(), later.as_microsecond());
    // The cause can still be read once it was deleted as well.
    assert_eq!(
        second
            .delete(&format!("/sandboxes/{}", running.id))
            .await
            .status(),
        404
    );
    assert_eq!(cause(&second, &running.id).await, "vmm_failed");
}

#[tokio::test]
async fn what_is_older_than_a_new_store_is_left_to_its_deadline() {
    let node = FakeNode::new();
    let first = Platform::start_with(Quotas::default(), node.clone(), Limits::default()).await;
    let sandbox = first.create().await;
    first.server.abort();
    // Another directory: the store is lost, and the machines are not.
    let limits = || Limits {
        reconcile: Duration::from_millis(20),
        ..Limits::default()
    };
    let second = Platform::start_with(Quotas::default(), node.clone(), limits()).await;
    let compared = async || {
        let before = node.lists.load(Ordering::SeqCst);
        eventually("several comparisons go by", async || {
            node.lists.load(Ordering::SeqCst) >= before + 3
        })
        .await;
    };
    compared().await;
    assert!(node.status_of(&sandbox.id).is_some());
    // The store is no longer new, and knows as little of it.
    let (directory, key) = (second.directory.clone(), second.owner.key.clone());
    second.stop().await;
    let third = Platform::start_in(directory, Quotas::default(), node.clone(), limits(), Some(key)).await;
    compared().await;
    assert!(node.status_of(&sandbox.id).is_some());
    assert_eq!(
        third.get(&format!("/sandboxes/{}", sandbox.id)).await.status(),
        404
    );
}

#[tokio::test]
async fn a_node_that_cannot_say_how_a_sandbox_is_ends_none() {
    let limits = Limits {
        reconcile: Duration::from_millis(20),
        ..Limits::default()
    };
    let platform = Platform::start_with(Quotas::default(), FakeNode::new(), limits).await;
    let sandbox = platform.create().await;
    platform.node.mute.store(true, Ordering::SeqCst);
    let status = platform.node.status_of(&sandbox.id).expect("is live");
    platform.node.lose(&sandbox.id);
    let before = platform.node.lists.load(Ordering::SeqCst);
    eventually("several comparisons go by", async || {
        platform.node.lists.load(Ordering::SeqCst) >= before + 3
    })
    .await;
    platform.node.stray(status);
    platform.node.mute.store(false, Ordering::SeqCst);
    assert_eq!(
        platform.get(&format!("/sandboxes/{}", sandbox.id)).await.status(),
        200
    );
}
