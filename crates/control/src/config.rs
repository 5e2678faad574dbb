//! What the control plane can be told.

use std::time::Duration;

/// Settings of the control plane.
#[derive(Debug, Clone)]
pub struct ControlConfig {
    /// Sandboxes are found under `<port>-<id>.<domain>`. Without port, lower case.
    pub domain: String,
    /// Where clients reach this server, such as `http://localhost:3000`. Its host name is trusted for routing by headers too.
    pub public_url: String,
    /// The domain that create and connect tell to SDKs, with port if need be, such as `localhost:3000`; SDKs build host
    /// names of ports with it. `None` leaves them to their own setting.
    pub announced_domain: Option<String>,
    /// Answered as E2B's `clientID`.
    pub node_name: String,
    /// Bounds.
    pub limits: Limits,
}

/// Bounds of the server. The defaults are meant for production.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at once; more wait to be accepted.
    pub connections: usize,
    /// Bytes of an API request's body.
    pub api_body: usize,
    /// Bytes of a create's body, which carries environment values.
    pub create_body: usize,
    /// How long a client may take to send its head; hence also how long an idle HTTP/1.1 connection is kept, and a new one on
    /// which nothing is asked.
    pub head: Duration,
    /// How long an API call may take: a create may wait for room for as long as may be asked for, and then have to make a machine
    /// snapshot first.
    pub api_call: Duration,
    /// How long a stream through the edge may be silent.
    pub edge_idle: Duration,
    /// How much longer than the client's own deadline the edge lets a command stream run.
    pub command_grace: Duration,
    /// How long streams may go on after the server was told to stop.
    pub drain: Duration,
    /// How often the store and the node are compared.
    pub reconcile: Duration,
    /// How long records of ended sandboxes are kept.
    pub record_lifetime: Duration,
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self {
            domain: "localhost".to_owned(),
            public_url: "http://localhost:3000".to_owned(),
            announced_domain: None,
            node_name: "local".to_owned(),
            limits: Limits::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            api_body: 1 << 20,
            create_body: 4 << 20,
            head: Duration::from_secs(90),
            api_call: Duration::from_secs(660),
            edge_idle: Duration::from_secs(620),
            command_grace: Duration::from_secs(10),
            drain: Duration::from_secs(5),
            reconcile: Duration::from_secs(15),
            record_lifetime: Duration::from_secs(30 * 24 * 3600),
        }
    }
}
