//! What is done in a machine before it is anyone's, so that what a sandbox does first is quick.
//!
//! An emulated machine translates each piece of code when it first runs it, so a program's first run takes ten times as
//! long as the next. So the very paths that a new sandbox takes are taken here: the greeting and an identity, commands as the
//! SDKs and our own client send them, files, figures, a tunnel. Once is enough for most, measured: the second time is as
//! quick as the tenth. Only what every sandbox does first is done twice, for the sake of what depends on the order.
//!
//! All but a few of them go in one exchange, which the daemon takes apart and answers with the same handlers: each exchange
//! costs the platform itself some tenths of a millisecond, and counts into what a create costs. What must go over the channel
//! by itself is what warms the channel: a tunnel, and at the end, as a new sandbox does it, a greeting and a command.
//!
//! Nothing of it stays. The identity is a throw-away one, which the real one replaces whole; the files are removed; the
//! commands leave none behind, and the daemon forgets them with the next identity. A machine whose template has a start
//! command waits frozen for its identity: in such a one nothing is started and no identity is given, only what a frozen
//! machine can do is done.

use std::{future::Future, sync::LazyLock, time::Duration};

use bytes::Bytes;
use http::{Method, Request, header};
use serde_json::{Value, json};
use space_channel::GuestState;
use tokio::time::Instant;

use crate::{
    link::{LinkError, Secrets},
    worker::Worker,
};

/// How long a create holds back the next exchange.
pub(crate) const HOLD_BACK: Duration = Duration::from_millis(500);
/// For one exchange. Machines that are made ahead run behind all others, so on a busy host it takes long.
const LIMIT: Duration = Duration::from_secs(50);
/// Host name until there is a real one.
const HOSTNAME: &str = "space";

/// How requests name the accounts `user` and `root`.
const AS_USER: &str = "Basic dXNlcjo=";
const AS_ROOT: &str = "Basic cm9vdDo=";
/// The file that is written, looked at and removed.
const FILE: &str = "/files?path=/tmp/.space-warm&username=user";
/// Where programs are started.
const START: &str = "/process.Process/Start";
const PROGRAM: &str = r#"{"process":{"cmd":"/bin/true"},"stdin":false}"#;
/// The form in which E2B's SDKs send every command.
const SHELL: &str = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{}},"stdin":false}"#;

/// How it went.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    /// Time of everything.
    pub(crate) first: Duration,
    /// Time of what was done a second time.
    pub(crate) again: Duration,
}

/// Lets the machine run and warms it. It runs still when this returns. `quiet` waits until the CPU is free for it.
pub(crate) async fn warm<F: Future<Output = ()>>(
    worker: &Worker,
    quiet: impl Fn() -> F,
) -> Result<Report, LinkError> {
    let link = &worker.link;
    let frozen = link.wake().await? == GuestState::Frozen;
    let identify = async || {
        quiet().await;
        let (secrets, began) = (Secrets::random()?, Instant::now());
        link.identify(HOSTNAME, 0, &secrets).await?;
        Ok::<_, LinkError>(began.elapsed())
    };
    let ask = async |step: &'static str, request: Made| {
        quiet().await;
        let began = Instant::now();
        let (request, body) = request.map_err(|error| LinkError::Answer {
            step,
            what: error.to_string(),
        })?;
        // Whatever it answers: a small image may lack what is tried.
        let (status, answer) = link.exchange(step, request, body, LIMIT).await?;
        tracing::trace!(step, %status, answer = %String::from_utf8_lossy(&answer), "warmed");
        Ok::<_, LinkError>(began.elapsed())
    };

    let mut first = Duration::ZERO;
    if !frozen {
        first += identify().await?;
    }
    first += ask("a batch", batch(frozen)).await?;
    first += ask("a tunnel", tunnel()).await?;
    let mut again = Duration::ZERO;
    if !frozen {
        again += identify().await?;
        again += ask("a program", start(PROGRAM)).await?;
        again += ask("a shell", start(SHELL)).await?;
    }
    Ok(Report { first, again })
}

