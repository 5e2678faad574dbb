//! Standing still and going on.

use space_api::lifecycle::{EndCause, SandboxState};
use space_vmm::ExitReason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::{
    NodeError, SandboxEvent, TunnelError, WakeReason,
    fakes::{Fault, guest::ECHO_PORT},
    locked,
};

async fn created(fixture: &Fixture) -> SandboxId {
    let request = request();
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    request.id
}

async fn end_of(fixture: &Fixture, id: &SandboxId) -> EndCause {
    let mut seen = None;
    until("it has ended", || {
        seen = fixture.node.shared.registry.recent_end(id);
        seen.is_some()
    })
    .await;
    seen.expect("has ended").cause
}

#[tokio::test]
async fn a_paused_sandbox_stands_still_and_goes_on_where_it_was() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    let id = created(&fixture).await;
    let life = fixture.life(&id).expect("lives");
    let mut events = node.events();
    let mut tunnel = within(node.tunnel(&id, ECHO_PORT)).await.expect("opens");

    let paused = within(node.pause(&id)).await.expect("is paused");
    assert_eq!(paused.state, SandboxState::Paused);
    assert!(paused.paused_at.is_some() && paused.idle_since.is_some());
    assert!(!life.runs());
    assert_eq!(
        within(node.pause(&id)).await.expect("again"),
        paused,
        "it is paused already"
    );
    for refused in [
        within(node.data(&id)).await.map(drop).err(),
        match within(node.tunnel(&id, ECHO_PORT)).await {
            Err(TunnelError::Node(error)) => Some(error),
            other => panic!("{other:?}"),
        },
    ] {
        assert!(matches!(refused, Some(NodeError::Paused { .. })), "{refused:?}");
    }
    assert!(
        within(node.usage(&id)).await.is_ok(),
        "what was sampled before is still there"
    );

    tunnel.write_all(b"while it stands still").await.expect("is kept");
    let mut echo = [0; 21];
    let early = tokio::time::timeout(Duration::from_millis(50), tunnel.read_exact(&mut echo)).await;
    assert!(early.is_err(), "it stands still");
    let running = within(node.wake(&id, WakeReason::Traffic))
        .await
        .expect("is woken");
    assert_eq!(
        (running.state, running.paused_at, running.idle_since),
        (SandboxState::Running, None, None)
    );
    within(tunnel.read_exact(&mut echo))
        .await
        .expect("the stream goes on");
    assert_eq!(&echo, b"while it stands still");
    let thaws = locked(&life.guest.known).thaws.clone();
    let now = u64::try_from(Timestamp::now().as_nanosecond()).expect("after 1970");
    assert_eq!(thaws.len(), 1);
    assert!(now - thaws[0] < 20_000_000_000, "its clock is set");
    within(node.resume(&id)).await.expect("it runs already");
    assert_eq!(locked(&life.guest.known).thaws.len(), 1);
    within(node.data(&id)).await.expect("is usable");

    let mut states = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let SandboxEvent::Changed(status) = event {
            states.push(status.state);
        }
    }
    use SandboxState::{Paused, Pausing, Resuming, Running};
    assert_eq!(states, [Pausing, Paused, Resuming, Running]);
    fixture.close().await;
}

#[tokio::test]
async fn pause_resume_and_delete_at_once_take_their_turns() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    *locked(&fixture.world.slowness) = Duration::from_millis(2);
    for round in 0..20 {
        let id = created(&fixture).await;
        let (paused, resumed, again, deleted) = within(async {
            tokio::join!(node.pause(&id), node.resume(&id), node.pause(&id), async {
                tokio::time::sleep(Duration::from_millis(round)).await;
                node.delete(&id).await
            })
        })
        .await;
        for answer in [paused, resumed, again] {
            assert!(
                matches!(
                    &answer,
                    Ok(_) | Err(NodeError::NotFound { .. } | NodeError::Transitioning { .. })
                ),
                "{answer:?}"
            );
        }
        assert_eq!(deleted.expect("is deleted").cause, EndCause::Deleted);
    }
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
    fixture.close().await;
}

