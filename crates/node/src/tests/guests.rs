//! Guests that misbehave on the control port: bounded, named, and nobody else's trouble.

use std::sync::atomic::Ordering;

use space_api::lifecycle::{EndCause, SandboxState};

use super::*;
use crate::{
    NodeError, SandboxEvent,
    fakes::{Fault, guest::Manner},
    locked,
};

/// One that misbehaves and one beside it, asked for their health often.
struct Pair {
    fixture: Fixture,
    bad: SandboxId,
    good: SandboxId,
}

impl Pair {
    async fn new(manner: Manner) -> Self {
        let fixture = Fixture::with(|config| {
            config.limits.health_interval = Duration::from_millis(10);
            config.limits.health_answer = Duration::from_millis(200);
            config.limits.health_misses = 3;
        })
        .await;
        let (bad, good) = (request(), request());
        for request in [&bad, &good] {
            within(fixture.node.create(request.clone()))
                .await
                .expect("is created");
        }
        let life = fixture.life(&bad.id).expect("lives");
        locked(&life.guest.known).manner = manner;
        Self {
            fixture,
            bad: bad.id,
            good: good.id,
        }
    }

    async fn answers(&self, id: &SandboxId, questions: usize) {
        let life = self.fixture.life(id).expect("lives");
        let before = locked(&life.guest.known).health;
        until("it has answered", || {
            locked(&life.guest.known).health >= before + questions
        })
        .await;
    }

    /// The good one sees nothing of it.
    async fn close(self) {
        self.answers(&self.good, 5).await;
        let status = self.fixture.node.status(&self.good).await.expect("lives");
        assert_eq!(status.state, SandboxState::Running);
        within(self.fixture.node.data(&self.good)).await.expect("usable");
        self.fixture.close().await;
    }

    async fn fault(&self) -> String {
        let registry = &self.fixture.node.shared.registry;
        until("it has ended", || registry.recent_end(&self.bad).is_some()).await;
        match registry.recent_end(&self.bad).expect("has ended").cause {
            EndCause::GuestFailed { detail } => detail,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_guest_that_never_answers_is_named_and_ended() {
    for manner in [Manner::Silent, Manner::HangingUp] {
        let pair = Pair::new(manner).await;
        let fault = pair.fault().await;
        assert!(fault.contains("not answered 3 times"), "{manner:?}: {fault}");
        pair.close().await;
    }
}

#[tokio::test]
async fn a_flood_or_lies_around_the_answers_hold_nobody_up() {
    for manner in [Manner::Flooding, Manner::Lying] {
        let pair = Pair::new(manner).await;
        let mut events = pair.fixture.node.events();
        pair.answers(&pair.bad, 10).await;
        if matches!(manner, Manner::Flooding) {
            let told = within(async {
                loop {
                    if let Ok(SandboxEvent::Told(notice)) = events.recv().await {
                        return notice;
                    }
                }
            })
            .await;
            assert_eq!((&told.id, told.kind), (&pair.bad, "agent_out_of_memory"));
        }
        let status = pair.fixture.node.status(&pair.bad).await.expect("lives");
        assert_eq!(status.state, SandboxState::Running, "{manner:?}");
        let (node, bad) = (&pair.fixture.node, &pair.bad);
        within(node.pause(bad)).await.expect("is paused");
        within(node.resume(bad)).await.expect("is resumed");
        assert_eq!(
            within(node.delete(bad)).await.expect("is deleted").cause,
            EndCause::Deleted
        );
        pair.close().await;
    }
}

#[tokio::test]
async fn a_guest_that_is_silent_at_its_birth_is_a_failed_create() {
    let fixture = Fixture::with(|config| config.limits.ask = Duration::from_millis(100)).await;
    fixture.world.inject("hello", Fault::Hang);
    let failed = within(fixture.node.create(request())).await;
    assert!(
        matches!(&failed, Err(NodeError::CreateFailed { step, .. }) if step.contains("greeting the daemon")),
        "{failed:?}"
    );
    fixture.world.mend();
    fixture.close().await;
}

#[tokio::test]
async fn the_oldest_daemon_is_asked_what_it_understands() {
    let fixture = Fixture::with(|config| config.limits.health_interval = Duration::from_millis(5)).await;
    fixture.world.old.store(true, Ordering::SeqCst);
    let request = request();
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    let life = fixture.life(&request.id).expect("lives");
    until("it has answered", || locked(&life.guest.known).health >= 5).await;
    within(fixture.node.pause(&request.id)).await.expect("is paused");
    within(fixture.node.resume(&request.id))
        .await
        .expect("is resumed");
    within(fixture.node.data(&request.id)).await.expect("is usable");
    fixture.close().await;
}
