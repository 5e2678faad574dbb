//! One manager at a time, and what the next one does about a crash.

use space_api::lifecycle::EndCause;

use super::*;
use crate::{LockError, NodeError, fakes::Fault};

#[tokio::test]
async fn a_second_manager_is_refused_and_does_no_harm() {
    let fixture = Fixture::new().await;
    let request = request();
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    let second = open(config(fixture.directory.path()), &fixture.world).await;
    assert!(
        matches!(second, Err(OpenError::Lock(LockError::Held { .. }))),
        "{second:?}"
    );
    // Another data directory does not help: the machines' directory is locked as well.
    let mut beside = config(fixture.directory.path());
    beside.data_directory = fixture.directory.path().join("other");
    let second = open(beside, &fixture.world).await;
    assert!(
        matches!(second, Err(OpenError::Lock(LockError::Held { .. }))),
        "{second:?}"
    );
    assert!(fixture.life(&request.id).is_some(), "its machine was swept");
    within(fixture.node.data(&request.id)).await.expect("it lives on");
    fixture.close().await;
}

#[tokio::test]
async fn shutting_down_ends_all_whatever_their_state_and_lets_nobody_in() {
    let fixture = Fixture::new().await;
    let running = request();
    within(fixture.node.create(running.clone()))
        .await
        .expect("is created");
    fixture.world.inject("start", Fault::Hang);
    let stuck = request();
    let node = fixture.node.clone();
    let creating = tokio::spawn(async move { node.create(stuck).await });
    until("both are in", || fixture.node.shared.registry.len() == 2).await;
    within(async { tokio::join!(fixture.node.shutdown(), fixture.node.shutdown()) }).await;
    assert!(within(creating).await.expect("no panic").is_err());
    let late = within(fixture.node.create(request())).await;
    assert!(matches!(late, Err(NodeError::ShuttingDown)), "{late:?}");
    let world = fixture.world.clone();
    let directory = fixture.directory.clone();
    fixture.close().await;

    world.mend();
    let again = open(config(directory.path()), &world)
        .await
        .expect("its locks are free");
    let ends = again.ends_since(Timestamp::UNIX_EPOCH).await.expect("reads");
    assert_eq!(ends.len(), 2);
    assert!(
        ends.iter().all(|end| end.cause == EndCause::PlatformShutdown),
        "{ends:?}"
    );
    again.shutdown().await;
}

#[tokio::test]
async fn bad_configurations_are_refused_with_what_to_do() {
    let directory = directory();
    let world = World::new();
    let refused = |change: fn(&mut NodeConfig)| {
        let mut config = config(directory.path());
        change(&mut config);
        let world = world.clone();
        async move { open(config, &world).await.expect_err("refused").to_string() }
    };
    assert!(refused(|config| config.uids = 0..100).await.contains("user id"));
    assert!(
        refused(|config| config.uids = 1000..1001)
            .await
            .contains("user id")
    );
    assert!(refused(|config| config.capacity = 0).await.contains("at least 1"));
    assert!(
        refused(|config| config.run_directory = "relative".into())
            .await
            .contains("absolute")
    );
    let long = refused(|config| config.run_directory.push("x".repeat(60))).await;
    assert!(long.contains("shorter"), "{long}");
    let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs_err::set_permissions(directory.path(), closed).expect("ours");
    let closed = refused(|_| {}).await;
    assert!(closed.contains("chmod o+x"), "{closed}");
}
