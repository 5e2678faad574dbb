//! Several requests in one: `POST /batch`, for the host alone.
//!
//! What the host would ask one after the other, over one stream and one wake-up of either side. It is how a machine that is
//! made ahead is warmed: the same handlers run, and the host has one exchange to pay for instead of a dozen.

use std::collections::BTreeMap;

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri},
    response::{IntoResponse as _, Response},
};
use http_body_util::{BodyExt as _, Limited};
use serde::Deserialize;
use tower::ServiceExt as _;

use crate::routes::refuse;

/// Requests in one batch.
const MOST_REQUESTS: usize = 64;
/// Bytes of a batch as it is sent.
const MOST_BYTES: usize = 256 * 1024;
/// Bytes that one answer may have; a longer one is cut off and counts as failed.
const MOST_ANSWER: usize = 1 << 20;

/// One request of a batch. Nothing here can be a stream that is still being written: a body is text, whole.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// `GET`, `POST`, …
    method: String,
    /// Path and query.
    path: String,
    /// Header names and values.
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// The whole body.
    #[serde(default)]
    body: String,
}

/// Answers each request in turn, and how: the status of each as a JSON list, `0` for an answer that broke off.
pub(crate) async fn serve(router: Router, body: Body) -> Response {
    let Ok(body) = Limited::new(body, MOST_BYTES).collect().await else {
        let message = format!("the body is not whole or larger than {MOST_BYTES} bytes");
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, &message);
    };
    let requests = match requests(&body.to_bytes()) {
        Ok(requests) => requests,
        Err(message) => return refuse(StatusCode::BAD_REQUEST, &message),
    };
    let mut statuses = Vec::with_capacity(requests.len());
    for request in requests {
        let Ok(answer) = router.clone().oneshot(request).await;
        let status = answer.status().as_u16();
        let whole = Limited::new(answer.into_body(), MOST_ANSWER).collect().await;
        statuses.push(if whole.is_ok() { status } else { 0 });
    }
    axum::Json(statuses).into_response()
}

/// All of them are understood, or none is asked.
fn requests(body: &Bytes) -> Result<Vec<Request<Body>>, String> {
    let asked: Vec<Asked> =
        serde_json::from_slice(body).map_err(|error| format!("the body is not valid: {error}"))?;
    if asked.len() > MOST_REQUESTS {
        return Err(format!("more than {MOST_REQUESTS} requests"));
    }
    let request = |(at, asked): (usize, Asked)| made(asked).map_err(|what| format!("request {at}: {what}"));
    asked.into_iter().enumerate().map(request).collect()
}

fn made(asked: Asked) -> Result<Request<Body>, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &asked.headers {
        let name = HeaderName::try_from(name.as_str()).map_err(|error| error.to_string())?;
        let value = HeaderValue::try_from(value.as_str()).map_err(|error| error.to_string())?;
        headers.append(name, value);
    }
    let mut request = Request::new(Body::from(asked.body));
    *request.method_mut() = Method::try_from(asked.method.as_str()).map_err(|error| error.to_string())?;
    *request.uri_mut() = Uri::try_from(asked.path.as_str()).map_err(|error| error.to_string())?;
    *request.headers_mut() = headers;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};

    use super::*;

    fn router() -> Router {
        Router::new()
            .route("/well", get(|| async { "well" }))
            .route(
                "/echo",
                post(|headers: HeaderMap, body: String| async move {
                    if headers.get("x-a").is_some_and(|a| a == "b") && body == "\u{0}text" {
                        StatusCode::CREATED
                    } else {
                        StatusCode::BAD_REQUEST
                    }
                }),
            )
            .route("/endless", get(|| async { vec![7_u8; MOST_ANSWER + 1] }))
    }

    async fn ask(body: impl Into<Body>) -> (StatusCode, String) {
        let answer = serve(router(), body.into()).await;
        let status = answer.status();
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(text.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn each_is_answered_in_turn() {
        let body = r#"[{"method":"GET","path":"/well?a=b"},
            {"method":"POST","path":"/echo","headers":{"X-A":"b"},"body":"\u0000text"},
            {"method":"GET","path":"/none"},{"method":"GET","path":"/endless"}]"#;
        assert_eq!(ask(body).await, (StatusCode::OK, "[200,201,404,0]".to_owned()));
        assert_eq!(ask("[]").await, (StatusCode::OK, "[]".to_owned()));
    }

    #[tokio::test]
    async fn what_is_not_understood_is_refused_whole() {
        for body in [
            "",
            "{}",
            r#"[{"method":"GET"}]"#,
            r#"[{"method":"G T","path":"/"}]"#,
            r#"[{"method":"GET","path":"a b"}]"#,
            r#"[{"method":"GET","path":"/","headers":{"a b":"c"}}]"#,
            r#"[{"method":"GET","path":"/","headers":{"a":"\n"}}]"#,
        ] {
            assert_eq!(ask(body).await.0, StatusCode::BAD_REQUEST, "{body}");
        }
        let many = format!(
            "[{}]",
            vec![r#"{"method":"GET","path":"/"}"#; MOST_REQUESTS + 1].join(",")
        );
        assert_eq!(ask(many).await.0, StatusCode::BAD_REQUEST);
        assert_eq!(
            ask(vec![b' '; MOST_BYTES + 1]).await.0,
            StatusCode::PAYLOAD_TOO_LARGE
        );
    }
}
