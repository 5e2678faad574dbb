//! The data port: one HTTP/2 session after the other, each let in by its nonce.
//!
//! ```text
//!  idle ──gate opens──► seeking ──nonce seen, nonce written──► serving
//!    ▲                     │                                     │
//!    │                     └───────── gate opens again ──────────┤ (the old session is dropped, all its requests with it)
//!    └───────────────────────── connection ends ─────────────────┘
//! ```

use std::{
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker},
};

use axum::{
    Router,
    body::{Body, HttpBody},
};
use bytes::Bytes;
use http::{Method, Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::TokioIo;
use space_channel::{Nonce, NonceSearch, Prefixed, http2 as windows};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf, unix::AsyncFd},
    sync::Notify,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::{port::Port, say, tunnel};

/// Bytes read at once while looking for the nonce.
const CHUNK: usize = 16 * 1024;
/// Most bytes of a request's headers.
const MAX_HEADERS: u32 = 64 * 1024;

/// Lets data sessions in, one at a time, each by the nonce of the hello that announced it.
///
/// A session reads and writes the port only through the gate, which refuses all but the newest. So as soon as
/// [`DataGate::open`] has returned, no earlier session takes another byte, wherever its thread happens to be.
#[derive(Debug, Default)]
pub struct DataGate {
    newest: Mutex<Newest>,
    opened: Notify,
    tunnels: Count,
    requests: Count,
}

#[derive(Debug, Default)]
struct Newest {
    session: u64,
    nonce: Option<Nonce>,
}

impl DataGate {
    /// Drops the session there may be and announces the next. Waits at most for one short system call.
    pub fn open(&self, nonce: Nonce) {
        let mut newest = self.lock();
        newest.session += 1;
        newest.nonce = Some(nonce);
        drop(newest);
        self.opened.notify_waiters();
    }

    /// Waits for a session newer than `after`.
    async fn next(&self, after: u64) -> (u64, Nonce) {
        loop {
            let mut opened = pin!(self.opened.notified());
            opened.as_mut().enable();
            if let Newest {
                session,
                nonce: Some(nonce),
            } = *self.lock()
                && session > after
            {
                return (session, nonce);
            }
            opened.await;
        }
    }

    /// Does something to the port if `session` is the newest.
    fn pass<T>(&self, session: u64, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let newest = self.lock();
        if newest.session == session {
            act()
        } else {
            Err(io::ErrorKind::ConnectionAborted.into())
        }
    }

    /// Tunnels that are open.
    pub fn tunnels(&self) -> u32 {
        self.tunnels.get()
    }

    /// Requests, other than tunnels, whose answer has not ended.
    pub fn requests(&self) -> u32 {
        self.requests.get()
    }

    fn is_newest(&self, session: u64) -> bool {
        self.lock().session == session
    }

    fn lock(&self) -> MutexGuard<'_, Newest> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of something there are at the moment.
#[derive(Debug, Clone, Default)]
struct Count(Arc<AtomicU32>);

impl Count {
    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn one(&self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(&self.0))
    }
}

