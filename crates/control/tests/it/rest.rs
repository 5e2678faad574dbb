//! E2B's calls and our own: shapes, statuses, and each kind of bad input.

use jiff::{SignedDuration, Timestamp};
use reqwest::Method;
use serde_json::{Value, json};
use space_api::id::SandboxId;

use crate::{
    fake::eventually,
    platform::{Platform, error},
};

fn at(body: &Value, field: &str) -> Timestamp {
    body[field].as_str().expect(field).parse().expect("time")
}

#[tokio::test]
async fn a_sandbox_lives_through_the_calls_of_both_versions() {
    let platform = Platform::start().await;
    for (create, connect) in [("/v2/sandboxes", "/v2/sandboxes"), ("/sandboxes", "/sandboxes")] {
        let body = json!({
            "timeout": 120, "metadata": {"user": "ann"}, "envVars": {"A": "1"}, "autoPause": false, "autoPauseMemory": true,
            "autoResume": {"enabled": false}, "allow_internet_access": true, "network": {}, "mcp": null, "somethingNew": 1,
        });
        let sandbox = platform.create_with(create, body).await;
        assert_eq!(sandbox.token.len(), 64);
        assert_eq!(sandbox.body["envdVersion"], "0.6.13");
        assert_eq!(sandbox.body["templateID"], "base:latest");
        assert_eq!(sandbox.body["alias"], "base");
        assert_eq!(sandbox.body.get("domain"), None);
        let asked = platform
            .node
            .creates
            .lock()
            .expect("not poisoned")
            .last()
            .cloned()
            .expect("created");
        assert_eq!(asked.environment["A"], "1");
        assert_eq!(asked.id, sandbox.id);
        assert_eq!(asked.generation, 1);

        let path = format!("/sandboxes/{}", sandbox.id);
        let info: Value = platform.get(&path).await.json().await.expect("json");
        assert_eq!(info["state"], "running");
        assert_eq!(info["cpuCount"], 1);
        assert_eq!(info["memoryMB"], 512);
        assert_eq!(info["diskSizeMB"], 4096);
        assert_eq!(info["metadata"]["user"], "ann");
        assert_eq!(info["envdAccessToken"], sandbox.token.as_str());
        assert_eq!(info["lifecycle"]["onTimeout"], "kill");
        let left = at(&info, "endAt").duration_since(Timestamp::now());
        assert!(
            left > SignedDuration::from_secs(110) && left <= SignedDuration::from_secs(120),
            "{left:?}"
        );

        // Connect extends, and never shortens.
        let connect = format!("{connect}/{}/connect", sandbox.id);
        for (timeout, least) in [(900, 890), (10, 880)] {
            let response = platform.post(&connect, &json!({"timeout": timeout})).await;
            assert_eq!(response.status(), 200);
            let again: Value = response.json().await.expect("json");
            assert_eq!(again["envdAccessToken"], sandbox.token.as_str());
            let info: Value = platform.get(&path).await.json().await.expect("json");
            assert!(at(&info, "endAt").duration_since(Timestamp::now()) > SignedDuration::from_secs(least));
        }
        // The timeout call does.
        assert_eq!(
            platform
                .post(&format!("{path}/timeout"), &json!({"timeout": 60}))
                .await
                .status(),
            204
        );
        let deadline = platform.node.status_of(&sandbox.id).expect("live").deadline;
        assert!(deadline.duration_since(Timestamp::now()) <= SignedDuration::from_secs(60));
        assert_eq!(
            platform
                .post(&format!("{path}/refreshes"), &json!({"duration": 600}))
                .await
                .status(),
            204
        );
        let deadline = platform.node.status_of(&sandbox.id).expect("live").deadline;
        assert!(deadline.duration_since(Timestamp::now()) > SignedDuration::from_secs(590));

        let samples: Value = platform
            .get(&format!("{path}/metrics?start=1500"))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(samples.as_array().map(Vec::len), Some(1));
        assert_eq!(samples[0]["timestampUnix"], 2000);
        assert_eq!(samples[0]["cpuUsedPct"], 12.5);
        let many: Value = platform
            .get(&format!(
                "/sandboxes/metrics?sandbox_ids={},{}",
                sandbox.id,
                SandboxId::random()
            ))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(many["sandboxes"].as_object().map(serde_json::Map::len), Some(1));

        assert_eq!(platform.delete(&path).await.status(), 204);
        assert_eq!(platform.delete(&path).await.status(), 404);
        for response in [
            platform.get(&path).await,
            platform.post(&connect, &json!({"timeout": 10})).await,
            platform
                .post(&format!("{path}/timeout"), &json!({"timeout": 10}))
                .await,
            platform.get(&format!("{path}/metrics")).await,
        ] {
            let (status, body) = error(response).await;
            assert_eq!(status, 404);
            assert_eq!(body["error_code"], "sandbox_not_found");
            assert!(body["hint"].as_str().expect("hint").contains("/v1/sandboxes/"));
        }
        let record: Value = platform
            .get(&format!("/v1/sandboxes/{}", sandbox.id))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(record["state"], "ended");
        assert_eq!(record["end_cause"]["kind"], "deleted");
        assert_eq!(record["cpu_micros"], 1234);
        assert_eq!(record["ready_ms"], 61.0);
        let logs: Value = platform
            .get(&format!("/v2{path}/logs?direction=backward"))
            .await
            .json()
            .await
            .expect("json");
        assert!(
            logs["logs"][0]["message"]
                .as_str()
                .expect("text")
                .starts_with("ended")
        );
        let logs: Value = platform
            .get(&format!("{path}/logs"))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(logs["logEntries"].as_array().map(Vec::len), Some(3));
    }
    assert_eq!(platform.node.live_count(), 0);
    platform.stop().await;
}

