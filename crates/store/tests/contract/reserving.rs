//! Quotas, room and idempotency keys: what a create may have.

use futures_util::future::join_all;
use jiff::{SignedDuration, Timestamp};
use space_api::{lifecycle::EndCause, rest::Quotas, size::SizeClass};
use space_store::{Claim, End, NodeCapacity, Prior, Project, Quota, Reservation, Room};

use crate::{deleted, project, project_with, ready, run, sandbox, store};

#[tokio::test]
async fn of_a_hundred_at_once_exactly_as_many_as_the_quota_are_reserved() {
    let (store, _directory) = store().await;
    let quotas = Quotas {
        max_sandboxes: 10,
        ..Quotas::default()
    };
    let project = project(&store, "p", quotas).await;
    let outcomes = join_all((0..100).map(|_| {
        let (store, new) = (store.clone(), sandbox(&project));
        async move { store.reserve(&new, None).await.expect("answers") }
    }))
    .await;
    let reserved = outcomes.iter().filter(|o| **o == Reservation::Reserved).count();
    assert_eq!(reserved, 10);
    assert!(outcomes.iter().all(|o| matches!(
        o,
        Reservation::Reserved
            | Reservation::QuotaExceeded {
                quota: Quota::Sandboxes,
                limit: 10
            }
    )));
    assert_eq!(store.usage(&project.id).await.expect("counts").sandboxes, 10);

    let one = store.live().await.expect("lists").remove(0);
    assert!(store.end(&one.sandbox.id, &deleted(), false).await.expect("ends"));
    assert_eq!(
        store.reserve(&sandbox(&project), None).await.expect("answers"),
        Reservation::Reserved,
        "an end gives the place back"
    );
}

#[tokio::test]
async fn vcpus_and_memory_are_limited_too() {
    let (store, _directory) = store().await;
    let quotas = Quotas {
        max_vcpus: 3,
        max_memory_mib: 1024,
        ..Quotas::default()
    };
    let project = project(&store, "p", quotas).await;
    let mut big = sandbox(&project);
    big.size = SizeClass::new(4, 512, 4096).expect("size");
    let outcome = store.reserve(&big, None).await.expect("answers");
    assert_eq!(
        outcome,
        Reservation::QuotaExceeded {
            quota: Quota::Vcpus,
            limit: 3
        }
    );
    big.size = SizeClass::new(1, 2048, 4096).expect("size");
    let outcome = store.reserve(&big, None).await.expect("answers");
    assert_eq!(
        outcome,
        Reservation::QuotaExceeded {
            quota: Quota::Memory,
            limit: 1024
        }
    );
}

#[tokio::test]
async fn of_a_hundred_at_once_exactly_as_many_as_the_node_holds_are_reserved() {
    let (store, _directory) = store().await;
    let node = |max_sandboxes, max_memory_mib| NodeCapacity {
        name: "local".into(),
        max_sandboxes,
        max_memory_mib,
    };
    store.register_node(&node(10, None)).await.expect("registers");
    let projects = [
        project(&store, "p", Quotas::default()).await,
        project(&store, "q", Quotas::default()).await,
    ];
    let outcomes = join_all((0..100).map(|at| {
        let (store, new) = (store.clone(), sandbox(&projects[at % 2]));
        async move { store.reserve(&new, None).await.expect("answers") }
    }))
    .await;
    let reserved = outcomes.iter().filter(|o| **o == Reservation::Reserved).count();
    assert_eq!(reserved, 10);
    let full = Reservation::NodeFull {
        room: Room::Sandboxes,
        limit: 10,
    };
    assert_eq!(outcomes.iter().filter(|o| **o == full).count(), 90);

    // Paused ones hold their place; ended ones do not.
    let mut live = store.live().await.expect("lists");
    let (first, second) = (live.remove(0).sandbox, live.remove(0).sandbox);
    assert!(store.mark_running(&first.id, 1, &ready()).await.expect("marks"));
    assert!(
        store
            .set_paused(&first.id, 1, true, "asked")
            .await
            .expect("pauses")
    );
    let again = || async {
        let new = sandbox(&projects[0]);
        store.reserve(&new, None).await.expect("answers")
    };
    assert_eq!(again().await, full);
    assert!(store.end(&second.id, &deleted(), false).await.expect("ends"));
    assert_eq!(again().await, Reservation::Reserved);
    assert_eq!(again().await, full);

    // Ten of 512 MiB are there.
    store.register_node(&node(100, Some(6000))).await.expect("again");
    assert_eq!(again().await, Reservation::Reserved);
    assert_eq!(
        again().await,
        Reservation::NodeFull {
            room: Room::Memory,
            limit: 6000
        }
    );
    let mut elsewhere = sandbox(&projects[0]);
    elsewhere.node = "other".into();
    assert_eq!(
        store.reserve(&elsewhere, None).await.expect("answers"),
        Reservation::Reserved,
        "another node has room of its own"
    );
}

