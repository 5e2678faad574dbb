//! [`RemotePrivileges`]: asks the node manager's process.
//!
//! ```text
//!   connecting ──► connected ──► lost ──► connecting …      (one task takes every edge)
//! ```
//!
//! While there is no connection, calls wait for one. A call that was under way when the connection was lost is made
//! again if that is the same as making it once; a spawn fails with [`PrivilegeError::Unreachable`], for it may or may not
//! have been done, and what it may have started is found by name. Processes whose end somebody waits for are adopted
//! from the new node manager.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use std::collections::BTreeSet;
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    Adopted, ExitStatus, Group, GroupLimits, GroupUsage, MachineMemory, Network, ObjectName, PrivilegeError,
    Privileges, ProcessIdentity, Spawned, SweepReport, View, VmmProcess,
    packets::{Packet, Packets},
    process,
    protocol::{Call, Done, MOST_KEPT, Reply, Request, SpawnCall, VERSION},
};

/// How long a call waits for a node manager: one that was killed is started again within a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an act may take. The longest are waits for processes to end, 5 s each.
const ANSWER: Duration = Duration::from_secs(60);

/// How long the first exchange of a connection may take.
const WELCOME: Duration = Duration::from_secs(5);

/// Pauses between attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// The node's side of the protocol.
#[derive(Debug)]
pub struct RemotePrivileges {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    next: AtomicU64,
    current: watch::Sender<Option<Arc<Connection>>>,
    /// Processes whose end is still to be told.
    watched: Mutex<BTreeMap<ProcessIdentity, watch::Sender<Option<ExitStatus>>>>,
}

#[derive(Debug)]
struct Connection {
    packets: Packets,
    /// Calls under way; `None` once the connection is lost.
    pending: Mutex<Option<BTreeMap<u64, oneshot::Sender<Answer>>>>,
}

#[derive(Debug)]
struct Answer {
    outcome: Result<Done, PrivilegeError>,
    descriptors: Vec<OwnedFd>,
    exit: Option<watch::Receiver<Option<ExitStatus>>>,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for RemotePrivileges {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RemotePrivileges {
    /// Connects to the node manager that listens at `path`, and from then on whenever the connection is lost.
    ///
    /// # Errors
    /// [`PrivilegeError::Unreachable`] if nobody listens there within ten seconds; [`PrivilegeError::Refused`] if the
    /// other end is not root or is of another version.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, PrivilegeError> {
        let shared = Arc::new(Shared {
            path: path.as_ref().to_owned(),
            next: AtomicU64::new(0),
            current: watch::Sender::new(None),
            watched: Mutex::default(),
        });
        let give_up = Instant::now() + PATIENCE;
        let first = shared.establish(Some(give_up)).await?;
        let task = tokio::spawn(keep(shared.clone(), first));
        Ok(Self { shared, task })
    }

    async fn call(&self, call: Call, descriptors: &[BorrowedFd<'_>]) -> Result<Answer, PrivilegeError> {
        let act = call.words();
        let unreachable = |source| PrivilegeError::Unreachable {
            act: act.clone(),
            source,
        };
        let give_up = Instant::now() + PATIENCE;
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let idempotent = call.is_idempotent();
        let message = serde_json::to_vec(&Request::Request { id, call });
        let message = message.map_err(|e| unreachable(e.into()))?;
        let mut current = self.shared.current.subscribe();
        loop {
            let connection = match timeout_at(give_up, current.wait_for(Option::is_some)).await {
                Ok(Ok(connection)) => connection.clone(),
                _ => None,
            };
            let Some(connection) = connection else {
                return Err(unreachable(io::ErrorKind::TimedOut.into()));
            };
            match timeout(ANSWER, connection.ask(id, &message, descriptors)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Lost::NotSent(error))) if error.kind() == io::ErrorKind::InvalidInput => {
                    return Err(PrivilegeError::Refused {
                        what: format!("{act}: {error}"),
                    });
                }
                Ok(Err(Lost::NotSent(_))) => {}
                Ok(Err(Lost::Unanswered)) if idempotent => {}
                Ok(Err(Lost::Unanswered)) => {
                    return Err(unreachable(io::ErrorKind::ConnectionReset.into()));
                }
                Err(_) => {
                    connection.forget(id);
                    return Err(unreachable(io::ErrorKind::TimedOut.into()));
                }
            }
            // Until the task has seen it too.
            let lost =
                |now: &Option<Arc<Connection>>| now.as_ref().is_none_or(|now| !Arc::ptr_eq(now, &connection));
            if timeout_at(give_up, current.wait_for(lost)).await.is_err() {
                return Err(unreachable(io::ErrorKind::TimedOut.into()));
            }
        }
    }

