//! Each kind of request that is refused, and in which words.

use reqwest::Method;
use serde_json::{Value, json};
use space_api::{
    id::SandboxId,
    rest::{KeyRole, Quotas},
};
use space_store::Store as _;

use crate::platform::{Platform, error};

#[tokio::test]
async fn each_bad_input_has_its_own_answer() {
    let platform = Platform::start().await;
    let id = SandboxId::random();
    let send = |method: Method, path: &str, body: &str| {
        platform
            .request(method, path)
            .header("content-type", "application/json")
            .body(body.to_owned())
            .send()
    };
    let cases = [
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"nope"}"#.to_owned(),
            404,
            "template_not_found",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"no pe\u0007"}"#.to_owned(),
            404,
            "template_not_found",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":""}"#.to_owned(),
            400,
            "bad_request",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            "{}".to_owned(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"#.to_owned(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"base","timeout":-1}"#.to_owned(),
            400,
            "invalid_json",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"base","timeout":0}"#.to_owned(),
            400,
            "bad_request",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"base","timeout":99999999999}"#.to_owned(),
            400,
            "bad_request",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            r#"{"templateID":"base","envVars":{"A=B":"1"}}"#.to_owned(),
            400,
            "bad_request",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            "[".repeat(100_000),
            400,
            "invalid_json",
        ),
        (
            Method::GET,
            "/sandboxes/NOT_AN_ID".to_owned(),
            String::new(),
            400,
            "invalid_sandbox_id",
        ),
        (
            Method::DELETE,
            "/sandboxes/%2e%2e%2fetc".to_owned(),
            String::new(),
            400,
            "invalid_sandbox_id",
        ),
        (
            Method::GET,
            format!("/sandboxes/{id}"),
            String::new(),
            404,
            "sandbox_not_found",
        ),
        (
            Method::DELETE,
            format!("/sandboxes/{id}"),
            String::new(),
            404,
            "sandbox_not_found",
        ),
        (
            Method::POST,
            format!("/sandboxes/{id}/timeout"),
            "{}".to_owned(),
            400,
            "invalid_json",
        ),
        (
            Method::GET,
            "/v2/sandboxes?limit=0".to_owned(),
            String::new(),
            400,
            "bad_request",
        ),
        (
            Method::GET,
            "/v2/sandboxes?nextToken=zzz".to_owned(),
            String::new(),
            400,
            "bad_request",
        ),
        (
            Method::GET,
            "/v2/sandboxes?state=flying".to_owned(),
            String::new(),
            400,
            "bad_request",
        ),
        (
            Method::GET,
            "/v2/sandboxes?startedAfter=soon".to_owned(),
            String::new(),
            400,
            "bad_request",
        ),
        (
            Method::GET,
            "/nowhere".to_owned(),
            String::new(),
            404,
            "route_not_found",
        ),
        (
            Method::PUT,
            "/v2/sandboxes".to_owned(),
            String::new(),
            405,
            "method_not_allowed",
        ),
        (
            Method::POST,
            "/v2/sandboxes".to_owned(),
            format!(r#"{{"templateID":"{}"}}"#, "a".repeat(5 << 20)),
            413,
            "payload_too_large",
        ),
        (
            Method::POST,
            "/v1/keys".to_owned(),
            format!(r#"{{"name":"{}"}}"#, "a".repeat(2 << 20)),
            413,
            "payload_too_large",
        ),
        (
            Method::POST,
            "/v1/keys".to_owned(),
            r#"{"name":""}"#.to_owned(),
            400,
            "bad_request",
        ),
        (
            Method::DELETE,
            "/v1/keys/aaaaaaaaaaaa".to_owned(),
            String::new(),
            404,
            "key_not_found",
        ),
        (
            Method::GET,
            "/templates/nope".to_owned(),
            String::new(),
            404,
            "template_not_found",
        ),
        (
            Method::GET,
            "/templates/aliases/nope".to_owned(),
            String::new(),
            404,
            "template_not_found",
        ),
    ];
    for (method, path, body, wanted, code) in cases {
        let (status, answer) = error(send(method.clone(), &path, &body).await.expect("answers")).await;
        assert_eq!(
            (status, answer["error_code"].as_str()),
            (wanted, Some(code)),
            "{method} {path}: {answer}"
        );
        assert_eq!(answer["code"], wanted);
        let message = answer["message"].as_str().expect("message");
        assert!(
            !message.is_empty() && message.len() < 400 && !message.contains(char::is_control),
            "{message}"
        );
    }
    let (_, answer) = error(
        send(Method::POST, "/v2/sandboxes", r#"{"templateID":"nope"}"#)
            .await
            .expect("answers"),
    )
    .await;
    assert_eq!(answer["message"], "template 'nope' not found");
    assert_eq!(platform.node.live_count(), 0);
    let usage = platform
        .store
        .usage(&platform.owner.project.id)
        .await
        .expect("counts");
    assert_eq!(usage.sandboxes, 0, "a refused create holds no place");
    let records: Value = platform.get("/v1/sandboxes").await.json().await.expect("json");
    assert_eq!(records, json!([]), "nor does it leave a record");
    assert!(platform.node.creates.lock().expect("not poisoned").is_empty());
}

#[tokio::test]
async fn the_nodes_refusals_are_typed_and_say_whether_to_retry() {
    let platform = Platform::start().await;
    for (template, wanted, code, retry) in [
        ("full", 429, "sandbox_capacity_unavailable", "true"),
        ("broken", 500, "sandbox_create_failed", "true"),
        ("unusable", 503, "sandbox_no_compatible_node", "false"),
        ("leaving", 503, "shutting_down", "true"),
        ("stopping", 503, "shutting_down", "true"),
    ] {
        let response = platform
            .post("/v2/sandboxes", &json!({"templateID": template}))
            .await;
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .map(|v| v.to_str().expect("text").to_owned())
        };
        assert_eq!(header("should-retry").as_deref(), Some(retry), "{template}");
        assert_eq!(header("retry-after").is_some(), retry == "true", "{template}");
        let (status, body) = error(response).await;
        assert_eq!((status, body["error_code"].as_str()), (wanted, Some(code)));
        assert!(body["hint"].is_string());
    }
    let records: Value = platform
        .get("/v1/sandboxes?ended=true")
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(
        records.as_array().map(Vec::len),
        Some(5),
        "each failure can still be read"
    );
    let kinds: Vec<_> = records
        .as_array()
        .expect("list")
        .iter()
        .map(|r| &r["end_cause"]["kind"])
        .collect();
    // Newest first.
    assert_eq!(
        kinds,
        [
            "create_failed",
            "platform_shutdown",
            "create_failed",
            "create_failed",
            "create_failed"
        ]
    );
}