#[tokio::test]
async fn a_refused_reservation_leaves_its_idempotency_key_free() {
    let (store, _directory) = store().await;
    let quotas = Quotas {
        max_sandboxes: 1,
        ..Quotas::default()
    };
    let project = project(&store, "p", quotas).await;
    let first = sandbox(&project);
    run(&store, &first).await;
    let claim = Claim {
        key: "k".into(),
        request_hash: "h".into(),
        now: Timestamp::now(),
    };
    let again = || async {
        let new = sandbox(&project);
        store.reserve(&new, Some(&claim)).await.expect("answers")
    };
    assert!(matches!(again().await, Reservation::QuotaExceeded { .. }));
    store.end(&first.id, &deleted(), false).await.expect("ends");
    assert_eq!(again().await, Reservation::Reserved);
}

#[tokio::test]
async fn an_idempotency_key_is_used_once() {
    let (store, _directory) = store().await;
    let project = project(&store, "p", Quotas::default()).await;
    let claim = |hash: &str| Claim {
        key: "k-1".into(),
        request_hash: hash.into(),
        now: Timestamp::now(),
    };
    let new = sandbox(&project);
    let first = store.reserve(&new, Some(&claim("a"))).await.expect("answers");
    assert_eq!(first, Reservation::Reserved);
    let second = |hash: &'static str| {
        let (store, other, claim) = (store.clone(), sandbox(&project), claim(hash));
        async move { store.reserve(&other, Some(&claim)).await.expect("answers") }
    };
    assert_eq!(second("a").await, Reservation::Used(Prior::InProgress));
    assert_eq!(second("b").await, Reservation::Used(Prior::Mismatch));
    store.mark_running(&new.id, 1, &ready()).await.expect("marks");
    let Reservation::Used(Prior::Done(row)) = second("a").await else {
        panic!("the answer is remembered");
    };
    assert_eq!(row.sandbox.id, new.id);
    assert_eq!(second("b").await, Reservation::Used(Prior::Mismatch));
    assert_eq!(
        store.usage(&project.id).await.expect("counts").sandboxes,
        1,
        "nothing else was written"
    );

    let prior =
        async |project: &Project, claim: Claim| store.prior(&project.id, &claim).await.expect("answers");
    assert!(matches!(prior(&project, claim("a")).await, Some(Prior::Done(row)) if row.sandbox.id == new.id));
    assert_eq!(prior(&project, claim("b")).await, Some(Prior::Mismatch));
    let stranger = project_with(&store, "q").await;
    assert_eq!(prior(&stranger, claim("a")).await, None);
    let outcome = store
        .reserve(&sandbox(&stranger), Some(&claim("b")))
        .await
        .expect("answers");
    assert_eq!(outcome, Reservation::Reserved, "keys are per project");

    let expired = Claim {
        now: Timestamp::now() + SignedDuration::from_hours(25),
        ..claim("b")
    };
    let outcome = store
        .reserve(&sandbox(&project), Some(&expired))
        .await
        .expect("answers");
    assert_eq!(outcome, Reservation::Reserved, "a day later it is free");
}

#[tokio::test]
async fn claims_of_undone_and_interrupted_creates_are_settled() {
    let (store, _directory) = store().await;
    let project = project(&store, "p", Quotas::default()).await;
    let claim = |key: &str| Claim {
        key: key.into(),
        request_hash: "h".into(),
        now: Timestamp::now(),
    };
    let failed = sandbox(&project);
    store
        .reserve(&failed, Some(&claim("failed")))
        .await
        .expect("answers");
    let end = End {
        cause: EndCause::CreateFailed { detail: "no".into() },
        ..deleted()
    };
    assert!(store.end(&failed.id, &end, true).await.expect("ends"));
    let retried = store
        .reserve(&sandbox(&project), Some(&claim("failed")))
        .await
        .expect("answers");
    assert_eq!(
        retried,
        Reservation::Reserved,
        "an undone create may be tried again"
    );

    let interrupted = sandbox(&project);
    store
        .reserve(&interrupted, Some(&claim("interrupted")))
        .await
        .expect("answers");
    store.end(&interrupted.id, &end, false).await.expect("ends");
    assert_eq!(store.settle_claims().await.expect("settles"), 2);
    let outcome = store
        .reserve(&sandbox(&project), Some(&claim("interrupted")))
        .await
        .expect("answers");
    assert_eq!(outcome, Reservation::Used(Prior::Unknown));
}
