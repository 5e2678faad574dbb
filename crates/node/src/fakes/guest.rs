//! The guest of a pretended machine.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, atomic::Ordering},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use space_channel::{
    Activity, Event, GuestControl, GuestMessage, GuestState, HelloAck, HostMessage, Identity, Nonce,
    NonceSearch, Prefixed, Status, capabilities,
};
use space_vmm::ExitReason;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::{mpsc, watch},
    task::AbortHandle,
};

use super::World;
use crate::locked;

/// The only port something listens on: it echoes.
pub(crate) const ECHO_PORT: u16 = 7;

#[derive(Debug)]
enum Plugged {
    Control(std::os::unix::net::UnixStream),
    Data(std::os::unix::net::UnixStream),
}

/// What the guest was told.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) identities: Vec<Identity>,
    pub(crate) environment: Option<serde_json::Value>,
    /// Thaws, by the time that they set.
    pub(crate) thaws: Vec<u64>,
    /// Health questions that were answered.
    pub(crate) health: usize,
    /// What it says of its agent.
    pub(crate) activity: Activity,
    pub(crate) manner: Manner,
}

/// How a guest behaves on the control port.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// As it should.
    #[default]
    Proper,
    /// Like the oldest daemon that there is.
    Old,
    /// It reads and never answers.
    Silent,
    /// It answers, in a flood of other frames and bytes.
    Flooding,
    /// It answers with what was not asked, out of turn, and with numbers beyond all sense.
    Lying,
    /// It hangs up on every connection.
    HangingUp,
}

#[derive(Debug)]
pub(crate) struct Guest {
    plugs: mpsc::UnboundedSender<Plugged>,
    pub(crate) known: Arc<Mutex<Known>>,
    session: Arc<Mutex<Option<AbortHandle>>>,
}

impl Guest {
    pub(crate) fn new(
        world: Arc<World>,
        mut running: watch::Receiver<bool>,
        mut exit: watch::Receiver<Option<ExitReason>>,
    ) -> Self {
        let (plugs, mut plugged) = mpsc::unbounded_channel();
        let manner = match world.old.load(Ordering::SeqCst) {
            true => Manner::Old,
            false => Manner::Proper,
        };
        let known = Arc::new(Mutex::new(Known {
            manner,
            ..Known::default()
        }));
        let session = Arc::new(Mutex::new(None));
        let (known_inside, session_inside) = (known.clone(), session.clone());
        let home = world.home();
        let runs = running.clone();
        let life = async move {
            if running.wait_for(|running| *running).await.is_err() {
                return;
            }
            let nonce = Arc::new(Mutex::new(None::<Nonce>));
            let mut control = None;
            while let Some(plug) = plugged.recv().await {
                match plug {
                    Plugged::Control(stream) => {
                        let task = speak(
                            world.clone(),
                            runs.clone(),
                            stream,
                            known_inside.clone(),
                            nonce.clone(),
                            session_inside.clone(),
                        );
                        let task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(task));
                        control = Some(task);
                    }
                    Plugged::Data(stream) => {
                        let nonce = locked(&nonce).take();
                        let Some(nonce) = nonce else { continue };
                        world.sessions.fetch_add(1, Ordering::SeqCst);
                        let serving = tokio::spawn(serve(
                            stream,
                            nonce,
                            world.clone(),
                            runs.clone(),
                            known_inside.clone(),
                        ));
                        *locked(&session_inside) = Some(serving.abort_handle());
                    }
                }
            }
            drop(control);
        };
        let ended_session = session.clone();
        home.spawn(async move {
            tokio::select! {
                () = life => {}
                _ = exit.wait_for(Option::is_some) => {}
            }
            drop_session(&ended_session);
        });
        Self {
            plugs,
            known,
            session,
        }
    }

    pub(crate) fn control(&self, stream: std::os::unix::net::UnixStream) {
        drop(self.plugs.send(Plugged::Control(stream)));
    }

    pub(crate) fn data(&self, stream: std::os::unix::net::UnixStream) {
        drop(self.plugs.send(Plugged::Data(stream)));
    }

    /// Breaks the data session as a crash of the daemon would.
    pub(crate) fn break_session(&self) {
        drop_session(&self.session);
    }
}

