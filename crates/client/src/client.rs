//! The REST half: lifecycle, templates, keys.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Method;
use serde::{Serialize, de::DeserializeOwned};
use space_api::{
    e2b,
    error::ErrorCode,
    id::SandboxId,
    lifecycle::IdlePolicy,
    rest::{CreatedKey, KeyRecord, KeyRole, NewKey, NodeRecord, ProjectRecord, QueueRequest, SandboxRecord},
    size::SizeClass,
};

use crate::{ClientError, Endpoint, Sandbox};

/// Longest that a REST call may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);
/// Longest that a create may take beside its waiting for room: longer than the platform gives it, which is 300 s for the first
/// machine of a template and size and 30 s for the sandbox, so that its answer is always heard.
const CREATE_LIMIT: Duration = Duration::from_secs(390);
/// How often a create with an idempotency key is asked for again whose connection broke.
const CREATE_TRIES: u32 = 3;
/// How long until then, and until one that is under way is asked for its answer.
const CREATE_AGAIN: Duration = Duration::from_secs(1);
/// Most bytes of an error answer that are read.
const ERROR_BODY_LIMIT: usize = 64 * 1024;
/// Most pages of one list that are read.
const PAGE_LIMIT: usize = 1000;

/// A client of one platform. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    endpoint: Endpoint,
    http: reqwest::Client,
}

/// What to create.
#[derive(Debug, Clone)]
pub struct SandboxOptions {
    /// Name, `name:tag` or digest.
    pub template: String,
    /// Size; the template's default if `None`.
    pub size: Option<SizeClass>,
    /// How long it lives; the platform's default if `None`. Whole seconds count.
    pub timeout: Option<Duration>,
    /// Environment of every process in it.
    pub environment: BTreeMap<String, String>,
    /// Free text under names, as E2B's SDKs write it.
    pub metadata: BTreeMap<String, String>,
    /// Labels, to be found by.
    pub labels: BTreeMap<String, String>,
    /// What is done when it does no work for a while; nothing if `None`.
    pub on_idle: Option<IdlePolicy>,
    /// Whether traffic to its ports wakes it when it is paused.
    pub wake_on_traffic: bool,
    /// How long to wait for room, at most 300 s; refused at once if `None`.
    pub queue: Option<Duration>,
    /// Sent as `Idempotency-Key`, so that a repeated create makes one sandbox. With it, a create whose connection breaks is
    /// asked for again by itself.
    pub idempotency_key: Option<String>,
}

impl Default for SandboxOptions {
    fn default() -> Self {
        Self {
            template: "base".to_owned(),
            size: None,
            timeout: None,
            environment: BTreeMap::new(),
            metadata: BTreeMap::new(),
            labels: BTreeMap::new(),
            on_idle: None,
            wake_on_traffic: false,
            queue: None,
            idempotency_key: None,
        }
    }
}

