//! What every metadata store must do. Written against the trait: another implementation joins by one more `stores()` entry.

use std::{collections::BTreeMap, sync::Arc};

use futures_util::future::join_all;
use jiff::{SignedDuration, Timestamp};
use space_api::{
    id::{KeyId, SandboxId},
    key::ApiKey,
    lifecycle::{EndCause, SandboxState},
    rest::Quotas,
    size::SizeClass,
};
use space_store::{
    Claim, End, ListFilter, NewSandbox, Prior, Project, Quota, Ready, Reservation, SortOrder, SqliteStore,
    Store,
};

/// One fresh store with what must outlive it.
async fn store() -> (Arc<dyn Store>, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let store = SqliteStore::open(&directory.path().join("control.db"))
        .await
        .expect("opens");
    (Arc::new(store), directory)
}

async fn project(store: &Arc<dyn Store>, name: &str, quotas: Quotas) -> Project {
    store.create_project(name, quotas).await.expect("project")
}

fn sandbox(project: &Project) -> NewSandbox {
    let now = Timestamp::now();
    NewSandbox {
        id: SandboxId::random(),
        project: project.id.clone(),
        template: "base".into(),
        size: SizeClass::DEFAULT,
        generation: 1,
        metadata: BTreeMap::new(),
        access_token: Some("secret".into()),
        traffic_token: None,
        mask_request_host: None,
        started_at: now,
        deadline: now + SignedDuration::from_secs(300),
    }
}

fn ready() -> Ready {
    Ready {
        template: "base:latest".into(),
        template_digest: "sha256:00".into(),
        size: SizeClass::DEFAULT,
        ready_ms: Some(61.5),
    }
}

fn deleted() -> End {
    End {
        generation: 1,
        cause: EndCause::Deleted,
        ended_at: Timestamp::now(),
        cpu_micros: Some(7),
    }
}

fn filter(states: &[SandboxState]) -> ListFilter {
    ListFilter {
        states: states.to_vec(),
        metadata: BTreeMap::new(),
        template: None,
        started_after: None,
        order: SortOrder::Ascending,
        cursor: None,
        limit: 100,
    }
}

async fn run(store: &Arc<dyn Store>, new: &NewSandbox) {
    assert_eq!(
        store.reserve(new, None).await.expect("reserves"),
        Reservation::Reserved
    );
    assert!(store.mark_running(&new.id, 1, &ready()).await.expect("marks"));
}

#[tokio::test]
async fn a_key_opens_its_project_until_it_is_revoked() {
    let (store, _directory) = store().await;
    let first = store
        .ensure_default_project_and_key(Quotas::default(), None)
        .await
        .expect("bootstrap");
    assert!(first.key_is_new);
    let again = store
        .ensure_default_project_and_key(Quotas::default(), Some(first.key.clone()))
        .await
        .expect("bootstrap");
    assert!(!again.key_is_new);
    assert_eq!(again.project.id, first.project.id);

    let who = store
        .authenticate(&first.key)
        .await
        .expect("reads")
        .expect("known");
    assert_eq!(who.project, first.project);
    assert_eq!(store.authenticate(&ApiKey::random()).await.expect("reads"), None);

    let (record, key) = store.create_key(&first.project.id, "ci").await.expect("key");
    let id: KeyId = record.id.parse().expect("id");
    let other = project(&store, "other", Quotas::default()).await;
    assert!(
        !store.revoke_key(&other.id, &id).await.expect("runs"),
        "another project's key"
    );
    assert!(store.authenticate(&key).await.expect("reads").is_some());
    assert!(store.revoke_key(&first.project.id, &id).await.expect("runs"));
    assert!(store.revoke_key(&first.project.id, &id).await.expect("twice"));
    assert_eq!(store.authenticate(&key).await.expect("reads"), None);
    let listed = store.keys(&first.project.id).await.expect("lists");
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().any(|k| k.id == record.id && k.revoked_at.is_some()));
    assert!(listed.iter().all(|k| k.shown.len() == 8));

    let replaced = store
        .ensure_default_project_and_key(Quotas::default(), Some(key))
        .await
        .expect("bootstrap");
    assert!(replaced.key_is_new, "a revoked key is not kept");
}

#[tokio::test]
async fn a_key_of_an_earlier_installation_is_taken_into_a_new_store() {
    let (store, _directory) = store().await;
    let key = ApiKey::random();
    let outcome = store
        .ensure_default_project_and_key(Quotas::default(), Some(key.clone()))
        .await
        .expect("bootstrap");
    assert!(!outcome.key_is_new);
    assert!(store.authenticate(&key).await.expect("reads").is_some());
}

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
    let kinds: Vec<_> = store
        .events(&new.id)
        .await
        .expect("reads")
        .into_iter()
        .map(|e| e.kind)
        .collect();
    assert_eq!(kinds, ["creating", "running", "ended"]);
    assert!(store.live().await.expect("lists").is_empty());
    assert_eq!(
        store
            .prune(Timestamp::now() + SignedDuration::from_secs(1))
            .await
            .expect("prunes"),
        1
    );
    assert_eq!(store.sandbox(&new.id).await.expect("reads"), None);
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

    let stranger = project_with(&store, "q").await;
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

