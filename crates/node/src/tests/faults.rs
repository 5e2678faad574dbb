//! A failure, a panic and a kill at each durable write of the node's journal.

use space_api::lifecycle::{EndCause, SandboxState};

use super::{
    adoption::{Host, created},
    *,
};
use crate::{FaultPoints, NodeError, locked};

/// Every durable write, in the order in which a sandbox's life makes them.
const WRITES: [&str; 7] = [
    "begin", "running", "pausing", "paused", "deadline", "stopping", "end",
];

/// Everything that may be asked of a sandbox, each once; errors are for the caller to try again.
async fn a_whole_life(node: &NodeManager, request: &CreateSandbox) {
    let id = &request.id;
    drop(node.create(request.clone()).await);
    drop(node.pause(id).await);
    drop(node.resume(id).await);
    drop(node.set_deadline(id, Timestamp::now() + 2.hours()).await);
    drop(node.delete(id).await);
}

fn points() -> impl Iterator<Item = String> {
    WRITES
        .iter()
        .flat_map(|write| ["before", "after"].map(|when| format!("journal.{write}.{when}")))
}

#[tokio::test]
async fn a_write_that_fails_or_panics_is_told_and_leaves_nothing() {
    for point in points() {
        for act in ["fail", "panic"] {
            let faults = FaultPoints::parse(&format!("{point}={act}")).expect("parses");
            let fixture = Fixture::with(|config| config.faults = faults.clone()).await;
            let request = request();
            within(a_whole_life(&fixture.node, &request)).await;
            assert_eq!(
                faults.reached(),
                Some(point.clone()),
                "{point}: it was not reached"
            );
            assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{point} {act}");
            let end = match fixture.node.status(&request.id).await {
                Err(NodeError::NotFound { end: Some(end), .. }) => end,
                other => panic!("{point} {act}: {other:?}"),
            };
            assert!(
                matches!(end.cause, EndCause::Deleted | EndCause::CreateFailed { .. }),
                "{point} {act}: {end:?}"
            );
            let again = created(&fixture.node, super::request()).await;
            assert_eq!(again.state, SandboxState::Running);
            fixture.close().await;
        }
    }
}

#[test]
fn a_kill_at_a_write_leaves_every_sandbox_usable_or_ended_with_a_cause() {
    for point in points() {
        let host = Host::new();
        let (bystander, request) = (request(), request());
        // The bystander is created and marked as usable first; the second hit is the other's.
        let shared = point.contains("begin") || point.contains("running");
        let nth = if shared { 2 } else { 1 };
        let faults = FaultPoints::parse(&format!("{point}=halt@{nth}")).expect("parses");
        host.killed(
            |config| config.faults = faults.clone(),
            async |node| {
                created(node, bystander.clone()).await;
                let flushed = node.set_deadline(&bystander.id, bystander.deadline);
                if !point.contains("deadline") {
                    within(flushed).await.expect("lives");
                }
                let (living, asked) = (node.clone(), request.clone());
                drop(tokio::spawn(async move { a_whole_life(&living, &asked).await }));
                until("it halts", || faults.reached().is_some()).await;
            },
        );
        host.last(async |fixture| {
            let node = &fixture.node;
            within(node.data(&bystander.id)).await.expect("it is usable");
            match node.status(&request.id).await {
                Ok(status) if status.state == SandboxState::Paused => {
                    within(node.resume(&request.id)).await.expect("is resumed");
                    within(node.data(&request.id)).await.expect("is usable");
                }
                Ok(status) => {
                    assert_eq!(status.state, SandboxState::Running, "{point}");
                    within(node.data(&request.id)).await.expect("is usable");
                }
                Err(NodeError::NotFound { end: Some(end), .. }) => {
                    let told = matches!(
                        end.cause,
                        EndCause::Deleted | EndCause::PlatformRestarted | EndCause::VmmFailed { .. }
                    );
                    assert!(told, "{point}: {end:?}");
                }
                // Nothing of it was durable, and so nobody was told of it.
                Err(NodeError::NotFound { end: None, .. }) => {
                    assert_eq!(point, "journal.begin.before");
                }
                Err(other) => panic!("{point}: {other:?}"),
            }
            for id in [&bystander.id, &request.id] {
                drop(within(node.delete(id)).await);
            }
            assert_eq!(fixture.leftovers(), Vec::<String>::new(), "{point}");
        });
        assert!(locked(&host.world.deleted_templates).is_empty());
    }
}
