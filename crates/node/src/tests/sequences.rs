//! Random sequences of what may happen to sandboxes, and what holds after each.

use std::collections::BTreeSet;

use proptest::prelude::*;
use space_api::lifecycle::{EndCause, SandboxState};
use space_vmm::ExitReason;

use super::*;
use crate::{NodeError, fakes::Fault, locked};

#[derive(Debug, Clone)]
enum Act {
    Create(usize),
    CreateAndLeave(usize),
    Delete(usize),
    DeleteAndLeave(usize),
    Exit(usize),
    Deadline(usize),
    FailNext(&'static str),
    Mend,
    Use(usize),
    Wait,
}

const IDS: usize = 4;

fn act() -> impl Strategy<Value = Act> {
    let id = 0..IDS;
    prop_oneof![
        4 => id.clone().prop_map(Act::Create),
        2 => id.clone().prop_map(Act::CreateAndLeave),
        2 => id.clone().prop_map(Act::Delete),
        1 => id.clone().prop_map(Act::DeleteAndLeave),
        2 => id.clone().prop_map(Act::Exit),
        1 => id.clone().prop_map(Act::Deadline),
        1 => prop::sample::select(vec!["create_group", "give_file", "start", "identity", "delete_network"])
            .prop_map(Act::FailNext),
        2 => Just(Act::Mend),
        2 => id.prop_map(Act::Use),
        1 => Just(Act::Wait),
    ]
}

async fn play(acts: Vec<Act>) {
    let fixture = Fixture::with(|config| {
        config.capacity = 3;
        config.limits.stop = Duration::from_millis(300);
    })
    .await;
    *locked(&fixture.world.slowness) = Duration::from_micros(500);
    let ids: Vec<_> = (0..IDS).map(|_| SandboxId::random()).collect();
    let mut generation = 0;
    let mut next = |at: usize| {
        generation += 1;
        CreateSandbox {
            id: ids[at].clone(),
            generation,
            ..request()
        }
    };
    let mut created = BTreeSet::new();
    let mut left = tokio::task::JoinSet::new();
    for act in acts {
        match act {
            Act::Create(at) => match within(fixture.node.create(next(at))).await {
                Ok(status) => {
                    assert_eq!(status.state, SandboxState::Running);
                    created.insert((status.id, status.generation));
                }
                Err(
                    NodeError::NoCapacity { .. }
                    | NodeError::CreateFailed { .. }
                    | NodeError::NotFound { .. },
                ) => {}
                Err(other) => panic!("{other:?}"),
            },
            Act::CreateAndLeave(at) => {
                let (node, request) = (fixture.node.clone(), next(at));
                left.spawn(async move {
                    drop(tokio::time::timeout(Duration::from_millis(1), node.create(request)).await);
                });
            }
            Act::Delete(at) => match within(fixture.node.delete(&ids[at])).await {
                Ok(end) => assert_eq!(end.id, ids[at]),
                Err(NodeError::NotFound { .. }) => {}
                Err(other) => panic!("{other:?}"),
            },
            Act::DeleteAndLeave(at) => {
                let (node, id) = (fixture.node.clone(), ids[at].clone());
                left.spawn(async move {
                    drop(tokio::time::timeout(Duration::from_millis(1), node.delete(&id)).await);
                });
            }
            Act::Exit(at) => {
                if let Some(life) = fixture.life(&ids[at]) {
                    life.exits(ExitReason::GuestShutdown);
                }
            }
            Act::Deadline(at) => drop(within(fixture.node.set_deadline(&ids[at], Timestamp::now())).await),
            Act::FailNext(step) => fixture.world.inject(step, Fault::Fail),
            Act::Mend => fixture.world.mend(),
            Act::Use(at) => drop(within(fixture.node.usage(&ids[at])).await),
            Act::Wait => tokio::time::sleep(Duration::from_millis(2)).await,
        }
        let list = fixture.node.list().await;
        assert!(list.len() <= 3, "more than fit: {list:?}");
        let (_, creating, live) = fixture.node.shared.registry.counts();
        assert!(creating <= live);
    }
    fixture.world.mend();
    while within(left.join_next()).await.is_some() {}
    for id in &ids {
        drop(within(fixture.node.delete(id)).await);
    }
    until("nothing is left", || fixture.leftovers().is_empty()).await;
    let ends = fixture
        .node
        .ends_since(Timestamp::UNIX_EPOCH)
        .await
        .expect("reads");
    let ended: BTreeSet<_> = ends.iter().map(|end| (end.id.clone(), end.generation)).collect();
    assert_eq!(ended.len(), ends.len(), "a life ends once: {ends:?}");
    assert!(created.is_subset(&ended), "every life that was usable has an end");
    let known = |cause: &EndCause| {
        matches!(
            cause,
            EndCause::Deleted
                | EndCause::GuestShutdown
                | EndCause::Deadline
                | EndCause::VmmFailed { .. }
                | EndCause::CreateFailed { .. }
        )
    };
    assert!(ends.iter().all(|end| known(&end.cause)), "{ends:?}");
    fixture.close().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_lives_end_once_and_leave_nothing(acts in prop::collection::vec(act(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(play(acts));
    }
}
