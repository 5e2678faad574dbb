//! The server: one port, HTTP/1.1 and HTTP/2 without TLS, for API and edge.
//!
//! Shutdown, in order: stop accepting; end event streams and those who wait for room; tell every connection to finish; wait for them up to [`Limits::drain`](crate::Limits::drain);
//! end what is left, upgraded connections among it; wait for creates under way, which must not be cut in half; stop the
//! controller. The node and the store are shut down by whoever owns them, after this.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, response::Response};
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use space_node::Node;
use space_store::Store;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use crate::{
    app::{App, Shared},
    config::ControlConfig,
    controller, edge,
};

/// Bytes of all request headers together.
const MAX_HEAD: usize = 64 << 10;
/// Number of request headers, HTTP/1.
const MAX_HEADERS: usize = 200;
/// Requests at once on one HTTP/2 connection; SDKs open another one beyond it.
const MAX_STREAMS: u32 = 250;
/// Bytes a client may send on one stream before they are consumed.
const STREAM_WINDOW: u32 = 1 << 20;
/// The same for the connection, so that one stuck upload leaves room for the others.
const CONNECTION_WINDOW: u32 = 32 << 20;
/// How often an HTTP/2 client is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(30);
/// Wait after a failed accept, which mostly means that descriptors have run out.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// How long creates and deletes under way are waited for at shutdown.
const SETTLE: Duration = Duration::from_secs(30);

/// Who asked; what forwarded requests are told about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// The control plane over a store and a node.
#[derive(Debug, Clone)]
pub struct Control {
    app: App,
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// What an earlier run has left could not be settled.
    #[error("the state of an earlier run could not be settled")]
    StartUp(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Control {
    /// Puts it together; nothing runs yet.
    pub fn new(config: ControlConfig, store: Arc<dyn Store>, node: Arc<dyn Node>) -> Self {
        Self {
            app: Arc::new(Shared::new(config, store, node)),
        }
    }

    /// API and edge as one router, without controller and connection handling. For tests and for embedding.
    pub fn router(&self) -> Router {
        let app = self.app.clone();
        let api = crate::api::router(app.clone());
        Router::new().fallback(move |request: Request<Body>| {
            let (app, api) = (app.clone(), api.clone());
            async move { Box::pin(dispatch(app, api, request)).await }
        })
    }

    /// Settles what an earlier run has left, then serves until `shutdown`, then stops in order.
    ///
    /// # Errors
    ///
    /// [`ServeError`] if start-up fails. Once it serves, nothing makes it stop but `shutdown`.
    pub async fn serve(&self, listener: TcpListener, shutdown: CancellationToken) -> Result<(), ServeError> {
        // Subscribed before the comparison, so that no end falls between the two.
        let events = self.app.node.events();
        controller::start_up(&self.app)
            .await
            .map_err(|error| ServeError::StartUp(Box::new(error)))?;
        let background = TaskTracker::new();
        let controller_stop = CancellationToken::new();
        background.spawn(controller::run(self.app.clone(), events, controller_stop.clone()));

        let connections = TaskTracker::new();
        let abandon = CancellationToken::new();
        self.accept(&listener, &connections, &shutdown, &abandon).await;
        drop(listener);

        self.app.closing.cancel();
        let drain = self.app.config.limits.drain;
        connections.close();
        if tokio::time::timeout(drain, connections.wait()).await.is_err() {
            tracing::info!(open = connections.len(), "ending the connections that are left");
        }
        abandon.cancel();
        self.app.stop.cancel();
        connections.wait().await;
        self.app.tasks.close();
        if tokio::time::timeout(SETTLE, self.app.tasks.wait()).await.is_err() {
            tracing::warn!(
                "creates or deletes were still under way at shutdown; the next start settles them"
            );
        }
        controller_stop.cancel();
        background.close();
        background.wait().await;
        Ok(())
    }

    async fn accept(
        &self,
        listener: &TcpListener,
        connections: &TaskTracker,
        shutdown: &CancellationToken,
        abandon: &CancellationToken,
    ) {
        let router = self.router();
        let room = Arc::new(Semaphore::new(self.app.config.limits.connections));
        let builder = Arc::new(builder(self.app.config.limits.head));
        loop {
            let (permit, accepted) = tokio::select! {
                () = shutdown.cancelled() => return,
                next = async {
                    let permit = room.clone().acquire_owned().await;
                    (permit, listener.accept().await)
                } => next,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                    continue;
                }
            };
            let connection = serve_connection(
                builder.clone(),
                router.clone(),
                stream,
                Peer(peer),
                shutdown.clone(),
                self.app.config.limits.head,
            );
            let abandon = abandon.clone();
            connections.spawn(async move {
                tokio::select! {
                    () = connection => {}
                    () = abandon.cancelled() => {}
                }
                drop(permit);
            });
        }
    }
}

fn builder(head: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(PING_EVERY);
    builder
}

async fn serve_connection(
    builder: Arc<Builder<TokioExecutor>>,
    router: Router,
    stream: TcpStream,
    peer: Peer,
    shutdown: CancellationToken,
    first_request: Duration,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "nodelay");
    }
    // A client that has vanished from the network is found out even while nothing is sent to it.
    if let Err(error) = rustix::net::sockopt::set_socket_keepalive(&stream, true) {
        tracing::debug!(%error, "keepalive");
    }
    let asked = Arc::new(AtomicBool::new(false));
    let asked_once = asked.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        asked_once.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(peer);
        router.clone().oneshot(request.map(Body::new))
    });
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let nothing_asked = async {
        tokio::time::sleep(first_request).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = nothing_asked => return,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, peer = %peer.0, "connection ended");
    }
}

async fn dispatch(app: App, api: Router, request: Request<Body>) -> Response {
    match edge::target::of(&app.config, &request) {
        Ok(None) => match edge::signer(&app, &request) {
            Some(target) => edge::serve(&app, target, request).await,
            None => call(api, request).await,
        },
        Ok(Some(target)) => edge::serve(&app, target, request).await,
        Err(bad) => edge::answers::bad_target(&bad, request.headers()),
    }
}

async fn call(api: Router, request: Request<Body>) -> Response {
    let began = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = match api.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    tracing::debug!(%method, path, status = response.status().as_u16(), micros, "api call");
    response
}