async fn project_with(store: &Arc<dyn Store>, name: &str) -> Project {
    project(store, name, Quotas::default()).await
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

#[tokio::test]
async fn lists_are_filtered_ordered_and_paged() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let stranger = project_with(&store, "q").await;
    run(&store, &sandbox(&stranger)).await;
    let start = Timestamp::now();
    let mut ids = Vec::new();
    for at in 0..25_i64 {
        let mut new = sandbox(&project);
        // Pairs share an instant, so that the id must break the tie.
        new.started_at = start + SignedDuration::from_secs(at / 2);
        new.metadata.insert("parity".into(), (at % 2).to_string());
        run(&store, &new).await;
        ids.push((new.started_at, new.id));
    }
    ids.sort();
    for order in [SortOrder::Ascending, SortOrder::Descending] {
        let mut wanted: Vec<_> = ids.iter().map(|(_, id)| id.clone()).collect();
        if order == SortOrder::Descending {
            wanted.reverse();
        }
        let mut found = Vec::new();
        let mut query = filter(&[SandboxState::Running]);
        query.order = order;
        query.limit = 7;
        loop {
            let page = store.list(&project.id, &query).await.expect("lists");
            assert!(page.rows.len() <= 7);
            found.extend(page.rows.into_iter().map(|row| row.sandbox.id));
            query.cursor = page.next;
            if query.cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, wanted);
    }
    let mut query = filter(&[SandboxState::Running]);
    query.metadata.insert("parity".into(), "1".into());
    query.limit = 5;
    let page = store.list(&project.id, &query).await.expect("lists");
    assert_eq!(page.rows.len(), 5);
    query.cursor = page.next;
    query.limit = 100;
    assert_eq!(
        store.list(&project.id, &query).await.expect("lists").rows.len(),
        12 - 5
    );

    let mut query = filter(&[SandboxState::Running]);
    query.started_after = Some(start + SignedDuration::from_secs(10));
    assert_eq!(
        store.list(&project.id, &query).await.expect("lists").rows.len(),
        5
    );
    for (template, count) in [
        ("base", 25),
        ("base:latest", 25),
        ("sha256:00", 25),
        ("bas", 0),
        ("base:l", 0),
    ] {
        let mut query = filter(&[SandboxState::Running]);
        query.template = Some(template.into());
        let page = store.list(&project.id, &query).await.expect("lists");
        assert_eq!(page.rows.len(), count, "{template}");
    }
    assert!(
        store
            .list(&project.id, &filter(&[SandboxState::Ended]))
            .await
            .expect("lists")
            .rows
            .is_empty()
    );
    assert!(
        store
            .list(&project.id, &filter(&[]))
            .await
            .expect("lists")
            .rows
            .is_empty()
    );
}

#[tokio::test]
async fn concurrent_flushes_all_answer() {
    let (store, _directory) = store().await;
    let outcomes = join_all((0..64).map(|_| {
        let store = store.clone();
        async move { store.flush().await }
    }))
    .await;
    assert!(outcomes.iter().all(Result::is_ok));
}

#[tokio::test]
async fn the_file_is_private_and_survives_reopening() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("control.db");
    let first = SqliteStore::open(&path).await.expect("opens");
    let made = first
        .ensure_default_project_and_key(Quotas::default(), None)
        .await
        .expect("bootstrap");
    let mode = std::fs::metadata(&path).expect("is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for name in ["control.db-wal", "control.db-shm"] {
        let mode = std::fs::metadata(directory.path().join(name))
            .expect("is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o077, 0, "{name}");
    }
    // Not closed: as after a kill.
    let second = SqliteStore::open(&path).await.expect("opens beside a dead one");
    assert!(second.authenticate(&made.key).await.expect("reads").is_some());
    second.close().await;
    first.close().await;
    let text = std::fs::read(&path).expect("readable");
    let secret = made.key.expose().as_bytes();
    assert!(
        !text.windows(secret.len()).any(|window| window == secret),
        "the key itself is not stored"
    );
}

#[tokio::test]
async fn an_unusable_path_is_a_typed_error() {
    let error = SqliteStore::open(std::path::Path::new("/proc/nowhere/control.db"))
        .await
        .expect_err("cannot be");
    assert!(matches!(error, space_store::StoreError::Open { .. }), "{error}");
}
