//! Exactly as many as fit.

use futures_util::future::join_all;

use super::*;
use crate::{NodeError, config::MONITOR_COMMIT, locked};

async fn of_a_hundred(fixture: &Fixture) -> usize {
    *locked(&fixture.world.slowness) = Duration::from_millis(2);
    let all = within(join_all((0..100).map(|_| fixture.node.create(request())))).await;
    for refused in all.iter().filter_map(|result| result.as_ref().err()) {
        assert!(matches!(refused, NodeError::NoCapacity { .. }), "{refused:?}");
    }
    all.iter().filter(|result| result.is_ok()).count()
}

#[tokio::test]
async fn of_a_hundred_at_a_capacity_of_ten_ten_succeed_and_ninety_are_told() {
    let fixture = Fixture::with(|config| config.capacity = 10).await;
    assert_eq!(of_a_hundred(&fixture).await, 10);
    let first = fixture.node.list().await[0].id.clone();
    within(fixture.node.delete(&first)).await.expect("lives");
    within(fixture.node.create(request()))
        .await
        .expect("its place is free again");
    fixture.close().await;
}

#[tokio::test]
async fn memory_is_spoken_for() {
    let each = (512 << 20) / 100 * 50 + MONITOR_COMMIT;
    let fixture = Fixture::with(|config| config.memory_budget = Some(each * 4 + each / 2)).await;
    assert_eq!(of_a_hundred(&fixture).await, 4);
    fixture.close().await;
}

#[tokio::test]
async fn creates_under_way_are_bounded() {
    let fixture = Fixture::with(|config| config.max_creating = 5).await;
    assert_eq!(of_a_hundred(&fixture).await, 5);
    fixture.close().await;
}

#[tokio::test]
async fn a_host_without_room_refuses_early() {
    let fixture = Fixture::with(|config| config.disk_reserve = u64::MAX).await;
    let refused = within(fixture.node.create(request())).await;
    assert!(
        matches!(&refused, Err(NodeError::NoCapacity { what, .. }) if what.starts_with("disk")),
        "{refused:?}"
    );
    fixture.close().await;
}
