//! A small client for the daemon's services: enough to bring a template's machine up.

use std::{future::Future, pin::Pin, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use space_channel::{Nonce, http2, open_data};
use tokio::{net::UnixStream, task::JoinSet, time::timeout};

use crate::{VolumeError, machine::guest};

/// For the data session to open, and for one small request.
const ANSWER: Duration = Duration::from_secs(60);
/// Largest answer that is read whole, bytes.
const MOST_ANSWER: usize = 1 << 20;
/// Largest message of a stream, bytes.
const MOST_MESSAGE: usize = 4 << 20;
/// How much of the end of a command's output is kept, bytes.
const TAIL: usize = 2048;

/// A data session. Dropping it ends the session, but not what runs in the guest.
pub(crate) struct Guest {
    requests: SendRequest<Full<Bytes>>,
    /// The connection itself.
    _tasks: JoinSet<()>,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Exit code, or that of a shell for a signal.
    pub(crate) code: i64,
    /// The end of what it printed, both streams, lossy.
    pub(crate) tail: String,
}

/// A command to run.
#[derive(Debug, Clone)]
pub(crate) struct Run<'a> {
    pub(crate) user: &'a str,
    pub(crate) program: &'a str,
    pub(crate) arguments: &'a [&'a str],
}

impl Guest {
    /// Opens the data session that belongs to the control connection with this nonce.
    pub(crate) async fn open(stream: UnixStream, nonce: &Nonce) -> Result<Self, VolumeError> {
        let step = "open the data session";
        let stream = open_data(stream, nonce, ANSWER)
            .await
            .map_err(|error| guest(step)(error.to_string()))?;
        let handshake = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(http2::STREAM_WINDOW)
            .initial_connection_window_size(http2::CONNECTION_WINDOW)
            .max_frame_size(http2::FRAME_SIZE)
            .max_send_buf_size(http2::SEND_BUFFER)
            .handshake(TokioIo::new(stream));
        let (requests, connection) = timeout(ANSWER, handshake)
            .await
            .map_err(|_| guest(step)("no HTTP/2 answer".to_owned()))?
            .map_err(|error| guest(step)(error.to_string()))?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the data session ended");
            }
        });
        Ok(Self {
            requests,
            _tasks: tasks,
        })
    }

    /// One request with a whole answer.
    pub(crate) async fn request(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), VolumeError> {
        let step = format!("answer {} {}", request.method(), request.uri().path());
        let answer = async {
            let response = self.send(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MOST_ANSWER)
                .collect()
                .await
                .map_err(|error| error.to_string())?;
            Ok((status, body.to_bytes()))
        };
        match timeout(ANSWER, answer).await {
            Ok(answer) => answer.map_err(guest(step)),
            Err(_) => Err(guest(step)(format!("no answer within {} s", ANSWER.as_secs()))),
        }
    }

    /// Sets the environment of everything started from now on.
    pub(crate) async fn set_environment(&self, environment: &Value) -> Result<(), VolumeError> {
        let body = json!({ "envVars": environment }).to_string();
        let request = Request::post("http://guest/init")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            .map_err(|error| guest("take its environment")(error.to_string()))?;
        let (status, body) = self.request(request).await?;
        if status.is_success() {
            Ok(())
        } else {
            let text = String::from_utf8_lossy(&body[..body.len().min(TAIL)]);
            Err(guest("take its environment")(format!("{status}: {text}")))
        }
    }

    /// Runs a command to its end.
    pub(crate) async fn run(&self, run: &Run<'_>, limit: Duration) -> Result<Ended, VolumeError> {
        let mut output = BytesMut::new();
        let finished = async {
            let mut events = self.start(run, Some(limit)).await?;
            loop {
                let event = events.next().await?;
                let event = &event["event"];
                for (stream, text) in event["data"].as_object().into_iter().flatten() {
                    if matches!(stream.as_str(), "stdout" | "stderr")
                        && let Some(bytes) = text.as_str().and_then(decode_base64)
                    {
                        output.extend_from_slice(&bytes);
                        output.advance(output.len().saturating_sub(TAIL));
                    }
                }
                if let Some(end) = event.get("end") {
                    let code = end["exitCode"].as_i64().unwrap_or(0);
                    let exited = end["exited"].as_bool().unwrap_or(false);
                    return Ok(if exited {
                        code
                    } else if code == 0 {
                        -1
                    } else {
                        code
                    });
                }
            }
        };
        let outcome = timeout(limit, finished).await;
        let tail = String::from_utf8_lossy(&output).into_owned();
        let step = || format!("run {}", run.program);
        match outcome {
            Ok(Ok(code)) => Ok(Ended { code, tail }),
            Ok(Err(what)) => Err(guest(step())(what)),
            Err(_) => Err(guest(step())(format!(
                "not finished within {} s: {tail}",
                limit.as_secs()
            ))),
        }
    }

    /// Starts a command and leaves it running.
    pub(crate) async fn leave_running(&self, run: &Run<'_>) -> Result<(), VolumeError> {
        let started = async {
            let mut events = self.start(run, None).await?;
            let first = events.next().await?;
            match first["event"].get("start") {
                Some(_) => Ok(()),
                None => Err(format!("unexpected answer: {first}")),
            }
        };
        let step = format!("start {}", run.program);
        match timeout(ANSWER, started).await {
            Ok(outcome) => outcome.map_err(guest(step)),
            Err(_) => Err(guest(step)("no answer".to_owned())),
        }
    }

    /// A command that is still running after `limit` is ended by the daemon, with all that it has started.
    async fn start(&self, run: &Run<'_>, limit: Option<Duration>) -> Result<Events, String> {
        let message = json!({
            "process": { "cmd": run.program, "args": run.arguments, "cwd": "/" },
            "stdin": false,
        });
        let message = message.to_string();
        let length = u32::try_from(message.len()).map_err(|_| "the command is too long".to_owned())?;
        let mut body = BytesMut::with_capacity(message.len() + 5);
        body.extend_from_slice(&[0]);
        body.extend_from_slice(&length.to_be_bytes());
        body.extend_from_slice(message.as_bytes());
        let mut request = Request::post("http://guest/process.Process/Start")
            .header(header::CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header(header::AUTHORIZATION, authorization(run.user));
        if let Some(limit) = limit {
            request = request.header("connect-timeout-ms", limit.as_millis().to_string());
        }
        let request = request
            .body(Full::from(body.freeze()))
            .map_err(|error| error.to_string())?;
        let response = self.send(request).await?;
        let status = response.status();
        if status == StatusCode::OK {
            Ok(Events {
                body: response.into_body(),
                buffer: BytesMut::new(),
            })
        } else {
            Err(format!("the daemon answered {status}"))
        }
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        // Each request takes its own handle: the sender is cheap to clone and the streams do not wait for each other.
        let mut requests = self.requests.clone();
        let sent: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(async move {
            requests.ready().await?;
            requests.send_request(request).await
        });
        sent.await.map_err(|error: hyper::Error| error.to_string())
    }
}

