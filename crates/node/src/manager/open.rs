//! The beginning of a node, and its two ends: with and without its sandboxes.

use std::{collections::BTreeSet, future::Future, sync::Arc, time::Duration};

use futures_util::future::join_all;
use space_api::lifecycle::EndCause;
use space_node_manager::{ObjectName, Privileges};
use space_vmm::Vmm;
use tokio::sync::{OnceCell, Semaphore, broadcast, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{NodeManager, Shared, admit, ended};
use crate::{
    OpenError,
    adopt::{Adopted, Adopter, Lost},
    config::NodeConfig,
    failure::chain,
    host_room::{self, HostRoom},
    journal::{Change, Journal, JournalError, Life},
    network_pool::NetworkPool,
    pool::Pool,
    registry::{Handle, Registry},
    remains::janitor,
    sandbox::{Input, now_as_recorded},
    seam::EndRecord,
    start_up,
    templates::Templates,
    uids::UidSlots,
};

/// Events that a slow receiver may be behind before it misses some.
const EVENTS: usize = 1024;
/// Wait for the node's own tasks at the end.
const LAST_TASKS: Duration = Duration::from_secs(5);

impl NodeManager {
    /// Locks the directories, takes over the machines of an earlier process that live, removes what else it has left
    /// and records the ends of what could not be taken over; then begins to make networks and machines ahead.
    pub async fn open(
        config: NodeConfig,
        privileges: Arc<dyn Privileges>,
        vmm: Arc<dyn Vmm>,
        templates: Arc<dyn Templates>,
    ) -> Result<Arc<Self>, OpenError> {
        let locks = start_up::directories(&config).await?;
        let tracker = TaskTracker::new();
        let stop = CancellationToken::new();
        let path = config.data_directory.join("node.db");
        let (journal, lives) = Journal::open(&path, &tracker, config.faults.clone()).await?;
        let adopter = Adopter {
            config: &config,
            privileges: privileges.as_ref(),
            vmm: vmm.as_ref(),
            templates: templates.as_ref(),
            tracker: &tracker,
        };
        let fates = Fates(adopter.all(lives).await);
        // First the machines, then the record that they have ended.
        start_up::sweep(&config, privileges.as_ref(), &fates.names()).await?;
        fates.record(&journal).await?;

        let available = host_room::memory_available().unwrap_or(u64::MAX);
        let memory_budget = config.memory_budget.unwrap_or(available / 5 * 4);
        let uids = Arc::new(UidSlots::new(config.uids.clone()));
        let networks = NetworkPool::start(
            privileges.clone(),
            config.networks_ahead,
            &tracker,
            stop.child_token(),
        );
        let (left, queue) = mpsc::unbounded_channel();
        tracker.spawn(janitor(
            privileges.clone(),
            uids.clone(),
            queue,
            stop.child_token(),
        ));
        let capabilities = vmm.capabilities();
        let description = format!(
            "{} {} {}",
            capabilities.driver, capabilities.version, capabilities.accelerator
        );
        let shared = Arc::new(Shared {
            registry: Registry::new(&config, memory_budget),
            starts: Semaphore::new(config.concurrent_starts),
            events: broadcast::channel(EVENTS).0,
            pool: Pool::new(config.pool.clone()),
            room: HostRoom::default(),
            config,
            privileges,
            vmm,
            templates,
            journal,
            networks,
            uids,
            tracker,
            stop,
            left,
            _locks: locks,
        });
        fates.readmit(&shared)?;
        Pool::begin(&shared);
        Ok(Arc::new(Self {
            shared,
            finished: OnceCell::new(),
            description,
        }))
    }

    /// Order: nobody gets in; all sandboxes end, at the same time; the background tasks stop; networks made ahead are
    /// removed; a sweep takes what is left; the journal is closed.
    pub(super) async fn close(&self) {
        self.finish(true, |handle| async move {
            drop(handle.inputs.send(Input::End(EndCause::PlatformShutdown)).await);
            drop(ended(&handle).await);
            None
        })
        .await;
    }

    /// Stops this process's part and leaves the machines as they are, running or paused, to the next
    /// [`NodeManager::open`] of the same directories. One that is being created ends.
    pub async fn detach(&self) {
        self.finish(false, |handle| async move {
            drop(handle.inputs.send(Input::Detach).await);
            // Until its task is over, one way or the other. Only then is it settled what is left: one that became usable at
            // this moment has another machine than the one it entered with.
            handle.inputs.closed().await;
            let view = handle.view.borrow();
            view.end
                .is_none()
                .then(|| (view.worker.clone(), view.network.clone()))
        })
        .await;
    }

    /// Parts with each sandbox by `part`, which says what is to be left of it, and ends everything else. With `all`
    /// nothing is to be left.
    async fn finish<F>(&self, all: bool, part: impl Fn(Arc<Handle>) -> F)
    where
        F: Future<Output = Option<(ObjectName, Option<ObjectName>)>>,
    {
        self.finished
            .get_or_init(|| async {
                let shared = &self.shared;
                shared.registry.close();
                let parted = join_all(shared.registry.all().into_iter().map(part));
                let parted = tokio::time::timeout(shared.config.limits.shutdown, parted);
                let (parted, ()) = tokio::join!(parted, shared.pool.close());
                shared.stop.cancel();
                shared.networks.close().await;
                if parted.is_err() {
                    tracing::error!(left = shared.registry.len(), "not every sandbox parted in time");
                }
                match parted {
                    Ok(left) => self.sweep(left).await,
                    Err(_) if all => self.sweep(Vec::new()).await,
                    // What is to be left is not known: the next start sweeps, by the journal.
                    Err(_) => {}
                }
                shared.journal.close().await;
                shared.tracker.close();
                if tokio::time::timeout(LAST_TASKS, shared.tracker.wait())
                    .await
                    .is_err()
                {
                    tracing::error!(
                        tasks = shared.tracker.len(),
                        "tasks of the node are still running"
                    );
                }
            })
            .await;
    }

    async fn sweep(&self, left: Vec<Option<(ObjectName, Option<ObjectName>)>>) {
        let keep = left.into_iter().flatten();
        let keep = keep.flat_map(|(worker, network)| std::iter::once(worker).chain(network));
        let keep = keep.collect();
        let swept = start_up::sweep(&self.shared.config, self.shared.privileges.as_ref(), &keep);
        if let Err(error) = swept.await {
            tracing::error!(error = %chain(&error), "the last sweep failed; the next start repeats it");
        }
    }
}

/// What has become of the lives of an earlier process. Dropped half-way it lets the machines go, and the next start finds
/// everything as this one did.
struct Fates(Vec<(Life, Result<Adopted, Lost>)>);

impl Fates {
    /// The names of what is not to be swept.
    fn names(&self) -> BTreeSet<ObjectName> {
        let adopted = self.0.iter().filter(|(_, fate)| fate.is_ok());
        let names = adopted
            .flat_map(|(life, _)| std::iter::once(life.machine.name.clone()).chain(life.network.clone()));
        names.collect()
    }

    /// Makes durable what has become of each, all in one.
    async fn record(&self, journal: &Journal) -> Result<(), JournalError> {
        let records = self.0.iter().map(|(life, fate)| async move {
            match fate {
                Ok(adopted) if adopted.paused_at.is_none() => {
                    let ready = Change::Running { ready_ms: None };
                    journal.change(life.id.clone(), life.generation, ready).await
                }
                Ok(_) => Ok(()),
                Err(Lost { cause, cpu_micros }) => {
                    let end = EndRecord {
                        id: life.id.clone(),
                        generation: life.generation,
                        cause: cause.clone(),
                        ended_at: now_as_recorded(),
                        cpu_micros: *cpu_micros,
                    };
                    journal.end(end).await
                }
            }
        });
        join_all(records).await.into_iter().collect()
    }

    /// Lets those that were taken over live on.
    fn readmit(mut self, shared: &Arc<Shared>) -> Result<(), OpenError> {
        while let Some((life, fate)) = self.0.pop() {
            let Ok(adopted) = fate else { continue };
            let machine = adopted.worker.machine.clone();
            if let Err(error) = admit::readmit(shared, life, adopted) {
                machine.detach();
                return Err(OpenError::Config {
                    what: format!("sandboxes cannot be taken over: {}", chain(&error)),
                });
            }
        }
        Ok(())
    }
}

impl Drop for Fates {
    fn drop(&mut self) {
        for adopted in self.0.iter().filter_map(|(_, fate)| fate.as_ref().ok()) {
            adopted.worker.machine.detach();
        }
    }
}
