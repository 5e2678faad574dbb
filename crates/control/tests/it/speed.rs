//! What the control plane itself adds to a create: store, checks, HTTP. The node is faked, so that nothing else is in it.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::platform::Platform;

const CREATES: usize = 200;
/// Ten times what is meant, because tests run beside each other on few cores; what was measured is printed.
const BOUND: Duration = Duration::from_millis(15);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_create_costs_the_control_plane_little() {
    let platform = Platform::start().await;
    let body = json!({"templateID": "base"});
    let (mut creates, mut deletes) = (Vec::new(), Vec::new());
    for _ in 0..CREATES {
        let began = Instant::now();
        let sandbox = platform.create_with("/v2/sandboxes", body.clone()).await;
        creates.push(began.elapsed());
        let began = Instant::now();
        let deleted = platform.delete(&format!("/sandboxes/{}", sandbox.id)).await;
        deletes.push(began.elapsed());
        assert_eq!(deleted.status(), 204);
    }
    creates.sort();
    deletes.sort();
    let at = |sorted: &[Duration], percent: usize| sorted[sorted.len() * percent / 100].as_micros();
    println!(
        "create p50 {} p90 {} p99 {} µs; delete p50 {} p90 {} p99 {} µs",
        at(&creates, 50),
        at(&creates, 90),
        at(&creates, 99),
        at(&deletes, 50),
        at(&deletes, 90),
        at(&deletes, 99),
    );
    assert!(creates[CREATES / 2] < BOUND, "{:?}", creates[CREATES / 2]);
}
