//! The next node takes over what the one before it has left.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use space_api::lifecycle::{EndCause, IdleAction, IdlePolicy, SandboxState};
use space_vmm::ExitReason;
use tokio::runtime::Runtime;

use super::*;
use crate::{
    FaultPoints, SandboxStatus,
    fakes::{Fault, guest::Manner},
    locked,
};

/// A host on which one node follows the other.
pub(super) struct Host {
    pub(super) directory: Arc<tempfile::TempDir>,
    pub(super) world: Arc<World>,
}

impl Host {
    pub(super) fn new() -> Self {
        Self {
            directory: directory(),
            world: World::new(),
        }
    }

    /// A node that is killed when `life` is done with it.
    pub(super) fn killed<T>(
        &self,
        change: impl FnOnce(&mut NodeConfig),
        life: impl AsyncFnOnce(&Arc<NodeManager>) -> T,
    ) -> T {
        let runtime = Runtime::new().expect("a runtime");
        let lived = runtime.block_on(async {
            let fixture = self.open(change).await;
            life(&fixture.node).await
        });
        self.world.crash(runtime);
        lived
    }

    pub(super) async fn open(&self, change: impl FnOnce(&mut NodeConfig)) -> Fixture {
        let mut config = config(self.directory.path());
        config.limits.adopt = Duration::from_secs(2);
        change(&mut config);
        Fixture {
            directory: self.directory.clone(),
            world: self.world.clone(),
            node: within(open(config, &self.world)).await.expect("opens"),
        }
    }

    /// A node that is shut down in order when `life` is done with it, after which nothing is left.
    pub(super) fn last<T>(&self, life: impl AsyncFnOnce(&Fixture) -> T) -> T {
        Runtime::new().expect("a runtime").block_on(async {
            let fixture = self.open(|_| {}).await;
            let lived = life(&fixture).await;
            fixture.close().await;
            lived
        })
    }
}

pub(super) async fn created(node: &NodeManager, request: CreateSandbox) -> SandboxStatus {
    within(node.create(request)).await.expect("is created")
}

