//! Calls of E2B's API that this version does not have. They say so, so that nobody takes them for a wrong address.

use axum::{Router, routing::any};

use super::extract::Caller;
use crate::{app::App, error::ApiError};

/// Path, what it is in words, what to do instead.
const CALLS: &[(&str, &str, &str)] = &[
    (
        "/sandboxes/{id}/pause",
        "suspend (E2B's pause, which frees the machine)",
        "POST /v1/sandboxes/{id}/pause stops it in memory; connect, resume and traffic let it run on",
    ),
    (
        "/sandboxes/{id}/fork",
        "fork",
        "create several sandboxes from one template",
    ),
    (
        "/sandboxes/{id}/snapshots",
        "taking snapshots",
        "build a template instead",
    ),
    (
        "/snapshots",
        "listing snapshots",
        "GET /templates lists templates",
    ),
    (
        "/sandboxes/{id}/network",
        "changing network rules",
        "in this version no sandbox reaches any network",
    ),
    (
        "/secrets",
        "secrets",
        "pass values as envVars at create, knowing that the guest sees them",
    ),
    (
        "/secrets/{id}",
        "secrets",
        "pass values as envVars at create, knowing that the guest sees them",
    ),
    ("/volumes", "volumes", "use the sandbox's own disk"),
    ("/volumes/{id}", "volumes", "use the sandbox's own disk"),
    (
        "/v3/templates",
        "building templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/v2/templates/{id}",
        "changing templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/v2/templates/{id}/builds/{build}",
        "building templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/templates/{id}/builds/{build}/status",
        "building templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/templates/{id}/builds/{build}/logs",
        "building templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/templates/{id}/files/{hash}",
        "building templates over the API",
        "use `space template build` on the node",
    ),
    (
        "/templates/{id}/tags",
        "template tags",
        "a template's tag is part of its name",
    ),
    (
        "/templates/tags",
        "template tags",
        "a template's tag is part of its name",
    ),
];

pub(super) fn routes() -> Router<App> {
    let mut router = Router::new();
    for &(path, feature, hint) in CALLS {
        router = router.route(
            path,
            any(move |_: Caller| async move { ApiError::not_available(feature).hint(hint) }),
        );
    }
    router
}
