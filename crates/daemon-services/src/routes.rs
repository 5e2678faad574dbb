//! The routes: which path leads to which service, and who may take it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use connectrpc::{CompressionPolicy, ConnectRpcService, Limits};
use http::{Method, StatusCode};
use serde::Deserialize;

use crate::core::Core;
use crate::{ENVD_VERSION, Origin, Services, batch, files, process};

const TOKEN_HEADER: &str = "x-access-token";
/// The largest message that carries a piece of a program's input: a sixteenth of the memory, within
/// these bounds, in bytes. A message is held several times over while it is decoded. What is larger
/// is refused; `StreamInput` takes any amount in pieces. All such messages together get no more memory than one of the
/// largest: see [`crate::budget`].
const INPUT_MESSAGE: (usize, usize) = (16 << 20, 64 << 20);
const MAX_START_MESSAGE: usize = 16 << 20;

pub(crate) fn router(services: &Arc<Services>, origin: Origin) -> Router {
    let large = |size| {
        Limits::default()
            .with_max_request_body_size(size)
            .with_max_message_size(size)
            .with_element_memory_limit(2 * size)
    };
    let input = largest_input();
    let connect = connectrpc::Router::new()
        .add_service(Arc::new(process::Service(Arc::clone(&services.processes))))
        .add_service(Arc::new(files::Service(Arc::clone(&services.files))))
        .with_route_limits("/process.Process/Start", large(MAX_START_MESSAGE))
        .with_route_limits("/process.Process/SendInput", large(input))
        .with_route_limits("/process.Process/StreamInput", large(input));
    // The channel is a memory copy: compressing would only cost time.
    let connect = ConnectRpcService::new(connect).with_compression_policy(CompressionPolicy::disabled());

    let (core, meter) = (Arc::clone(&services.core), Arc::clone(&services.meter));
    let (reading, writing, joining) = (
        Arc::clone(&services.files),
        Arc::clone(&services.files),
        Arc::clone(&services.files),
    );
    let transfer = get(move |request| files::download(Arc::clone(&reading), request))
        .post(move |request| files::upload(Arc::clone(&writing), request));
    let budget = services.input.clone();
    let programs = Router::new()
        .route_service("/process.Process/{method}", connect.clone())
        .layer(axum::middleware::from_fn(move |request, next| {
            budget.clone().serve(request, next)
        }));
    let router = Router::new()
        .route("/health", get(|| async { StatusCode::NO_CONTENT }))
        .route(
            "/metrics",
            get(move || async move { axum::Json(meter.measure()) }),
        )
        .route(
            "/envs",
            get(move || async move { axum::Json(core.defaults().environment) }),
        )
        .route("/files", transfer)
        .route(
            "/files/compose",
            post(move |request| files::compose(Arc::clone(&joining), request)),
        )
        .merge(programs)
        .route_service("/filesystem.Filesystem/{method}", connect)
        .fallback(|| async { refuse(StatusCode::NOT_FOUND, "there is no such route") })
        // The guest's disk is the limit of a file, and the services read bodies piece by piece.
        .layer(DefaultBodyLimit::disable());

    let core = Arc::clone(&services.core);
    match origin {
        Origin::Channel => {
            let initialise = post(move |body: Bytes| std::future::ready(init(&core, &body)));
            let router = router.route("/init", initialise);
            let each = router.clone();
            let batched = post(move |request: Request| batch::serve(each.clone(), request.into_body()));
            router.route("/batch", batched)
        }
        Origin::Loopback => router.layer(axum::middleware::from_fn(move |request, next| {
            guard(Arc::clone(&core), request, next)
        })),
    }
}

/// What the host may set. Everything else that E2B's service takes here is the host's own business
/// in this system.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Init {
    env_vars: Option<BTreeMap<String, String>>,
    default_user: Option<String>,
    default_workdir: Option<String>,
}

fn init(core: &Core, body: &Bytes) -> Response {
    let init: Init = match serde_json::from_slice(if body.is_empty() { b"{}" } else { body }) {
        Ok(init) => init,
        Err(error) => {
            return refuse(
                StatusCode::BAD_REQUEST,
                &format!("the body is not valid: {error}"),
            );
        }
    };
    core.change(|defaults| {
        if let Some(variables) = init.env_vars {
            defaults.environment.extend(variables);
        }
        if let Some(user) = init.default_user.filter(|user| !user.is_empty()) {
            defaults.user = user;
        }
        if let Some(workdir) = init.default_workdir {
            defaults.workdir = Some(workdir).filter(|workdir| !workdir.is_empty());
        }
    });
    (StatusCode::NO_CONTENT, [("x-envd-version", ENVD_VERSION)]).into_response()
}

pub(crate) fn largest_input() -> usize {
    let memory = rustix::system::sysinfo();
    let total = memory.totalram.saturating_mul(memory.mem_unit.into());
    usize::try_from(total / 16)
        .unwrap_or(INPUT_MESSAGE.1)
        .clamp(INPUT_MESSAGE.0, INPUT_MESSAGE.1)
}

pub(crate) fn refuse(status: StatusCode, message: &str) -> Response {
    (
        status,
        axum::Json(serde_json::json!({ "code": status.as_u16(), "message": message })),
    )
        .into_response()
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
        let message = "unauthorized: send the token of /run/space/token in the header X-Access-Token";
        return refuse(StatusCode::UNAUTHORIZED, message);
    }
    next.run(request).await
}

/// Compares without telling by its duration how much is right.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (x, y)| different | (x ^ y)) == 0
}
