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
mod requests;
mod secrets;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use http::StatusCode;
use hyper_util::rt::TokioIo;
use space_channel::{ChannelError, GuestState, HostControl, http2, open_data};
use space_vmm::{Machine, PortStream, VmmError};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{create::milliseconds, failure::chain, seam::DataStream};
pub(crate) use secrets::Secrets;

/// Generation of a machine that is nobody's yet.
pub(crate) const NOBODY: u64 = 0;

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

    /// Opens the control port of a machine that need not run yet, and writes the hello, which is read when it runs. Of a
    /// machine that an earlier process made, it ends the earlier connection; nothing of that one can be mistaken for an
    /// answer. `generation` is [`NOBODY`] for one that is nobody's yet.
    pub(crate) async fn open(
        machine: Arc<dyn Machine>,
        generation: u64,
        owner: Owner,
        limit: Duration,
    ) -> Result<Arc<Self>, LinkError> {
        let control = open_control(machine.as_ref(), generation).await?;
        let session = Session {
            control: Arc::new(control),
            nonce_used: false,
            data: None,
        };
        Ok(Arc::new(Self {
            machine,
            generation: AtomicU64::new(generation),
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
    pub(crate) async fn wake(&self, limit: Duration) -> Result<GuestState, LinkError> {
        let control = self.session.lock().await.control.clone();
        self.machine
            .resume()
            .await
            .map_err(|source| LinkError::Resume { source })?;
        Ok(control.greeted(limit).await?.state)
    }

    /// Gives a machine that runs, and is nobody's, an identity for a while.
    pub(crate) async fn pretend(
        &self,
        hostname: &str,
        secrets: &Secrets,
        limit: Duration,
    ) -> Result<(), LinkError> {
        let control = self.session.lock().await.control.clone();
        control
            .identity(secrets.identity(hostname, NOBODY), limit)
            .await?;
        Ok(())
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
}
