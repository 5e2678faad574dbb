//! A daemon on Unix sockets, and a host that speaks to it.

#![expect(clippy::unwrap_used, reason = "for tests")]

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http2, upgrade::Upgraded};
use hyper_util::rt::{TokioExecutor, TokioIo};
use space_channel::{HelloAck, HostControl, http2 as windows, open_data};
use tempfile::TempDir;
use tokio::net::UnixStream;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) type Sender = http2::SendRequest<Full<Bytes>>;

/// The daemon's process; killed when dropped.
pub(crate) struct Stand {
    directory: TempDir,
    daemon: Child,
}

impl Drop for Stand {
    fn drop(&mut self) {
        drop(self.daemon.kill());
        drop(self.daemon.wait());
    }
}

impl Stand {
    pub(crate) fn start(cgroup: Option<&std::path::Path>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_space-daemon"));
        command
            .arg("--serve-sockets")
            .args([path("control"), path("data"), directory.path().to_path_buf()]);
        let daemon = command.args(cgroup).stdin(Stdio::null()).spawn().unwrap();
        let stand = Self { directory, daemon };
        let begun = Instant::now();
        while !(stand.path("control").exists() && stand.path("data").exists()) {
            assert!(begun.elapsed() < LIMIT, "the daemon makes no sockets");
            std::thread::sleep(Duration::from_millis(5));
        }
        stand
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.daemon.id()
    }

    pub(crate) async fn stream(&self, name: &str) -> UnixStream {
        let begun = Instant::now();
        loop {
            match UnixStream::connect(self.path(name)).await {
                Ok(stream) => return stream,
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn control(&self) -> (HostControl, HelloAck) {
        HostControl::connect(self.stream("control").await, 1, LIMIT)
            .await
            .unwrap()
    }

    pub(crate) async fn session(&self, control: &HostControl) -> Sender {
        let stream = open_data(self.stream("data").await, control.nonce(), LIMIT)
            .await
            .unwrap();
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(windows::STREAM_WINDOW)
            .initial_connection_window_size(windows::CONNECTION_WINDOW)
            .max_frame_size(windows::FRAME_SIZE)
            .handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender
    }
}

pub(crate) async fn get(sender: &mut Sender, path: &str) -> hyper::Result<Response<Incoming>> {
    let request = Request::get(format!("http://guest{path}"))
        .body(Full::default())
        .unwrap();
    sender.send_request(request).await
}

/// Asks for a tunnel; the response says how it went.
pub(crate) async fn connect(sender: &mut Sender, authority: &str) -> Response<Incoming> {
    let request = Request::connect(authority).body(Full::default()).unwrap();
    sender.send_request(request).await.unwrap()
}

pub(crate) async fn tunnel(sender: &mut Sender, port: u16) -> TokioIo<Upgraded> {
    let response = connect(sender, &format!("127.0.0.1:{port}")).await;
    assert_eq!(response.status(), 200);
    TokioIo::new(hyper::upgrade::on(response).await.unwrap())
}