/// One of them, until dropped.
#[derive(Debug)]
pub struct Counted(Arc<AtomicU32>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer's body that counts as a request until its end.
struct CountedBody {
    body: Body,
    _request: Counted,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// Serves `router` on the port for ever. Must run on a tokio runtime.
pub async fn serve(port: Port, gate: Arc<DataGate>, router: Router) -> io::Error {
    let port = Arc::new(SharedPort {
        port,
        wakers: Mutex::default(),
    });
    let watching = match watch(&port) {
        Ok(watching) => watching,
        Err(error) => return error,
    };
    let sessions = async {
        let mut session = 0;
        loop {
            let (newer, nonce) = gate.next(session).await;
            session = newer;
            let stream = SessionStream {
                port: Arc::clone(&port),
                gate: Arc::clone(&gate),
                session,
            };
            let tasks = SessionTasks::default();
            tokio::select! {
                outcome = serve_session(stream, nonce, router.clone(), &gate, tasks.clone()) => {
                    // The end of a session that another has replaced is no news.
                    if let (Err(error), true) = (outcome, gate.is_newest(session)) {
                        say!("the data session ended: {error}");
                    }
                }
                _ = gate.next(session) => {}
            }
            tasks.end().await;
        }
    };
    tokio::select! {
        error = watching => error,
        () = sessions => io::Error::other("the data port's sessions ended"),
    }
}

async fn serve_session(
    mut stream: SessionStream,
    nonce: Nonce,
    router: Router,
    gate: &DataGate,
    tasks: SessionTasks,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let prefix = seek(&mut stream, &nonce).await?;
    stream.write_all(nonce.as_bytes()).await?;
    let handlers = tasks.clone();
    let (tunnels, requests) = (gate.tunnels.clone(), gate.requests.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let counted = match *request.method() {
            Method::CONNECT => tunnels.one(),
            _ => requests.one(),
        };
        answer(request, router.clone(), handlers.clone(), counted)
    });
    http2::Builder::new(tasks)
        .initial_stream_window_size(windows::STREAM_WINDOW)
        .initial_connection_window_size(windows::CONNECTION_WINDOW)
        .max_concurrent_streams(windows::STREAMS)
        .max_frame_size(windows::FRAME_SIZE)
        .max_send_buf_size(windows::SEND_BUFFER)
        .max_header_list_size(MAX_HEADERS)
        .serve_connection(TokioIo::new(Prefixed::new(prefix, stream)), service)
        .await?;
    Ok(())
}

/// Discards input up to the nonce; returns what was read behind it.
async fn seek(stream: &mut SessionStream, nonce: &Nonce) -> io::Result<Bytes> {
    let mut search = NonceSearch::new(nonce);
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = stream.read(&mut buffer).await?;
        if let Some(end) = search.feed(&buffer[..length]) {
            return Ok(Bytes::copy_from_slice(&buffer[end..length]));
        }
    }
}

async fn answer(
    request: Request<Incoming>,
    router: Router,
    tasks: SessionTasks,
    counted: Counted,
) -> Result<Response<Body>, std::convert::Infallible> {
    if request.method() == Method::CONNECT {
        return Ok(tunnel::connect(request, &tasks, counted).await);
    }
    let response = router.oneshot(request.map(Body::new)).await?;
    Ok(response.map(|body| {
        Body::new(CountedBody {
            body,
            _request: counted,
        })
    }))
}

/// The tasks of one session; they end with it.
#[derive(Debug, Clone, Default)]
pub struct SessionTasks {
    tracker: TaskTracker,
    ended: CancellationToken,
}

impl SessionTasks {
    /// Runs a task until it is done or the session ends.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let ended = self.ended.clone();
        self.tracker
            .spawn(async move { ended.run_until_cancelled_owned(task).await });
    }

    async fn end(self) {
        self.ended.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

impl<F> hyper::rt::Executor<F> for SessionTasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        self.spawn(async move { drop(task.await) });
    }
}

/// A port with those that wait for it, as reading and writing wait for the same changes.
#[derive(Debug)]
struct SharedPort {
    port: Port,
    wakers: Mutex<[Option<Waker>; 2]>,
}

const READING: usize = 0;
const WRITING: usize = 1;

impl SharedPort {
    fn wait(&self, what: usize, cx: &Context<'_>) {
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut wakers[what] {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut *self.wakers.lock().unwrap_or_else(PoisonError::into_inner));
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Wakes whoever waits for the port on each of its changes; ends only when that fails.
fn watch(port: &Arc<SharedPort>) -> io::Result<impl Future<Output = io::Error> + use<>> {
    let port = Arc::clone(port);
    let changes: OwnedFd = port.port.changes().as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is owned by what is registered and stays open until that is dropped.
    let changes = unsafe { AsyncFd::register_with_interest(changes, Interest::READABLE) }?;
    Ok(async move {
        loop {
            match changes.readable().await {
                Ok(mut ready) => {
                    port.port.note_changes();
                    ready.clear_ready();
                    port.wake();
                }
                Err(error) => return error,
            }
        }
    })
}

/// The port as one session sees it.
#[derive(Debug)]
struct SessionStream {
    port: Arc<SharedPort>,
    gate: Arc<DataGate>,
    session: u64,
}

impl AsyncRead for SessionStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // Before trying, so that no change between the two is missed.
        self.port.wait(READING, cx);
        match self
            .gate
            .pass(self.session, || self.port.port.read(buf.initialize_unfilled()))?
        {
            Some(length) => {
                buf.advance(length);
                Poll::Ready(Ok(()))
            }
            None => Poll::Pending,
        }
    }
}

impl AsyncWrite for SessionStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.port.wait(WRITING, cx);
        match self.gate.pass(self.session, || self.port.port.write(bytes))? {
            Some(length) => Poll::Ready(Ok(length)),
            None => Poll::Pending,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