type Made = Result<(Request<()>, Bytes), http::Error>;

/// What is done inside. The order is that of a sandbox's first minute.
static ALL: LazyLock<Bytes> = LazyLock::new(|| steps(true));
/// The same without what starts a program.
static FROZEN: LazyLock<Bytes> = LazyLock::new(|| steps(false));

fn batch(frozen: bool) -> Made {
    let steps = if frozen { &FROZEN } else { &ALL };
    let request = Request::post("http://space/batch").header(header::CONTENT_TYPE, "application/json");
    Ok((request.body(())?, Bytes::clone(steps)))
}

fn steps(start: bool) -> Bytes {
    const JSON: &str = "application/json";
    let get = |path: &str| json!({"method": "GET", "path": path});
    let post = |path: &str, kind: &str, body: &str| json!({"method": "POST", "path": path, "headers": {"content-type": kind}, "body": body});
    let started = |kind: &str, user: &str, message: &str| {
        let mut step = post(START, kind, &enveloped(message));
        step["headers"]["authorization"] = user.into();
        step["headers"]["connect-timeout-ms"] = "60000".into();
        step["headers"]["keepalive-ping-interval"] = "50".into();
        step
    };
    let mut all: Vec<Value> = vec![get("/health"), post("/init", JSON, r#"{"envVars":{}}"#)];
    if start {
        all.extend([
            started(CONNECT_JSON, AS_USER, PROGRAM),
            // process { cmd: "/bin/true" }, stdin: false
            started(
                "application/connect+proto",
                AS_USER,
                "\x0a\x0b\x0a\x09/bin/true\x20\x00",
            ),
            started(CONNECT_JSON, AS_USER, SHELL),
            started(CONNECT_JSON, AS_ROOT, PROGRAM),
        ]);
    }
    let form = "--space-warm\r\ncontent-disposition: form-data; name=\"file\"; filename=\"w\"\r\n\
                content-type: application/octet-stream\r\n\r\nwarm\r\n--space-warm--\r\n";
    all.extend([
        post(FILE, "multipart/form-data; boundary=space-warm", form),
        get(FILE),
        post(
            "/filesystem.Filesystem/ListDir",
            JSON,
            r#"{"path":"/home/user","depth":1}"#,
        ),
        post(
            "/filesystem.Filesystem/Remove",
            JSON,
            r#"{"path":"/tmp/.space-warm"}"#,
        ),
        get("/metrics"),
    ]);
    Bytes::from(Value::from(all).to_string())
}

fn tunnel() -> Made {
    let request = Request::builder().method(Method::CONNECT).uri("127.0.0.1:1");
    Ok((request.body(())?, Bytes::new()))
}

const CONNECT_JSON: &str = "application/connect+json";

/// One command, over the channel.
fn start(message: &str) -> Made {
    let request = Request::post(format!("http://space{START}"))
        .header(header::CONTENT_TYPE, CONNECT_JSON)
        .header(header::AUTHORIZATION, AS_USER)
        .header("connect-protocol-version", "1")
        .header("connect-timeout-ms", "60000");
    Ok((request.body(())?, Bytes::from(enveloped(message))))
}

/// A stream of one message, as the Connect protocol frames it: flags and length before it. Messages here are shorter than
/// 128 bytes, so that the whole is text.
fn enveloped(message: &str) -> String {
    let length = u8::try_from(message.len())
        .ok()
        .filter(u8::is_ascii)
        .unwrap_or_default();
    format!("\0\0\0\0{}{message}", char::from(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_short_enough_for_its_frame() {
        for message in [PROGRAM, SHELL] {
            assert!(message.len() < 128 && message.is_ascii(), "{message}");
        }
        let (all, frozen): (Vec<Value>, Vec<Value>) = (
            serde_json::from_slice(&ALL).expect("JSON"),
            serde_json::from_slice(&FROZEN).expect("JSON"),
        );
        assert_eq!(all.len(), frozen.len() + 4);
        assert!(frozen.iter().all(|step| step["path"] != START));
    }
}
