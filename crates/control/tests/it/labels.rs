//! What is written on a sandbox, and finding it by that.

use reqwest::Method;
use serde_json::{Value, json};

use crate::platform::{Platform, error};

async fn ids(platform: &Platform, path: &str) -> Vec<String> {
    let list: Vec<Value> = platform.get(path).await.json().await.expect("json");
    list.iter()
        .map(|entry| {
            let id = entry["id"].as_str().or(entry["sandboxID"].as_str());
            id.expect("id").to_owned()
        })
        .collect()
}

async fn patch(platform: &Platform, id: &str, body: &Value) -> reqwest::Response {
    platform
        .request(Method::PATCH, &format!("/v1/sandboxes/{id}"))
        .json(body)
        .send()
        .await
        .expect("answers")
}

#[tokio::test]
async fn labels_are_set_changed_and_found_by_in_both_lists() {
    let platform = Platform::start().await;
    let own: Value = platform
        .post(
            "/v1/sandboxes",
            &json!({"template": "base", "labels": {"tier": "free", "team": "a"}}),
        )
        .await
        .json()
        .await
        .expect("json");
    let own = own["id"].as_str().expect("id").to_owned();
    let e2b = platform
        .create_with(
            "/v2/sandboxes",
            json!({"labels": {"tier": "paid"}, "metadata": {"who": "x"}}),
        )
        .await
        .id
        .to_string();
    for list in ["/v1/sandboxes", "/v2/sandboxes"] {
        let found = |query: &str| format!("{list}?{query}");
        assert_eq!(
            ids(&platform, &found("label=tier%3Dfree")).await,
            std::slice::from_ref(&own)
        );
        assert_eq!(
            ids(&platform, &found("label=tier=free&label=team=a")).await,
            std::slice::from_ref(&own)
        );
        assert_eq!(
            ids(&platform, &found("label=tier=free,team=a")).await,
            std::slice::from_ref(&own)
        );
        assert!(
            ids(&platform, &found("label=tier=free&label=team=b"))
                .await
                .is_empty()
        );
        assert_eq!(
            ids(&platform, &found("metadata=who%3Dx")).await,
            std::slice::from_ref(&e2b)
        );
        assert_eq!(ids(&platform, list).await.len(), 2);
    }
    let changed = patch(
        &platform,
        &own,
        &json!({"labels": {"tier": "paid", "team": null}, "metadata": {"note": "any text, of = any kind"}}),
    )
    .await;
    assert_eq!(changed.status(), 200);
    let record: Value = changed.json().await.expect("json");
    assert_eq!(record["labels"], json!({"tier": "paid"}));
    assert_eq!(record["metadata"]["note"], "any text, of = any kind");
    assert_eq!(ids(&platform, "/v1/sandboxes?label=tier=paid").await.len(), 2);
    let detail: Value = platform
        .get(&format!("/sandboxes/{own}"))
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(detail["labels"]["tier"], "paid");

    // Also after its end.
    assert_eq!(platform.delete(&format!("/sandboxes/{own}")).await.status(), 204);
    assert_eq!(
        patch(&platform, &own, &json!({"labels": {"kept": "yes"}}))
            .await
            .status(),
        200
    );
    assert_eq!(
        ids(&platform, "/v1/sandboxes?state=ended&label=kept=yes").await,
        [own]
    );
}

