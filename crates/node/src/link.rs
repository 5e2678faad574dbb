//! The connection to one guest's daemon: the control port and the data session that its nonce opens.
//!
//! ```text
//!  greeting ──► control ──data()──► control + data ──data session broken──► (closed)
//!                  ▲                                                            │
//!                  └───────── control port opened anew, new nonce ◄─── data() ──┘
//! ```
//!
//! One data session belongs to one control connection, for the nonce is used once. Opening is done by one task at a
//! time, which goes on when the caller that wanted it has gone; everyone else waits for its outcome.

mod control;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full, Limited, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use rand::TryRngCore as _;
use space_channel::{ChannelError, GuestState, HostControl, Identity, IdentityMode, http2, open_data};
use space_vmm::{Machine, PortStream, VmmError};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    create::milliseconds,
    failure::chain,
    seam::{DataStream, TunnelStream},
};

/// Largest answer that is read whole, bytes.
const MOST_ANSWER: usize = 64 * 1024;
/// Generation of a machine that is nobody's yet.
const NOBODY: u64 = 0;
/// Set by the daemon on its answer when nothing listens on the port of a tunnel.
const PORT_CLOSED: &str = "space-port-closed";

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why the daemon could not be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("cannot open the {port} port")]
    Port {
        port: &'static str,
        #[source]
        source: VmmError,
    },
    #[error("cannot let the machine run")]
    Resume {
        #[source]
        source: VmmError,
    },
    #[error("the private channel failed")]
    Channel(#[from] ChannelError),
    #[error("the data channel failed: {step}")]
    Http {
        step: &'static str,
        #[source]
        source: hyper::Error,
    },
    #[error("the daemon answered {step} with {status}: {text}")]
    Status {
        step: &'static str,
        status: StatusCode,
        text: String,
    },
    #[error("the daemon's answer to {step} is not understood: {what}")]
    Answer { step: &'static str, what: String },
    #[error("the daemon did not answer {step} within {} ms", limit.as_millis())]
    TimedOut { step: &'static str, limit: Duration },
    #[error("nothing listens on the port")]
    PortClosed,
    #[error("the operating system gave no random bytes")]
    Random,
    #[error("the sandbox has ended")]
    Ended,
}

/// What a new guest is told, with what only the host may know.
pub(crate) struct Secrets {
    pub(crate) guest_token: String,
    entropy: [u8; 64],
    machine_id: [u8; 16],
    boot_id: [u8; 16],
}

impl Secrets {
    /// Drawn from the operating system.
    pub(crate) fn random() -> Result<Self, LinkError> {
        let mut bytes = [0_u8; 128];
        rand::rngs::OsRng
            .try_fill_bytes(&mut bytes)
            .map_err(|_| LinkError::Random)?;
        let (entropy, rest) = bytes.split_at(64);
        let (machine_id, rest) = rest.split_at(16);
        let (boot_id, token) = rest.split_at(16);
        let guest_token = token.iter().map(|byte| format!("{byte:02x}")).collect();
        let (Ok(entropy), Ok(machine_id), Ok(boot_id)) =
            (entropy.try_into(), machine_id.try_into(), boot_id.try_into())
        else {
            return Err(LinkError::Random);
        };
        Ok(Self {
            guest_token,
            entropy,
            machine_id: version_4(machine_id),
            boot_id: version_4(boot_id),
        })
    }

    fn identity(&self, hostname: &str, generation: u64) -> Identity {
        let now = Timestamp::now().as_nanosecond();
        Identity {
            mode: IdentityMode::New,
            realtime_ns: u64::try_from(now).unwrap_or_default(),
            entropy: self.entropy,
            generation,
            machine_id: self.machine_id,
            boot_id: self.boot_id,
            hostname: hostname.to_owned(),
            guest_token: self.guest_token.clone(),
        }
    }
}

/// Marks random bytes as a random UUID, which is what both ids are read as.
fn version_4(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    bytes
}

/// The tasks that serve a link and the end of all of them.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    pub(crate) tracker: TaskTracker,
    pub(crate) stop: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Owner
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let stop = self.stop.clone();
        self.tracker.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                _ = future => {}
            }
        });
    }
}

#[derive(Debug)]
struct Session {
    control: Arc<HostControl>,
    /// Whether this control connection's nonce has opened a data session.
    nonce_used: bool,
    data: Option<DataStream>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    machine: Arc<dyn Machine>,
    /// Of the life that the machine has become.
    generation: AtomicU64,
    owner: Owner,
    /// For one question.
    limit: Duration,
    session: Arc<Mutex<Session>>,
}

async fn open_control(machine: &dyn Machine, generation: u64) -> Result<HostControl, LinkError> {
    let PortStream::Unix(stream) = machine.control_port().await.map_err(|source| LinkError::Port {
        port: "control",
        source,
    })?;
    Ok(HostControl::open(stream, generation)?)
}