#[tokio::test]
async fn another_projects_sandbox_is_not_there() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let stranger = platform
        .store
        .create_project("stranger", Quotas::default())
        .await
        .expect("project");
    let (_, key) = platform
        .store
        .create_key(&stranger.id, "k", KeyRole::Project)
        .await
        .expect("key");
    let path = format!("/sandboxes/{}", sandbox.id);
    for (method, path) in [
        (Method::GET, path.clone()),
        (Method::DELETE, path.clone()),
        (Method::POST, format!("{path}/connect")),
        (Method::POST, format!("/v2{path}/connect")),
        (Method::GET, format!("{path}/metrics")),
        (Method::GET, format!("{path}/logs")),
        (Method::GET, format!("/v1{path}")),
        (Method::PATCH, format!("/v1{path}")),
        (Method::POST, format!("/v1{path}/pause")),
        (Method::POST, format!("/v1{path}/resume")),
        (Method::GET, format!("/v1{path}/events")),
        (Method::POST, format!("{path}/resume")),
    ] {
        let request = platform
            .client
            .request(method.clone(), format!("{}{path}", platform.url))
            .header("x-api-key", key.expose());
        let (status, body) = error(request.send().await.expect("answers")).await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (404, Some("sandbox_not_found")),
            "{method} {path}"
        );
    }
    let list = platform
        .client
        .get(format!("{}/v2/sandboxes", platform.url))
        .header("x-api-key", key.expose());
    assert_eq!(
        list.send().await.expect("answers").text().await.expect("text"),
        "[]"
    );
    assert_eq!(platform.node.live_count(), 1);
}

