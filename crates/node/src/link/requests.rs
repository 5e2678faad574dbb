//! What is asked over the data session by the node itself: requests with whole answers, and tunnels.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full, Limited, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use super::{Link, LinkError};
use crate::seam::TunnelStream;

/// Largest answer that is read whole, bytes.
const MOST_ANSWER: usize = 64 * 1024;
/// Set by the daemon on its answer when nothing listens on the port of a tunnel.
const PORT_CLOSED: &str = "space-port-closed";

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Link {
    /// One request with a whole answer, whatever its status.
    pub(crate) async fn exchange(
        self: &Arc<Self>,
        step: &'static str,
        request: Request<()>,
        body: Bytes,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), LinkError> {
        let exchange = async {
            let request = request.map(|()| boxed(Full::new(body)));
            let response = self.send_within(step, request, limit).await?;
            let status = response.status();
            Ok((status, read(step, response).await?))
        };
        tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| LinkError::TimedOut { step, limit })?
    }

    /// Sets the environment of everything started from now on.
    pub(crate) async fn init(self: &Arc<Self>, body: Vec<u8>) -> Result<(), LinkError> {
        let step = "its environment";
        let request = Request::builder()
            .method(Method::POST)
            .uri("http://space/init")
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(boxed(Full::new(Bytes::from(body))))
            .map_err(|error| LinkError::Answer {
                step,
                what: error.to_string(),
            })?;
        self.whole(step, request).await.map(drop)
    }

    /// The daemon's own figures, as it writes them.
    pub(crate) async fn metrics(self: &Arc<Self>) -> Result<Bytes, LinkError> {
        let step = "its metrics";
        let request = Request::get("http://space/metrics")
            .body(boxed(Empty::new()))
            .map_err(|error| LinkError::Answer {
                step,
                what: error.to_string(),
            })?;
        self.whole(step, request).await
    }

    /// A byte stream to a port on the guest's loopback.
    pub(crate) async fn tunnel(self: &Arc<Self>, port: u16) -> Result<TunnelStream, LinkError> {
        let step = "a tunnel";
        // A session that broke unnoticed shows itself at the first request: once more with a new one.
        let mut again = true;
        let response = loop {
            let request = Request::builder()
                .method(Method::CONNECT)
                .uri(format!("127.0.0.1:{port}"))
                .body(boxed(Empty::new()))
                .map_err(|error| LinkError::Answer {
                    step,
                    what: error.to_string(),
                })?;
            match self.send(step, request).await {
                Err(LinkError::Http { .. }) if again => again = false,
                answered => break answered?,
            }
        };
        if response.status().is_success() {
            let upgraded = hyper::upgrade::on(response)
                .await
                .map_err(|source| LinkError::Http { step, source })?;
            Ok(TokioIo::new(upgraded))
        } else if response.headers().contains_key(PORT_CLOSED) {
            Err(LinkError::PortClosed)
        } else {
            let status = response.status();
            let text = read(step, response)
                .await
                .map_or_else(|_| String::new(), |body| words(&body));
            Err(LinkError::Status { step, status, text })
        }
    }

    async fn send(
        self: &Arc<Self>,
        step: &'static str,
        request: Request<BoxBody<Bytes, BoxError>>,
    ) -> Result<Response<Incoming>, LinkError> {
        self.send_within(step, request, self.limit).await
    }

    async fn send_within(
        self: &Arc<Self>,
        step: &'static str,
        request: Request<BoxBody<Bytes, BoxError>>,
        limit: Duration,
    ) -> Result<Response<Incoming>, LinkError> {
        let exchange = async {
            let mut data = self.data().await?;
            data.ready()
                .await
                .map_err(|source| LinkError::Http { step, source })?;
            data.send_request(request)
                .await
                .map_err(|source| LinkError::Http { step, source })
        };
        tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| LinkError::TimedOut { step, limit })?
    }

    async fn whole(
        self: &Arc<Self>,
        step: &'static str,
        request: Request<BoxBody<Bytes, BoxError>>,
    ) -> Result<Bytes, LinkError> {
        let limit = self.limit;
        let exchange = async {
            let response = self.send(step, request).await?;
            let status = response.status();
            let body = read(step, response).await?;
            if status.is_success() {
                Ok(body)
            } else {
                Err(LinkError::Status {
                    step,
                    status,
                    text: words(&body),
                })
            }
        };
        tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| LinkError::TimedOut { step, limit })?
    }
}

fn boxed<B>(body: B) -> BoxBody<Bytes, BoxError>
where
    B: http_body_util::BodyExt + hyper::body::Body<Data = Bytes> + Send + Sync + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed()
}

async fn read(step: &'static str, response: Response<Incoming>) -> Result<Bytes, LinkError> {
    Limited::new(response.into_body(), MOST_ANSWER)
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .map_err(|error| LinkError::Answer {
            step,
            what: error.to_string(),
        })
}

/// What a guest wrote, fit for a log line.
fn words(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(256)])
        .escape_debug()
        .to_string()
}
