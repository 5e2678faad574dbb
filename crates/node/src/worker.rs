//! A machine that is nobody's yet, and how it becomes somebody.
//!
//! ```text
//!  provision ──► standing still, hello written ──claim──► running under an identity
//! ```
//!
//! A worker has a random name of its own, after which everything it has on the host is called; the sandbox it becomes is
//! written down next to that name. So it can be made before anyone knows whose it will be.

use std::{sync::Arc, time::Duration};

use space_node_manager::{ObjectName, PrivilegeError};
use space_vmm::Machine;

use crate::{
    failure::Failure,
    link::{Link, LinkError, Secrets},
};

/// How long to wait for the machine's own account of its end when its daemon cannot be asked.
const CAUSE: Duration = Duration::from_millis(500);

/// See the module. What it has on the host is noted in a [`crate::remains::Remains`] of the same name.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) name: ObjectName,
    pub(crate) machine: Arc<dyn Machine>,
    pub(crate) link: Arc<Link>,
}

impl Worker {
    /// Gives it its identity and lets it run; returns when its daemon has acknowledged. May be dropped at any point,
    /// after which the worker is of no use.
    pub(crate) async fn claim(
        &self,
        hostname: &str,
        generation: u64,
        secrets: &Secrets,
    ) -> Result<(), Failure> {
        match self.link.identify(hostname, generation, secrets).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.failure("greeting the daemon", &error).await),
        }
    }

    /// A machine that died is the better explanation than a port that was closed.
    pub(crate) async fn failure(&self, step: &str, error: &LinkError) -> Failure {
        let mut exit = self.machine.exit();
        // The monitor's exit may be noticed a moment after its sockets closed.
        match tokio::time::timeout(CAUSE, exit.wait_for(Option::is_some)).await {
            Ok(Ok(reason)) => Failure::Step(format!("{step}: the machine ended: {:?}", reason.as_ref())),
            _ => Failure::step(step, error),
        }
    }
}

/// A name that nothing has had.
pub(crate) fn fresh_name() -> Result<ObjectName, PrivilegeError> {
    ObjectName::new(&format!("m{:012x}", rand::random::<u64>() & 0xffff_ffff_ffff))
}
