//! A node without machines: each sandbox is an HTTP/2 server over a pipe in memory, as the daemon's data channel is, and its
//! tunnels lead to TCP listeners of the test.
//!
//! The template's name chooses how a create goes: `base` works, and so does `tagged:v2`, which has no tag `latest`; `full`,
//! `broken`, `unusable` fail as they say, `leaving` and `stopping` as a node that is being stopped does it; `gated` waits for
//! [`FakeNode::gate`].

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
    size::SizeClass,
};
use space_node::{
    CreateSandbox, DataStream, EndRecord, Node, NodeError, NodeInfo, SandboxEvent, SandboxStatus,
    TemplateInfo, TunnelError, TunnelStream, Usage, WakeReason,
};
use tokio::{
    net::TcpStream,
    sync::{Notify, broadcast},
    task::AbortHandle,
};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Answer = Response<BoxBody<Bytes, BoxError>>;

/// See the module.
#[derive(Debug)]
pub(crate) struct FakeNode {
    live: Mutex<HashMap<SandboxId, Live>>,
    ends: Mutex<Vec<EndRecord>>,
    events: broadcast::Sender<SandboxEvent>,
    capacity: Mutex<usize>,
    pub(crate) creates: Mutex<Vec<CreateSandbox>>,
    templates: Mutex<Vec<TemplateInfo>>,
    /// By which names templates were removed.
    pub(crate) removed: Mutex<Vec<String>>,
    /// Whether it cannot say how any sandbox is.
    pub(crate) mute: AtomicBool,
    /// Deadlines before this take a while to set.
    pub(crate) slow_before: Mutex<Option<Timestamp>>,
    /// Why sandboxes were woken.
    pub(crate) wakes: Mutex<Vec<WakeReason>>,
    /// How often all were listed, as the controller does when it compares.
    pub(crate) lists: AtomicUsize,
    /// What wakes wait for, if anything.
    pub(crate) wake_gate: Mutex<Option<Arc<Notify>>>,
    /// What creates from the template `gated` wait for.
    pub(crate) gate: Arc<Notify>,
    pub(crate) guest: Arc<Guest>,
}

#[derive(Debug)]
struct Live {
    status: SandboxStatus,
    channel: Option<(DataStream, AbortHandle)>,
    unnoticed: bool,
}

/// What all the guests share, for tests to look into.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    /// Where guest ports lead.
    pub(crate) ports: Mutex<HashMap<u16, SocketAddr>>,
    /// What slow handlers wait for before they go on.
    pub(crate) go_on: Notify,
}

// As on the real channel: an unread stream holds nobody else up.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;

pub(crate) const GUEST_TOKEN: &str = "guest-side-token";