impl Client {
    /// Makes a client; connects on first use.
    ///
    /// # Errors
    ///
    /// [`ClientError::Unexpected`] if the HTTP client cannot be set up.
    pub fn new(endpoint: Endpoint) -> Result<Self, ClientError> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .tcp_nodelay(true)
            .user_agent(concat!("space-client/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| ClientError::from_reqwest(&endpoint.url(), error))?;
        Ok(Self { endpoint, http })
    }

    /// Where it asks.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Makes a sandbox and waits until it is ready.
    pub async fn create(&self, options: &SandboxOptions) -> Result<Sandbox, ClientError> {
        let body = e2b::NewSandbox {
            template_id: options.template.clone(),
            timeout: options.timeout.map(|timeout| timeout.as_secs()),
            metadata: Some(options.metadata.clone()).filter(|map| !map.is_empty()),
            env_vars: Some(options.environment.clone()).filter(|map| !map.is_empty()),
            labels: Some(options.labels.clone()).filter(|map| !map.is_empty()),
            on_idle: options.on_idle,
            auto_resume: options
                .wake_on_traffic
                .then_some(e2b::AutoResume { enabled: true }),
            queue: options.queue.map(|span| QueueRequest {
                timeout_seconds: span.as_secs().max(1),
            }),
            cpu_count: options.size.map(|size| size.vcpus),
            memory_mb: options.size.map(|size| size.memory_mib),
            disk_size_mb: options.size.map(|size| size.disk_mib),
            ..e2b::NewSandbox::default()
        };
        let made = self.ask_for(&body, options).await?;
        self.handle(made)
    }

    async fn ask_for(
        &self,
        body: &e2b::NewSandbox,
        options: &SandboxOptions,
    ) -> Result<e2b::Sandbox, ClientError> {
        let limit = CREATE_LIMIT.saturating_add(options.queue.unwrap_or_default());
        let began = Instant::now();
        let mut broken = 0;
        loop {
            let left = limit.saturating_sub(began.elapsed());
            let mut request = self
                .request(Method::POST, "/v2/sandboxes")
                .json(body)
                .timeout(left);
            if let Some(key) = &options.idempotency_key {
                request = request.header("idempotency-key", key);
            }
            let error = match self.read(request).await {
                Ok(made) => return Ok(made),
                Err(error) => error,
            };
            // What the first request has begun may be under way still when it is repeated.
            let under_way = broken > 0 && error.error_code() == Some(ErrorCode::IdempotencyInProgress);
            let broke = error.broke_off() && broken + 1 < CREATE_TRIES;
            if options.idempotency_key.is_none() || !(under_way || broke) || left <= CREATE_AGAIN {
                return Err(error);
            }
            broken += u32::from(broke);
            tokio::time::sleep(CREATE_AGAIN).await;
        }
    }

    /// Gives a handle to a sandbox, which runs on if it was paused. Extends its life to `timeout` from now, never shortens it.
    pub async fn connect(&self, id: &SandboxId, timeout: Option<Duration>) -> Result<Sandbox, ClientError> {
        // Zero asks for nothing: it is before every deadline, and a deadline is never moved closer.
        let body = e2b::ConnectRequest {
            timeout: Some(timeout.map_or(0, |timeout| timeout.as_secs())),
        };
        let found: e2b::Sandbox = self
            .send(Method::POST, &format!("/v2/sandboxes/{id}/connect"), &body)
            .await?;
        self.handle(found)
    }

    fn handle(&self, made: e2b::Sandbox) -> Result<Sandbox, ClientError> {
        let id = made.sandbox_id.parse().map_err(|error| ClientError::Unexpected {
            what: "a sandbox id".to_owned(),
            source: Box::new(error),
        })?;
        Sandbox::new(self.clone(), id, made)
    }

    /// All sandboxes of the project that are not ended, newest first.
    pub async fn sandboxes(&self) -> Result<Vec<e2b::ListedSandbox>, ClientError> {
        self.pages("/v2/sandboxes", &[("limit", "100".to_owned())], usize::MAX)
            .await
    }

    /// What a list has on all its pages, or the first of it up to `most`.
    pub(crate) async fn pages<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, String)],
        most: usize,
    ) -> Result<Vec<T>, ClientError> {
        let mut found = Vec::new();
        let mut token: Option<String> = None;
        for _ in 0..PAGE_LIMIT {
            let mut request = self.request(Method::GET, path).query(query);
            if let Some(token) = &token {
                request = request.query(&[("nextToken", token)]);
            }
            let answer = self.checked(request).await?;
            token = answer
                .headers()
                .get("x-next-token")
                .and_then(|value| value.to_str().ok())
                .filter(|token| !token.is_empty())
                .map(str::to_owned);
            let page: Vec<T> = self.json(answer).await?;
            found.extend(page);
            if token.is_none() || found.len() >= most {
                break;
            }
        }
        found.truncate(most);
        Ok(found)
    }

    /// Everything known of a sandbox, also after its end.
    pub async fn inspect(&self, id: &SandboxId) -> Result<SandboxRecord, ClientError> {
        self.get(&format!("/v1/sandboxes/{id}")).await
    }

    /// Records of sandboxes, ended ones among them, newest first, at most `limit`.
    pub async fn records(&self, limit: u32) -> Result<Vec<SandboxRecord>, ClientError> {
        self.get(&format!("/v1/sandboxes?limit={limit}")).await
    }

    /// Ends a sandbox. `false` if there was none to end.
    pub async fn delete(&self, id: &SandboxId) -> Result<bool, ClientError> {
        match self
            .checked(self.request(Method::DELETE, &format!("/sandboxes/{id}")))
            .await
        {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Moves a sandbox's end to `timeout` from now, sooner or later than before.
    pub async fn set_timeout(&self, id: &SandboxId, timeout: Duration) -> Result<(), ClientError> {
        let body = e2b::TimeoutRequest {
            timeout: timeout.as_secs(),
        };
        let request = self
            .request(Method::POST, &format!("/sandboxes/{id}/timeout"))
            .json(&body);
        self.checked(request).await.map(drop)
    }

    /// Samples of its use, oldest first.
    pub async fn metrics(&self, id: &SandboxId) -> Result<Vec<e2b::SandboxMetric>, ClientError> {
        self.get(&format!("/sandboxes/{id}/metrics")).await
    }

    /// Templates that sandboxes can be made from.
    pub async fn templates(&self) -> Result<Vec<e2b::Template>, ClientError> {
        self.get("/templates").await
    }

    /// Removes a template by name, `name:tag` or digest.
    pub async fn delete_template(&self, name: &str) -> Result<(), ClientError> {
        let name = utf8_percent_encode(name, NON_ALPHANUMERIC);
        self.checked(self.request(Method::DELETE, &format!("/templates/{name}")))
            .await
            .map(drop)
    }

    /// API keys of the project, revoked ones among them.
    pub async fn keys(&self) -> Result<Vec<KeyRecord>, ClientError> {
        self.get("/v1/keys").await
    }

    /// Makes an API key. Its secret is in this answer only.
    pub async fn create_key(&self, name: &str, role: KeyRole) -> Result<CreatedKey, ClientError> {
        self.send(
            Method::POST,
            "/v1/keys",
            &NewKey {
                name: name.to_owned(),
                role,
            },
        )
        .await
    }

    /// Revokes an API key by its handle.
    pub async fn revoke_key(&self, id: &str) -> Result<(), ClientError> {
        let id = utf8_percent_encode(id, NON_ALPHANUMERIC);
        self.checked(self.request(Method::DELETE, &format!("/v1/keys/{id}")))
            .await
            .map(drop)
    }

    /// The project that the key belongs to.
    pub async fn project(&self) -> Result<ProjectRecord, ClientError> {
        self.get("/v1/projects/me").await
    }

    /// What the node offers.
    pub async fn node(&self) -> Result<NodeRecord, ClientError> {
        self.get("/v1/node").await
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.read(self.request(Method::GET, path)).await
    }

    pub(crate) async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, ClientError> {
        self.read(self.request(method, path).json(body)).await
    }

    async fn read<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, ClientError> {
        let answer = self.checked(request).await?;
        self.json(answer).await
    }

    async fn json<T: DeserializeOwned>(&self, answer: reqwest::Response) -> Result<T, ClientError> {
        answer
            .json()
            .await
            .map_err(|error| ClientError::from_reqwest(&self.endpoint.url(), error))
    }

    /// A REST request with key and time limit.
    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.raw_request(method, path)
            .headers(self.endpoint.api_headers())
            .timeout(REQUEST_LIMIT)
    }

    /// A request to the platform's origin, without key or limit: for what is routed into a sandbox.
    pub(crate) fn raw_request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}{path}", self.endpoint))
    }

    /// Sends, and turns every status other than success into an error.
    pub(crate) async fn checked(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, ClientError> {
        let url = self.endpoint.url();
        let mut answer = request
            .send()
            .await
            .map_err(|error| ClientError::from_reqwest(&url, error))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let mut text = Vec::new();
        while let Ok(Some(chunk)) = answer.chunk().await {
            text.extend_from_slice(&chunk);
            if text.len() > ERROR_BODY_LIMIT {
                text.truncate(ERROR_BODY_LIMIT);
                break;
            }
        }
        Err(ClientError::from_status(
            status.as_u16(),
            &String::from_utf8_lossy(&text),
        ))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}
