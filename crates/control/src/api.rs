//! The REST API: E2B's calls and our own under `/v1/`.
//!
//! Adding a call: its body types in `space-api`, a handler with `#[utoipa::path]` here, its line in [`documented`], a test in
//! `tests/`, and `docs/openapi.json` anew (the drift test says how).

mod events;
mod extract;
mod keys;
mod lifecycle;
mod listing;
mod logs;
mod metrics;
mod own;
mod pausing;
mod sandboxes;
mod templates;
mod unavailable;
mod views;

use axum::{
    Router,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use http::{Method, StatusCode, Uri};
use space_api::error::ErrorCode;
use tower::ServiceBuilder;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{Any, CorsLayer},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{app::App, error::ApiError};

pub(crate) use extract::api_key_shaped;

/// All calls that are part of the published contract.
pub(crate) fn documented() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(listing::list_v1))
        .routes(routes!(sandboxes::create, listing::list_v2))
        .routes(routes!(sandboxes::detail, lifecycle::delete))
        .routes(routes!(lifecycle::set_timeout))
        .routes(routes!(lifecycle::connect))
        .routes(routes!(pausing::resume_e2b))
        .routes(routes!(lifecycle::refresh))
        .routes(routes!(metrics::of_one))
        .routes(routes!(metrics::of_many))
        .routes(routes!(logs::v1))
        .routes(routes!(logs::v2))
        .routes(routes!(templates::list))
        .routes(routes!(templates::list_v2))
        .routes(routes!(templates::list_default))
        .routes(routes!(templates::one, templates::delete))
        .routes(routes!(templates::alias))
        .routes(routes!(own::health))
        .routes(routes!(own::sandbox, own::edit))
        .routes(routes!(own::sandboxes, sandboxes::create_own))
        .routes(routes!(pausing::pause))
        .routes(routes!(pausing::resume))
        .routes(routes!(pausing::prolong))
        .routes(routes!(events::of_sandbox))
        .routes(routes!(events::of_project))
        .routes(routes!(own::node))
        .routes(routes!(own::project))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::revoke))
}

/// Older paths of calls that are documented under newer ones: E2B's SDKs before 2.55 use them.
pub(crate) const OLDER_PATHS: [(&str, &str); 2] = [
    ("/sandboxes", "/v2/sandboxes"),
    (
        "/sandboxes/{sandboxID}/connect",
        "/v2/sandboxes/{sandboxID}/connect",
    ),
];

fn older_paths() -> Router<App> {
    let [(create, _), (connect, _)] = OLDER_PATHS;
    Router::new()
        .route(create, post(sandboxes::create))
        .route(connect, post(lifecycle::connect))
}

/// The API as a service, layers included.
pub(crate) fn router(app: App) -> Router {
    let (documented, _) = documented().split_for_parts();
    // From the outside in:
    let layers = ServiceBuilder::new()
        // browsers may call from anywhere: a key is never sent by itself, so no page gains by it;
        .layer(
            CorsLayer::new()
                .allow_origin(Any)
                .allow_methods(Any)
                .allow_headers(Any)
                .expose_headers(Any),
        )
        // a bug in one call must not take the connection's other calls with it;
        .layer(CatchPanicLayer::custom(panicked))
        // a backstop: every step within has its own, shorter limit.
        .layer(axum::middleware::from_fn_with_state(app.clone(), within_limit));
    documented
        .merge(older_paths())
        .merge(unavailable::routes())
        .route("/openapi.json", get(openapi))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(no_such_path)
        .layer(layers)
        .with_state(app)
}

async fn openapi() -> Response {
    axum::Json(crate::openapi::document()).into_response()
}

async fn no_such_path(method: Method, uri: Uri) -> ApiError {
    let shown: String = uri
        .path()
        .chars()
        .take(128)
        .flat_map(char::escape_debug)
        .collect();
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorCode::RouteNotFound,
        format!("there is no {method} {shown}"),
    )
    .hint("GET /openapi.json lists all calls")
}

async fn method_not_allowed(method: Method) -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        ErrorCode::MethodNotAllowed,
        format!("this path does not take {method}"),
    )
    .hint("GET /openapi.json lists all calls")
}

async fn within_limit(
    axum::extract::State(app): axum::extract::State<App>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    match tokio::time::timeout(app.config.limits.api_call, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            ErrorCode::Timeout,
            "the call took longer than the platform allows",
        )
        .into_response(),
    }
}

fn panicked(_: Box<dyn std::any::Any + Send + 'static>) -> Response {
    ApiError::internal(&std::io::Error::other("a handler panicked")).into_response()
}