impl Link {
    async fn open_control(&self) -> Result<HostControl, LinkError> {
        open_control(self.machine.as_ref(), self.generation.load(Ordering::Relaxed)).await
    }

    /// Opens the control port of a machine that need not run yet, and writes the hello.
    pub(crate) async fn open(
        machine: Arc<dyn Machine>,
        owner: Owner,
        limit: Duration,
    ) -> Result<Arc<Self>, LinkError> {
        let control = open_control(machine.as_ref(), NOBODY).await?;
        let session = Session {
            control: Arc::new(control),
            nonce_used: false,
            data: None,
        };
        Ok(Arc::new(Self {
            machine,
            generation: AtomicU64::new(NOBODY),
            owner,
            limit,
            session: Arc::new(Mutex::new(session)),
        }))
    }

    /// Lets a machine that stands still run and gives it its identity; returns when the daemon has acknowledged it.
    ///
    /// The identity is written before the machine runs, so that the daemon finds it at its first look.
    pub(crate) async fn identify(
        &self,
        hostname: &str,
        generation: u64,
        secrets: &Secrets,
    ) -> Result<(), LinkError> {
        let (begun, limit) = (Instant::now(), self.limit);
        self.generation.store(generation, Ordering::Relaxed);
        let control = self.session.lock().await.control.clone();
        let resume = async {
            self.machine
                .resume()
                .await
                .map_err(|source| LinkError::Resume { source })?;
            Ok::<_, LinkError>(milliseconds(begun))
        };
        let greeted = async {
            control.greeted(limit).await?;
            Ok::<_, LinkError>(milliseconds(begun))
        };
        let identity = async {
            control
                .identity(secrets.identity(hostname, generation), limit)
                .await?;
            Ok::<_, LinkError>(milliseconds(begun))
        };
        // The identity is queued first: `join!` polls in order, and the machine's first steps should find it there.
        let (identified_ms, greeted_ms, resumed_ms) = tokio::try_join!(identity, greeted, resume)?;
        tracing::debug!(
            sandbox = hostname,
            resumed_ms,
            greeted_ms,
            identified_ms,
            "the daemon has its identity"
        );
        Ok(())
    }

    /// Lets a machine run that is nobody's, and says what its daemon is in.
    pub(crate) async fn wake(&self) -> Result<GuestState, LinkError> {
        let control = self.session.lock().await.control.clone();
        self.machine
            .resume()
            .await
            .map_err(|source| LinkError::Resume { source })?;
        Ok(control.greeted(self.limit).await?.state)
    }

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

    /// The data session, opened if there is none that works.
    pub(crate) async fn data(self: &Arc<Self>) -> Result<DataStream, LinkError> {
        let session = self.session.clone().lock_owned().await;
        if let Some(data) = &session.data
            && !data.is_closed()
        {
            return Ok(data.clone());
        }
        let link = self.clone();
        let opening = self.owner.tracker.spawn(async move {
            let stop = link.owner.stop.clone();
            tokio::select! {
                () = stop.cancelled() => Err(LinkError::Ended),
                opened = link.open_session(session) => opened,
            }
        });
        opening.await.unwrap_or(Err(LinkError::Ended))
    }

    async fn open_session(&self, mut session: OwnedMutexGuard<Session>) -> Result<DataStream, LinkError> {
        if session.nonce_used || session.control.is_closed() {
            // Dropped first: the old connection must not outlive the new one's hello.
            session.data = None;
            session.control = Arc::new(self.open_control().await?);
            session.nonce_used = false;
        }
        session.control.greeted(self.limit).await?;
        session.nonce_used = true;
        let PortStream::Unix(stream) = self
            .machine
            .data_port()
            .await
            .map_err(|source| LinkError::Port { port: "data", source })?;
        let stream = open_data(stream, session.control.nonce(), self.limit).await?;
        let (data, connection) = hyper::client::conn::http2::Builder::new(self.owner.clone())
            .initial_stream_window_size(http2::STREAM_WINDOW)
            .initial_connection_window_size(http2::CONNECTION_WINDOW)
            .max_frame_size(http2::FRAME_SIZE)
            .max_send_buf_size(http2::SEND_BUFFER)
            .initial_max_send_streams(http2::STREAMS as usize)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|source| LinkError::Http {
                step: "the HTTP/2 handshake",
                source,
            })?;
        let stop = self.owner.stop.clone();
        self.owner.tracker.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                ended = connection => {
                    if let Err(error) = ended {
                        tracing::debug!(error = %chain(&error), "a data session broke");
                    }
                }
            }
        });
        session.data = Some(data.clone());
        Ok(data)
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
