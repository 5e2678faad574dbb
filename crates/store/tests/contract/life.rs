//! States and events.

use jiff::{SignedDuration, Timestamp};
use space_api::{
    lifecycle::{EndCause, SandboxState},
    rest::Quotas,
};
use space_store::{End, EventsOf, MAX_FAILED, NewSandbox};

use crate::{deleted, filter, kinds, project, project_with, ready, run, sandbox, store};

#[tokio::test]
async fn pausing_and_resuming_are_recorded_once_each() {
    let (store, _directory) = store().await;
    let project = project(&store, "p", Quotas::default()).await;
    let new = sandbox(&project);
    store.reserve(&new, None).await.expect("reserves");
    assert!(
        !store
            .set_paused(&new.id, 1, true, "too early")
            .await
            .expect("runs"),
        "what is being made cannot be paused"
    );
    assert!(store.mark_running(&new.id, 1, &ready()).await.expect("marks"));
    let set = |paused| {
        let (store, id) = (store.clone(), new.id.clone());
        async move { store.set_paused(&id, 1, paused, "asked").await.expect("runs") }
    };
    assert!(!set(false).await, "it runs");
    assert!(set(true).await);
    assert!(!set(true).await, "twice is once");
    let row = store.sandbox(&new.id).await.expect("reads").expect("is there");
    assert_eq!(row.state, SandboxState::Paused);
    assert_eq!(store.live().await.expect("lists").len(), 1);
    assert_eq!(store.usage(&project.id).await.expect("counts").sandboxes, 1);
    let listed = |state| {
        let (store, project, filter) = (store.clone(), project.id.clone(), filter(&[state]));
        async move { store.list(&project, &filter).await.expect("lists").rows.len() }
    };
    assert_eq!(listed(SandboxState::Paused).await, 1);
    assert_eq!(listed(SandboxState::Running).await, 0);
    assert!(
        !store.set_paused(&new.id, 2, false, "x").await.expect("runs"),
        "another life"
    );
    assert!(set(false).await);
    assert!(set(true).await);
    assert!(store.end(&new.id, &deleted(), false).await.expect("ends"));
    assert!(!set(false).await, "it has ended");
    assert_eq!(
        kinds(&store, &new.id).await,
        ["creating", "running", "paused", "resumed", "paused", "ended"]
    );
}

#[tokio::test]
async fn events_are_read_from_where_one_left_off_and_told_of() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let stranger = project_with(&store, "q").await;
    let mut changes = store.changes();
    let (one, two) = (sandbox(&project), sandbox(&project));
    run(&store, &one).await;
    assert!(changes.has_changed().expect("open"));
    changes.mark_unchanged();
    run(&store, &sandbox(&stranger)).await;
    run(&store, &two).await;
    store.end(&one.id, &deleted(), false).await.expect("ends");
    assert!(changes.has_changed().expect("open"));
    changes.mark_unchanged();
    assert!(!store.end(&one.id, &deleted(), false).await.expect("runs"));
    assert!(!changes.has_changed().expect("open"), "nothing happened");

    let of_project = EventsOf::Project(&project.id);
    let mut seen = Vec::new();
    let mut after = 0;
    loop {
        let page = store.events(of_project, after, 2).await.expect("reads");
        assert!(page.len() <= 2);
        let Some(last) = page.last() else { break };
        after = last.id;
        seen.extend(page.into_iter().map(|event| (event.sandbox, event.kind)));
    }
    let wanted = [
        (&one, "creating"),
        (&one, "running"),
        (&two, "creating"),
        (&two, "running"),
        (&one, "ended"),
    ];
    let wanted: Vec<_> = wanted
        .iter()
        .map(|(s, kind)| (s.id.clone(), (*kind).to_owned()))
        .collect();
    assert_eq!(seen, wanted);
    assert_eq!(store.last_event().await.expect("reads"), after);

    let at = Timestamp::from_second(1_800_000_000).expect("in range");
    let note = async |of: &NewSandbox| {
        store
            .note(&of.id, at, "agent_out_of_memory", "1 killed")
            .await
            .expect("writes")
    };
    assert!(!note(&one).await, "it has ended");
    assert!(note(&two).await);
    let page = store.events(of_project, after, 2).await.expect("reads");
    let noted: Vec<_> = page
        .iter()
        .map(|e| (&e.sandbox, e.kind.as_str(), e.detail.as_str(), e.at))
        .collect();
    assert_eq!(noted, [(&two.id, "agent_out_of_memory", "1 killed", at)]);
    assert!(changes.has_changed().expect("open"));
}

