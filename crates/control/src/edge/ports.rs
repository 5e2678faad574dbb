//! Every other port: a program on the guest's loopback, spoken to in HTTP/1.1 over a tunnel of its own per request.

use std::sync::Arc;

use axum::{body::Body, response::Response};
use http::{HeaderValue, Method, Request, StatusCode, Uri, Version, header, request::Parts};
use hyper::{client::conn::http1, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use space_node::{TunnelError, TunnelStream};

use super::{
    answers::Answer,
    awake, broken, guard, headers, node_answer,
    stream::Guarded,
    target::{self, Routing, Target},
};
use crate::{
    app::{App, Route},
    server::Peer,
    transitions::Traffic,
};

/// Bytes of a guest's answer head.
const MAX_HEAD: usize = 64 << 10;
/// Headers of a guest's answer.
const MAX_HEADERS: usize = 200;

pub(super) async fn serve(
    app: &App,
    route: &Arc<Route>,
    target: &Target,
    request: Request<Body>,
) -> Result<Response, Answer> {
    guard::admit_traffic(route, target, request.headers())?;
    if matches!(target.routing, Routing::Path { .. }) && request.headers().contains_key("service-worker") {
        return Err(Answer::Forbidden {
            id: target.id.clone(),
            why: "A service worker cannot be had under a shared address; use the host name of the port",
        });
    }
    if request.method() == Method::CONNECT {
        return Err(Answer::NoSuchPath {
            id: target.id.clone(),
        });
    }
    let mut woken = 0;
    let tunnel = loop {
        match app.node.tunnel(&target.id, target.port).await {
            Ok(tunnel) => break tunnel,
            Err(TunnelError::PortClosed { port }) => {
                return Err(Answer::PortClosed {
                    id: target.id.clone(),
                    port,
                });
            }
            Err(TunnelError::Node(refusal)) => {
                awake(app, route, Traffic::Anyone, &mut woken, refusal).await?;
            }
        }
    };
    let authority = target::authority(&request).unwrap_or_default();
    let (mut parts, body) = request.into_parts();
    let upgrade = upgrade_asked(&mut parts);
    let mut outgoing = Request::new(Guarded::new(body, app.config.limits.edge_idle));
    *outgoing.method_mut() = parts.method.clone();
    *outgoing.uri_mut() = origin_form(target, &parts.uri)?;
    *outgoing.headers_mut() = headers::for_guest(target, &parts.headers);
    describe(app, route, target, &parts, &authority, outgoing.headers_mut());
    if let Some((protocol, _)) = &upgrade {
        outgoing
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        outgoing.headers_mut().insert(header::UPGRADE, protocol.clone());
    }
    replace_token(app, route, &parts, outgoing.headers_mut()).await?;

    let exchange = Box::pin(exchange(app, route, target.port, tunnel, outgoing));
    let response = match tokio::time::timeout(app.config.limits.edge_idle, exchange).await {
        Ok(response) => response?,
        Err(_) => {
            return Err(Answer::Silent {
                id: target.id.clone(),
                port: target.port,
            });
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return match upgrade {
            Some((_, client)) => Ok(splice(app, client, response)),
            None => Err(Answer::Broken {
                id: target.id.clone(),
                what: "the program switched protocols unasked".to_owned(),
            }),
        };
    }
    let (mut head, body) = response.into_parts();
    headers::remove_hop_by_hop(&mut head.headers);
    head.version = Version::default();
    Ok(Response::from_parts(
        head,
        Body::new(Guarded::new(body, app.config.limits.edge_idle)),
    ))
}

/// One request and its answer on a fresh tunnel, whose driver lives as long as the answer's body or upgrade.
async fn exchange(
    app: &App,
    route: &Route,
    port: u16,
    tunnel: TunnelStream,
    request: Request<Guarded<Body>>,
) -> Result<Response<hyper::body::Incoming>, Answer> {
    let handshake = http1::Builder::new()
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .handshake(tunnel.into_inner());
    let (mut sender, connection) = match handshake.await {
        Ok(both) => both,
        Err(error) => return Err(broken(app, route, error.to_string()).await),
    };
    let stop = app.stop.clone();
    app.tasks.spawn(async move {
        tokio::select! {
            outcome = connection.with_upgrades() => {
                if let Err(error) = outcome {
                    tracing::trace!(%error, "tunnelled connection ended");
                }
            }
            () = stop.cancelled() => {}
        }
    });
    match sender.send_request(request).await {
        Ok(response) => Ok(response),
        Err(error) => {
            // A listener that closes at once looks like one that is not there, mostly because it is just starting.
            tracing::debug!(sandbox = %route.id, port, %error, "exchange failed");
            Err(broken(app, route, error.to_string()).await)
        }
    }
}

/// Path and query alone: the form in which a server, not a proxy, is asked.
fn origin_form(target: &Target, uri: &Uri) -> Result<Uri, Answer> {
    let path = match &target.routing {
        Routing::Path { rest: Some(rest), .. } => rest.as_str(),
        _ => uri.path(),
    };
    let text = uri
        .query()
        .map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    text.parse().map_err(|_| Answer::NoSuchPath {
        id: target.id.clone(),
    })
}

/// `Host` and what says where the request came from, in place of what the client claims.
fn describe(
    app: &App,
    route: &Route,
    target: &Target,
    parts: &Parts,
    authority: &str,
    headers: &mut http::HeaderMap,
) {
    let mut set = |name: &'static str, text: &str| match HeaderValue::from_str(text) {
        Ok(value) if !text.is_empty() => {
            headers.insert(name, value);
        }
        _ => {
            headers.remove(name);
        }
    };
    let host = match (&route.mask_request_host, &target.routing) {
        (Some(mask), _) => mask.replace("${PORT}", &target.port.to_string()),
        // The address under which it is known, as E2B does.
        (None, Routing::HostName) => authority.to_owned(),
        // The shared address is not the program's; by this name it is called inside.
        (None, Routing::Headers | Routing::Path { .. }) => format!("localhost:{}", target.port),
    };
    set("host", &host);
    set("x-forwarded-host", authority);
    let scheme = if app.config.public_url.starts_with("https:") {
        "https"
    } else {
        "http"
    };
    set("x-forwarded-proto", scheme);
    let peer = parts
        .extensions
        .get::<Peer>()
        .map_or_else(String::new, |peer| peer.0.ip().to_string());
    set("x-forwarded-for", &peer);
    let prefix = match &target.routing {
        Routing::Path { prefix, .. } => prefix.as_str(),
        Routing::HostName | Routing::Headers => "",
    };
    set("x-forwarded-prefix", prefix);
    headers.remove("forwarded");
}

/// A client that showed the sandbox's access token speaks for its owner: the program inside gets the guest-side token instead,
/// with which it can ask the daemon on its own loopback. The access token itself never goes in.
async fn replace_token(
    app: &App,
    route: &Route,
    parts: &Parts,
    headers: &mut http::HeaderMap,
) -> Result<(), Answer> {
    let (Some(shown), Some(token)) = (parts.headers.get("x-access-token"), &route.access_token) else {
        return Ok(());
    };
    if !guard::equal(shown.as_bytes(), token.0.as_bytes()) {
        return Ok(());
    }
    let inner = app
        .node
        .guest_token(&route.id)
        .await
        .map_err(|error| node_answer(app, route, &error))?;
    if let Ok(mut value) = HeaderValue::from_str(&inner) {
        value.set_sensitive(true);
        headers.insert("x-access-token", value);
    }
    Ok(())
}

/// The protocol to switch to and the client's side of it, if it asked.
fn upgrade_asked(parts: &mut Parts) -> Option<(HeaderValue, OnUpgrade)> {
    let asked = parts
        .headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case("upgrade"));
    if !asked || parts.version != Version::HTTP_11 {
        return None;
    }
    let protocol = parts.headers.get(header::UPGRADE)?.clone();
    Some((protocol, parts.extensions.remove::<OnUpgrade>()?))
}

/// Answers the switch and connects both sides until one closes.
fn splice(app: &App, client: OnUpgrade, mut response: Response<hyper::body::Incoming>) -> Response {
    let guest = hyper::upgrade::on(&mut response);
    let stop = app.stop.clone();
    app.tasks.spawn(async move {
        let both = async {
            let (client, guest) = tokio::try_join!(client, guest)?;
            let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
            if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut guest).await {
                tracing::trace!(%error, "upgraded connection ended");
            }
            Ok::<_, hyper::Error>(())
        };
        tokio::select! {
            outcome = both => {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "upgrade failed");
                }
            }
            () = stop.cancelled() => {}
        }
    });
    let (mut head, _) = response.into_parts();
    let protocol = head.headers.get(header::UPGRADE).cloned();
    headers::remove_hop_by_hop(&mut head.headers);
    head.headers
        .insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        head.headers.insert(header::UPGRADE, protocol);
    }
    Response::from_parts(head, Body::empty())
}