#[tokio::test]
async fn sizes_are_chosen_at_create_and_checked() {
    let platform = Platform::start().await;
    let sandbox = platform
        .create_with("/v2/sandboxes", json!({"cpuCount": 2, "memoryMB": 1024}))
        .await;
    let info: Value = platform
        .get(&format!("/sandboxes/{}", sandbox.id))
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(
        (
            info["cpuCount"].clone(),
            info["memoryMB"].clone(),
            info["diskSizeMB"].clone()
        ),
        (2.into(), 1024.into(), 4096.into())
    );
    for bad in [
        json!({"cpuCount": 0}),
        json!({"cpuCount": 17}),
        json!({"memoryMB": 100}),
        json!({"diskSizeMB": 1}),
    ] {
        let mut body = bad.clone();
        body["templateID"] = json!("base");
        let (status, body) = error(platform.post("/v2/sandboxes", &body).await).await;
        assert_eq!(status, 400, "{bad}");
        assert!(
            body["message"].as_str().expect("message").contains("expected"),
            "{body}"
        );
    }
}

#[tokio::test]
async fn keys_are_asked_for_made_and_revoked() {
    let platform = Platform::start().await;
    let path = format!("{}/v2/sandboxes", platform.url);
    let (status, body) = error(platform.client.get(&path).send().await.expect("answers")).await;
    assert_eq!(
        (status, body["error_code"].as_str()),
        (401, Some("authentication_required"))
    );
    assert!(body["hint"].as_str().expect("hint").contains("E2B_API_KEY"));
    for bad in ["", "e2b_0", "e2b_0000000000000000000000000000000000000000", "é"] {
        let (status, body) = error(
            platform
                .client
                .get(&path)
                .header("x-api-key", bad)
                .send()
                .await
                .expect("answers"),
        )
        .await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (401, Some("invalid_api_key")),
            "{bad}"
        );
    }
    let bearer = platform
        .client
        .get(&path)
        .bearer_auth(platform.key())
        .send()
        .await
        .expect("answers");
    assert_eq!(bearer.status(), 200);

    let made: Value = platform
        .post("/v1/keys", &json!({"name": "ci"}))
        .await
        .json()
        .await
        .expect("json");
    let key = made["key"].as_str().expect("secret").to_owned();
    let use_it = || async {
        platform
            .client
            .get(&path)
            .header("x-api-key", &key)
            .send()
            .await
            .expect("answers")
            .status()
            .as_u16()
    };
    assert_eq!(use_it().await, 200);
    let listed = platform.get("/v1/keys").await.text().await.expect("text");
    assert!(!listed.contains(&key) && listed.contains("\"ci\""));
    assert_eq!(
        platform
            .delete(&format!("/v1/keys/{}", made["id"].as_str().expect("id")))
            .await
            .status(),
        204
    );
    assert_eq!(use_it().await, 401);

    let me: Value = platform.get("/v1/projects/me").await.json().await.expect("json");
    assert_eq!(me["name"], "default");
    assert_eq!(me["usage"]["sandboxes"], 0);
    let node: Value = platform.get("/v1/node").await.json().await.expect("json");
    assert_eq!(node["isolates_hostile_code"], false);
    assert_eq!(
        platform
            .client
            .get(format!("{}/health", platform.url))
            .send()
            .await
            .expect("answers")
            .status(),
        200
    );
}

#[tokio::test]
async fn lists_come_in_pages_with_filters() {
    let platform = Platform::start().await;
    let mut ids = Vec::new();
    for at in 0..5 {
        let body = json!({"metadata": {"n": at.to_string(), "a b": "50%&"}});
        ids.push(platform.create_with("/v2/sandboxes", body).await.id.to_string());
    }
    let mut found = Vec::new();
    let mut token = String::new();
    loop {
        let response = platform
            .get(&format!("/v2/sandboxes?limit=2&order=asc&nextToken={token}"))
            .await;
        let next = response
            .headers()
            .get("x-next-token")
            .map(|v| v.to_str().expect("text").to_owned());
        let page: Vec<Value> = response.json().await.expect("json");
        assert!(page.len() <= 2);
        found.extend(
            page.into_iter()
                .map(|entry| entry["sandboxID"].as_str().expect("id").to_owned()),
        );
        match next {
            Some(next) => token = next,
            None => break,
        }
    }
    assert_eq!(found, ids);
    let count = async |query: &str| {
        let list: Vec<Value> = platform
            .get(&format!("/v2/sandboxes?{query}"))
            .await
            .json()
            .await
            .expect("json");
        list.len()
    };
    assert_eq!(count("metadata=n%3D3").await, 1);
    // As the SDKs encode it: key and value, then the pairs, then the query value.
    assert_eq!(count("metadata=a%252520b%3D50%252525%252526%26n%3D3").await, 1);
    assert_eq!(count("metadata=n%3D9").await, 0);
    assert_eq!(count("state=running,paused").await, 5);
    assert_eq!(count("state=running&state=paused").await, 5);
    assert_eq!(count("state=paused").await, 0);
    assert_eq!(count("template=base").await, 5);
    assert_eq!(count("template=other").await, 0);
    assert_eq!(count("startedAfter=2100-01-01T00:00:00Z").await, 0);
    let v1: Vec<Value> = platform
        .get("/sandboxes?metadata=n%3D3")
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(v1.len(), 1);
    let own: Vec<Value> = platform
        .get("/v1/sandboxes?limit=3")
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(own.len(), 3);
}

