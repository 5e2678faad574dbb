//! A create that fails, at each of its steps, leaves nothing.

use space_api::lifecycle::{EndCause, SandboxState};

use super::*;
use crate::{NodeError, fakes::Fault, locked};

/// Every step of a create that acts on the host or speaks to the guest, in order.
const STEPS: [&str; 12] = [
    "ensure_machine",
    "create_network",
    "create_group",
    "create_disk_layer",
    "give_file",
    "start",
    "control_port",
    "hello",
    "identity",
    "resume",
    "data_port",
    "init",
];

fn with_environment() -> CreateSandbox {
    CreateSandbox {
        environment: [("A".to_owned(), "B".to_owned())].into(),
        ..request()
    }
}

async fn fixture_with(step: &'static str, fault: Fault) -> Fixture {
    let world = World::new();
    // Before the node opens, for the sake of the networks that are made ahead.
    world.inject(step, fault);
    Fixture::on(world, |config| config.limits.ask = Duration::from_millis(200)).await
}

#[tokio::test]
async fn each_step_that_fails_is_undone_and_named() {
    for step in STEPS {
        let fixture = fixture_with(step, Fault::Fail).await;
        let request = with_environment();
        let failed = within(fixture.node.create(request.clone())).await;
        assert!(
            matches!(&failed, Err(NodeError::CreateFailed { id, .. }) if *id == request.id),
            "{step}: {failed:?}"
        );
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{step}");
        let end = match fixture.node.status(&request.id).await {
            Err(NodeError::NotFound { end: Some(end), .. }) => end,
            other => panic!("{step}: {other:?}"),
        };
        assert!(
            matches!(end.cause, EndCause::CreateFailed { .. }),
            "{step}: {end:?}"
        );
        if step != "ensure_machine" {
            // What was begun is recorded as ended.
            let ends = fixture
                .node
                .ends_since(Timestamp::UNIX_EPOCH)
                .await
                .expect("reads");
            assert_eq!(ends, [*end], "{step}");
        }
        fixture.world.mend();
        within(fixture.node.create(with_environment()))
            .await
            .expect("the next one is fine");
        fixture.close().await;
    }
}

#[tokio::test]
async fn each_step_that_panics_is_undone() {
    for step in [
        "create_group",
        "create_disk_layer",
        "start",
        "resume",
        "data_port",
    ] {
        let fixture = Fixture::new().await;
        fixture.world.inject(step, Fault::Panic);
        let failed = within(fixture.node.create(with_environment())).await;
        assert!(
            matches!(&failed, Err(NodeError::CreateFailed { .. })),
            "{step}: {failed:?}"
        );
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{step}");
        fixture.world.mend();
        fixture.close().await;
    }
}

#[tokio::test]
async fn a_full_disk_is_no_capacity() {
    for step in ["create_network", "create_disk_layer"] {
        let fixture = fixture_with(step, Fault::Full).await;
        let failed = within(fixture.node.create(request())).await;
        assert!(
            matches!(&failed, Err(NodeError::NoCapacity { what, .. }) if what.starts_with("disk")),
            "{failed:?}"
        );
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{step}");
        fixture.close().await;
    }
}

#[tokio::test]
async fn deleting_during_each_step_ends_it_and_tells_both() {
    for step in ["ensure_machine", "start", "hello", "identity", "init"] {
        let fixture = Fixture::with(|config| config.limits.stop = Duration::from_secs(5)).await;
        fixture.world.inject(step, Fault::Hang);
        let request = with_environment();
        let id = request.id.clone();
        let node = fixture.node.clone();
        let creating = tokio::spawn(async move { node.create(request).await });
        until("it hangs in the step", || fixture.world.hanging() > 0).await;
        let seen = fixture.node.status(&id).await.expect("is known").state;
        assert_eq!(seen, SandboxState::Creating);
        let data = fixture.node.data(&id).await;
        assert!(matches!(data, Err(NodeError::Transitioning { .. })), "{data:?}");
        let end = within(fixture.node.delete(&id)).await.expect("is ended");
        assert_eq!(end.cause, EndCause::Deleted, "{step}");
        let told = within(creating).await.expect("no panic");
        assert!(
            matches!(&told, Err(NodeError::NotFound { end: Some(known), .. }) if **known == end),
            "{told:?}"
        );
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{step}");
        fixture.world.mend();
        fixture.close().await;
    }
}

#[tokio::test]
async fn a_create_that_takes_too_long_says_where() {
    let fixture = Fixture::with(|config| config.limits.create = Duration::from_millis(100)).await;
    fixture.world.inject("start", Fault::Hang);
    let failed = within(fixture.node.create(request())).await;
    assert!(
        matches!(&failed, Err(NodeError::CreateFailed { step, .. }) if step.contains("starting the machine")),
        "{failed:?}"
    );
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
    fixture.close().await;
}

#[tokio::test]
async fn what_cannot_be_removed_in_time_is_removed_later_and_its_user_id_stays_taken() {
    let fixture = Fixture::with(|config| config.limits.stop = Duration::from_millis(100)).await;
    let request = request();
    let status = within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    fixture.world.inject("delete_group", Fault::Fail);
    let end = within(fixture.node.delete(&request.id))
        .await
        .expect("ends all the same");
    assert_eq!(end.cause, EndCause::Deleted);
    assert_eq!(
        fixture.leftovers(),
        [format!("group {}", status.machine), "1 user ids".to_owned()]
    );
    fixture.world.mend();
    tokio::time::timeout(Duration::from_secs(20), async {
        while !fixture.leftovers().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the janitor comes");
    fixture.close().await;
}

#[tokio::test]
async fn starts_are_bounded_and_all_get_their_turn() {
    let fixture = Fixture::with(|config| config.concurrent_starts = 3).await;
    *locked(&fixture.world.slowness) = Duration::from_millis(3);
    let all = futures_util::future::join_all((0..32).map(|_| fixture.node.create(request())));
    let all = within(all).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    let most = fixture
        .world
        .most_starts
        .load(std::sync::atomic::Ordering::SeqCst);
    assert!((2..=3).contains(&most), "{most} at once");
    fixture.close().await;
}