#[tokio::test]
async fn what_this_version_cannot_do_it_refuses_in_words() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    for (method, path) in [
        (Method::POST, format!("/sandboxes/{}/pause", sandbox.id)),
        (Method::POST, format!("/sandboxes/{}/fork", sandbox.id)),
        (Method::POST, format!("/sandboxes/{}/snapshots", sandbox.id)),
        (Method::PUT, format!("/sandboxes/{}/network", sandbox.id)),
        (Method::GET, "/snapshots".to_owned()),
        (Method::POST, "/secrets".to_owned()),
        (Method::GET, "/volumes".to_owned()),
        (Method::POST, "/v3/templates".to_owned()),
    ] {
        let (status, body) = error(platform.request(method, &path).send().await.expect("answers")).await;
        assert_eq!(
            (status, body["error_code"].as_str()),
            (501, Some("not_available_yet")),
            "{path}"
        );
        assert!(body["hint"].is_string(), "{path}");
    }
    for field in [
        json!({"autoPause": true}),
        json!({"mcp": {"browserbase": {}}}),
        json!({"iam": {"tokens": {"a": {}}}}),
        json!({"volumeMounts": [{"name": "v", "path": "/v"}]}),
        json!({"network": {"allowOut": ["example.com"]}}),
        json!({"network": {"egressProxy": {"address": "x:1"}}}),
        json!({"network": {"rules": {"example.com": []}}}),
        json!({"network": {"httpsPorts": [443]}}),
    ] {
        let mut body = field.clone();
        body["templateID"] = json!("base");
        let (status, answer) = error(platform.post("/v2/sandboxes", &body).await).await;
        assert_eq!(
            (status, answer["error_code"].as_str()),
            (501, Some("not_available_yet")),
            "{field}"
        );
    }
    for harmless in [
        json!({"allow_internet_access": false}),
        json!({"network": {"denyOut": ["0.0.0.0/0"], "allowOut": []}}),
        json!({"iam": {}}),
        json!({"autoPause": false, "autoResume": {"enabled": false}}),
    ] {
        platform.create_with("/v2/sandboxes", harmless).await;
    }
}

#[tokio::test]
async fn what_concerns_all_projects_takes_an_admin_key() {
    let platform = Platform::start().await;
    let made: Value = platform
        .post("/v1/keys", &json!({"name": "ci"}))
        .await
        .json()
        .await
        .expect("json");
    assert_eq!(made["role"], "project");
    let key = made["key"].as_str().expect("secret");
    let owners: Value = platform.get("/v1/keys").await.json().await.expect("json");
    let owners_id = owners[0]["id"].as_str().expect("id");
    assert_eq!(owners[0]["role"], "admin");
    let send = async |method: Method, path: &str, body: &Value| {
        let request = platform.client.request(method, format!("{}{path}", platform.url));
        request
            .header("x-api-key", key)
            .json(body)
            .send()
            .await
            .expect("answers")
    };
    for (method, path, body) in [
        (Method::DELETE, "/templates/base".to_owned(), json!({})),
        (
            Method::POST,
            "/v1/keys".to_owned(),
            json!({"name": "x", "role": "admin"}),
        ),
        (Method::DELETE, format!("/v1/keys/{owners_id}"), json!({})),
    ] {
        let (status, answer) = error(send(method.clone(), &path, &body).await).await;
        assert_eq!(
            (status, answer["error_code"].as_str()),
            (403, Some("forbidden")),
            "{method} {path}"
        );
        assert!(answer["hint"].is_string());
    }
    // Its own project's affairs it sees to.
    assert_eq!(
        send(Method::POST, "/v1/keys", &json!({"name": "x"}))
            .await
            .status(),
        201
    );
    assert_eq!(
        send(Method::POST, "/v2/sandboxes", &json!({"templateID": "base"}))
            .await
            .status(),
        201
    );
    let admin = platform
        .post("/v1/keys", &json!({"name": "x", "role": "admin"}))
        .await;
    assert_eq!(admin.status(), 201);
}