#[tokio::test]
async fn templates_are_listed_found_and_removed() {
    let platform = Platform::start().await;
    for path in ["/templates", "/v2/templates", "/default-templates"] {
        let list: Value = platform.get(path).await.json().await.expect("json");
        assert_eq!(list[0]["templateID"], "base:latest", "{path}");
        assert_eq!(list[0]["aliases"][0], "base");
        assert_eq!(list[0]["readySizes"][0], "1x512x4096");
    }
    for name in ["base", "base%3Alatest"] {
        let one: Value = platform
            .get(&format!("/templates/{name}"))
            .await
            .json()
            .await
            .expect("json");
        assert_eq!(
            one["builds"][0]["buildID"],
            "01234567-89ab-cdef-0123-456789abcdef"
        );
    }
    let alias: Value = platform
        .get("/templates/aliases/base")
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(alias["templateID"], "base:latest");
    assert_eq!(platform.delete("/templates/base").await.status(), 204);
}

#[tokio::test]
async fn a_bare_name_means_the_tag_latest_and_no_other() {
    let platform = Platform::start().await;
    for path in ["/templates/tagged", "/templates/aliases/tagged"] {
        assert_eq!(platform.get(path).await.status(), 404, "{path}");
    }
    assert_eq!(platform.get("/templates/tagged:v2").await.status(), 200);
    let create = async |template: &str| {
        let body = json!({"templateID": template});
        platform.post("/v2/sandboxes", &body).await.status().as_u16()
    };
    assert_eq!((create("tagged").await, create("tagged:v2").await), (404, 201));
    assert_eq!(platform.delete("/templates/tagged").await.status(), 404);
    let digest = crate::fake::FakeNode::template("base").digest;
    assert_eq!(
        platform.delete(&format!("/templates/{digest}")).await.status(),
        204
    );
    assert_eq!(
        *platform.node.removed.lock().expect("not poisoned"),
        ["tagged".to_owned(), digest],
        "the node is told what the caller said"
    );
}

#[tokio::test]
async fn who_keeps_a_sandbox_alive_never_shortens_what_another_was_promised() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let later = Timestamp::now() + jiff::SignedDuration::from_secs(1500);
    *platform.node.slow_before.lock().expect("not poisoned") = Some(later);
    let path = format!("/v1/sandboxes/{}/extend", sandbox.id);
    let extend = async |seconds: u64| {
        let body = json!({"timeout_seconds": seconds});
        assert_eq!(platform.post(&path, &body).await.status(), 200);
    };
    futures_util::join!(extend(1000), extend(2000), extend(1100), extend(1200));
    let status = platform.node.status_of(&sandbox.id).expect("is live");
    assert!(status.deadline > later, "{}", status.deadline);
}

#[tokio::test]
async fn a_timeout_of_zero_ends_it_with_its_cause() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let response = platform
        .post(
            &format!("/sandboxes/{}/timeout", sandbox.id),
            &json!({"timeout": 0}),
        )
        .await;
    assert_eq!(response.status(), 204);
    let path = format!("/v1/sandboxes/{}", sandbox.id);
    eventually("the end is recorded", async || {
        let record: Value = platform.get(&path).await.json().await.expect("json");
        record["end_cause"]["kind"] == "deadline"
    })
    .await;
}

#[tokio::test]
async fn the_api_speaks_http2_and_answers_preflights() {
    let platform = Platform::start().await;
    let client = reqwest::Client::builder()
        .no_proxy()
        .http2_prior_knowledge()
        .build()
        .expect("client");
    let response = client
        .get(format!("{}/v2/sandboxes", platform.url))
        .header("x-api-key", platform.key())
        .send()
        .await
        .expect("answers");
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    assert_eq!(response.status(), 200);
    let preflight = platform
        .client
        .request(Method::OPTIONS, format!("{}/v2/sandboxes", platform.url))
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "x-api-key")
        .send()
        .await
        .expect("answers");
    assert_eq!(preflight.status(), 200);
    assert_eq!(preflight.headers()["access-control-allow-origin"], "*");
}