    /// Calls something that gives nothing.
    async fn act(&self, call: Call) -> Result<(), PrivilegeError> {
        self.call(call, &[]).await?.outcome.map(drop)
    }

    /// Calls something that gives `N` descriptors.
    async fn open<const N: usize>(&self, call: Call) -> Result<[OwnedFd; N], PrivilegeError> {
        let act = call.words();
        let answer = self.call(call, &[]).await?;
        answer.outcome?;
        answer.descriptors.try_into().map_err(|_| strange(act))
    }

    async fn process(&self, call: Call, descriptors: &[BorrowedFd<'_>]) -> Result<Spawned, PrivilegeError> {
        let act = call.words();
        let answer = self.call(call, descriptors).await?;
        match (answer.outcome?, answer.exit) {
            (Done::Process { identity, executable }, Some(exit)) => Ok(Spawned {
                identity,
                executable,
                exit,
            }),
            _ => Err(strange(act)),
        }
    }
}

/// The error for an answer that does not fit its question.
fn strange(act: String) -> PrivilegeError {
    let what = "the answer does not fit the question";
    PrivilegeError::Unreachable {
        act,
        source: io::Error::new(io::ErrorKind::InvalidData, what),
    }
}

/// Why there is no answer.
enum Lost {
    /// The request was not sent, so nothing was done.
    NotSent(io::Error),
    /// It was, and who knows.
    Unanswered,
}

impl Connection {
    async fn ask(&self, id: u64, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<Answer, Lost> {
        let (tell, answer) = oneshot::channel();
        match &mut *locked(&self.pending) {
            Some(pending) => pending.insert(id, tell),
            None => return Err(Lost::NotSent(io::ErrorKind::NotConnected.into())),
        };
        if let Err(error) = self.packets.send(message, descriptors).await {
            self.forget(id);
            return Err(Lost::NotSent(error));
        }
        answer.await.map_err(|_| Lost::Unanswered)
    }

    fn forget(&self, id: u64) {
        if let Some(pending) = &mut *locked(&self.pending) {
            pending.remove(&id);
        }
    }
}

/// Keeps a connection for as long as this value's owner lives.
async fn keep(shared: Arc<Shared>, first: Connection) {
    let mut next = first;
    loop {
        let connection = Arc::new(next);
        shared.current.send_replace(Some(connection.clone()));
        let read = shared.read(&connection);
        let adopt = shared.adopt_again(&connection);
        // Both at once: the answers that the one waits for come through the other.
        let end = tokio::select! {
            end = read => end,
            end = async { adopt.await; std::future::pending().await } => end,
        };
        shared.current.send_replace(None);
        // Who waits for an answer learns that none comes.
        drop(locked(&connection.pending).take());
        match end {
            Ok(()) => tracing::warn!("the node manager has closed the connection"),
            Err(error) => tracing::warn!(%error, "the connection to the node manager is lost"),
        }
        next = loop {
            match shared.establish(None).await {
                Ok(connection) => break connection,
                Err(error) => {
                    tracing::error!(%error, "the node manager cannot be used");
                    sleep(PATIENCE).await;
                }
            }
        };
        tracing::info!("connected to the node manager again");
    }
}

impl Shared {
    /// Connects, trying until `give_up`, and says hello.
    async fn establish(&self, give_up: Option<Instant>) -> Result<Connection, PrivilegeError> {
        let act = || format!("connecting to {}", self.path.display());
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.greet().await {
                Ok(connection) => return connection,
                Err(error) => error,
            };
            if give_up.is_some_and(|give_up| Instant::now() > give_up) {
                return Err(PrivilegeError::Unreachable {
                    act: act(),
                    source: error,
                });
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt; the inner error is one that no further attempt mends.
    async fn greet(&self) -> io::Result<Result<Connection, PrivilegeError>> {
        let packets = Packets::connect(&self.path)?;
        let refused = |what: String| Ok(Err(PrivilegeError::Refused { what }));
        if packets.peer()? != 0 {
            return refused(format!(
                "what listens at {} is not the node manager: it is not root",
                self.path.display()
            ));
        }
        let hello = serde_json::to_vec(&Request::Hello { version: VERSION })?;
        packets.send(&hello, &[]).await?;
        let answer = timeout(WELCOME, packets.receive(&mut Vec::new()))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let Some(answer) = answer else {
            return Err(io::ErrorKind::ConnectionReset.into());
        };
        match serde_json::from_slice(&answer.bytes) {
            Ok(Reply::Welcome { version: VERSION }) => Ok(Ok(Connection {
                packets,
                pending: Mutex::new(Some(BTreeMap::new())),
            })),
            Ok(Reply::Welcome { version }) => refused(format!(
                "the node manager speaks version {version} and the node version {VERSION}: restart both"
            )),
            _ => refused("the node manager does not speak the node's language: restart both".to_owned()),
        }
    }

    /// Hands out what arrives, until the connection ends.
    async fn read(&self, connection: &Connection) -> io::Result<()> {
        let mut buffer = Vec::new();
        while let Some(Packet { bytes, descriptors }) = connection.packets.receive(&mut buffer).await? {
            match serde_json::from_slice(&bytes)? {
                Reply::Welcome { .. } => {}
                Reply::Exited { process, status } => self.exited(process, status),
                Reply::Answer { id, outcome } => {
                    let exit = match &outcome {
                        // Before the next message, which may say that it has ended.
                        Ok(Done::Process { identity, .. }) => Some(self.watch(*identity)),
                        _ => None,
                    };
                    let asked = locked(&connection.pending).as_mut().and_then(|p| p.remove(&id));
                    if let Some(asked) = asked {
                        let outcome = outcome.map_err(PrivilegeError::from);
                        // Whoever asked may have gone.
                        drop(asked.send(Answer {
                            outcome,
                            descriptors,
                            exit,
                        }));
                    }
                }
            }
        }
        Ok(())
    }

    fn watch(&self, process: ProcessIdentity) -> watch::Receiver<Option<ExitStatus>> {
        let mut watched = locked(&self.watched);
        let tell = watched.entry(process).or_insert_with(|| watch::Sender::new(None));
        tell.subscribe()
    }

    fn exited(&self, process: ProcessIdentity, status: ExitStatus) {
        if let Some(tell) = locked(&self.watched).remove(&process) {
            tell.send_replace(Some(status));
        }
    }

    /// Asks a new node manager to watch what the one before it watched. A process that cannot be watched now is asked for
    /// again: only one that is known to be gone has ended.
    async fn adopt_again(&self, connection: &Connection) {
        let mut left = locked(&self.watched).keys().copied().collect::<Vec<_>>();
        let mut pause = FIRST_PAUSE;
        while !left.is_empty() {
            let mut again = Vec::new();
            for process in left {
                let id = self.next.fetch_add(1, Ordering::Relaxed);
                let call = Call::Adopt { process };
                let Ok(message) = serde_json::to_vec(&Request::Request { id, call }) else {
                    continue;
                };
                match connection.ask(id, &message, &[]).await {
                    Ok(Answer { outcome: Ok(_), .. }) => {}
                    Ok(Answer {
                        outcome: Err(error), ..
                    }) if is_gone(&error) => {
                        // It ended while nobody watched.
                        tracing::info!(pid = process.pid, "a monitor is gone");
                        self.exited(process, ExitStatus::Unknown);
                    }
                    Ok(Answer {
                        outcome: Err(error), ..
                    }) => {
                        tracing::warn!(pid = process.pid, %error, "a monitor is not watched yet");
                        again.push(process);
                    }
                    // The connection is lost again, and all will be asked anew.
                    Err(_) => return,
                }
            }
            left = again;
            if !left.is_empty() {
                sleep(pause).await;
                pause = (pause * 2).min(PATIENCE);
            }
        }
    }
}

/// Whether an error says that there is no such process.
fn is_gone(error: &PrivilegeError) -> bool {
    matches!(error, PrivilegeError::System { source, .. } if source.raw_os_error() == Some(libc::ESRCH))
}

fn text(of: &std::ffi::OsStr) -> Result<String, PrivilegeError> {
    of.to_str()
        .map(str::to_owned)
        .ok_or_else(|| PrivilegeError::Refused {
            what: format!("{} is not UTF-8", of.to_string_lossy()),
        })
}

#[async_trait]
impl Privileges for RemotePrivileges {
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        let [namespace, tap] = self.open(Call::CreateNetwork { name: name.clone() }).await?;
        Ok(Network { namespace, tap })
    }

    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.act(Call::DeleteNetwork { name: name.clone() }).await
    }

