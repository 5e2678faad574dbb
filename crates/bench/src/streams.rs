//! How fast a guest answers on the control port while a hundred streams of its data port are left unread.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use space_channel::http2::{CONNECTION_WINDOW, STREAM_WINDOW};
use tokio::net::UnixStream;

use crate::{
    create,
    floor::{self, Floor},
    machine::Host,
    report::{Promise, Report},
    statistics::Times,
};

/// Streams that nobody reads.
const STREAMS: usize = 100;
/// Programs started at the same time; the daemon refuses more than 64.
const STARTS_AT_ONCE: usize = 16;
/// Longest that starting them, or any one answer, may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Between two questions: long enough for the streams' bytes to flow.
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of a stream that ended which an error shows.
const SHOWN: usize = 1000;
/// Longest that the guest may take to answer, milliseconds.
const PROMISE: f64 = 10.0;

/// Asks `n` times before and `n` times while the streams are there.
pub(crate) async fn control_answers(host: &Host, n: u32, report: &mut Report) -> Result<()> {
    let mut machine = floor::restore(host).await?;
    let port = machine.data_port()?;
    port.set_nonblocking(true).context("cannot open the data port")?;
    let stream = UnixStream::from_std(port).context("cannot open the data port")?;
    let data = space_channel::open_data(stream, machine.nonce(), LIMIT).await?;
    let (daemon, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .handshake(TokioIo::new(data))
        .await
        .context("the daemon does not speak HTTP/2")?;
    let connection = tokio::spawn(connection);

    let quiet = ask(&mut machine, n).await?;
    let starting = stream::iter((0..STREAMS).map(|_| start_endless(daemon.clone())))
        .buffer_unordered(STARTS_AT_ONCE)
        .try_collect::<Vec<Incoming>>();
    let unread = tokio::time::timeout(LIMIT, starting)
        .await
        .context("a hundred programs did not start in time")??;
    let busy = ask(&mut machine, n).await?;
    // Only now it is seen that each stream had been full.
    let full = try_join_all(unread.into_iter().map(a_window_of));
    tokio::time::timeout(LIMIT, full)
        .await
        .context("the unread streams held too little")??;
    drop(daemon);
    machine.end()?;
    connection.abort();

    report.promise(Promise::at_most(
        "control_unread.p99_ms",
        busy.percentile(99),
        PROMISE,
    ));
    report.times("control", quiet);
    report.times("control_unread", busy);
    Ok(())
}

async fn ask(machine: &mut Floor, n: u32) -> Result<Times> {
    let bar = create::progress("control port", n);
    let mut times = Times::default();
    for _ in 0..n {
        tokio::time::sleep(PAUSE).await;
        let begin = Instant::now();
        machine.ask_health()?;
        times.push(begin.elapsed());
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(times)
}

/// Starts a program that writes without end, and gives its stream, of which nothing was read.
async fn start_endless(mut daemon: SendRequest<Full<Bytes>>) -> Result<Incoming> {
    let message = json!({"process": {"cmd": "/usr/bin/yes"}, "stdin": false}).to_string();
    let mut body = BytesMut::new();
    body.put_u8(0);
    body.put_u32(u32::try_from(message.len()).context("the message is short")?);
    body.put_slice(message.as_bytes());
    let request = Request::builder()
        .method("POST")
        .uri("http://sandbox/process.Process/Start")
        .header("content-type", "application/connect+json")
        .header("connect-protocol-version", "1")
        .body(Full::new(body.freeze()))?;
    let answer = daemon.send_request(request).await?;
    ensure!(
        answer.status().is_success(),
        "the daemon answered {}",
        answer.status()
    );
    Ok(answer.into_body())
}

/// Reads as much as could have been waiting.
async fn a_window_of(mut stream: Incoming) -> Result<()> {
    let window = usize::try_from(STREAM_WINDOW)?;
    let mut read = 0;
    let mut begin = Vec::new();
    while read < window {
        let Some(frame) = stream.frame().await else {
            bail!(
                "a stream ended after {read} bytes: {}",
                String::from_utf8_lossy(&begin)
            );
        };
        if let Ok(data) = frame?.into_data() {
            read += data.len();
            begin.extend(data.iter().take(SHOWN.saturating_sub(begin.len())));
        }
    }
    Ok(())
}
