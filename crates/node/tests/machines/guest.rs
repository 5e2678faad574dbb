//! Commands inside a sandbox, with what they print.

use http::{Method, Request, StatusCode, request::Builder};
use http_body_util::{BodyExt as _, Full};
use space_node::DataStream;

/// Where a command's output waits to be fetched.
const OUTPUT: &str = "/root/.output";

pub(crate) async fn ask(data: &DataStream, request: Builder, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
    let mut data = data.clone();
    data.ready().await.expect("ready");
    let body = Full::from(body).map_err(|never| match never {}).boxed();
    let response = data
        .send_request(request.body(body).expect("valid"))
        .await
        .expect("answers");
    let status = response.status();
    let body = response.into_body().collect().await.expect("whole").to_bytes();
    (status, body.to_vec())
}

/// Runs a shell command as root to its end and answers what it printed.
pub(crate) async fn shell(data: &DataStream, command: &str) -> String {
    let command = format!("({command}) > {OUTPUT} 2>&1");
    let message =
        serde_json::json!({ "process": { "cmd": "/bin/sh", "args": ["-c", command] }, "stdin": false });
    let message = message.to_string();
    let mut body = vec![0];
    body.extend_from_slice(&u32::try_from(message.len()).expect("short").to_be_bytes());
    body.extend_from_slice(message.as_bytes());
    let request = Request::builder()
        .method(Method::POST)
        .uri("http://space/process.Process/Start")
        .header("authorization", "Basic cm9vdDo=")
        .header("connect-protocol-version", "1")
        .header("content-type", "application/connect+json");
    // The stream ends with the command.
    let (status, _) = ask(data, request, body).await;
    assert_eq!(status, StatusCode::OK);
    let request = Request::get(format!("http://space/files?path={OUTPUT}&username=root"));
    let (status, output) = ask(data, request, Vec::new()).await;
    assert_eq!(status, StatusCode::OK);
    String::from_utf8(output).expect("text")
}

/// What the daemon still knows of commands, ended ones included, as it says it.
pub(crate) async fn known_commands(data: &DataStream) -> serde_json::Value {
    let request = Request::post("http://space/process.Process/List")
        .header("connect-protocol-version", "1")
        .header("content-type", "application/json");
    let (status, list) = ask(data, request, br#"{"includeEnded":true}"#.to_vec()).await;
    assert_eq!(status, StatusCode::OK);
    serde_json::from_slice(&list).expect("JSON")
}
