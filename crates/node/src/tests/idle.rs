//! What counts as work, and what is done without.

use space_api::lifecycle::{IdleAction, IdlePolicy, SandboxState};
use space_channel::Activity;

use super::*;
use crate::{SandboxStatus, fakes::Life, locked};

/// One sandbox that does no work, looked at every few milliseconds.
struct Idling {
    fixture: Fixture,
    id: SandboxId,
    life: Arc<Life>,
}

/// Time between two looks. Real time: the journal's thread knows no other.
const LOOK: Duration = Duration::from_millis(20);

impl Idling {
    async fn new(on_idle: Option<IdlePolicy>) -> Self {
        let fixture = Fixture::with(|config| config.limits.health_interval = LOOK).await;
        let request = CreateSandbox { on_idle, ..request() };
        let id = request.id.clone();
        within(fixture.node.create(request)).await.expect("is created");
        let life = fixture.life(&id).expect("lives");
        Self { fixture, id, life }
    }

    fn says(&self, activity: Activity) {
        locked(&self.life.guest.known).activity = activity;
    }

    fn status(&self) -> SandboxStatus {
        let handle = self.fixture.node.shared.registry.find(&self.id).expect("lives");
        handle.view.borrow().status.clone()
    }

    fn state(&self) -> SandboxState {
        self.status().state
    }

    /// Has the guest say something else at every look, for longer than the shortest policy; it must run all the time.
    async fn keeps_running(&self, mut says: impl FnMut(u64) -> Activity) {
        let start = std::time::Instant::now();
        let mut look = 0;
        while start.elapsed() < SHORTEST + LOOK * 20 {
            look += 1;
            self.says(says(look));
            let life = &self.life.guest.known;
            let before = locked(life).health;
            until("it has been looked at", || locked(life).health > before).await;
            assert_eq!(self.state(), SandboxState::Running, "at look {look}");
        }
    }

    async fn is_paused(&self) {
        until("it is paused", || self.state() == SandboxState::Paused).await;
        assert!(!self.life.runs());
    }
}

/// The shortest time there is for a policy in whole seconds.
const SHORTEST: Duration = Duration::from_secs(1);

fn after_a_second() -> Option<IdlePolicy> {
    Some(IdlePolicy {
        after_seconds: 1,
        action: IdleAction::Pause,
    })
}

#[tokio::test]
async fn a_sandbox_without_work_is_paused_in_time_and_one_that_works_is_not() {
    let idling = Idling::new(after_a_second()).await;
    let working = |look| Activity {
        cpu_micros: look * 1_000_000,
        ..Activity::default()
    };
    idling.keeps_running(working).await;
    let status = idling.status();
    assert_eq!(status.idle_since, None);
    let began = std::time::Instant::now();
    until("it is idle", || idling.status().idle_since.is_some()).await;
    idling.is_paused().await;
    assert!(began.elapsed() + LOOK * 3 > SHORTEST, "not before its time");
    let status = idling.status();
    assert!(status.last_active_at <= status.idle_since.expect("is idle"));

    within(idling.fixture.node.resume(&idling.id))
        .await
        .expect("is resumed");
    assert_eq!(idling.status().idle_since, None, "the time begins anew");
    idling.is_paused().await;
    idling.fixture.close().await;
}

#[tokio::test]
async fn an_open_stream_is_work_for_as_long_as_it_is_open() {
    let idling = Idling::new(after_a_second()).await;
    let tunnel = Activity {
        tunnels: 1,
        ..Activity::default()
    };
    idling.keeps_running(|_| tunnel).await;
    let request = Activity {
        requests: 1,
        ..Activity::default()
    };
    idling.keeps_running(|_| request).await;
    idling.says(Activity::default());
    idling.is_paused().await;
    idling.fixture.close().await;
}

/// Requests that begin and end between two looks are seen in no guest's figures.
#[tokio::test]
async fn short_requests_between_the_looks_are_work() {
    let idling = Idling::new(Some(IdlePolicy {
        after_seconds: 2,
        action: IdleAction::Pause,
    }))
    .await;
    for _ in 0..3 {
        let data = within(idling.fixture.node.data(&idling.id)).await;
        assert!(data.is_ok(), "it is paused between requests: {data:?}");
        // Longer apart than a request may be on its way, and closer than the policy asks for.
        tokio::time::sleep(Duration::from_millis(1300)).await;
    }
    assert_eq!(idling.state(), SandboxState::Running);
    idling.is_paused().await;
    idling.fixture.close().await;
}

/// The last look was a while ago: what has been let in since must not be left hanging.
#[tokio::test]
async fn what_is_let_in_at_the_last_moment_is_not_cut_off() {
    let idling = Idling::new(after_a_second()).await;
    let start = std::time::Instant::now();
    while start.elapsed() < SHORTEST * 2 {
        let data = idling.fixture.node.data(&idling.id).await;
        assert!(data.is_ok(), "it is paused under a request: {data:?}");
        tokio::time::sleep(LOOK).await;
    }
    idling.is_paused().await;
    idling.fixture.close().await;
}

#[tokio::test]
async fn without_a_policy_idleness_is_only_told() {
    let idling = Idling::new(None).await;
    until("it is idle", || idling.status().idle_since.is_some()).await;
    idling.keeps_running(|_| Activity::default()).await;
    idling.fixture.close().await;
}

#[tokio::test]
async fn a_guest_that_lies_about_its_work_only_keeps_its_own_machine_awake() {
    let idling = Idling::new(after_a_second()).await;
    let honest = CreateSandbox {
        on_idle: after_a_second(),
        ..request()
    };
    let node = &idling.fixture.node;
    within(node.create(honest.clone())).await.expect("is created");
    let most = Activity {
        cpu_micros: u64::MAX,
        io_bytes: u64::MAX,
        tasks: u32::MAX,
        tunnels: u32::MAX,
        requests: u32::MAX,
    };
    idling.keeps_running(|_| most).await;
    let handle = node.shared.registry.find(&honest.id).expect("lives");
    until("the other is paused", || {
        handle.view.borrow().status.state == SandboxState::Paused
    })
    .await;
    assert_eq!(idling.state(), SandboxState::Running);
    idling.fixture.close().await;
}
