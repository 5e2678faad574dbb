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
//! Every process is waited for through its own pidfd, so the services work without help in an
//! ordinary program. Under PID 1 all orphans of the guest become children of the same process,
//! and someone has to reap those too. Two ways are safe:
//!
//! - call [`Services::reap`] on every `SIGCHLD`: it reaps *everything* that has ended, keeps the
//!   statuses that belong to the services' own processes and returns how many were reaped;
//! - or peek with `waitid(P_ALL, WNOWAIT)` and reap a pid only when [`Services::owns_pid`] says
//!   no. It says yes for every pid while a process is just being started, so a pid for which it
//!   said yes must be looked at again later.
//!
//! In both cases no status is lost or delivered twice. Children that the caller starts and waits
//! for itself must have ended before the first [`Services::reap`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;

use self::children::Children;
use self::core::Core;
use self::files::Files;
use self::process::Processes;
use self::usage::Meter;

mod account;
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
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// The cgroup (v2) directory under which each process gets a group of its own. Without one,
    /// descendants that leave their session escape a kill.
    pub agent_cgroup: Option<PathBuf>,
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
    children: Arc<Children>,
    processes: Arc<Processes>,
    files: Arc<Files>,
    meter: Arc<Meter>,
}

impl Services {
    /// Makes the services. Nothing runs until a router gets a request.
    #[must_use]
    pub fn new(config: ServiceConfig) -> Arc<Self> {
        let core = Arc::new(Core::new(config));
        let children = Arc::<Children>::default();
        let processes = Arc::new(Processes::new(Arc::clone(&core), Arc::clone(&children)));
        let files = Arc::new(Files::new(Arc::clone(&core)));
        Arc::new(Self {
            core,
            children,
            processes,
            files,
            meter: Arc::default(),
        })
    }

    /// The services as routes, for requests from `origin`. Also prepares, in the background, what
    /// the first process to be started needs.
    pub fn router(self: &Arc<Self>, origin: Origin) -> Router {
        self.processes.prepare();
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

    /// Whether a child with this pid is, or may be about to become, one of the services' own.
    #[must_use]
    pub fn owns_pid(&self, pid: i32) -> bool {
        self.children.owns(pid)
    }

    /// Reaps every child of this process that has ended, orphans included. For PID 1 only.
    /// Returns how many were reaped.
    pub fn reap(&self) -> usize {
        self.children.reap()
    }
}