impl FakeNode {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            live: Mutex::default(),
            ends: Mutex::default(),
            events: broadcast::channel(64).0,
            capacity: Mutex::new(1000),
            creates: Mutex::default(),
            templates: Mutex::new(
                [
                    "base:latest",
                    "tagged:v2",
                    "gated:latest",
                    "full:latest",
                    "broken:latest",
                    "unusable:latest",
                    "leaving:latest",
                    "stopping:latest",
                ]
                .map(Self::template)
                .into(),
            ),
            removed: Mutex::default(),
            mute: AtomicBool::default(),
            slow_before: Mutex::default(),
            wakes: Mutex::default(),
            lists: AtomicUsize::new(0),
            wake_gate: Mutex::default(),
            gate: Arc::new(Notify::new()),
            guest: Arc::default(),
        })
    }

    pub(crate) fn set_capacity(&self, capacity: usize) {
        *self.capacity.lock().expect("not poisoned") = capacity;
    }

    pub(crate) fn live_count(&self) -> usize {
        self.live.lock().expect("not poisoned").len()
    }

    /// Leads a guest port to a listener of the test.
    pub(crate) fn open_port(&self, port: u16, to: SocketAddr) {
        self.guest.ports.lock().expect("not poisoned").insert(port, to);
    }

    /// Ends a sandbox as a machine's own failure would; `tell` says whether anybody hears of it.
    pub(crate) fn crash(&self, id: &SandboxId, tell: bool) {
        let cause = EndCause::VmmFailed {
            detail: "signal 9".into(),
        };
        let record = self.end(id, cause).expect("is live");
        if tell {
            self.events
                .send(SandboxEvent::Ended(record))
                .expect("someone listens");
        }
    }

    /// Loses a sandbox without any record, as a killed platform does.
    pub(crate) fn lose(&self, id: &SandboxId) {
        self.live.lock().expect("not poisoned").remove(id);
    }

    /// Runs a sandbox nobody has asked for.
    pub(crate) fn stray(&self, status: SandboxStatus) {
        let live = Live {
            status,
            channel: None,
            unnoticed: false,
        };
        self.live
            .lock()
            .expect("not poisoned")
            .insert(live.status.id.clone(), live);
    }

    /// Puts a sandbox in the state of being taken apart.
    pub(crate) fn stopping(&self, id: &SandboxId) {
        self.live
            .lock()
            .expect("not poisoned")
            .get_mut(id)
            .expect("is live")
            .status
            .state = SandboxState::Stopping;
    }

    pub(crate) fn status_of(&self, id: &SandboxId) -> Option<SandboxStatus> {
        self.live
            .lock()
            .expect("not poisoned")
            .get(id)
            .map(|live| live.status.clone())
    }

    /// Breaks the data channel, and gives the broken one out once more, as a node does that has not noticed yet.
    pub(crate) fn break_channel(&self, id: &SandboxId) {
        let mut live = self.live.lock().expect("not poisoned");
        let live = live.get_mut(id).expect("is live");
        live.channel.as_ref().expect("was open").1.abort();
        live.unnoticed = true;
    }

    fn end(&self, id: &SandboxId, cause: EndCause) -> Option<EndRecord> {
        let gone = self.live.lock().expect("not poisoned").remove(id)?;
        if let Some((_, server)) = gone.channel {
            server.abort();
        }
        let record = EndRecord {
            id: id.clone(),
            generation: gone.status.generation,
            cause,
            ended_at: Timestamp::now(),
            cpu_micros: 1234,
        };
        self.ends.lock().expect("not poisoned").push(record.clone());
        Some(record)
    }

    fn stand(&self, id: &SandboxId, state: SandboxState) -> Result<SandboxStatus, NodeError> {
        let mut live = self.live.lock().expect("not poisoned");
        let Some(entry) = live.get_mut(id) else {
            return Err(self.not_found(id));
        };
        if entry.status.state != state {
            entry.status.state = state;
            entry.status.paused_at = (state == SandboxState::Paused).then(Timestamp::now);
            let _heard = self.events.send(SandboxEvent::Changed(entry.status.clone()));
        }
        Ok(entry.status.clone())
    }

    fn not_found(&self, id: &SandboxId) -> NodeError {
        let end = self
            .ends
            .lock()
            .expect("not poisoned")
            .iter()
            .find(|end| end.id == *id)
            .cloned();
        NodeError::NotFound {
            id: id.clone(),
            end: end.map(Box::new),
        }
    }

    pub(crate) fn template(name: &str) -> TemplateInfo {
        TemplateInfo {
            name: name.into(),
            digest: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef".into(),
            default_size: SizeClass::DEFAULT,
            ready_sizes: vec![SizeClass::DEFAULT],
            disk_bytes: 1 << 30,
            created_at: Timestamp::UNIX_EPOCH,
        }
    }
}

#[async_trait]
impl Node for FakeNode {
    async fn info(&self) -> NodeInfo {
        NodeInfo {
            vmm: "fake 1".into(),
            isolates_hostile_code: false,
            sandboxes: self.live_count(),
            capacity: *self.capacity.lock().expect("not poisoned"),
            data_directory: PathBuf::from("/nowhere"),
            pool: Vec::new(),
        }
    }