#[tokio::test]
async fn labels_have_bounds() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let many: serde_json::Map<String, Value> = (0..65).map(|at| (format!("l{at}"), json!("x"))).collect();
    for labels in [
        json!({"": "x"}),
        json!({"a b": "x"}),
        json!({"a": "x,y"}),
        json!({"a": "x=y"}),
        json!({"a": "x\ny"}),
        json!({ "a".repeat(64): "x" }),
        json!({"a": "x".repeat(129)}),
        Value::Object(many),
    ] {
        let (status, body) =
            error(patch(&platform, sandbox.id.as_str(), &json!({"labels": labels})).await).await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (400, Some("bad_request")),
            "{labels}"
        );
        let body = json!({"templateID": "base", "labels": labels});
        assert_eq!(
            platform.post("/v2/sandboxes", &body).await.status(),
            400,
            "{labels}"
        );
    }
    let half: serde_json::Map<String, Value> = (0..40).map(|at| (format!("a{at}"), json!("x"))).collect();
    assert_eq!(
        patch(&platform, sandbox.id.as_str(), &json!({"labels": half}))
            .await
            .status(),
        200
    );
    let other: serde_json::Map<String, Value> = (0..40).map(|at| (format!("b{at}"), json!("x"))).collect();
    assert_eq!(
        patch(&platform, sandbox.id.as_str(), &json!({"labels": other}))
            .await
            .status(),
        400,
        "what is there already counts"
    );
    let large = json!({"metadata": {"a": "x".repeat(70_000)}});
    assert_eq!(patch(&platform, sandbox.id.as_str(), &large).await.status(), 400);
    assert_eq!(
        patch(&platform, sandbox.id.as_str(), &json!({"state": "paused"}))
            .await
            .status(),
        400
    );
}

#[tokio::test]
async fn the_own_list_filters_by_state_and_time_and_pages_while_things_change() {
    let platform = Platform::start().await;
    let mut made = Vec::new();
    for _ in 0..6 {
        made.push(platform.create().await.id.to_string());
    }
    made.reverse();
    platform
        .post(&format!("/v1/sandboxes/{}/pause", made[0]), &json!({}))
        .await;
    platform.delete(&format!("/sandboxes/{}", made[1])).await;
    assert_eq!(
        ids(&platform, "/v1/sandboxes?state=paused").await,
        [made[0].clone()]
    );
    assert_eq!(
        ids(&platform, "/v1/sandboxes?state=ended").await,
        [made[1].clone()]
    );
    assert_eq!(
        ids(&platform, "/v1/sandboxes?state=running,paused").await.len(),
        5
    );
    assert_eq!(ids(&platform, "/v1/sandboxes?ended=false").await.len(), 5);
    assert_eq!(ids(&platform, "/v1/sandboxes").await, made);
    let third: Value = platform
        .get(&format!("/v1/sandboxes/{}", made[3]))
        .await
        .json()
        .await
        .expect("json");
    let at = third["started_at"].as_str().expect("time");
    assert_eq!(
        ids(&platform, &format!("/v1/sandboxes?createdBefore={at}")).await,
        made[4..]
    );
    assert_eq!(
        ids(&platform, &format!("/v1/sandboxes?createdAfter={at}")).await,
        made[..4]
    );
    for bad in [
        "state=pausing",
        "state=running&ended=true",
        "createdAfter=yesterday",
        "label=x",
        "limit=0",
        "nextToken=x",
    ] {
        let (status, _) = error(platform.get(&format!("/v1/sandboxes?{bad}")).await).await;
        assert_eq!(status, 400, "{bad}");
    }

    let first = platform.get("/v1/sandboxes?limit=2").await;
    let token = first.headers()["x-next-token"].to_str().expect("text").to_owned();
    let page: Vec<Value> = first.json().await.expect("json");
    let mut seen: Vec<_> = page
        .iter()
        .map(|entry| entry["id"].as_str().expect("id").to_owned())
        .collect();
    platform.create().await;
    seen.extend(ids(&platform, &format!("/v1/sandboxes?limit=100&nextToken={token}")).await);
    assert_eq!(seen, made, "a newer one neither moves nor repeats the others");
}

#[tokio::test]
async fn edits_at_the_same_time_do_not_add_up_to_more_than_there_may_be() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let labels = |from: u32| {
        let map: serde_json::Map<_, _> = (from..from + 40)
            .map(|at| (format!("l{at}"), json!("x")))
            .collect();
        json!({"labels": map})
    };
    let (one, other) = (labels(0), labels(100));
    let id = sandbox.id.as_str();
    let (one, other) = futures_util::join!(patch(&platform, id, &one), patch(&platform, id, &other));
    let mut statuses = [one.status().as_u16(), other.status().as_u16()];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 400]);
}
