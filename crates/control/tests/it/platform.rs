//! A whole control plane of its own for each test.

use std::{path::Path, sync::Arc, time::Duration};

use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::{Value, json};
use space_api::{id::SandboxId, key::ApiKey, rest::Quotas};
use space_control::{Control, ControlConfig, Limits, ServeError};
use space_store::{Bootstrap, SqliteStore, Store};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::fake::FakeNode;

pub(crate) struct Platform {
    pub(crate) node: Arc<FakeNode>,
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) url: String,
    pub(crate) port: u16,
    pub(crate) owner: Bootstrap,
    pub(crate) client: Client,
    pub(crate) stop: CancellationToken,
    pub(crate) server: JoinHandle<Result<(), ServeError>>,
    pub(crate) directory: Arc<tempfile::TempDir>,
}

impl Platform {
    pub(crate) async fn start() -> Self {
        Self::start_with(Quotas::default(), FakeNode::new(), Limits::default()).await
    }

    pub(crate) async fn start_with(quotas: Quotas, node: Arc<FakeNode>, limits: Limits) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("temporary directory"));
        Self::start_in(directory, quotas, node, limits, None).await
    }

    /// Starts again where another platform was.
    pub(crate) async fn start_in(
        directory: Arc<tempfile::TempDir>,
        quotas: Quotas,
        node: Arc<FakeNode>,
        limits: Limits,
        key: Option<ApiKey>,
    ) -> Self {
        let path: &Path = directory.path();
        let store = Arc::new(SqliteStore::open(&path.join("control.db")).await.expect("opens"));
        let owner = store
            .ensure_default_project_and_key(quotas, key)
            .await
            .expect("bootstrap");
        let config = ControlConfig {
            limits,
            ..ControlConfig::default()
        };
        let control = Control::new(config, store.clone(), node.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = listener.local_addr().expect("bound").port();
        let stop = CancellationToken::new();
        let token = stop.clone();
        let server = tokio::spawn(async move { control.serve(listener, token).await });
        let url = format!("http://127.0.0.1:{port}");
        let client = Client::builder().no_proxy().build().expect("client");
        // Answered when the start is over, so that a test finds the node's room written down.
        let health = client.get(format!("{url}/health")).send().await.expect("starts");
        assert_eq!(health.status(), 200);
        Self {
            node,
            store,
            url,
            port,
            owner,
            client,
            stop,
            server,
            directory,
        }
    }

    /// Stops in order.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        tokio::time::timeout(Duration::from_secs(20), &mut self.server)
            .await
            .expect("stops in time")
            .expect("does not panic")
            .expect("stops cleanly");
        self.store.close().await;
    }

    pub(crate) fn key(&self) -> &str {
        self.owner.key.expose()
    }

    /// A request with the owner's key.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client
            .request(method, format!("{}{path}", self.url))
            .header("x-api-key", self.key())
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.request(Method::GET, path).send().await.expect("answers")
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.request(Method::POST, path)
            .json(body)
            .send()
            .await
            .expect("answers")
    }

    pub(crate) async fn delete(&self, path: &str) -> Response {
        self.request(Method::DELETE, path).send().await.expect("answers")
    }

    /// Makes a sandbox with more fields than the template.
    pub(crate) async fn create_with(&self, path: &str, mut body: Value) -> Sandbox {
        if body.get("templateID").is_none() {
            body["templateID"] = json!("base");
        }
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), 201, "{:?}", response.text().await);
        let body: Value = response.json().await.expect("json");
        Sandbox {
            id: body["sandboxID"].as_str().expect("id").parse().expect("id"),
            token: body["envdAccessToken"].as_str().unwrap_or_default().to_owned(),
            body,
        }
    }

    pub(crate) async fn create(&self) -> Sandbox {
        self.create_with("/v2/sandboxes", json!({})).await
    }

    /// A request to a port of a sandbox, routed by headers, with its token.
    pub(crate) fn guest(&self, sandbox: &Sandbox, port: u16, method: Method, path: &str) -> RequestBuilder {
        self.anonymous(&sandbox.id, port, method, path)
            .header("x-access-token", &sandbox.token)
    }

    /// The same without a token.
    pub(crate) fn anonymous(&self, id: &SandboxId, port: u16, method: Method, path: &str) -> RequestBuilder {
        self.client
            .request(method, format!("{}{path}", self.url))
            .header("e2b-sandbox-id", id.as_str())
            .header("e2b-sandbox-port", port.to_string())
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) struct Sandbox {
    pub(crate) id: SandboxId,
    pub(crate) token: String,
    pub(crate) body: Value,
}

/// The status and the body of an error answer.
pub(crate) async fn error(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.expect("body");
    let body = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{status}: {text}"));
    (status, body)
}