    async fn create(&self, request: CreateSandbox) -> Result<SandboxStatus, NodeError> {
        let id = request.id.clone();
        self.creates.lock().expect("not poisoned").push(request.clone());
        match request.template.as_str() {
            "base" | "base:latest" | "tagged:v2" => {}
            "gated" => self.gate.notified().await,
            "full" => {
                return Err(NodeError::NoCapacity {
                    what: "memory".into(),
                    retry_after_ms: 1000,
                });
            }
            "broken" => {
                return Err(NodeError::CreateFailed {
                    id,
                    step: "start the monitor: no".into(),
                });
            }
            "stopping" => return Err(NodeError::ShuttingDown),
            "leaving" => {
                let end = EndRecord {
                    id: id.clone(),
                    generation: request.generation,
                    cause: EndCause::PlatformShutdown,
                    ended_at: Timestamp::now(),
                    cpu_micros: 0,
                };
                return Err(NodeError::NotFound {
                    id,
                    end: Some(Box::new(end)),
                });
            }
            "unusable" => {
                return Err(NodeError::VmmUnavailable {
                    what: "QEMU is older than 8.2".into(),
                });
            }
            other => {
                return Err(NodeError::TemplateNotFound { name: other.into() });
            }
        }
        let status = SandboxStatus {
            id: id.clone(),
            project: request.project,
            state: SandboxState::Running,
            template: "base:latest".into(),
            template_digest: Self::template("base:latest").digest,
            size: request.size.unwrap_or(SizeClass::DEFAULT),
            generation: request.generation,
            started_at: Timestamp::now(),
            deadline: request.deadline,
            ready_ms: Some(61.0),
            machine: "m000000000001".into(),
            paused_at: None,
            last_active_at: Timestamp::now(),
            idle_since: None,
        };
        let mut live = self.live.lock().expect("not poisoned");
        if live.len() >= *self.capacity.lock().expect("not poisoned") {
            return Err(NodeError::NoCapacity {
                what: "places".into(),
                retry_after_ms: 1000,
            });
        }
        live.insert(
            id,
            Live {
                status: status.clone(),
                channel: None,
                unnoticed: false,
            },
        );
        Ok(status)
    }

    async fn delete(&self, id: &SandboxId) -> Result<EndRecord, NodeError> {
        self.end(id, EndCause::Deleted).ok_or_else(|| self.not_found(id))
    }

    async fn status(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        if self.mute.load(Ordering::SeqCst) {
            return Err(NodeError::Internal {
                what: "nothing is known".into(),
            });
        }
        self.status_of(id).ok_or_else(|| self.not_found(id))
    }