/// The messages of a Connect stream.
struct Events {
    body: Incoming,
    buffer: BytesMut,
}

impl Events {
    /// The next message; the end of the stream before the wanted one is an error, with the server's reason.
    async fn next(&mut self) -> Result<Value, String> {
        loop {
            if let Some((flags, message)) = split_envelope(&mut self.buffer)? {
                let value: Value = serde_json::from_slice(&message)
                    .map_err(|error| format!("a message is not JSON: {error}"))?;
                if flags & 2 != 0 {
                    return Err(format!("the stream ended early: {value}"));
                }
                return Ok(value);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.buffer.extend_from_slice(data);
                    }
                }
                Some(Err(error)) => return Err(error.to_string()),
                None => return Err("the stream ended early".to_owned()),
            }
        }
    }
}

/// Takes one whole message, with its flags, off the front.
pub(crate) fn split_envelope(buffer: &mut BytesMut) -> Result<Option<(u8, BytesMut)>, String> {
    let Some((header, rest)) = buffer.split_at_checked(5) else {
        return Ok(None);
    };
    let (flags, length) = (header[0], [header[1], header[2], header[3], header[4]]);
    let length = u32::from_be_bytes(length) as usize;
    if length > MOST_MESSAGE {
        return Err(format!("a message of {length} bytes"));
    }
    if rest.len() < length {
        return Ok(None);
    }
    buffer.advance(5);
    Ok(Some((flags, buffer.split_to(length))))
}

/// How a request names the account to run as.
fn authorization(user: &str) -> String {
    use base64::Engine as _;
    let name = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
    format!("Basic {name}")
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn envelopes_come_whole_or_not_at_all() {
        let mut buffer = BytesMut::from(&[0, 0, 0, 0, 2, b'{'][..]);
        assert_eq!(split_envelope(&mut buffer).unwrap(), None);
        buffer.extend_from_slice(b"}\x02\0\0\0\0");
        let (flags, message) = split_envelope(&mut buffer).unwrap().unwrap();
        assert_eq!((flags, &message[..]), (0, &b"{}"[..]));
        let (flags, message) = split_envelope(&mut buffer).unwrap().unwrap();
        assert_eq!((flags, message.len()), (2, 0));
        assert!(buffer.is_empty());
        let mut huge = BytesMut::from(&[0, 255, 255, 255, 255][..]);
        split_envelope(&mut huge).unwrap_err();
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_guest_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = split_envelope(&mut buffer) {}
        }
    }
}
