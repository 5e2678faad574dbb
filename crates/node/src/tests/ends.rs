//! Why sandboxes end.

use std::sync::atomic::Ordering;

use space_api::lifecycle::EndCause;
use space_vmm::ExitReason;

use super::*;
use crate::{EndRecord, NodeError, SandboxEvent, locked};

async fn end_of(fixture: &Fixture, id: &SandboxId) -> EndRecord {
    let start = std::time::Instant::now();
    loop {
        match fixture.node.status(id).await {
            Err(NodeError::NotFound { end: Some(end), .. }) => return *end,
            Err(other) => panic!("{other:?}"),
            Ok(_) => assert!(start.elapsed() < SOON, "it does not end"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn each_exit_of_the_machine_is_a_typed_cause_and_ends_the_streams() {
    let fixture = Fixture::new().await;
    let long = "x".repeat(5000);
    for (reason, cause) in [
        (ExitReason::GuestShutdown, EndCause::GuestShutdown),
        (
            ExitReason::GuestPanicked {
                console: String::new(),
            },
            EndCause::GuestFailed {
                detail: "the console".to_owned(),
            },
        ),
        (ExitReason::OutOfMemory, EndCause::OutOfMemory),
        (
            ExitReason::MonitorFailed { detail: long.clone() },
            EndCause::VmmFailed {
                detail: long[..2048].to_owned(),
            },
        ),
        (
            ExitReason::Killed,
            EndCause::VmmFailed {
                detail: "the monitor was killed".to_owned(),
            },
        ),
    ] {
        let mut events = fixture.node.events();
        let request = request();
        within(fixture.node.create(request.clone()))
            .await
            .expect("is created");
        let data = within(fixture.node.data(&request.id)).await.expect("opens");
        fixture.life(&request.id).expect("lives").exits(reason);
        let end = end_of(&fixture, &request.id).await;
        assert_eq!(end.cause, cause);
        assert_eq!(fixture.leftovers(), Vec::<String>::new());
        until("the data session is closed", || data.is_closed()).await;
        assert!(matches!(within(events.recv()).await, Ok(SandboxEvent::Ready(_))));
        assert_eq!(within(events.recv()).await, Ok(SandboxEvent::Ended(end)));
    }
    fixture.close().await;
}

#[tokio::test]
async fn a_deadline_can_be_moved_and_then_holds() {
    let fixture = Fixture::new().await;
    let mut first = request();
    first.deadline = Timestamp::now() + 400.milliseconds();
    let moved = CreateSandbox {
        id: SandboxId::random(),
        ..first.clone()
    };
    within(fixture.node.create(first.clone()))
        .await
        .expect("is created");
    within(fixture.node.create(moved.clone()))
        .await
        .expect("is created");
    let later = crate::sandbox::as_recorded(Timestamp::now() + 1.hour());
    within(fixture.node.set_deadline(&moved.id, later))
        .await
        .expect("lives");
    assert_eq!(
        fixture.node.status(&moved.id).await.expect("lives").deadline,
        later
    );

    let end = end_of(&fixture, &first.id).await;
    assert_eq!(end.cause, EndCause::Deadline);
    assert!(end.ended_at >= first.deadline, "not before its time");
    assert!(fixture.node.status(&moved.id).await.is_ok());
    within(fixture.node.set_deadline(&moved.id, Timestamp::UNIX_EPOCH))
        .await
        .expect("lives");
    assert_eq!(end_of(&fixture, &moved.id).await.cause, EndCause::Deadline);
    let gone = within(fixture.node.set_deadline(&moved.id, later)).await;
    assert!(matches!(gone, Err(NodeError::NotFound { .. })), "{gone:?}");

    let late = CreateSandbox {
        deadline: Timestamp::now() - 1.second(),
        ..request()
    };
    let refused = within(fixture.node.create(late)).await;
    assert!(
        matches!(&refused, Err(NodeError::NotFound { end: Some(end), .. }) if end.cause == EndCause::Deadline),
        "{refused:?}"
    );
    fixture.close().await;
}

#[tokio::test]
async fn a_daemon_that_is_silent_for_too_long_is_a_failed_guest() {
    let fixture = Fixture::with(|config| {
        config.limits.health_interval = Duration::from_millis(10);
        config.limits.health_answer = Duration::from_millis(30);
        config.limits.health_misses = 3;
    })
    .await;
    let request = request();
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    let life = fixture.life(&request.id).expect("lives");
    until("it has answered more often than it may be silent", || {
        locked(&life.guest.known).health > 6
    })
    .await;
    assert!(
        fixture.node.status(&request.id).await.is_ok(),
        "it answers, so it lives"
    );
    fixture.world.mute.store(true, Ordering::SeqCst);
    let end = end_of(&fixture, &request.id).await;
    assert!(
        matches!(&end.cause, EndCause::GuestFailed { detail } if detail.contains("not answered 3 times")),
        "{end:?}"
    );
    fixture.close().await;
}

#[tokio::test]
async fn use_is_sampled_in_the_background() {
    let fixture = Fixture::with(|config| config.limits.usage_interval = Duration::from_millis(5)).await;
    let request = request();
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    let handle = fixture.node.shared.registry.find(&request.id).expect("lives");
    until("there are samples", || handle.history.all().len() >= 3).await;
    let samples = within(fixture.node.usage(&request.id)).await.expect("lives");
    assert!(
        samples.len() >= 4 && samples.is_sorted_by_key(|sample| sample.at),
        "{samples:?}"
    );
    fixture.close().await;
}
