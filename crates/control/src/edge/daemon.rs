//! Port 49983: the space daemon, over the sandbox's private HTTP/2 channel.

use std::{sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::{BodyExt as _, combinators::BoxBody};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::{
    answers::Answer,
    awake, broken,
    guard::{self, Admission},
    headers,
    stream::{BoxError, Guarded, end_envelope},
    target::{Routing, Target},
};
use crate::{
    app::{App, Route},
    transitions::Traffic,
};

type ChannelBody = BoxBody<Bytes, BoxError>;

/// The call whose timeout is a command's deadline.
const START: &str = "/process.Process/Start";
/// Tries on a channel that turns out to be broken before the request was on it.
const ATTEMPTS: usize = 2;

pub(super) async fn serve(
    app: &App,
    route: &Arc<Route>,
    target: &Target,
    request: Request<Body>,
) -> Result<Response, Answer> {
    let (parts, body) = request.into_parts();
    let (path, query) = path_and_query(target, &parts.uri);
    let admission = guard::admit(
        route,
        target,
        &parts.method,
        path,
        query.unwrap_or_default(),
        &parts.headers,
    )?;
    if parts.method == Method::CONNECT {
        return Err(Answer::NoSuchPath {
            id: target.id.clone(),
        });
    }
    let health = parts.method == Method::GET && path == "/health";
    let traffic = match &route.access_token {
        _ if health => Traffic::HealthCheck,
        Some(_) => Traffic::Owner,
        None => Traffic::Anyone,
    };

    let deadline = command_deadline(app, path, &parts.headers);
    let mut forwarded = headers::for_guest(target, &parts.headers);
    if admission == Admission::Signature {
        // A signature names its user; the header must not name another.
        forwarded.remove(header::AUTHORIZATION);
    }
    let uri = channel_uri(target, path, query)?;
    let body = if body.is_end_stream() {
        http_body_util::Empty::new()
            .map_err(|never| match never {})
            .boxed()
    } else {
        SyncBody::new(Guarded::new(body, app.config.limits.edge_idle)).boxed()
    };
    let mut outgoing = Request::new(body);
    *outgoing.method_mut() = parts.method;
    *outgoing.uri_mut() = uri;
    *outgoing.version_mut() = http::Version::HTTP_2;
    *outgoing.headers_mut() = forwarded;

    let content_type = outgoing.headers().get(header::CONTENT_TYPE).cloned();
    let sent = Box::pin(send(app, route, traffic, outgoing));
    let response = match deadline {
        None => sent.await?,
        Some(at) => match tokio::time::timeout_at(at, sent).await {
            Ok(response) => response?,
            Err(_) => return Ok(deadline_answer(content_type)),
        },
    };
    let (mut head, body) = response.into_parts();
    headers::remove_hop_by_hop(&mut head.headers);
    headers::permit_all_origins(&mut head.headers);
    let mut body = Guarded::new(body, app.config.limits.edge_idle).deadline(deadline);
    if head.status == StatusCode::OK && is_connect_stream(head.headers.get(header::CONTENT_TYPE)) {
        body = body.connect_stream();
    }
    Ok(Response::from_parts(head, Body::new(body)))
}

/// Sends on the channel; once more on a new one if the old one was broken before it took the request.
async fn send(
    app: &App,
    route: &Route,
    traffic: Traffic,
    mut request: Request<ChannelBody>,
) -> Result<Response<Incoming>, Answer> {
    let mut failure = String::new();
    let mut woken = 0;
    for _ in 0..ATTEMPTS {
        let mut channel = loop {
            match app.node.data(&route.id).await {
                Ok(channel) => break channel,
                Err(refusal) => awake(app, route, traffic, &mut woken, refusal).await?,
            }
        };
        if let Err(error) = channel.ready().await {
            failure = error.to_string();
            continue;
        }
        let mut refused = match channel.try_send_request(request).await {
            Ok(response) => return Ok(response),
            Err(refused) => refused,
        };
        failure = refused.error().to_string();
        match refused.take_message() {
            Some(unsent) => request = unsent,
            None => break,
        }
    }
    Err(broken(app, route, failure).await)
}

/// Path and query as the daemon sees them.
fn path_and_query<'a>(target: &'a Target, uri: &'a Uri) -> (&'a str, Option<&'a str>) {
    match &target.routing {
        Routing::Path { rest: Some(rest), .. } => (rest, uri.query()),
        _ => (uri.path(), uri.query()),
    }
}

fn channel_uri(target: &Target, path: &str, query: Option<&str>) -> Result<Uri, Answer> {
    let path_and_query = query.map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    Uri::builder()
        .scheme("http")
        .authority("localhost")
        .path_and_query(path_and_query)
        .build()
        .map_err(|_| Answer::NoSuchPath {
            id: target.id.clone(),
        })
}

/// When the edge ends a command stream that the guest has not: the client's own limit and some grace.
fn command_deadline(app: &App, path: &str, headers: &HeaderMap) -> Option<Instant> {
    if path != START {
        return None;
    }
    let limit: u64 = headers.get("connect-timeout-ms")?.to_str().ok()?.parse().ok()?;
    if limit == 0 {
        return None;
    }
    Instant::now().checked_add(Duration::from_millis(limit).saturating_add(app.config.limits.command_grace))
}

fn is_connect_stream(content_type: Option<&http::HeaderValue>) -> bool {
    content_type
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.starts_with("application/connect+"))
}

/// The deadline has passed before the guest has answered at all.
fn deadline_answer(content_type: Option<http::HeaderValue>) -> Response {
    let message = "the deadline of the command has passed and the sandbox did not answer";
    let mut response = if is_connect_stream(content_type.as_ref()) {
        Response::new(Body::from(end_envelope("deadline_exceeded", message)))
    } else {
        let body = serde_json::json!({"code": "deadline_exceeded", "message": message});
        let mut response = Response::new(Body::from(body.to_string()));
        *response.status_mut() = StatusCode::GATEWAY_TIMEOUT;
        response
    };
    let content_type = content_type.unwrap_or_else(|| http::HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    headers::permit_all_origins(response.headers_mut());
    response
}

/// The channel's body type wants `Sync`, which a body polled by one task at a time gets from a lock never contended.
type SyncBody<B> = sync_wrapper_body::SyncBody<B>;

mod sync_wrapper_body {
    use std::{
        pin::Pin,
        sync::Mutex,
        task::{Context, Poll},
    };

    use http_body::{Body, Frame, SizeHint};

    pub(super) struct SyncBody<B>(Mutex<Pin<Box<B>>>);

    impl<B> SyncBody<B> {
        pub(super) fn new(body: B) -> Self {
            Self(Mutex::new(Box::pin(body)))
        }
    }

    impl<B: Body> Body for SyncBody<B> {
        type Data = B::Data;
        type Error = B::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
            let inner = self
                .0
                .get_mut()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            inner.as_mut().poll_frame(cx)
        }

        fn is_end_stream(&self) -> bool {
            self.0.lock().is_ok_and(|inner| inner.is_end_stream())
        }

        fn size_hint(&self) -> SizeHint {
            self.0
                .lock()
                .map_or_else(|_| SizeHint::default(), |inner| inner.size_hint())
        }
    }
}