fn drop_session(session: &Mutex<Option<AbortHandle>>) {
    if let Some(session) = locked(session).take() {
        session.abort();
    }
}

/// A machine that stands still does nothing.
async fn running(runs: &watch::Receiver<bool>) {
    // An error says that it is gone, and then its tasks are about to be.
    drop(runs.clone().wait_for(|running| *running).await);
}

async fn speak(
    world: Arc<World>,
    runs: watch::Receiver<bool>,
    stream: std::os::unix::net::UnixStream,
    known: Arc<Mutex<Known>>,
    nonce: Arc<Mutex<Option<Nonce>>>,
    session: Arc<Mutex<Option<AbortHandle>>>,
) {
    let mut stream = UnixStream::from_std(stream).expect("a socket");
    let mut control = GuestControl::new();
    let mut buffer = vec![0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        running(&runs).await;
        let manner = locked(&known).manner;
        match manner {
            Manner::Silent => continue,
            Manner::HangingUp => return,
            _ => {}
        }
        let mut rest = &buffer[..length];
        while let Some(request) = control.next(&mut rest) {
            let of_sequence = request.sequence;
            let ack = |status| GuestMessage::Ack {
                of_sequence,
                status,
                detail: "on demand".to_owned(),
            };
            let answer = match request.message {
                Ok(HostMessage::Hello(hello)) => {
                    drop_session(&session);
                    *locked(&nonce) = Some(hello.nonce);
                    if world.step("hello").await.is_err() {
                        continue;
                    }
                    GuestMessage::HelloAck(HelloAck {
                        protocol: GuestControl::agree(&hello),
                        nonce_echo: hello.nonce,
                        daemon_version: "pretended".to_owned(),
                        capabilities: match manner {
                            Manner::Old => 0,
                            _ => capabilities::ACTIVITY,
                        },
                        generation: locked(&known).identities.last().map_or(0, |last| last.generation),
                        state: GuestState::Ready,
                    })
                }
                Ok(HostMessage::Identity(identity)) => {
                    locked(&known).identities.push(*identity);
                    ack(if world.step("identity").await.is_ok() {
                        Status::Ok
                    } else {
                        Status::Failed
                    })
                }
                Ok(HostMessage::Health) if world.mute.load(Ordering::SeqCst) => continue,
                Ok(HostMessage::Activity) if world.mute.load(Ordering::SeqCst) => continue,
                Ok(HostMessage::Health) => {
                    locked(&known).health += 1;
                    GuestMessage::HealthAck {
                        of_sequence,
                        uptime_ms: 1,
                        processes: 0,
                    }
                }
                Ok(HostMessage::Activity) if manner != Manner::Old => {
                    let mut known = locked(&known);
                    known.health += 1;
                    GuestMessage::ActivityAck {
                        of_sequence,
                        uptime_ms: 1,
                        processes: 0,
                        activity: known.activity,
                    }
                }
                Ok(HostMessage::Thaw { realtime_ns }) => {
                    locked(&known).thaws.push(realtime_ns);
                    ack(Status::Ok)
                }
                _ => ack(Status::NotUnderstood),
            };
            let mut out = Vec::new();
            misbehave(manner, &mut control, of_sequence, &mut out);
            control.say(&answer, &mut out);
            misbehave(manner, &mut control, of_sequence, &mut out);
            if stream.write_all(&out).await.is_err() {
                return;
            }
        }
    }
}

