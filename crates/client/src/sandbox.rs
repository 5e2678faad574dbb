//! A handle to one running sandbox: its processes.

use std::{fmt, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use connectrpc::client::{CallOptions, ClientConfig, HttpClient};
use http::{HeaderMap, HeaderName, HeaderValue};
use space_api::{e2b, id::SandboxId};
use space_proto::{
    filesystem::FilesystemClient,
    process::{
        self, __buffa::oneof, CloseStdinRequest, ConnectRequest, ListRequest, PTY, ProcessClient,
        ProcessInput, ProcessSelector, SendInputRequest, SendSignalRequest, UpdateRequest,
    },
};

use crate::{
    Client, ClientError, CollectLimits, Command, Output, Process, ProcessSummary, Replay, TerminalSize,
};

/// Longest that a call without a stream may take.
const UNARY_LIMIT: Duration = Duration::from_secs(60);
/// Largest message taken from a guest: it is hostile, and no honest answer is larger.
const MESSAGE_LIMIT: usize = 64 * 1024 * 1024;
/// How often a silent stream is to give a sign of life, in seconds.
const KEEPALIVE_SECONDS: &str = "30";

/// A running sandbox. Cheap to clone.
#[derive(Clone)]
pub struct Sandbox {
    pub(crate) client: Client,
    id: SandboxId,
    details: e2b::Sandbox,
    pub(crate) headers: HeaderMap,
    processes: ProcessClient<HttpClient>,
    pub(crate) filesystem: FilesystemClient<HttpClient>,
}

impl Sandbox {
    pub(crate) fn new(client: Client, id: SandboxId, details: e2b::Sandbox) -> Result<Self, ClientError> {
        let mut headers = HeaderMap::new();
        headers.insert("e2b-sandbox-id", header(id.as_str())?);
        headers.insert("e2b-sandbox-port", HeaderValue::from(e2b::ENVD_PORT));
        if let Some(token) = &details.envd_access_token {
            let mut token = header(token)?;
            token.set_sensitive(true);
            headers.insert("x-access-token", token);
        }
        let transport = HttpClient::plaintext();
        let config = ClientConfig::new(client.endpoint().uri())
            .with_default_headers(headers.clone())
            .with_default_max_message_size(MESSAGE_LIMIT);
        Ok(Self {
            processes: ProcessClient::new(transport.clone(), config.clone()),
            filesystem: FilesystemClient::new(transport, config),
            client,
            id,
            details,
            headers,
        })
    }

    /// Its id.
    pub fn id(&self) -> &SandboxId {
        &self.id
    }

    /// What create or connect answered.
    pub fn details(&self) -> &e2b::Sandbox {
        &self.details
    }

    /// The secret for the daemon's services, if they ask for one.
    pub fn access_token(&self) -> Option<&str> {
        self.details.envd_access_token.as_deref()
    }

    /// Starts a program. Its stream begins at once and must be read for it to go on.
    pub async fn start(&self, command: &Command) -> Result<Process, ClientError> {
        let mut options = CallOptions::default().with_header("keepalive-ping-interval", KEEPALIVE_SECONDS);
        if let Some(user) = &command.user {
            let (name, value) = basic(user)?;
            options = options.with_header(name, value);
        }
        if let Some(timeout) = command.timeout {
            // Only the header: the guest keeps the deadline and says so, which a client-side limit would cut off.
            options = options.with_header("connect-timeout-ms", timeout.as_millis().max(1).to_string());
        }
        let stream = self
            .processes
            .start_with_options(command.request(), options)
            .await
            .map_err(|error| self.connect_error(error))?;
        Process::from_start(stream, self.client.endpoint().url()).await
    }

    /// Attaches to a process that was started before; with `replay` also reads kept output again.
    pub async fn attach(&self, pid: u32, replay: Option<Replay>) -> Result<Process, ClientError> {
        let options = CallOptions::default().with_header("keepalive-ping-interval", KEEPALIVE_SECONDS);
        let request = ConnectRequest {
            process: selector(pid).into(),
            replay: replay
                .map(|from| process::connect_request::Replay {
                    stdout_offset: from.stdout,
                    stderr_offset: from.stderr,
                    pty_offset: from.terminal,
                    ..Default::default()
                })
                .into(),
            ..Default::default()
        };
        let stream = self
            .processes
            .connect_with_options(request, options)
            .await
            .map_err(|error| self.connect_error(error))?;
        Process::from_connect(stream, self.client.endpoint().url()).await
    }

    /// Runs a program to its end and keeps head and tail of what it wrote.
    pub async fn run(&self, command: &Command, limits: CollectLimits) -> Result<Output, ClientError> {
        self.start(command).await?.collect(limits).await
    }

    /// Processes that were started through the daemon and live, and with `ended` those whose end is remembered.
    pub async fn processes(&self, ended: bool) -> Result<Vec<ProcessSummary>, ClientError> {
        let request = ListRequest {
            include_ended: ended,
            ..Default::default()
        };
        let answer = self
            .processes
            .list_with_options(request, unary())
            .await
            .map_err(|error| self.connect_error(error))?;
        Ok(answer
            .into_owned()
            .processes
            .into_iter()
            .map(ProcessSummary::from)
            .collect())
    }

    /// Sends a signal by number. `false` if there is no such process.
    pub async fn signal(&self, pid: u32, number: u32) -> Result<bool, ClientError> {
        let request = SendSignalRequest {
            process: selector(pid).into(),
            signal: i32::try_from(number).unwrap_or(0).into(),
            number,
            ..Default::default()
        };
        match self.processes.send_signal_with_options(request, unary()).await {
            Ok(_) => Ok(true),
            Err(error) if error.code == connectrpc::ErrorCode::NotFound => Ok(false),
            Err(error) => Err(self.connect_error(error)),
        }
    }

    /// Kills a process with everything it started. `false` if there is no such process.
    pub async fn kill(&self, pid: u32) -> Result<bool, ClientError> {
        self.signal(pid, 9).await
    }

    /// Writes to a process's standard input; answered when the bytes are in its pipe.
    pub async fn send_stdin(&self, pid: u32, bytes: Bytes) -> Result<(), ClientError> {
        self.send_input(pid, oneof::process_input::Input::Stdin(bytes.into()))
            .await
    }

    /// Types into a process's terminal.
    pub async fn send_terminal(&self, pid: u32, bytes: Bytes) -> Result<(), ClientError> {
        self.send_input(pid, oneof::process_input::Input::Pty(bytes.into()))
            .await
    }

    async fn send_input(&self, pid: u32, input: oneof::process_input::Input) -> Result<(), ClientError> {
        let request = SendInputRequest {
            process: selector(pid).into(),
            input: ProcessInput {
                input: Some(input),
                ..Default::default()
            }
            .into(),
            ..Default::default()
        };
        // No limit in time: a program that does not read its input holds the caller up, as a pipe would.
        self.processes
            .send_input(request)
            .await
            .map(drop)
            .map_err(|error| self.connect_error(error))
    }

    /// Ends a process's standard input.
    pub async fn close_stdin(&self, pid: u32) -> Result<(), ClientError> {
        let request = CloseStdinRequest {
            process: selector(pid).into(),
            ..Default::default()
        };
        self.processes
            .close_stdin_with_options(request, unary())
            .await
            .map(drop)
            .map_err(|error| self.connect_error(error))
    }

    /// Tells a process's terminal its new size.
    pub async fn resize(&self, pid: u32, size: TerminalSize) -> Result<(), ClientError> {
        let request = UpdateRequest {
            process: selector(pid).into(),
            pty: PTY::from(size).into(),
            ..Default::default()
        };
        self.processes
            .update_with_options(request, unary())
            .await
            .map(drop)
            .map_err(|error| self.connect_error(error))
    }

    /// Whether the daemon inside answers.
    pub async fn is_healthy(&self) -> Result<bool, ClientError> {
        let request = self
            .client
            .raw_request(reqwest::Method::GET, "/health")
            .headers(self.headers.clone())
            .timeout(Duration::from_secs(5));
        match self.client.checked(request).await {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn connect_error(&self, error: connectrpc::ConnectError) -> ClientError {
        ClientError::from_connect(&self.client.endpoint().url(), error)
    }
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox")
            .field("id", &self.id)
            .field("endpoint", self.client.endpoint())
            .finish_non_exhaustive()
    }
}

/// Options of a call that is one request and one answer.
pub(crate) fn unary() -> CallOptions {
    CallOptions::default().with_timeout(UNARY_LIMIT)
}

/// The header by which the daemon chooses the account to act as.
pub(crate) fn basic(user: &str) -> Result<(HeaderName, HeaderValue), ClientError> {
    let value = header(&format!("Basic {}", STANDARD.encode(format!("{user}:"))))?;
    Ok((http::header::AUTHORIZATION, value))
}

fn header(text: &str) -> Result<HeaderValue, ClientError> {
    HeaderValue::from_str(text).map_err(|error| ClientError::Unexpected {
        what: "a header".to_owned(),
        source: Box::new(error),
    })
}

fn selector(pid: u32) -> ProcessSelector {
    ProcessSelector {
        selector: Some(oneof::process_selector::Selector::Pid(pid)),
        ..Default::default()
    }
}
