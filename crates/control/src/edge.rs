//! The edge router: traffic to what runs inside sandboxes.
//!
//! Port 49983 is the space daemon, reached over the sandbox's private channel; its callers show the access token here, and it
//! never goes further. Every other port is a program on the guest's loopback, reached by a tunnel. Whatever comes back is
//! written by a guest and must not gain anything from the address under which it is served (see [`headers`]).

pub(crate) mod answers;
mod daemon;
mod guard;
mod headers;
mod ports;
mod stream;
pub(crate) mod target;
#[cfg(test)]
mod tests;

use axum::{body::Body, response::Response};
use http::Request;
use space_api::e2b::ENVD_PORT;
use space_api::lifecycle::SandboxState;
use space_node::{NodeError, SandboxStatus};

use crate::{
    app::{App, Route},
    error::chain,
    transitions::{self, NotWoken, Traffic},
};
use answers::Answer;
use target::{Routing, Target};

/// Serves a request that names a sandbox.
pub(crate) async fn serve(app: &App, target: Target, request: Request<Body>) -> Response {
    let page = answers::wants_page(request.headers());
    match routed(app, &target, request).await {
        Ok(mut response) => {
            if let Routing::Path { .. } = target.routing {
                headers::contain_page(&target, response.headers_mut());
            }
            response
        }
        Err(answer) => {
            tracing::debug!(sandbox = %target.id, port = target.port, %answer, "edge refused");
            answer.into_response(page)
        }
    }
}

/// The sandbox whose token made the signature of a file's URL that names none.
///
/// E2B's SDKs, told by `E2B_SANDBOX_URL` to use one address for all sandboxes, make such URLs: they carry no header. A signature is
/// made with 256 secret bits of exactly one sandbox, so it names it all the same.
pub(crate) fn signer(app: &App, request: &Request<Body>) -> Option<Target> {
    if !guard::is_signed_file(request) || !target::is_shared(&target::host(request)?, &app.config) {
        return None;
    }
    let query = request.uri().query()?;
    let route = app.find_route(|route| guard::is_signer(route, request.method(), query))?;
    Some(Target {
        id: route.id.clone(),
        port: ENVD_PORT,
        routing: Routing::Headers,
    })
}

async fn routed(app: &App, target: &Target, request: Request<Body>) -> Result<Response, Answer> {
    if let Routing::Path { rest: None, .. } = &target.routing {
        return Ok(answers::add_slash(target, request.uri()));
    }
    if target.port == ENVD_PORT && guard::is_preflight(&request) {
        return Ok(headers::preflight(request.headers()));
    }
    let route = app
        .route(&target.id)
        .await
        .map_err(|error| Answer::Failed {
            id: target.id.clone(),
            what: chain(&error),
        })?
        .ok_or_else(|| Answer::NotFound {
            id: target.id.to_string(),
        })?;
    if target.port == ENVD_PORT {
        daemon::serve(app, &route, target, request).await
    } else {
        ports::serve(app, &route, target, request).await
    }
}

/// How often one request wakes a sandbox that is paused again before it gets through.
const WAKES: u32 = 3;

/// To be called with a refusal of the node: wakes the sandbox if it is paused and this traffic may do that, after which the node is to be asked
/// again. Every other refusal is an answer. `woken` counts for one request.
async fn awake(
    app: &App,
    route: &Route,
    traffic: Traffic,
    woken: &mut u32,
    refusal: NodeError,
) -> Result<(), Answer> {
    if !transitions::is_asleep(&refusal) || *woken >= WAKES {
        return Err(node_answer(app, route, &refusal));
    }
    *woken += 1;
    transitions::wake(app, route, traffic)
        .await
        .map_err(|not| not_woken(app, route, traffic, not))
}

fn not_woken(app: &App, route: &Route, traffic: Traffic, not: NotWoken) -> Answer {
    let id = route.id.clone();
    match not {
        NotWoken::NotByThis | NotWoken::TooOften => Answer::Paused {
            id,
            health: traffic == Traffic::HealthCheck,
            again: matches!(not, NotWoken::TooOften),
        },
        NotWoken::Slow => Answer::Transitioning {
            id,
            state: SandboxState::Resuming,
        },
        NotWoken::Failed(error) => node_answer(app, route, &error),
    }
}

/// What the client is told when the connection to the sandbox broke before there was an answer: the node knows best whether
/// that was its end.
async fn broken(app: &App, route: &Route, what: String) -> Answer {
    let id = route.id.clone();
    match app.node.status(&id).await {
        Ok(SandboxStatus {
            state: state @ (SandboxState::Stopping | SandboxState::Ended),
            ..
        }) => node_answer(app, route, &NodeError::Transitioning { id, state }),
        Ok(_) => Answer::Broken { id, what },
        Err(error) => node_answer(app, route, &error),
    }
}

/// What the client is told of the node's refusal.
fn node_answer(app: &App, route: &Route, error: &NodeError) -> Answer {
    let id = route.id.clone();
    match error {
        NodeError::NotFound { .. } => {
            // The controller records the end; from now on the store is asked.
            app.forget_route(&id);
            Answer::NotFound { id: id.to_string() }
        }
        // One that is being ended will not be back: SDKs ask here whether it runs, and "wait" would be the wrong answer.
        NodeError::Transitioning {
            state: SandboxState::Stopping | SandboxState::Ended,
            ..
        } => Answer::NotFound { id: id.to_string() },
        NodeError::Transitioning { state, .. } => Answer::Transitioning { id, state: *state },
        NodeError::Paused { .. } => Answer::Paused {
            id,
            health: false,
            again: true,
        },
        NodeError::TransitionFailed { what, .. } => Answer::Broken {
            id,
            what: what.clone(),
        },
        NodeError::GuestUnresponsive { what, .. } => Answer::Unresponsive {
            id,
            what: what.clone(),
        },
        NodeError::ShuttingDown => Answer::ShuttingDown { id },
        other => Answer::Failed {
            id,
            what: other.to_string(),
        },
    }
}