/// What a hostile guest says around its answer.
fn misbehave(manner: Manner, control: &mut GuestControl, of_sequence: u32, out: &mut Vec<u8>) {
    let ack = |of_sequence| GuestMessage::Ack {
        of_sequence,
        status: Status::Failed,
        detail: "x".repeat(256),
    };
    match manner {
        Manner::Flooding => {
            for number in 0..2000_u32 {
                control.say(&ack(number.wrapping_mul(7919) | 0x8000_0000), out);
                let detail = "y".repeat(200);
                control.say(&GuestMessage::Event(Event::AgentOutOfMemory { detail }), out);
            }
            out.extend(std::iter::repeat_n(0x53, 64 * 1024));
        }
        Manner::Lying => {
            let most = Activity {
                cpu_micros: u64::MAX,
                io_bytes: u64::MAX,
                tasks: u32::MAX,
                tunnels: u32::MAX,
                requests: u32::MAX,
            };
            for of_sequence in [of_sequence.wrapping_add(1), 0, u32::MAX] {
                control.say(&ack(of_sequence), out);
                let (uptime_ms, processes, activity) = (u64::MAX, u32::MAX, most);
                control.say(
                    &GuestMessage::ActivityAck {
                        of_sequence,
                        uptime_ms,
                        processes,
                        activity,
                    },
                    out,
                );
            }
        }
        Manner::Proper | Manner::Old | Manner::Silent | Manner::HangingUp => {}
    }
}

async fn serve(
    stream: std::os::unix::net::UnixStream,
    nonce: Nonce,
    world: Arc<World>,
    runs: watch::Receiver<bool>,
    known: Arc<Mutex<Known>>,
) {
    let mut stream = UnixStream::from_std(stream).expect("a socket");
    let mut search = NonceSearch::new(&nonce);
    let mut buffer = vec![0; 4096];
    let prefix = loop {
        let Ok(length @ 1..) = stream.read(&mut buffer).await else {
            return;
        };
        if let Some(end) = search.feed(&buffer[..length]) {
            break Bytes::copy_from_slice(&buffer[end..length]);
        }
    };
    // Stale bytes of an earlier life come first.
    let mut first = b"HTTP/1.1 200 stale".to_vec();
    first.extend_from_slice(nonce.as_bytes());
    if stream.write_all(&first).await.is_err() {
        return;
    }
    let service = service_fn(|request| answer(request, world.clone(), runs.clone(), known.clone()));
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder.enable_connect_protocol();
    drop(
        builder
            .serve_connection(TokioIo::new(Prefixed::new(prefix, stream)), service)
            .await,
    );
}

async fn answer(
    request: Request<Incoming>,
    world: Arc<World>,
    runs: watch::Receiver<bool>,
    known: Arc<Mutex<Known>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    running(&runs).await;
    let status = |status| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        response
    };
    let path = request.uri().path().to_owned();
    Ok(match (request.method(), path.as_str()) {
        (&Method::GET, "/health") => status(StatusCode::NO_CONTENT),
        (&Method::GET, "/metrics") if world.step("metrics").await.is_ok() => Response::new(Full::from(
            r#"{"ts":1,"cpu_count":1,"cpu_used_pct":2.5,"mem_total":4,"mem_used":3,"mem_cache":2,"disk_used":5,"disk_total":6}"#,
        )),
        (&Method::POST, "/init") => {
            let body = request
                .into_body()
                .collect()
                .await
                .map(http_body_util::Collected::to_bytes);
            let body = body.ok().and_then(|body| serde_json::from_slice(&body).ok());
            locked(&known).environment = body;
            status(if world.step("init").await.is_ok() {
                StatusCode::NO_CONTENT
            } else {
                StatusCode::INTERNAL_SERVER_ERROR
            })
        }
        (&Method::CONNECT, _) if request.uri().port_u16() == Some(ECHO_PORT) => {
            tokio::spawn(async move {
                let Ok(upgraded) = hyper::upgrade::on(request).await else {
                    return;
                };
                let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgraded));
                let mut buffer = vec![0; 4096];
                while let Ok(length @ 1..) = reader.read(&mut buffer).await {
                    running(&runs).await;
                    if writer.write_all(&buffer[..length]).await.is_err() {
                        return;
                    }
                }
                drop(writer.shutdown().await);
            });
            status(StatusCode::OK)
        }
        (&Method::CONNECT, _) => {
            let mut response = status(StatusCode::BAD_GATEWAY);
            response
                .headers_mut()
                .insert("space-port-closed", http::HeaderValue::from_static("1"));
            response
        }
        _ => status(StatusCode::INTERNAL_SERVER_ERROR),
    })
}
