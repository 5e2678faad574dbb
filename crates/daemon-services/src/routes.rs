//! The routes: which path leads to which service, and who may take it.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use connectrpc::{CompressionPolicy, ConnectRpcService, Limits};
use http::{Method, StatusCode};
use space_proto::process::ProcessExt;

use crate::core::Core;
use crate::{Origin, Services, process};

const TOKEN_HEADER: &str = "x-access-token";
/// The largest message that carries a file name, a program or a piece of its input, in bytes.
/// Input in one message is also held decoded, so this bounds what one caller can make us hold;
/// `StreamInput` takes any amount in pieces.
const MAX_INPUT_MESSAGE: usize = 64 << 20;
const MAX_START_MESSAGE: usize = 16 << 20;

pub(crate) fn router(services: &Arc<Services>, origin: Origin) -> Router {
    let large = |size| {
        Limits::default()
            .with_max_request_body_size(size)
            .with_max_message_size(size)
            .with_element_memory_limit(2 * size)
    };
    let process = Arc::new(process::Service(Arc::clone(&services.processes)));
    let connect = process
        .register(connectrpc::Router::new())
        .with_route_limits("/process.Process/Start", large(MAX_START_MESSAGE))
        .with_route_limits("/process.Process/SendInput", large(MAX_INPUT_MESSAGE))
        .with_route_limits("/process.Process/StreamInput", large(MAX_INPUT_MESSAGE));
    // The channel is a memory copy: compressing would only cost time.
    let connect = ConnectRpcService::new(connect).with_compression_policy(CompressionPolicy::disabled());

    let router = Router::new()
        .route("/health", get(|| async { StatusCode::NO_CONTENT }))
        .fallback_service(connect);
    let core = Arc::clone(&services.core);
    match origin {
        Origin::Channel => router,
        Origin::Loopback => router.layer(axum::middleware::from_fn(move |request, next| {
            guard(Arc::clone(&core), request, next)
        })),
    }
}

/// Lets loopback callers in only with the guest's token.
async fn guard(core: Arc<Core>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET && request.uri().path() == "/health" {
        return next.run(request).await;
    }
    let given = request
        .headers()
        .get(TOKEN_HEADER)
        .map(http::HeaderValue::as_bytes)
        .unwrap_or_default();
    let wanted = core.defaults().guest_token.unwrap_or_default();
    if wanted.is_empty() || !same(given, wanted.as_bytes()) {
        let body = axum::Json(serde_json::json!({
            "code": 401,
            "message": "unauthorized: send the token of /run/space/token in the header X-Access-Token",
        }));
        return (StatusCode::UNAUTHORIZED, body).into_response();
    }
    next.run(request).await
}

/// Compares without telling by its duration how much is right.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (x, y)| different | (x ^ y)) == 0
}
