//! The services that a sandbox's guest offers: programs, files, usage.
//!
//! They are wire-compatible with the guest service that E2B's SDKs speak to (Connect, gRPC and a
//! few plain HTTP routes) and come as one [`axum::Router`], so that they can be served over any
//! byte stream. [`Services`] holds the state; [`Services::router`] makes a router for one
//! [`Origin`].
//!
//! ```text
//!   host ──private channel──▶ router(Origin::Channel) ──┐
//!                                                       ├─▶ Services ─▶ processes, files, usage
//!   programs ──127.0.0.1────▶ router(Origin::Loopback) ─┘
//! ```
//!
//! # Who reaps
//!
//! Every process is waited for through its own pidfd, and by nobody else. Under PID 1 all orphans of the guest become
//! children of the same process too; whoever reaps those must leave the services' own alone, by waiting on a thread that
//! starts nothing and only for that thread's children (`__WNOTHREAD`).

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;

use self::budget::Budget;
use self::core::Core;
use self::files::Files;
use self::process::Processes;
use self::usage::Meter;

mod account;
mod batch;
mod budget;
mod children;
mod core;
mod descriptor;
mod files;
mod identity;
mod paths;
mod process;
mod routes;
mod usage;

/// The version of the guest service that is told to clients; E2B's SDKs choose features by it.
pub const ENVD_VERSION: &str = "0.6.13";

/// The port that programs in the guest find the services on, on the loopback address.
pub const GUEST_PORT: u16 = 49983;

/// Where requests come from, hence what they may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The private channel to the host, which has checked its caller: everything is allowed.
    Channel,
    /// The guest's own loopback: every request except `GET /health` needs the guest token, and
    /// calls that are the host's alone do not exist.
    Loopback,
}

/// Settings that stay the same for the life of the services.
#[derive(Debug)]
pub struct ServiceConfig {
    /// The cgroup (v2) directory under which each process gets a group of its own. Without one,
    /// descendants that leave their session escape a kill.
    pub agent_cgroup: Option<PathBuf>,
    /// A cgroup namespace whose root is that directory: programs are started in it, so that what lies above, or beside,
    /// does not exist for them.
    pub cgroup_namespace: Option<OwnedFd>,
    /// The account used where a request names none.
    pub default_user: String,
    /// The directory used where a request names none; the account's home when absent.
    pub default_workdir: Option<String>,
    /// Where the account files are looked up: `/etc` outside tests.
    pub etc: PathBuf,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            agent_cgroup: None,
            cgroup_namespace: None,
            default_user: "user".to_owned(),
            default_workdir: None,
            etc: PathBuf::from("/etc"),
        }
    }
}

/// The state behind the routers.
#[derive(Debug)]
pub struct Services {
    core: Arc<Core>,
    processes: Arc<Processes>,
    files: Arc<Files>,
    meter: Arc<Meter>,
    input: Budget,
}

impl Services {
    /// Makes the services. Nothing runs until a router gets a request.
    #[must_use]
    pub fn new(config: ServiceConfig) -> Arc<Self> {
        let core = Arc::new(Core::new(config));
        let processes = Arc::new(Processes::new(Arc::clone(&core)));
        let files = Arc::new(Files::new(Arc::clone(&core)));
        Arc::new(Self {
            core,
            processes,
            files,
            meter: Arc::default(),
            input: Budget::new(routes::largest_input()),
        })
    }

    /// The services as routes, for requests from `origin`. Also prepares, in the background, what
    /// the first process to be started needs. Only inside a runtime.
    pub fn router(self: &Arc<Self>, origin: Origin) -> Router {
        self.processes.prepare();
        if origin == Origin::Channel {
            self.processes.relieve();
        }
        routes::router(self, origin)
    }

    /// Sets the token that loopback callers present in `X-Access-Token`. Until one is set,
    /// loopback callers get nothing but `GET /health`.
    pub fn set_guest_token(&self, token: String) {
        self.core.change(|defaults| defaults.guest_token = Some(token));
    }

    /// Replaces the environment that every process starts with.
    pub fn set_environment(&self, environment: BTreeMap<String, String>) {
        self.core.change(|defaults| defaults.environment = environment);
    }

    /// How many processes that were started here still live, or left something behind that does.
    #[must_use]
    pub fn process_count(&self) -> usize {
        self.processes.count()
    }

    /// Forgets what is known of whoever had this machine before: commands that have ended and what they wrote. What still
    /// runs, as a template's start command does, stays.
    pub fn forget_past(&self) {
        self.processes.forget_ended();
    }
}
