//! Who may call what.

use serde_json::{Value, json};
use space_daemon_services::{ENVD_VERSION, Origin};

use crate::harness::{guest, guest_from};

#[tokio::test]
async fn loopback_needs_the_token_and_has_no_host_calls() {
    let Some(guest) = guest_from(Origin::Loopback).await else {
        return;
    };
    let get = |path: &str, token: Option<&str>| {
        let mut request = guest.http.get(format!("{}{path}", guest.address));
        if let Some(token) = token {
            request = request.header("X-Access-Token", token);
        }
        async { request.send().await.unwrap().status().as_u16() }
    };
    assert_eq!(get("/health", None).await, 204);
    assert_eq!(get("/envs", None).await, 401);
    // Before a token is set, an empty one opens nothing.
    assert_eq!(get("/envs", Some("")).await, 401);
    guest.services.set_guest_token("secret".to_owned());
    assert_eq!(get("/envs", Some("secreT")).await, 401);
    assert_eq!(get("/envs", Some("secret")).await, 200);
    for path in [
        "/init",
        "/batch",
        "/freeze",
        "/unfreeze",
        "/fsfreeze",
        "/fsthaw",
        "/collapse",
        "/upgrade",
    ] {
        let request = guest
            .http
            .post(format!("{}{path}", guest.address))
            .header("X-Access-Token", "secret")
            .body("{}");
        assert_eq!(request.send().await.unwrap().status(), 404, "{path}");
    }
}

#[tokio::test]
async fn the_host_sets_defaults() {
    let Some(guest) = guest().await else { return };
    let init = json!({ "envVars": { "KEY": "value" }, "defaultUser": "nobody", "accessToken": "ignored", "timestamp": null });
    let response = guest
        .http
        .post(format!("{}/init", guest.address))
        .body(init.to_string())
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 204);
    assert_eq!(response.headers()["x-envd-version"], ENVD_VERSION);
    let envs: Value = guest
        .http
        .get(format!("{}/envs", guest.address))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(envs, json!({ "KEY": "value" }));
    let (_, mut events) = guest.bash("id -un; echo $KEY", json!({})).await;
    assert_eq!(events.finish().await.stdout(), "nobody\nvalue\n");
    let broken = guest
        .http
        .post(format!("{}/init", guest.address))
        .body("{")
        .send()
        .await
        .unwrap();
    assert_eq!(broken.status(), 400);
    let usage: Value = guest
        .http
        .get(format!("{}/metrics", guest.address))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert!(usage["mem_total"].as_u64().unwrap() > 0 && usage["disk_total"].as_u64().unwrap() > 0);
    assert_eq!(
        guest
            .http
            .post(format!("{}/freeze", guest.address))
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
}
