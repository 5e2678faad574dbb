//! What is done in a machine before it is anyone's, so that what a sandbox does first is quick.
//!
//! An emulated machine translates each piece of code when it first runs it, so a program's first run takes ten times as
//! long as the next. So the very paths that a new sandbox takes are taken here: the greeting and an identity, commands as the
//! SDKs and our own client send them, files, figures, a tunnel. Once is enough for most, measured: the second time is as
//! quick as the tenth. Only what every sandbox does first is done twice, for the sake of what depends on the order.
//!
//! Each step costs the platform itself some tenths of a millisecond, and counts into what a create costs: what is added here
//! must earn it.
//!
//! Nothing of it stays. The identity is a throw-away one, which the real one replaces whole; the files are removed; the
//! commands leave none behind, and the daemon forgets them with the next identity. A machine whose template has a start
//! command waits frozen for its identity: in such a one nothing is started and no identity is given, only what a frozen
//! machine can do is done.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{Method, Request, header, request::Builder};
use space_channel::GuestState;
use tokio::time::Instant;

use crate::{
    link::{Link, LinkError, Secrets},
    worker::Worker,
};

/// All steps, then those that are done again.
const ROUNDS: usize = 2;
/// How long a create holds back the next step.
pub(crate) const HOLD_BACK: Duration = Duration::from_millis(500);
/// Host name until there is a real one.
const HOSTNAME: &str = "space";

/// How requests name the accounts `user` and `root`.
const AS_USER: &str = "Basic dXNlcjo=";
const AS_ROOT: &str = "Basic cm9vdDo=";
/// The file that is written, looked at and removed.
const FILE: &str = "/files?path=/tmp/.space-warm&username=user";

/// How it went.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    /// Time of all steps.
    pub(crate) first: Duration,
    /// Time of those that were done again.
    pub(crate) again: Duration,
}

/// Lets the machine run and warms it. It runs still when this returns. `quiet` waits until the CPU is free for it.
pub(crate) async fn warm<F: Future<Output = ()>>(
    worker: &Worker,
    quiet: impl Fn() -> F,
) -> Result<Report, LinkError> {
    let link = &worker.link;
    let frozen = link.wake().await? == GuestState::Frozen;
    let mut rounds = [Duration::ZERO; ROUNDS];
    for (at, took) in rounds.iter_mut().enumerate() {
        *took = round(link, frozen, at, &quiet).await?;
    }
    let [first, again] = rounds;
    Ok(Report { first, again })
}

/// One round; answers how long its steps took without the waits.
async fn round<F: Future<Output = ()>>(
    link: &Arc<Link>,
    frozen: bool,
    round: usize,
    quiet: &impl Fn() -> F,
) -> Result<Duration, LinkError> {
    let mut took = Duration::ZERO;
    let mut done = |what: &'static str, began: Instant| {
        let once = began.elapsed();
        tracing::trace!(what, round, ms = once.as_secs_f64() * 1e3, "warmed");
        took += once;
    };
    if !frozen {
        quiet().await;
        let (secrets, began) = (Secrets::random()?, Instant::now());
        link.identify(HOSTNAME, 0, &secrets).await?;
        done("identity", began);
    }
    for step in STEPS {
        if (frozen && step.starts) || (round > 0 && !step.again) {
            continue;
        }
        quiet().await;
        let began = Instant::now();
        let request = (step.request)(Request::builder().uri(format!("http://space{}", step.path)));
        let (request, body) = request.map_err(|error| LinkError::Answer {
            step: step.name,
            what: error.to_string(),
        })?;
        // Whatever it answers: a small image may lack what is tried.
        link.exchange(step.name, request, body).await?;
        done(step.name, began);
    }
    Ok(took)
}

type Made = Result<(Request<()>, Bytes), http::Error>;