#[tokio::test]
async fn a_machine_that_cannot_be_stopped_runs_on() {
    let fixture = Fixture::with(|config| config.limits.pause = Duration::from_millis(50)).await;
    let id = created(&fixture).await;
    for fault in [Fault::Fail, Fault::Hang] {
        fixture.world.inject("pause", fault);
        let failed = within(fixture.node.pause(&id)).await;
        assert!(
            matches!(
                &failed,
                Err(NodeError::TransitionFailed {
                    wanted: SandboxState::Paused,
                    ..
                })
            ),
            "{failed:?}"
        );
        let status = fixture.node.status(&id).await.expect("lives");
        assert_eq!((status.state, status.paused_at), (SandboxState::Running, None));
        within(fixture.node.data(&id)).await.expect("is usable");
        fixture.world.mend();
    }
    within(fixture.node.pause(&id)).await.expect("now it can");
    fixture.close().await;
}

#[tokio::test]
async fn a_machine_that_cannot_run_again_ends_with_a_cause() {
    let fixture = Fixture::with(|config| config.limits.resume = Duration::from_millis(50)).await;
    for fault in [Fault::Fail, Fault::Hang] {
        let id = created(&fixture).await;
        within(fixture.node.pause(&id)).await.expect("is paused");
        fixture.world.inject("resume", fault);
        let failed = within(fixture.node.resume(&id)).await;
        assert!(
            matches!(
                &failed,
                Err(NodeError::NotFound { .. } | NodeError::Transitioning { .. })
            ),
            "{failed:?}"
        );
        let cause = end_of(&fixture, &id).await;
        assert!(
            matches!(&cause, EndCause::VmmFailed { detail } if detail.contains("let run")),
            "{cause:?}"
        );
        fixture.world.mend();
    }
    fixture.close().await;
}

#[tokio::test]
async fn while_it_is_on_its_way_an_end_comes_at_once() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    for (step, exits) in [
        ("pause", false),
        ("pause", true),
        ("resume", false),
        ("resume", true),
    ] {
        let id = created(&fixture).await;
        if step == "resume" {
            within(node.pause(&id)).await.expect("is paused");
        }
        fixture.world.inject(step, Fault::Hang);
        let (asking, asked) = (node.clone(), id.clone());
        let transition = tokio::spawn(async move {
            match step {
                "pause" => asking.pause(&asked).await,
                _ => asking.resume(&asked).await,
            }
        });
        let handle = node.shared.registry.find(&id).expect("lives");
        let mut view = handle.view.clone();
        let on_its_way = |state| matches!(state, SandboxState::Pausing | SandboxState::Resuming);
        within(view.wait_for(|view| on_its_way(view.status.state)))
            .await
            .expect("lives");
        if exits {
            fixture.life(&id).expect("lives").exits(ExitReason::GuestShutdown);
            assert_eq!(end_of(&fixture, &id).await, EndCause::GuestShutdown);
        } else {
            let end = within(node.delete(&id)).await.expect("is deleted");
            assert_eq!(end.cause, EndCause::Deleted);
        }
        assert!(within(transition).await.expect("no panic").is_err());
        fixture.world.mend();
    }
    fixture.close().await;
}

#[tokio::test]
async fn the_deadline_of_a_paused_sandbox_goes_on_counting() {
    let fixture = Fixture::new().await;
    let id = created(&fixture).await;
    within(fixture.node.pause(&id)).await.expect("is paused");
    let soon = Timestamp::now() + 20.milliseconds();
    within(fixture.node.set_deadline(&id, soon)).await.expect("lives");
    assert_eq!(end_of(&fixture, &id).await, EndCause::Deadline);
    fixture.close().await;
}

/// A machine that stands still answers nothing, which is no fault of its guest.
#[tokio::test]
async fn health_is_not_asked_while_it_stands_still() {
    let fixture = Fixture::with(|config| {
        config.limits.health_interval = Duration::from_millis(5);
        config.limits.health_answer = Duration::from_millis(20);
        config.limits.health_misses = 2;
    })
    .await;
    let (still, other) = (created(&fixture).await, created(&fixture).await);
    let asked = |id: &SandboxId| {
        let life = fixture.life(id).expect("lives");
        let known = locked(&life.guest.known);
        known.health
    };
    until("it is asked", || asked(&still) >= 3).await;
    within(fixture.node.pause(&still)).await.expect("is paused");
    let (before, others) = (asked(&still), asked(&other));
    // Far more looks than a silent guest would be granted.
    until("the other is asked often", || asked(&other) >= others + 50).await;
    assert_eq!(asked(&still), before);
    let status = fixture.node.status(&still).await.expect("lives");
    assert_eq!(status.state, SandboxState::Paused);
    within(fixture.node.resume(&still)).await.expect("is resumed");
    until("it is asked again", || asked(&still) > before).await;
    fixture.close().await;
}