#[tokio::test]
async fn a_life_is_recorded_from_reservation_to_end() {
    let (store, _directory) = store().await;
    let project = project(&store, "p", Quotas::default()).await;
    let mut new = sandbox(&project);
    new.metadata.insert("k \u{1f600}".into(), "v'\";--".into());
    run(&store, &new).await;
    let row = store.sandbox(&new.id).await.expect("reads").expect("is there");
    assert_eq!(row.state, SandboxState::Running);
    assert_eq!(row.sandbox.template, "base:latest");
    assert_eq!(row.sandbox.metadata, new.metadata);
    assert_eq!(row.sandbox.access_token.as_deref(), Some("secret"));
    assert_eq!(row.ready_ms, Some(61.5));
    assert!(!format!("{row:?}").contains("secret"), "tokens are not printed");

    let later = new.deadline + SignedDuration::from_secs(60);
    assert!(store.set_deadline(&new.id, later).await.expect("sets"));
    let mut wrong_life = deleted();
    wrong_life.generation = 2;
    assert!(!store.end(&new.id, &wrong_life, false).await.expect("runs"));
    assert!(store.end(&new.id, &deleted(), false).await.expect("ends"));
    let mut second = deleted();
    second.cause = EndCause::OutOfMemory;
    assert!(
        !store.end(&new.id, &second, false).await.expect("runs"),
        "the first end wins"
    );
    assert!(!store.mark_running(&new.id, 1, &ready()).await.expect("runs"));
    assert!(!store.set_deadline(&new.id, later).await.expect("runs"));

    let row = store.sandbox(&new.id).await.expect("reads").expect("is kept");
    assert_eq!(row.state, SandboxState::Ended);
    assert_eq!(row.end_cause, Some(EndCause::Deleted));
    assert_eq!(row.cpu_micros, Some(7));
    assert_eq!(kinds(&store, &new.id).await, ["creating", "running", "ended"]);
    assert!(store.live().await.expect("lists").is_empty());
    assert_eq!(
        store
            .prune(Timestamp::now() + SignedDuration::from_secs(1), Timestamp::MIN)
            .await
            .expect("prunes"),
        1
    );
    assert_eq!(store.sandbox(&new.id).await.expect("reads"), None);
}

#[tokio::test]
async fn creates_that_failed_are_forgotten_sooner_and_but_for_the_last_of_them() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let now = Timestamp::now();
    let failed = async |seconds_ago: i64| {
        let new = sandbox(&project);
        store.reserve(&new, None).await.expect("reserves");
        let end = End {
            cause: EndCause::CreateFailed { detail: "no".into() },
            ended_at: now - SignedDuration::from_secs(seconds_ago),
            ..deleted()
        };
        assert!(store.end(&new.id, &end, true).await.expect("ends"));
        new.id
    };
    let ran = sandbox(&project);
    run(&store, &ran).await;
    let end = End {
        ended_at: now - SignedDuration::from_secs(200),
        ..deleted()
    };
    assert!(store.end(&ran.id, &end, false).await.expect("ends"));
    let (old, recent) = (failed(200).await, failed(50).await);
    let hundred_ago = now - SignedDuration::from_secs(100);
    assert_eq!(store.prune(Timestamp::MIN, hundred_ago).await.expect("prunes"), 1);
    let is_there = async |id| store.sandbox(id).await.expect("reads").is_some();
    assert!(!is_there(&old).await && is_there(&recent).await && is_there(&ran.id).await);
    assert!(kinds(&store, &old).await.is_empty(), "nor its events are kept");

    for _ in 0..MAX_FAILED {
        failed(10).await;
    }
    assert_eq!(store.prune(Timestamp::MIN, hundred_ago).await.expect("prunes"), 1);
    assert!(!is_there(&recent).await && is_there(&ran.id).await);
}
