//! File throughput: through the path that SDKs take, against the same bytes over the private channel alone.
//!
//! ```text
//!  raw      host ─────────── virtio-serial ── guest searches the bytes for a nonce and drops them
//!  channel  host ── HTTP/2 ─ virtio-serial ── daemon ── file
//!  SDK      client ── HTTP/1.1 ── edge ── HTTP/2 ─ virtio-serial ── daemon ── file
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rand::RngCore as _;
use space_channel::http2::{CONNECTION_WINDOW, STREAM_WINDOW};
use space_client::Client;
use tokio::{io::AsyncWriteExt as _, net::UnixStream};

use crate::{
    create, floor,
    machine::Host,
    memory::mebibytes,
    report::{Figure, Report},
};

/// Longest that any one transfer may take.
const LIMIT: Duration = Duration::from_secs(300);
const PATH: &str = "/tmp/space-bench";

/// Measures all three, `mib` MiB each way.
pub(crate) async fn throughput(client: &Client, host: &Host, mib: usize, report: &mut Report) -> Result<()> {
    let mut content = vec![0; mib << 20];
    rand::rng().fill_bytes(&mut content);
    let content = Bytes::from(content);
    let mut figure = |key, what, took: Duration| {
        let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
        report.figure(Figure {
            key,
            what,
            value: mebibytes(bytes) / took.as_secs_f64(),
            unit: "MiB/s",
        });
    };

    let machine = floor::restore(host).await?;
    let port = machine.data_port()?;
    port.set_nonblocking(true).context("cannot open the data port")?;
    let mut stream = UnixStream::from_std(port).context("cannot open the data port")?;
    let begin = Instant::now();
    let raw = async {
        // Until the guest has seen the nonce it reads and drops everything.
        stream.write_all(&content).await?;
        anyhow::Ok(space_channel::open_data(stream, machine.nonce(), LIMIT).await?)
    };
    let data = tokio::time::timeout(LIMIT, raw)
        .await
        .context("the raw channel took too long")??;
    figure(
        "files.raw_write_mib_s",
        "channel alone, to the guest",
        begin.elapsed(),
    );

    let (mut daemon, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .handshake(TokioIo::new(data))
        .await
        .context("the daemon does not speak HTTP/2")?;
    // It ends with its sender at the end of this function.
    let connection = tokio::spawn(connection);
    let begin = Instant::now();
    let answer = ask(&mut daemon, "POST", content.clone()).await?;
    figure(
        "files.channel_write_mib_s",
        "channel and daemon, write",
        begin.elapsed(),
    );
    ensure!(!answer.is_empty(), "the daemon did not confirm the file");
    let begin = Instant::now();
    let read = ask(&mut daemon, "GET", Bytes::new()).await?;
    figure(
        "files.channel_read_mib_s",
        "channel and daemon, read",
        begin.elapsed(),
    );
    ensure!(read == content, "the daemon gave other bytes than were written");
    drop(daemon);
    machine.end()?;
    connection.abort();

    let sandbox = create::create(client).await?;
    let begin = Instant::now();
    sandbox.write_file(PATH, content.clone(), None).await?;
    figure("files.sdk_write_mib_s", "SDK path, write", begin.elapsed());
    let begin = Instant::now();
    let read = sandbox.read_file(PATH, None).await?;
    figure("files.sdk_read_mib_s", "SDK path, read", begin.elapsed());
    ensure!(read == content, "the sandbox gave other bytes than were written");
    create::end(client, &sandbox).await
}

/// One request for the file to the daemon itself.
async fn ask(daemon: &mut SendRequest<Full<Bytes>>, method: &str, body: Bytes) -> Result<Bytes> {
    let request = Request::builder()
        .method(method)
        .uri(format!("http://sandbox/files?path={PATH}&username=root"))
        .header("content-type", "application/octet-stream")
        .body(Full::new(body))?;
    let exchange = async {
        let answer = daemon.send_request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        ensure!(
            status.is_success(),
            "the daemon answered {status}: {}",
            String::from_utf8_lossy(&body)
        );
        Ok(body)
    };
    tokio::time::timeout(LIMIT, exchange)
        .await
        .context("the daemon took too long")?
}
