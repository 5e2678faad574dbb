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

use std::{collections::BTreeMap, future::Future, sync::LazyLock, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use serde::Serialize;
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
/// What removes it.
const REMOVE: &str = "/filesystem.Filesystem/Remove";
const JSON: &str = "application/json";
const CONNECT_JSON: &str = "application/connect+json";
/// Where programs are started.
const START: &str = "/process.Process/Start";
const PROGRAM: &str = r#"{"process":{"cmd":"/bin/true"},"stdin":false}"#;
/// The form in which E2B's SDKs send every command.
const SHELL: &str = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{}},"stdin":false}"#;

/// How it went.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    /// Whether the machine waits frozen for its identity.
    pub(crate) frozen: bool,
    /// Time of everything but what was done again.
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
    let frozen = link.wake(LIMIT).await? == GuestState::Frozen;
    let identify = async || {
        quiet().await;
        let (secrets, began) = (Secrets::random()?, Instant::now());
        link.pretend(HOSTNAME, &secrets, LIMIT).await?;
        Ok::<_, LinkError>(began.elapsed())
    };
    let ask = async |step: &'static str, request: Made| {
        quiet().await;
        let began = Instant::now();
        let (request, body) = request.map_err(|error| not_understood(step, &error))?;
        let (status, answer) = link.exchange(step, request, body, LIMIT).await?;
        tracing::trace!(step, %status, "warmed");
        Ok::<_, LinkError>((status, answer, began.elapsed()))
    };

    let mut first = Duration::ZERO;
    if !frozen {
        first += identify().await?;
    }
    let steps = || ALL.iter().filter(move |step| !(frozen && step.path == START));
    let (status, answer, took) = ask("a batch", batch(steps())).await?;
    first += took;
    let statuses: Vec<u16> = if status == StatusCode::OK {
        serde_json::from_slice(&answer).map_err(|error| not_understood("a batch", &error))?
    } else {
        // The daemon is older than batches: one by one, which costs more and does the same.
        let mut statuses = Vec::new();
        for step in steps() {
            let (status, _, took) = ask("a step", step.request()).await?;
            first += took;
            statuses.push(status.as_u16());
        }
        statuses
    };
    // Whatever the others answer: a small image may lack what is tried.
    if leaves_a_file(steps(), &statuses) {
        return Err(not_understood("a batch", &"the file that was written is left"));
    }
    first += ask("a tunnel", tunnel()).await?.2;
    let mut again = Duration::ZERO;
    if !frozen {
        again += identify().await?;
        for (name, message) in [("a program", PROGRAM), ("a shell", SHELL)] {
            again += ask(name, started(CONNECT_JSON, AS_USER, message).request())
                .await?
                .2;
        }
    }
    Ok(Report { frozen, first, again })
}

fn not_understood(step: &'static str, what: &dyn std::fmt::Display) -> LinkError {
    LinkError::Answer {
        step,
        what: what.to_string(),
    }
}

/// Whether the file was written and not removed.
fn leaves_a_file<'a>(steps: impl Iterator<Item = &'a Step>, statuses: &[u16]) -> bool {
    let done = |path: &str, (step, status): (&Step, &u16)| {
        step.method == "POST" && step.path == path && (200..300).contains(status)
    };
    let answered: Vec<_> = steps.zip(statuses).collect();
    let any = |path: &str| answered.iter().any(|both| done(path, *both));
    any(FILE) && !any(REMOVE)
}

type Made = Result<(Request<()>, Bytes), http::Error>;

/// One request, in the form that a batch has of it.
#[derive(Debug, Serialize)]
struct Step {
    method: &'static str,
    path: &'static str,
    headers: BTreeMap<&'static str, &'static str>,
    body: String,
}

impl Step {
    /// The same by itself.
    fn request(&self) -> Made {
        let mut request = Request::builder()
            .method(self.method)
            .uri(format!("http://space{}", self.path));
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        Ok((request.body(())?, Bytes::from(self.body.clone())))
    }
}

/// What is done inside. The order is that of a sandbox's first minute.
static ALL: LazyLock<Vec<Step>> = LazyLock::new(|| {
    let form = "--space-warm\r\ncontent-disposition: form-data; name=\"file\"; filename=\"w\"\r\n\
                content-type: application/octet-stream\r\n\r\nwarm\r\n--space-warm--\r\n";
    vec![
        get("/health"),
        post("/init", JSON, r#"{"envVars":{}}"#),
        started(CONNECT_JSON, AS_USER, PROGRAM),
        // process { cmd: "/bin/true" }, stdin: false
        started(
            "application/connect+proto",
            AS_USER,
            "\x0a\x0b\x0a\x09/bin/true\x20\x00",
        ),
        started(CONNECT_JSON, AS_USER, SHELL),
        started(CONNECT_JSON, AS_ROOT, PROGRAM),
        post(FILE, "multipart/form-data; boundary=space-warm", form),
        get(FILE),
        post(
            "/filesystem.Filesystem/ListDir",
            JSON,
            r#"{"path":"/home/user","depth":1}"#,
        ),
        post(REMOVE, JSON, r#"{"path":"/tmp/.space-warm"}"#),
        get("/metrics"),
    ]
});

fn get(path: &'static str) -> Step {
    Step {
        method: "GET",
        path,
        headers: BTreeMap::new(),
        body: String::new(),
    }
}

fn post(path: &'static str, kind: &'static str, body: &str) -> Step {
    Step {
        method: "POST",
        path,
        headers: BTreeMap::from([("content-type", kind), ("connect-protocol-version", "1")]),
        body: body.to_owned(),
    }
}

/// A command, as a stream with one message.
fn started(kind: &'static str, user: &'static str, message: &str) -> Step {
    let mut step = post(START, kind, &enveloped(message));
    step.headers.extend([
        ("authorization", user),
        ("connect-timeout-ms", "60000"),
        ("keepalive-ping-interval", "50"),
    ]);
    step
}

fn batch<'a>(steps: impl Iterator<Item = &'a Step>) -> Made {
    let steps: Vec<_> = steps.collect();
    let body = serde_json::to_vec(&steps).unwrap_or_default();
    let request = Request::post("http://space/batch").header(header::CONTENT_TYPE, JSON);
    Ok((request.body(())?, Bytes::from(body)))
}

fn tunnel() -> Made {
    let request = Request::builder().method(Method::CONNECT).uri("127.0.0.1:1");
    Ok((request.body(())?, Bytes::new()))
}

/// As the Connect protocol frames a message: flags and length before it. Messages here are shorter than 128 bytes, so that
/// the whole is text.
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
        for step in ALL.iter().filter(|step| step.path == START) {
            let (frame, message) = step.body.split_at(5);
            assert_eq!(usize::from(frame.as_bytes()[4]), message.len(), "{step:?}");
        }
    }

    #[test]
    fn a_file_that_is_left_is_noticed() {
        let statuses = |write: u16, remove: u16| -> Vec<u16> {
            let of = |step: &Step| match step.path {
                FILE if step.method == "POST" => write,
                REMOVE => remove,
                _ => 200,
            };
            ALL.iter().map(of).collect()
        };
        assert!(!leaves_a_file(ALL.iter(), &statuses(200, 200)));
        assert!(!leaves_a_file(ALL.iter(), &statuses(500, 404)));
        assert!(leaves_a_file(ALL.iter(), &statuses(200, 404)));
        assert!(leaves_a_file(ALL.iter(), &statuses(200, 200)[..8]));
    }
}