    async fn list(&self) -> Vec<SandboxStatus> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        self.live
            .lock()
            .expect("not poisoned")
            .values()
            .map(|live| live.status.clone())
            .collect()
    }

    async fn set_deadline(&self, id: &SandboxId, deadline: Timestamp) -> Result<(), NodeError> {
        let slow = self
            .slow_before
            .lock()
            .expect("not poisoned")
            .is_some_and(|before| deadline < before);
        if slow {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if let Some(live) = self.live.lock().expect("not poisoned").get_mut(id) {
            live.status.deadline = deadline;
        } else {
            return Err(self.not_found(id));
        }
        if deadline <= Timestamp::now() {
            let record = self
                .end(id, EndCause::Deadline)
                .ok_or_else(|| self.not_found(id))?;
            let _heard = self.events.send(SandboxEvent::Ended(record));
        }
        Ok(())
    }

    async fn pause(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        self.stand(id, SandboxState::Paused)
    }

    async fn resume(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        self.stand(id, SandboxState::Running)
    }

    async fn wake(&self, id: &SandboxId, reason: WakeReason) -> Result<SandboxStatus, NodeError> {
        self.wakes.lock().expect("not poisoned").push(reason);
        let gate = self.wake_gate.lock().expect("not poisoned").clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        self.resume(id).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Vec<Usage>, NodeError> {
        self.status(id).await?;
        let sample = |at: i64| Usage {
            at: Timestamp::from_second(at).expect("in range"),
            cpu_count: 1,
            cpu_used_pct: 12.5,
            mem_total: 512 << 20,
            mem_used: 100 << 20,
            mem_cache: 50 << 20,
            disk_total: 4 << 30,
            disk_used: 1 << 30,
            host_cpu_micros: 1,
            host_memory_bytes: 2,
        };
        Ok(vec![sample(1000), sample(2000)])
    }

    async fn data(&self, id: &SandboxId) -> Result<DataStream, NodeError> {
        {
            let mut live = self.live.lock().expect("not poisoned");
            let entry = live.get_mut(id).ok_or_else(|| self.not_found(id))?;
            if entry.status.state == SandboxState::Paused {
                return Err(NodeError::Paused { id: id.clone() });
            }
            if entry.status.state != SandboxState::Running {
                return Err(NodeError::Transitioning {
                    id: id.clone(),
                    state: entry.status.state,
                });
            }
            if let Some((channel, _)) = &entry.channel
                && (std::mem::take(&mut entry.unnoticed) || !channel.is_closed())
            {
                return Ok(channel.clone());
            }
        }
        let (ours, theirs) = tokio::io::duplex(256 << 10);
        let guest = self.guest.clone();
        let server = tokio::spawn(async move {
            let service = service_fn(move |request| {
                let guest = guest.clone();
                async move { Ok::<_, Infallible>(answer(guest, request).await) }
            });
            let _ended = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .serve_connection(TokioIo::new(theirs), service)
                .await;
        });
        let (channel, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(TokioIo::new(ours))
            .await
            .map_err(|error| NodeError::Internal {
                what: error.to_string(),
            })?;
        tokio::spawn(connection);
        let mut live = self.live.lock().expect("not poisoned");
        let entry = live.get_mut(id).ok_or_else(|| self.not_found(id))?;
        entry.channel = Some((channel.clone(), server.abort_handle()));
        Ok(channel)
    }

    async fn tunnel(&self, id: &SandboxId, port: u16) -> Result<TunnelStream, TunnelError> {
        let mut channel = self.data(id).await?;
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(format!("127.0.0.1:{port}"))
            .body(Empty::new().map_err(|never| match never {}).boxed())
            .expect("valid");
        let response = channel.send_request(request).await.map_err(|error| {
            TunnelError::Node(NodeError::Internal {
                what: error.to_string(),
            })
        })?;
        if response.headers().contains_key("space-port-closed") {
            return Err(TunnelError::PortClosed { port });
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(|error| {
            TunnelError::Node(NodeError::Internal {
                what: error.to_string(),
            })
        })?;
        Ok(TokioIo::new(upgraded))
    }

    async fn guest_token(&self, id: &SandboxId) -> Result<String, NodeError> {
        self.status(id).await?;
        Ok(GUEST_TOKEN.into())
    }

    async fn ends_since(&self, since: Timestamp) -> Result<Vec<EndRecord>, NodeError> {
        let ends = self.ends.lock().expect("not poisoned");
        Ok(ends.iter().filter(|end| end.ended_at >= since).cloned().collect())
    }

    async fn templates(&self) -> Result<Vec<TemplateInfo>, NodeError> {
        Ok(self.templates.lock().expect("not poisoned").clone())
    }

    async fn delete_template(&self, name: &str) -> Result<(), NodeError> {
        self.removed.lock().expect("not poisoned").push(name.to_owned());
        // As the volume manager understands it.
        let latest = format!("{name}:latest");
        let mut templates = self.templates.lock().expect("not poisoned");
        let before = templates.len();
        templates.retain(|each| each.name != name && each.name != latest && each.digest != name);
        if templates.len() == before {
            return Err(NodeError::TemplateNotFound { name: name.into() });
        }
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<SandboxEvent> {
        self.events.subscribe()
    }

    async fn shutdown(&self) {
        self.live.lock().expect("not poisoned").clear();
    }
}

/// The guest's daemon, as far as the edge can tell.
async fn answer(guest: Arc<Guest>, request: Request<Incoming>) -> Answer {
    if request.method() == Method::CONNECT {
        return connect(&guest, request).await;
    }
    match request.uri().path() {
        "/health" => with_status(StatusCode::NO_CONTENT),
        "/seen" | "/files" => seen(&request),
        "/init" => text("reached"),
        "/echo" => Response::new(request.into_body().map_err(Into::into).boxed()),
        "/sink" => sink(request.into_body()).await,
        "/stall" => {
            guest.go_on.notified().await;
            sink(request.into_body()).await
        }
        "/drip" => drip(guest),
        "/trailers" => trailers(),
        "/process.Process/Start" => start(request.headers()),
        _ => with_status(StatusCode::NOT_FOUND),
    }
}

fn with_status(status: StatusCode) -> Answer {
    let mut response = text("");
    *response.status_mut() = status;
    response
}

fn text(text: impl Into<Bytes>) -> Answer {
    Response::new(Full::new(text.into()).map_err(|never| match never {}).boxed())
}

/// Tells what arrived.
fn seen(request: &Request<Incoming>) -> Answer {
    text(describe(
        request.method(),
        &request.uri().to_string(),
        request.headers(),
    ))
}

pub(crate) fn describe(method: &Method, uri: &str, headers: &HeaderMap) -> String {
    let headers: HashMap<_, _> = headers
        .iter()
        .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes())))
        .collect();
    serde_json::json!({"method": method.as_str(), "uri": uri, "headers": headers}).to_string()
}

async fn sink(mut body: Incoming) -> Answer {
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => total += frame.data_ref().map_or(0, Bytes::len),
            Err(_) => return with_status(StatusCode::BAD_REQUEST),
        }
    }
    text(total.to_string())
}

