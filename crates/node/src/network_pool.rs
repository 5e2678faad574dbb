//! Networks made ahead in the background, each used once.
//!
//! The task that makes them holds back while machines are being started, unless the pool is nearly empty: making a
//! namespace takes a CPU that the start could use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use space_node_manager::{Network, ObjectName, PrivilegeError, Privileges};
use tokio::sync::{Mutex, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Below this many ready ones, new ones are made whatever else is going on.
const LOW: usize = 2;
/// How long a start can hold back the making of one network.
const HOLD_BACK: Duration = Duration::from_millis(100);
/// Wait after a failure, doubled up to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(10);

/// A network and the name it is owned by.
#[derive(Debug)]
pub(crate) struct NamedNetwork {
    pub(crate) name: ObjectName,
    pub(crate) network: Network,
}

#[derive(Debug)]
pub(crate) struct NetworkPool {
    privileges: Arc<dyn Privileges>,
    ready: Mutex<mpsc::Receiver<NamedNetwork>>,
    starting: Arc<AtomicUsize>,
}

/// Counts one machine start for as long as it lives.
#[derive(Debug)]
pub(crate) struct Starting(Arc<AtomicUsize>);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl NetworkPool {
    /// Starts making `ahead` networks (at least one).
    pub(crate) fn start(
        privileges: Arc<dyn Privileges>,
        ahead: usize,
        tracker: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        // The one being offered counts as ready too.
        let (offer, ready) = mpsc::channel(ahead.saturating_sub(1).max(1));
        let starting = Arc::new(AtomicUsize::new(0));
        tracker.spawn(fill(privileges.clone(), offer, starting.clone(), stop));
        Self {
            privileges,
            ready: Mutex::new(ready),
            starting,
        }
    }

    /// Says that a machine is being started, until the answer is dropped.
    pub(crate) fn starting(&self) -> Starting {
        self.starting.fetch_add(1, Ordering::Relaxed);
        Starting(self.starting.clone())
    }

    /// Takes a ready one, or makes one when there is none.
    pub(crate) async fn take(&self) -> Result<NamedNetwork, PrivilegeError> {
        if let Ok(mut ready) = self.ready.try_lock()
            && let Ok(network) = ready.try_recv()
        {
            return Ok(network);
        }
        make(self.privileges.as_ref()).await
    }

    /// Removes what is ready. The filling task must have been stopped.
    pub(crate) async fn close(&self) {
        let mut ready = self.ready.lock().await;
        ready.close();
        while let Some(NamedNetwork { name, network }) = ready.recv().await {
            drop(network);
            remove(self.privileges.as_ref(), &name).await;
        }
    }
}

async fn remove(privileges: &dyn Privileges, name: &ObjectName) {
    if let Err(error) = privileges.delete_network(name).await {
        tracing::warn!(%name, error = %crate::failure::chain(&error), "a network was left for the next sweep");
    }
}

/// Makes one under a fresh name, and removes what a failure may have left.
async fn make(privileges: &dyn Privileges) -> Result<NamedNetwork, PrivilegeError> {
    let name = ObjectName::new(&format!("n{:012x}", rand::random::<u64>() & 0xffff_ffff_ffff))?;
    match privileges.create_network(&name).await {
        Ok(network) => Ok(NamedNetwork { name, network }),
        Err(error) => {
            remove(privileges, &name).await;
            Err(error)
        }
    }
}

async fn fill(
    privileges: Arc<dyn Privileges>,
    offer: mpsc::Sender<NamedNetwork>,
    starting: Arc<AtomicUsize>,
    stop: CancellationToken,
) {
    let mut retry = FIRST_RETRY;
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => return,
            permit = offer.reserve() => permit,
        };
        let Ok(permit) = permit else { return };
        let plenty = offer.max_capacity() - offer.capacity() > LOW;
        if plenty && starting.load(Ordering::Relaxed) > 0 {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(HOLD_BACK) => {}
            }
        }
        // Not raced against `stop`: a half-made network would be left behind.
        match make(privileges.as_ref()).await {
            Ok(network) => {
                retry = FIRST_RETRY;
                permit.send(network);
            }
            Err(error) => {
                tracing::warn!(error = %crate::failure::chain(&error), "no network could be made ahead");
                drop(permit);
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(retry) => retry = (retry * 2).min(LONGEST_RETRY),
                }
            }
        }
    }
}
