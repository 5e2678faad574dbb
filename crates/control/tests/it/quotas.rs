//! Many at once, room for few.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use serde_json::{Value, json};
use space_api::rest::Quotas;
use space_control::Limits;

use crate::{fake::FakeNode, platform::Platform};

async fn a_hundred_creates(platform: &Platform) -> BTreeMap<u16, usize> {
    let body = json!({"templateID": "base"});
    let answers = join_all((0..100).map(|_| platform.post("/v2/sandboxes", &body))).await;
    let mut counts = BTreeMap::new();
    for answer in answers {
        let status = answer.status().as_u16();
        if status != 201 {
            assert_eq!(answer.headers()["should-retry"], "true");
            assert!(answer.headers().contains_key("retry-after"));
            let body: Value = answer.json().await.expect("json");
            assert!(
                body["hint"].is_string() && body["error_code"].is_string(),
                "{body}"
            );
        }
        *counts.entry(status).or_insert(0) += 1;
    }
    counts
}

#[tokio::test]
async fn a_project_gets_exactly_its_quota() {
    let quotas = Quotas {
        max_sandboxes: 10,
        ..Quotas::default()
    };
    let platform = Platform::start_with(quotas, FakeNode::new(), Limits::default()).await;
    assert_eq!(
        a_hundred_creates(&platform).await,
        BTreeMap::from([(201, 10), (429, 90)])
    );
    assert_eq!(platform.node.live_count(), 10);
    assert_eq!(
        platform.node.creates.lock().expect("not poisoned").len(),
        10,
        "the node is not even asked for the others"
    );
    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["usage"]["sandboxes"], 10);
}

#[tokio::test]
async fn a_node_gives_exactly_what_it_has() {
    let platform = Platform::start().await;
    platform.node.set_capacity(10);
    let counts = a_hundred_creates(&platform).await;
    assert_eq!(counts.get(&201), Some(&10), "{counts:?}");
    assert_eq!(counts.values().sum::<usize>(), 100);
    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["usage"]["sandboxes"], 10, "refused creates hold no place");
}
