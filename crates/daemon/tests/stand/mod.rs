//! A daemon on Unix sockets, and a host that speaks to it.

#![expect(clippy::unwrap_used, reason = "for tests")]
#![cfg_attr(test, expect(dead_code, reason = "each test program uses a part of it"))]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http2, upgrade::Upgraded};
use hyper_util::rt::{TokioExecutor, TokioIo};
use space_channel::{
    HelloAck, HostControl, Identity, IdentityMode, http2 as windows, message::ENTROPY_LENGTH, open_data,
};
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

/// A call with one message each way, in JSON.
pub(crate) async fn call(sender: &mut Sender, method: &str, message: &'static str) -> Bytes {
    let request = Request::post(format!("http://guest/{method}"))
        .header("content-type", "application/json")
        .header("connect-protocol-version", "1")
        .body(Full::from(message))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    tokio::time::timeout(LIMIT, response.into_body().collect())
        .await
        .unwrap()
        .unwrap()
        .to_bytes()
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

/// Starts a program over the data port and returns all of its output's stream, undecoded.
pub(crate) async fn run(sender: &mut Sender, script: &str) -> Bytes {
    let message = format!(
        r#"{{"process":{{"cmd":"/bin/sh","args":["-c",{}]}},"stdin":false}}"#,
        serde_json_string(script)
    );
    let mut body = vec![0];
    body.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend_from_slice(message.as_bytes());
    let request = Request::post("http://guest/process.Process/Start")
        .header("content-type", "application/connect+json")
        .header("connect-protocol-version", "1")
        .body(Full::from(body))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    tokio::time::timeout(LIMIT, response.into_body().collect())
        .await
        .unwrap()
        .unwrap()
        .to_bytes()
}

fn serde_json_string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// One to give a guest.
pub(crate) fn identity(mode: IdentityMode) -> Identity {
    Identity {
        mode,
        realtime_ns: 1_800_000_000_000_000_000,
        entropy: [1; ENTROPY_LENGTH],
        generation: 4,
        machine_id: [0xcd; 16],
        boot_id: [2; 16],
        hostname: "one".into(),
        guest_token: "secret".into(),
    }
}

/// A cgroup v2 directory of this test's own; removed when dropped.
pub(crate) struct OwnGroup(pub(crate) PathBuf);

impl OwnGroup {
    pub(crate) fn make() -> Option<Self> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let root = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
            .into_iter()
            .map(Path::new)
            .find(|root| root.join("cgroup.procs").exists() && root.join("cgroup.controllers").exists())?;
        let group = root.join(format!(
            "space-daemon-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
        ));
        fs::create_dir(&group).ok()?;
        Some(Self(group))
    }
}

impl Drop for OwnGroup {
    fn drop(&mut self) {
        drop(fs::write(self.0.join("cgroup.kill"), "1"));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) && fs::remove_dir(&self.0).is_err() {
            for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
                drop(fs::remove_dir(entry.path()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