/// A first part at once, a second when told.
fn drip(guest: Arc<Guest>) -> Answer {
    let parts = futures_util::stream::unfold(0, move |part| {
        let guest = guest.clone();
        async move {
            match part {
                0 => Some((Ok(Frame::data(Bytes::from_static(b"first"))), 1)),
                1 => {
                    guest.go_on.notified().await;
                    Some((Ok(Frame::data(Bytes::from_static(b"second"))), 2))
                }
                _ => None,
            }
        }
    });
    Response::new(StreamBody::new(parts).boxed())
}

fn trailers() -> Answer {
    let mut last = HeaderMap::new();
    last.insert("grpc-status", "0".parse().expect("valid"));
    let parts = [
        Ok(Frame::data(Bytes::from_static(b"body"))),
        Ok(Frame::trailers(last)),
    ];
    Response::new(StreamBody::new(futures_util::stream::iter(parts)).boxed())
}

/// A command that never ends. `x-test: mute` does not even answer.
fn start(headers: &HeaderMap) -> Answer {
    let event = br#"{"event":{"start":{"pid":7}}}"#;
    let mut envelope = vec![0];
    envelope.extend(u32::try_from(event.len()).expect("short").to_be_bytes());
    envelope.extend(event);
    let envelope = Bytes::from(envelope);
    let mute = headers.contains_key("x-test");
    let first = futures_util::stream::iter((!mute).then_some(Ok(Frame::data(envelope))));
    let parts = futures_util::StreamExt::chain(first, futures_util::stream::pending());
    let mut response = Response::new(StreamBody::new(parts).boxed());
    response
        .headers_mut()
        .insert("content-type", "application/connect+json".parse().expect("valid"));
    response
}

async fn connect(guest: &Guest, request: Request<Incoming>) -> Answer {
    let port = request.uri().port_u16().unwrap_or(0);
    let to = guest.ports.lock().expect("not poisoned").get(&port).copied();
    let stream = match to {
        Some(to) => TcpStream::connect(to).await.ok(),
        None => None,
    };
    let Some(mut stream) = stream else {
        let mut response = with_status(StatusCode::BAD_GATEWAY);
        response
            .headers_mut()
            .insert("space-port-closed", "1".parse().expect("valid"));
        return response;
    };
    tokio::spawn(async move {
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            let _ended = tokio::io::copy_bidirectional(&mut TokioIo::new(upgraded), &mut stream).await;
        }
    });
    with_status(StatusCode::OK)
}

/// Waits until `done`, with a limit.
pub(crate) async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    for _ in 0..500 {
        if done().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("waited in vain: {what}");
}