    async fn create_group(&self, name: &ObjectName, limits: &GroupLimits) -> Result<Group, PrivilegeError> {
        let (name, limits) = (name.clone(), limits.clone());
        self.act(Call::CreateGroup {
            name: name.clone(),
            limits,
        })
        .await?;
        Ok(Group { name })
    }

    async fn group_usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError> {
        let call = Call::GroupUsage { name: name.clone() };
        let act = call.words();
        match self.call(call, &[]).await?.outcome? {
            Done::Usage(usage) => Ok(usage),
            _ => Err(strange(act)),
        }
    }

    async fn set_group_weight(&self, name: &ObjectName, cpu_weight: u64) -> Result<(), PrivilegeError> {
        let (name, weight) = (name.clone(), cpu_weight);
        self.act(Call::SetGroupWeight { name, weight }).await
    }

    async fn kill_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.act(Call::KillGroup { name: name.clone() }).await
    }

    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.act(Call::DeleteGroup { name: name.clone() }).await
    }

    async fn give_file(&self, file: OwnedFd, uid: u32) -> Result<(), PrivilegeError> {
        let answer = self.call(Call::GiveFile { uid }, &[file.as_fd()]).await?;
        answer.outcome.map(drop)
    }

    async fn spawn(&self, process: VmmProcess) -> Result<Spawned, PrivilegeError> {
        let VmmProcess {
            name,
            program,
            arguments,
            uid,
            network_namespace,
            descriptors,
            log,
            file_size_limit,
            views,
        } = process;
        text(program.as_os_str())?;
        let arguments = arguments.iter().map(|a| text(a)).collect::<Result<_, _>>()?;
        let (numbers, passed): (Vec<_>, Vec<_>) = descriptors.into_iter().unzip();
        let (places, sources): (Vec<_>, Vec<_>) = views
            .into_iter()
            .map(
                |View {
                     path,
                     source,
                     writable,
                 }| ((path, writable), source),
            )
            .unzip();
        for (path, _) in &places {
            text(path.as_os_str())?;
        }
        let call = Call::Spawn(Box::new(SpawnCall {
            name,
            program,
            arguments,
            uid,
            file_size_limit,
            network: network_namespace.is_some(),
            log: log.is_some(),
            numbers,
            views: places,
        }));
        let all = network_namespace
            .iter()
            .chain(&log)
            .chain(&passed)
            .chain(&sources);
        let all = all.map(AsFd::as_fd).collect::<Vec<_>>();
        self.process(call, &all).await
    }