async fn end_of(fixture: &Fixture, id: &SandboxId) -> EndCause {
    let start = std::time::Instant::now();
    loop {
        match fixture.node.status(id).await {
            Err(crate::NodeError::NotFound { end: Some(end), .. }) => return end.cause,
            Err(other) => panic!("{other:?}"),
            Ok(_) => assert!(start.elapsed() < SOON, "it does not end"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn after_a_kill_every_machine_is_still_there_and_answers() {
    let host = Host::new();
    let mut running = request();
    running.environment.insert("A".to_owned(), "B".to_owned());
    running.on_idle = Some(IdlePolicy {
        after_seconds: 90,
        action: IdleAction::Pause,
    });
    let (paused, late) = (request(), request());
    let (statuses, token) = host.killed(
        |_| {},
        async |node| {
            let mut statuses = BTreeMap::new();
            for request in [&running, &paused, &late] {
                let status = created(node, request.clone()).await;
                statuses.insert(status.id.clone(), status);
            }
            let stopped = within(node.pause(&paused.id)).await.expect("is paused");
            statuses.insert(paused.id.clone(), stopped);
            let later = Timestamp::from_second(4_102_444_800).expect("in range");
            within(node.set_deadline(&running.id, later))
                .await
                .expect("lives");
            statuses.get_mut(&running.id).expect("lives").deadline = later;
            // This one's time is over while no node is there.
            let soon = Timestamp::now() + 1.milliseconds();
            let handle = node.shared.registry.find(&late.id).expect("lives");
            let change = crate::journal::Change::Deadline(soon);
            let journal = &node.shared.journal;
            journal
                .change(handle.id.clone(), 1, change)
                .await
                .expect("is durable");
            (statuses, node.guest_token(&running.id).await.expect("lives"))
        },
    );
    let life = host.world.life(&statuses[&running.id].machine).expect("lives on");
    let thaws = || locked(&life.guest.known).thaws.len();
    assert_eq!(thaws(), 0);
    host.last(async |fixture| {
        let node = &fixture.node;
        assert_eq!(end_of(fixture, &late.id).await, EndCause::Deadline);
        assert_eq!(node.list().await.len(), 2);
        for id in [&running.id, &paused.id] {
            let (before, now) = (&statuses[id], node.status(id).await.expect("lives"));
            let expected = SandboxStatus {
                last_active_at: now.last_active_at,
                idle_since: now.idle_since,
                ..before.clone()
            };
            assert_eq!(now, expected);
        }
        assert_eq!(thaws(), 1, "every adoption of one that runs ends in a thaw");
        assert_eq!(node.guest_token(&running.id).await.expect("lives"), token);
        let handle = node.shared.registry.find(&running.id).expect("lives");
        assert!(handle.view.borrow().link.is_some());
        assert_eq!(node.shared.uids.in_use(), 2, "nobody else gets their user ids");
        let (_, creating, live) = node.shared.registry.counts();
        assert_eq!((creating, live), (0, 2));
        assert!(
            Arc::strong_count(&fixture.world.template) > 2,
            "its files are held again"
        );
        within(node.data(&running.id)).await.expect("is usable");
        let asked_again = within(node.create(running.clone()))
            .await
            .expect("it is the same");
        assert_eq!(asked_again.machine, statuses[&running.id].machine);

        let stands = fixture.world.life(&statuses[&paused.id].machine).expect("lives");
        assert!(!stands.runs());
        within(node.resume(&paused.id)).await.expect("is resumed");
        within(node.data(&paused.id)).await.expect("is usable");
        assert!(stands.runs());
        for id in [&running.id, &paused.id] {
            let end = within(node.delete(id)).await.expect("is deleted");
            assert_eq!(end.cause, EndCause::Deleted);
        }
        assert_eq!(fixture.leftovers(), Vec::<String>::new());
    });
}

#[test]
fn a_node_that_lets_go_leaves_its_machines_to_the_next_and_nothing_else() {
    let host = Host::new();
    let (running, paused) = (request(), request());
    Runtime::new().expect("a runtime").block_on(async {
        let fixture = host.open(|config| config.networks_ahead = 4).await;
        let node = &fixture.node;
        for request in [&running, &paused] {
            created(node, request.clone()).await;
        }
        within(node.pause(&paused.id)).await.expect("is paused");
        host.world.inject("start", Fault::Hang);
        let (asking, unborn) = (node.clone(), request());
        let creating = tokio::spawn(async move { asking.create(unborn).await });
        until("it is on its way", || node.shared.registry.len() == 3).await;
        within(node.detach()).await;
        assert!(within(creating).await.expect("no panic").is_err());
        let refused = node.status(&running.id).await;
        assert!(refused.is_ok(), "it is not said to be gone: {refused:?}");
        host.world.mend();
        let left = host.world.objects();
        assert_eq!(left.len(), 6, "two of each kind: {left:?}");
    });
    host.last(async |fixture| {
        let states: BTreeMap<_, _> = fixture
            .node
            .list()
            .await
            .into_iter()
            .map(|status| (status.id, status.state))
            .collect();
        let expected = [
            (running.id.clone(), SandboxState::Running),
            (paused.id.clone(), SandboxState::Paused),
        ];
        assert_eq!(states, expected.into());
    });
}

/// The node died after it had stopped the machine and before that was recorded as done, or the other way round.
#[test]
fn a_machine_that_stands_still_for_no_reason_is_let_run() {
    let host = Host::new();
    let (cut, woken) = (request(), request());
    let (cut_status, woken_status) = host.killed(
        |_| {},
        async |node| {
            let cut = created(node, cut.clone()).await;
            let woken = created(node, woken.clone()).await;
            within(node.pause(&woken.id)).await.expect("is paused");
            (cut, woken)
        },
    );
    host.world.life(&cut_status.machine).expect("lives").stands(true);
    host.world
        .life(&woken_status.machine)
        .expect("lives")
        .stands(false);
    host.last(async |fixture| {
        for id in [&cut.id, &woken.id] {
            let status = fixture.node.status(id).await.expect("lives");
            assert_eq!((status.state, status.paused_at), (SandboxState::Running, None));
            within(fixture.node.data(id)).await.expect("is usable");
        }
    });
}

#[test]
fn what_cannot_be_taken_over_ends_with_its_cause_and_leaves_nothing() {
    let host = Host::new();
    let requests: Vec<_> = (0..6).map(|_| request()).collect();
    let machines = host.killed(
        |_| {},
        async |node| {
            let mut machines = Vec::new();
            for request in &requests {
                machines.push(created(node, request.clone()).await.machine);
            }
            machines
        },
    );
    let life = |at: usize| host.world.life(&machines[at]).expect("lives");
    life(0).exits(ExitReason::GuestShutdown);
    life(1).exits(ExitReason::OutOfMemory);
    life(2).exits(ExitReason::MonitorFailed {
        detail: "signal 9".to_owned(),
    });
    locked(&life(3).guest.known).manner = Manner::Silent;
    // Its daemon was started anew under somebody else's identity.
    locked(&life(4).guest.known).identities.clear();
    host.last(async |fixture| {
        assert_eq!(end_of(fixture, &requests[0].id).await, EndCause::GuestShutdown);
        assert_eq!(end_of(fixture, &requests[1].id).await, EndCause::OutOfMemory);
        let killed = end_of(fixture, &requests[2].id).await;
        assert!(
            matches!(&killed, EndCause::VmmFailed { detail } if detail.contains("signal 9")),
            "{killed:?}"
        );
        for silent in [3, 4] {
            let cause = end_of(fixture, &requests[silent].id).await;
            assert!(
                matches!(&cause, EndCause::GuestFailed { .. } | EndCause::VmmFailed { .. }),
                "{cause:?}"
            );
        }
        let list = fixture.node.list().await;
        assert_eq!(list.len(), 1, "the sixth sees nothing of it: {list:?}");
        within(fixture.node.data(&requests[5].id))
            .await
            .expect("is usable");
        within(fixture.node.delete(&requests[5].id))
            .await
            .expect("is deleted");
        assert_eq!(fixture.leftovers(), Vec::<String>::new());
    });
}

#[test]
fn after_the_host_was_started_anew_all_lives_have_ended_with_it() {
    let host = Host::new();
    let request = request();
    host.killed(|_| {}, async |node| drop(created(node, request.clone()).await));
    host.world.start_anew();
    host.last(async |fixture| {
        assert_eq!(end_of(fixture, &request.id).await, EndCause::PlatformRestarted);
    });
}

#[test]
fn the_oldest_daemon_is_taken_over() {
    let host = Host::new();
    host.world.old.store(true, Ordering::SeqCst);
    let request = request();
    host.killed(|_| {}, async |node| drop(created(node, request.clone()).await));
    host.last(async |fixture| {
        let status = fixture.node.status(&request.id).await.expect("lives");
        assert_eq!(status.state, SandboxState::Running);
        within(fixture.node.data(&request.id)).await.expect("is usable");
    });
}

/// The record was durable and nobody was told: whether it is finished depends on whether the guest knows who it is.
#[test]
fn a_create_that_was_cut_off_is_finished_or_ended() {
    for (step, finished) in [("init", true), ("identity", false)] {
        let host = Host::new();
        let mut request = request();
        request
            .environment
            .insert("KEY".to_owned(), "its value".to_owned());
        host.world.inject(step, Fault::Hang);
        let machine = host.killed(
            |_| {},
            async |node| {
                let (asking, asked) = (node.clone(), request.clone());
                drop(tokio::spawn(async move { asking.create(asked).await }));
                let mut machine = None;
                until("it has a machine", || {
                    let handle = node.shared.registry.find(&request.id);
                    machine = handle.map(|handle| handle.view.borrow().worker.clone());
                    let life = machine.as_ref().and_then(|name| host.world.life(name.as_str()));
                    life.is_some_and(|life| {
                        let known = locked(&life.guest.known);
                        match step {
                            "init" => known.environment.is_some(),
                            _ => !known.identities.is_empty(),
                        }
                    })
                })
                .await;
                // What was written before is durable when this is.
                let journal = &node.shared.journal;
                let noted = journal.change(
                    request.id.clone(),
                    1,
                    crate::journal::Change::Deadline(request.deadline),
                );
                noted.await.expect("is durable");
                machine.expect("has one")
            },
        );
        let life = host.world.life(machine.as_str()).expect("lives on");
        locked(&life.guest.known).environment = None;
        if !finished {
            // The identity was on its way and never got there.
            locked(&life.guest.known).identities.clear();
        }
        host.world.mend();
        host.last(async |fixture| {
            if finished {
                let status = fixture.node.status(&request.id).await.expect("is finished");
                assert_eq!(status.state, SandboxState::Running);
                assert!(status.ready_ms.is_some());
                let known = locked(&life.guest.known).environment.clone();
                assert_eq!(
                    known,
                    Some(serde_json::json!({ "envVars": { "KEY": "its value" } }))
                );
            } else {
                assert_eq!(end_of(fixture, &request.id).await, EndCause::PlatformRestarted);
            }
        });
    }
}

#[test]
fn a_kill_in_the_middle_of_an_adoption_changes_nothing() {
    for point in ["adopt.machine", "adopt.link", "adopt.done"] {
        let host = Host::new();
        let requests = [request(), request()];
        host.killed(
            |_| {},
            async |node| {
                for request in &requests {
                    created(node, request.clone()).await;
                }
                within(node.pause(&requests[1].id)).await.expect("is paused");
            },
        );
        let faults = FaultPoints::parse(&format!("{point}=halt@2")).expect("parses");
        let runtime = Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let mut config = config(host.directory.path());
            config.faults = faults.clone();
            let world = host.world.clone();
            drop(tokio::spawn(async move { open(config, &world).await.map(drop) }));
            until("it halts", || faults.reached().is_some()).await;
        });
        host.world.crash(runtime);
        host.last(async |fixture| {
            let states = [0, 1].map(|at: usize| requests[at].id.clone());
            for (id, expected) in states.iter().zip([SandboxState::Running, SandboxState::Paused]) {
                let status = fixture.node.status(id).await.expect("lives");
                assert_eq!(status.state, expected, "{point}");
            }
        });
    }
}

#[test]
fn an_adoption_that_fails_or_panics_ends_one_sandbox_and_no_other() {
    for (point, act) in [
        ("adopt.machine", "fail"),
        ("adopt.link", "panic"),
        ("adopt.done", "fail"),
        ("adopt.link", "halt"),
    ] {
        let host = Host::new();
        host.killed(
            |_| {},
            async |node| {
                for _ in 0..3 {
                    created(node, request()).await;
                }
            },
        );
        Runtime::new().expect("a runtime").block_on(async {
            let fixture = host
                .open(|config| {
                    config.limits.adopt = Duration::from_millis(500);
                    config.faults = FaultPoints::parse(&format!("{point}={act}@2")).expect("parses");
                })
                .await;
            assert_eq!(fixture.node.list().await.len(), 2, "{point} {act}");
            let ends = fixture.node.ends_since(Timestamp::UNIX_EPOCH).await;
            let ends = ends.expect("reads");
            assert!(
                matches!(&ends[..], [end] if matches!(end.cause, EndCause::VmmFailed { .. })),
                "{ends:?}"
            );
            fixture.close().await;
        });
    }
}

/// A runtime that is dropped stands for a process that is killed: every task stops where it is.
#[test]
fn after_a_kill_at_any_moment_what_was_promised_lives_and_all_else_has_an_end() {
    for moment in 0..12_u64 {
        let host = Host::new();
        *locked(&host.world.slowness) = Duration::from_millis(2);
        let requests: Vec<_> = (0..6).map(|_| request()).collect();
        let promised: Vec<SandboxId> = host.killed(
            |_| {},
            async |node| {
                let creating = requests.iter().map(|request| node.create(request.clone()));
                let creating = futures_util::future::join_all(creating);
                if moment == 0 {
                    within(creating).await;
                } else {
                    drop(tokio::time::timeout(Duration::from_millis(moment * 2), creating).await);
                }
                let usable = node.list().await.into_iter();
                usable
                    .filter(|status| status.ready_ms.is_some())
                    .map(|status| status.id)
                    .collect()
            },
        );
        *locked(&host.world.slowness) = Duration::ZERO;
        host.last(async |fixture| {
            let node = &fixture.node;
            let alive: Vec<_> = node.list().await.into_iter().map(|status| status.id).collect();
            for id in &promised {
                assert!(alive.contains(id), "moment {moment}: {id} was promised");
            }
            for id in &alive {
                within(node.data(id)).await.expect("is usable");
                within(node.delete(id)).await.expect("is deleted");
            }
            assert_eq!(fixture.leftovers(), Vec::<String>::new(), "moment {moment}");
            let ends = node.ends_since(Timestamp::UNIX_EPOCH).await.expect("reads");
            let known = |cause: &EndCause| matches!(cause, EndCause::PlatformRestarted | EndCause::Deleted);
            assert!(ends.iter().all(|end| known(&end.cause)), "{ends:?}");
            created(node, request()).await;
        });
    }
}
