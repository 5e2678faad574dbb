//! What is particular to a file: its mode, its versions, its log.

use std::sync::Arc;

use futures_util::future::join_all;
use space_api::{
    id::SandboxId,
    key::ApiKey,
    lifecycle::SandboxState,
    rest::{KeyRole, Quotas},
};
use space_store::{EventsOf, SqliteStore, Store};

use crate::{project_with, run, sandbox, store};

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
async fn a_store_of_the_first_version_is_brought_up_to_date_with_what_is_in_it() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("control.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(&path)
        .create_if_missing(true);
    let pool = sqlx::SqlitePool::connect_with(options).await.expect("opens");
    let migrations = tempfile::tempdir().expect("temporary directory");
    std::fs::write(
        migrations.path().join("0001_first.sql"),
        include_str!("../../migrations/sqlite/0001_first.sql"),
    )
    .expect("writes");
    let first = sqlx::migrate::Migrator::new(migrations.path())
        .await
        .expect("reads");
    first.run(&pool).await.expect("migrates");
    let (key, id) = (ApiKey::random(), SandboxId::random());
    let insert = format!(
        "INSERT INTO projects VALUES ('paaaaaaaaaaaaaaa', 'default', 10, 10, 10000, 1000, 1); \
         INSERT INTO api_keys VALUES ('kaaaaaaaaaaa', 'paaaaaaaaaaaaaaa', 'default', 'e2b_0000', '{}', 1, NULL); \
         INSERT INTO sandboxes VALUES ('{id}', 'paaaaaaaaaaaaaaa', 'base:latest', 'sha256:00', 1, 512, 4096, 1, 'running', \
         '{{\"a\":\"b\"}}', 'token', NULL, NULL, 1000, 2000, NULL, NULL, 61.0, NULL); \
         INSERT INTO events (sandbox_id, at, kind, detail) VALUES ('{id}', 1000, 'running', 'ready');",
        key.hash().as_str()
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(insert))
        .execute(&pool)
        .await
        .expect("inserts");
    pool.close().await;

    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&path).await.expect("opens"));
    let who = store
        .authenticate(&key)
        .await
        .expect("reads")
        .expect("the key is known");
    assert_eq!(who.role, KeyRole::Admin, "it may do what it could do before");
    let row = store.sandbox(&id).await.expect("reads").expect("is there");
    assert_eq!(
        (row.state, row.sandbox.metadata["a"].as_str()),
        (SandboxState::Running, "b")
    );
    assert!(store.set_paused(&id, 1, true, "asked").await.expect("pauses"));
    let events = store
        .events(EventsOf::Project(&who.project.id), 0, 10)
        .await
        .expect("reads");
    let kinds: Vec<_> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["running", "paused"]);
}

#[tokio::test]
async fn upkeep_folds_the_log_into_the_file() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("control.db");
    let open = SqliteStore::open(&path).await.expect("opens");
    let store: Arc<dyn Store> = Arc::new(open);
    let project = project_with(&store, "somewhere-to-be-found").await;
    run(&store, &sandbox(&project)).await;
    let holds = || {
        let bytes = std::fs::read(&path).expect("reads");
        bytes.windows(21).any(|window| window == b"somewhere-to-be-found")
    };
    assert!(!holds(), "so far it is in the log");
    store.flush().await.expect("flushes");
    store.maintain().await.expect("maintains");
    assert!(holds());
}

#[tokio::test]
async fn an_unusable_path_is_a_typed_error() {
    let error = SqliteStore::open(std::path::Path::new("/proc/nowhere/control.db"))
        .await
        .expect_err("cannot be");
    assert!(matches!(error, space_store::StoreError::Open { .. }), "{error}");
}
