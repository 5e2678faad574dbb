//! One set of services per test, with its own port, cgroup and directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base64::Engine;
use futures_util::{Stream, StreamExt};
use serde_json::{Value, json};
use space_daemon_services::{Origin, ServiceConfig, Services};

/// No step of any test takes longer, even on a loaded machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const CGROUPS: &str = "/sys/fs/cgroup/unified";

pub(crate) struct Guest {
    pub(crate) services: Arc<Services>,
    pub(crate) address: String,
    pub(crate) http: reqwest::Client,
    pub(crate) directory: tempfile::TempDir,
    cgroup: PathBuf,
}

/// Starts services, or says why this machine cannot.
pub(crate) async fn guest() -> Option<Guest> {
    guest_from(Origin::Channel).await
}

pub(crate) async fn guest_from(origin: Origin) -> Option<Guest> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: these tests start programs as other accounts and need root");
        return None;
    }
    let parent = Path::new(CGROUPS);
    if !parent.join("cgroup.procs").exists() {
        eprintln!("SKIPPED: no cgroup v2 hierarchy at {CGROUPS}");
        return None;
    }
    let cgroup = parent.join(format!(
        "space-test-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    std::fs::create_dir(&cgroup).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    let config = ServiceConfig {
        agent_cgroup: Some(cgroup.clone()),
        default_user: "root".to_owned(),
        default_workdir: Some("/".to_owned()),
        ..ServiceConfig::default()
    };
    let services = Services::new(config);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let router = services.router(origin);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    Some(Guest {
        services,
        address,
        http,
        directory,
        cgroup,
    })
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Whatever a failed test left running goes with its group.
        drop(std::fs::write(self.cgroup.join("cgroup.kill"), "1"));
        for _ in 0..100 {
            for group in std::fs::read_dir(&self.cgroup).into_iter().flatten().flatten() {
                drop(std::fs::remove_dir(group.path()));
            }
            if std::fs::remove_dir(&self.cgroup).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Guest {
    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// A unary call; the body, or the error's `code`.
    pub(crate) async fn call(
        &self,
        method: &str,
        user: &str,
        body: Value,
    ) -> Result<Value, (String, String)> {
        let url = format!("{}/{method}", self.address);
        let user = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
        let request = self
            .http
            .post(url)
            .header("authorization", format!("Basic {user}"))
            .json(&body);
        let response = tokio::time::timeout(LIMIT, request.send())
            .await
            .unwrap()
            .unwrap();
        let ok = response.status().is_success();
        let body: Value = response.json().await.unwrap();
        if ok { Ok(body) } else { Err(error_of(&body)) }
    }

    /// A server stream; `headers` as `name: value`.
    pub(crate) async fn stream(&self, method: &str, headers: &[(&str, &str)], body: Value) -> Events {
        let request = self.request(method, headers).body(envelope(&body));
        let response = tokio::time::timeout(LIMIT, request.send())
            .await
            .unwrap()
            .unwrap();
        assert!(response.status().is_success(), "{response:?}");
        Events {
            body: Box::pin(response.bytes_stream().map(Result::unwrap)),
            buffer: Vec::new(),
        }
    }

    /// A client stream of these messages.
    pub(crate) async fn feed(&self, method: &str, messages: Vec<Value>) -> Result<(), (String, String)> {
        let body = futures_util::stream::iter(
            messages
                .into_iter()
                .map(|m| Ok::<_, std::io::Error>(envelope(&m))),
        );
        let request = self.request(method, &[]).body(reqwest::Body::wrap_stream(body));
        let response = tokio::time::timeout(LIMIT, request.send())
            .await
            .unwrap()
            .unwrap();
        let mut events = Events {
            body: Box::pin(response.bytes_stream().map(Result::unwrap)),
            buffer: Vec::new(),
        };
        loop {
            match events.next().await {
                Event::Message(_) => {}
                Event::End(None) => return Ok(()),
                Event::End(Some(error)) => return Err(error),
            }
        }
    }

    fn request(&self, method: &str, headers: &[(&str, &str)]) -> reqwest::RequestBuilder {
        let mut request = self.http.post(format!("{}/{method}", self.address));
        request = request
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request
    }

    /// Starts `script` in bash and reads its start event.
    pub(crate) async fn bash(&self, script: &str, more: Value) -> (u32, Events) {
        self.bash_with(script, more, &[]).await
    }

    pub(crate) async fn bash_with(
        &self,
        script: &str,
        more: Value,
        headers: &[(&str, &str)],
    ) -> (u32, Events) {
        let mut request =
            json!({ "process": { "cmd": "/bin/bash", "args": ["-c", script] }, "stdin": false });
        for (key, value) in more.as_object().unwrap() {
            request[key] = value.clone();
        }
        let mut events = self.stream("process.Process/Start", headers, request).await;
        match events.next().await {
            Event::Message(start) => {
                let pid = start["event"]["start"]["pid"].as_u64().unwrap();
                (u32::try_from(pid).unwrap(), events)
            }
            Event::End(error) => panic!("did not start: {error:?}"),
        }
    }

    /// Why `bash` with these changes does not start.
    pub(crate) async fn refusal(&self, request: Value, headers: &[(&str, &str)]) -> (String, String) {
        match self
            .stream("process.Process/Start", headers, request)
            .await
            .next()
            .await
        {
            Event::End(Some(error)) => error,
            other => panic!("it did start: {other:?}"),
        }
    }
}

pub(crate) fn basic(user: &str) -> String {
    format!(
        "Basic {}",
        base64::engine::general_purpose::STANDARD.encode(format!("{user}:"))
    )
}

fn envelope(message: &Value) -> Vec<u8> {
    let json = message.to_string();
    let mut bytes = vec![0];
    bytes.extend(u32::try_from(json.len()).unwrap().to_be_bytes());
    bytes.extend(json.as_bytes());
    bytes
}

fn error_of(body: &Value) -> (String, String) {
    let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
    (text("code"), text("message"))
}

/// One message of a stream, or its end with an error.
#[derive(Debug)]
pub(crate) enum Event {
    Message(Value),
    End(Option<(String, String)>),
}

pub(crate) struct Events {
    body: std::pin::Pin<Box<dyn Stream<Item = bytes::Bytes>>>,
    buffer: Vec<u8>,
}

/// Everything up to the end of a process.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) dropped: u64,
    pub(crate) keepalives: usize,
    pub(crate) end: Value,
    pub(crate) error: Option<(String, String)>,
}

impl Outcome {
    pub(crate) fn cause(&self) -> &str {
        self.end["cause"].as_str().unwrap_or_default()
    }

    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Events {
    pub(crate) async fn next(&mut self) -> Event {
        tokio::time::timeout(LIMIT, self.wait())
            .await
            .expect("no event within the limit")
    }

    async fn wait(&mut self) -> Event {
        loop {
            if let [flags, a, b, c, d, rest @ ..] = &self.buffer[..] {
                let length = usize::try_from(u32::from_be_bytes([*a, *b, *c, *d])).unwrap();
                if rest.len() >= length {
                    let message: Value = serde_json::from_slice(&rest[..length]).unwrap();
                    let ended = flags & 2 != 0;
                    self.buffer.drain(..5 + length);
                    if ended {
                        return Event::End(message.get("error").map(error_of));
                    }
                    return Event::Message(message);
                }
            }
            let piece = self.body.next().await.expect("the stream broke off");
            self.buffer.extend_from_slice(&piece);
        }
    }

    /// Reads to the end of the stream, `pause` long after each message.
    pub(crate) async fn outcome(&mut self, pause: Duration) -> Outcome {
        let decode = |text: &Value| {
            base64::engine::general_purpose::STANDARD
                .decode(text.as_str().unwrap())
                .unwrap()
        };
        let mut outcome = Outcome::default();
        let mut positions = [0u64; 2];
        loop {
            let message = match self.next().await {
                Event::Message(message) => message,
                Event::End(error) => {
                    outcome.error = error;
                    return outcome;
                }
            };
            assert!(outcome.end.is_null(), "something came after the end: {message}");
            let event = &message["event"];
            if let Some(data) = event.get("data") {
                let number = |key: &str| data[key].as_str().map_or(0, |text| text.parse::<u64>().unwrap());
                for (key, kept, index) in [
                    ("stdout", &mut outcome.stdout, 0),
                    ("stderr", &mut outcome.stderr, 1),
                    ("pty", &mut outcome.pty, 0),
                ] {
                    if let Some(text) = data.get(key) {
                        let bytes = decode(text);
                        if positions[index] > 0 {
                            assert_eq!(
                                number("offset"),
                                positions[index] + number("dropped"),
                                "offsets are continuous"
                            );
                        }
                        positions[index] = number("offset") + bytes.len() as u64;
                        kept.extend(bytes);
                    }
                }
                outcome.dropped += number("dropped");
            }
            if event.get("keepalive").is_some() {
                outcome.keepalives += 1;
            }
            if let Some(end) = event.get("end") {
                outcome.end = end.clone();
            }
            tokio::time::sleep(pause).await;
        }
    }

    pub(crate) async fn finish(&mut self) -> Outcome {
        self.outcome(Duration::ZERO).await
    }
}

/// Waits until `ready` says something.
pub(crate) async fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let limit = tokio::time::Instant::now() + LIMIT;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(
            tokio::time::Instant::now() < limit,
            "not within the limit: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a process lives; one that waits to be reaped does not.
pub(crate) fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}
