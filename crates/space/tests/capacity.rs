//! More creates than there is room for.

use std::collections::BTreeSet;

use space_client::{Client, ClientError, Endpoint, SandboxOptions};
use space_test_support::Platform;

/// A hundred creates at once on a node for ten: exactly ten succeed, the others get a clear answer that they may try again,
/// and none hangs; when room is made, it is usable.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_creates_at_a_capacity_of_ten() {
    let Some(platform) = Platform::start_with(env!("CARGO_BIN_EXE_space"), &["--capacity", "10"]) else {
        return;
    };
    let client =
        Client::new(Endpoint::new(platform.url(), platform.key()).expect("valid")).expect("a client");
    let mut creates = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let client = client.clone();
        creates.spawn(async move { client.create(&SandboxOptions::default()).await });
    }
    let mut made = Vec::new();
    while let Some(created) = creates.join_next().await {
        match created.expect("no panic") {
            Ok(sandbox) => made.push(sandbox),
            Err(ClientError::Refused { body }) => {
                assert!(
                    matches!(body.code, 429 | 503),
                    "not an answer to try again on: {body:?}"
                );
                assert!(
                    body.message.contains("room") || body.message.contains("capacity"),
                    "{body:?}"
                );
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(made.len(), 10);
    assert_eq!(client.sandboxes().await.expect("a list").len(), 10);

    let first = made.swap_remove(0);
    assert!(client.delete(first.id()).await.expect("deleted"));
    let again = client
        .create(&SandboxOptions::default())
        .await
        .expect("room for one");
    let output = again
        .run(
            &space_client::Command::new("echo").arg("room"),
            space_client::CollectLimits::default(),
        )
        .await
        .expect("runs");
    assert_eq!(output.stdout.text(), "room\n");

    // Deleting is idempotent, also at once and from several sides.
    let deletes = (0..8).map(|_| client.delete(again.id()));
    let outcomes = futures_util::future::join_all(deletes).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Ok(true))));

    // Each has a machine of its own; others may have been made ahead, but none beyond what the node is for.
    let ids: BTreeSet<u32> = made
        .iter()
        .map(|sandbox| platform.monitor_of(sandbox.id().as_str()).pid)
        .collect();
    assert_eq!(ids.len(), 9);
}