    async fn adopt(&self, process: ProcessIdentity) -> Result<Adopted, PrivilegeError> {
        let spawned = self.process(Call::Adopt { process }, &[]).await?;
        Ok(Adopted { spawned })
    }

    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError> {
        let [device] = self.open(Call::OpenKvm).await?;
        Ok(device)
    }

    async fn kill(&self, process: ProcessIdentity) -> Result<(), PrivilegeError> {
        self.act(Call::Kill { process }).await
    }

    async fn open_memory(&self, process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError> {
        let [memory, pagemap, maps] = self.open(Call::OpenMemory { process }).await?;
        let maps = process::read_maps(maps);
        let maps =
            maps.map_err(|e| crate::failed(format!("reading the map of process {}", process.pid), e))?;
        Ok(MachineMemory {
            memory,
            pagemap,
            maps,
        })
    }

    async fn sweep(&self, keep: &BTreeSet<ObjectName>) -> Result<SweepReport, PrivilegeError> {
        if keep.len() > MOST_KEPT {
            return Err(PrivilegeError::Refused {
                what: format!("{} names to keep, more than {MOST_KEPT}", keep.len()),
            });
        }
        let call = Call::Sweep { keep: keep.clone() };
        let act = call.words();
        match self.call(call, &[]).await?.outcome? {
            Done::Swept(report) => Ok(report),
            _ => Err(strange(act)),
        }
    }
}