/// One request to the daemon.
#[derive(Clone, Copy)]
struct Step {
    name: &'static str,
    path: &'static str,
    /// Whether it starts a process.
    starts: bool,
    /// Whether it is done in each round.
    again: bool,
    request: fn(Builder) -> Made,
}

const STEPS: &[Step] = &[
    ask("health", "/health", |request| plain(request, "")),
    ask("init", "/init", |request| {
        plain(
            request
                .method(Method::POST)
                .header(header::CONTENT_TYPE, "application/json"),
            r#"{"envVars":{}}"#,
        )
    }),
    again(start("a program", |request| {
        json(
            request,
            AS_USER,
            r#"{"process":{"cmd":"/bin/true"},"stdin":false}"#,
        )
    })),
    start("a program, binary", |request| {
        // process { cmd: "/bin/true" }, stdin: false
        connect(
            request,
            "application/connect+proto",
            AS_USER,
            b"\x0a\x0b\x0a\x09/bin/true\x20\x00",
        )
    }),
    again(start("a shell", |request| {
        let shell = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{}},"stdin":false}"#;
        json(request.header("keepalive-ping-interval", "50"), AS_USER, shell)
    })),
    start("a program as root", |request| {
        json(
            request,
            AS_ROOT,
            r#"{"process":{"cmd":"/bin/true"},"stdin":false}"#,
        )
    }),
    ask("write a file", FILE, |request| {
        let form = "multipart/form-data; boundary=space-warm";
        let body = "--space-warm\r\ncontent-disposition: form-data; name=\"file\"; filename=\"w\"\r\n\
                    content-type: application/octet-stream\r\n\r\nwarm\r\n--space-warm--\r\n";
        plain(
            request.method(Method::POST).header(header::CONTENT_TYPE, form),
            body,
        )
    }),
    ask("read a file", FILE, |request| plain(request, "")),
    ask("list", "/filesystem.Filesystem/ListDir", |request| {
        unary(request, r#"{"path":"/home/user","depth":1}"#)
    }),
    ask("remove", "/filesystem.Filesystem/Remove", |request| {
        unary(request, r#"{"path":"/tmp/.space-warm"}"#)
    }),
    ask("metrics", "/metrics", |request| plain(request, "")),
    ask("a tunnel", "", |request| {
        plain(request.method(Method::CONNECT).uri("127.0.0.1:1"), "")
    }),
];

const fn ask(name: &'static str, path: &'static str, request: fn(Builder) -> Made) -> Step {
    Step {
        name,
        path,
        starts: false,
        again: false,
        request,
    }
}

const fn start(name: &'static str, request: fn(Builder) -> Made) -> Step {
    Step {
        name,
        path: "/process.Process/Start",
        starts: true,
        again: false,
        request,
    }
}

const fn again(step: Step) -> Step {
    Step { again: true, ..step }
}

fn plain(request: Builder, body: &'static str) -> Made {
    Ok((request.body(())?, Bytes::from_static(body.as_bytes())))
}

fn unary(request: Builder, body: &'static str) -> Made {
    let request = request
        .method(Method::POST)
        .header(header::CONTENT_TYPE, "application/json")
        .header("connect-protocol-version", "1");
    plain(request, body)
}

fn json(request: Builder, user: &'static str, message: &'static str) -> Made {
    let request = request.header("connect-timeout-ms", "60000");
    connect(request, "application/connect+json", user, message.as_bytes())
}

/// A stream with one message.
fn connect(request: Builder, codec: &'static str, user: &'static str, message: &'static [u8]) -> Made {
    let mut body = BytesMut::with_capacity(message.len() + 5);
    body.put_u8(0);
    // Messages here are short.
    body.put_u32(u32::try_from(message.len()).unwrap_or_default());
    body.put_slice(message);
    let request = request
        .method(Method::POST)
        .header(header::CONTENT_TYPE, codec)
        .header(header::AUTHORIZATION, user)
        .header("connect-protocol-version", "1")
        .body(())?;
    Ok((request, body.freeze()))
}
