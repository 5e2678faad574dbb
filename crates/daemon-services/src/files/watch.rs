//! Watching directories for changes.
//!
//! A [`Watch`] turns the kernel's events into ours, keeping one kernel watch per directory. It is
//! read either by one stream ([`events`]) or by a task that fills a bounded queue for callers that
//! poll ([`Watchers`]). Lost events are counted and told, never silent.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connectrpc::ConnectError;
use futures_util::{Stream, stream};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use space_proto::filesystem::__buffa::oneof::watch_dir_response::Event;
use space_proto::filesystem::watch_dir_response::{KeepAlive, StartEvent};
use space_proto::filesystem::{EventType, FilesystemEvent, WatchDirResponse};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::account::{Account, Names};
use crate::descriptor;
use crate::identity::run_as;

use super::FileError;
use super::entry::{both_forms, describe};

/// Directories in one watch.
const MAX_DIRECTORIES: usize = 65_536;
/// Events kept for a caller that polls; older ones are dropped and counted.
const MAX_QUEUED: usize = 10_000;
/// Watchers that are polled, all together.
const MAX_WATCHERS: usize = 256;
/// A watcher that nobody has polled for so long is given up.
const ABANDONED: Duration = Duration::from_secs(3600);
const READ_BUFFER: usize = 64 * 1024;

/// What a request asks of a watch.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WatchOptions {
    pub(crate) recursive: bool,
    pub(crate) include_entry: bool,
    pub(crate) allow_network_mounts: bool,
}

/// The kernel watches of one root.
#[derive(Debug)]
struct Tree {
    kernel: Arc<AsyncFd<OwnedFd>>,
    root: PathBuf,
    options: WatchOptions,
    /// Directory of each kernel watch, relative to the root.
    directories: HashMap<i32, PathBuf>,
    etc: PathBuf,
    /// Times that events were lost since the last event.
    dropped: u64,
}

/// One event as the kernel gave it.
#[derive(Debug)]
struct Raw {
    watch: i32,
    flags: ReadFlags,
    name: Option<PathBuf>,
}

/// A running watch.
#[derive(Debug)]
pub(crate) struct Watch {
    kernel: Arc<AsyncFd<OwnedFd>>,
    /// Absent while work on it is under way.
    tree: Option<Tree>,
    account: Account,
    ready: VecDeque<FilesystemEvent>,
}

impl Watch {
    /// Starts watching `root` as `account`, whose permission is checked here.
    pub(crate) async fn open(
        account: Account,
        root: PathBuf,
        options: WatchOptions,
        etc: PathBuf,
    ) -> Result<Self, FileError> {
        let failed = |source| FileError::from_io("watch", &root, source);
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let kernel = Arc::new(descriptor::watch(fd, Interest::READABLE).map_err(failed)?);
        let mut tree = Tree {
            kernel: Arc::clone(&kernel),
            root: root.clone(),
            options,
            directories: HashMap::new(),
            etc,
            dropped: 0,
        };
        let opened = run_as(&account, move || tree.open().map(|()| tree)).await;
        let tree = opened.map_err(failed)??;
        Ok(Self {
            kernel,
            tree: Some(tree),
            account,
            ready: VecDeque::new(),
        })
    }

    /// The next event. Cancel safe, except that a cancelled call may lose its batch of events, as
    /// it does when the client is gone.
    pub(crate) async fn next(&mut self) -> Result<FilesystemEvent, FileError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            let failed = |source| FileError::Internal {
                what: "watch",
                path: String::new(),
                source,
            };
            let batch = self
                .kernel
                .async_io(Interest::READABLE, |fd| Ok(read_batch(fd)?))
                .await
                .map_err(failed)?;
            let Some(mut tree) = self.tree.take() else {
                return Err(failed(std::io::Error::other("the watch was interrupted")));
            };
            let (tree, events) = if tree.options.recursive || tree.options.include_entry {
                let work = move || {
                    let events = tree.translate(batch);
                    (tree, events)
                };
                run_as(&self.account, work).await.map_err(failed)?
            } else {
                let events = tree.translate(batch);
                (tree, events)
            };
            self.tree = Some(tree);
            self.ready.extend(events);
        }
    }
}

/// Reads what is there; an error only if nothing is.
fn read_batch(fd: &OwnedFd) -> rustix::io::Result<Vec<Raw>> {
    let mut buffer = [MaybeUninit::uninit(); READ_BUFFER];
    let mut reader = inotify::Reader::new(fd.as_fd(), &mut buffer);
    let mut batch = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => batch.push(Raw {
                watch: event.wd(),
                flags: event.events(),
                name: event
                    .file_name()
                    .map(|name| PathBuf::from(OsStr::from_bytes(name.to_bytes()))),
            }),
            Err(error) => return if batch.is_empty() { Err(error) } else { Ok(batch) },
        }
        if reader.is_buffer_empty() {
            return Ok(batch);
        }
    }
}

impl Tree {
    fn open(&mut self) -> Result<(), FileError> {
        let path = || self.root.to_string_lossy().into_owned();
        let found = std::fs::metadata(&self.root)
            .map_err(|source| FileError::from_io("watch", &self.root, source))?;
        if !found.is_dir() {
            return Err(FileError::WrongKind {
                path: path(),
                problem: "is not a directory",
            });
        }
        if !self.options.allow_network_mounts && is_network(&self.root) {
            let problem =
                "is on a network file system, where events are unreliable; allow it to watch all the same";
            return Err(FileError::WrongKind {
                path: path(),
                problem,
            });
        }
        self.add(PathBuf::new(), &mut Vec::new())
    }

    /// Watches a directory, and below it when recursive. What is found below is added to `found`.
    fn add(&mut self, relative: PathBuf, found: &mut Vec<PathBuf>) -> Result<(), FileError> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let mut open = vec![relative];
        while let Some(relative) = open.pop() {
            let path = self.root.join(&relative);
            let is_root = relative.as_os_str().is_empty();
            let flags = if is_root {
                flags
            } else {
                flags | WatchFlags::DONT_FOLLOW
            };
            if self.directories.len() >= MAX_DIRECTORIES {
                return Err(FileError::TooMany {
                    what: "there are too many directories to watch",
                });
            }
            match inotify::add_watch(self.kernel.as_fd(), &path, flags) {
                Ok(watch) => {
                    self.directories.insert(watch, relative.clone());
                }
                Err(Errno::NOSPC) => {
                    return Err(FileError::TooMany {
                        what: "the kernel's limit of watched directories is reached",
                    });
                }
                // Below the root, what this account may not see or what has gone is left out.
                Err(Errno::ACCESS | Errno::NOENT | Errno::NOTDIR) if !is_root => continue,
                Err(error) => return Err(FileError::from_io("watch", &path, error.into())),
            }
            if !self.options.recursive {
                continue;
            }
            for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
                let below = relative.join(entry.file_name());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    open.push(below.clone());
                }
                if found.len() < MAX_QUEUED {
                    found.push(below);
                }
            }
        }
        Ok(())
    }

    /// Forgets a directory that was moved away or removed, with all below it.
    fn forget(&mut self, relative: &Path) {
        let gone: Vec<i32> = self
            .directories
            .iter()
            .filter(|(_, path)| path.starts_with(relative))
            .map(|(watch, _)| *watch)
            .collect();
        for watch in gone {
            self.directories.remove(&watch);
            // Fails when the directory is removed, which ends its watch too.
            let _ = inotify::remove_watch(self.kernel.as_fd(), watch);
        }
    }

    fn translate(&mut self, batch: Vec<Raw>) -> Vec<FilesystemEvent> {
        let names = self.options.include_entry.then(|| Names::read(&self.etc));
        let mut events = Vec::new();
        for raw in batch {
            if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.dropped += 1;
                continue;
            }
            let Some(directory) = self.directories.get(&raw.watch).cloned() else {
                continue;
            };
            if raw.flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&raw.watch);
                continue;
            }
            let Some(kind) = kind(raw.flags) else { continue };
            let name = match raw.name {
                Some(name) => directory.join(name),
                // About the directory itself; for those below the root its parent tells the same.
                None if directory.as_os_str().is_empty() => PathBuf::from("."),
                None => continue,
            };
            self.event(&mut events, &name, kind, names.as_ref());
            if self.options.recursive && raw.flags.contains(ReadFlags::ISDIR) {
                match kind {
                    EventType::EVENT_TYPE_CREATE => self.enter(&mut events, name, names.as_ref()),
                    EventType::EVENT_TYPE_RENAME | EventType::EVENT_TYPE_REMOVE => self.forget(&name),
                    _ => {}
                }
            }
        }
        events
    }

    /// Watches a new directory. What was made in it before the watch began has no event of its own.
    fn enter(&mut self, events: &mut Vec<FilesystemEvent>, directory: PathBuf, names: Option<&Names>) {
        let mut found = Vec::new();
        if let Err(error) = self.add(directory, &mut found) {
            tracing::warn!(%error, "a new directory is not watched");
            self.dropped += 1;
        }
        for path in found {
            self.event(events, &path, EventType::EVENT_TYPE_CREATE, names);
        }
    }

    fn event(
        &mut self,
        events: &mut Vec<FilesystemEvent>,
        name: &Path,
        kind: EventType,
        names: Option<&Names>,
    ) {
        let entry = names.and_then(|names| describe(&self.root.join(name), names).ok());
        let (name, raw_name) = both_forms(name);
        events.push(FilesystemEvent {
            name,
            raw_name,
            r#type: kind.into(),
            entry: entry.into(),
            dropped: std::mem::take(&mut self.dropped),
            ..FilesystemEvent::default()
        });
    }
}

fn kind(flags: ReadFlags) -> Option<EventType> {
    Some(match () {
        () if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) => EventType::EVENT_TYPE_CREATE,
        () if flags.contains(ReadFlags::MODIFY) => EventType::EVENT_TYPE_WRITE,
        () if flags.intersects(ReadFlags::DELETE | ReadFlags::DELETE_SELF) => EventType::EVENT_TYPE_REMOVE,
        () if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF) => EventType::EVENT_TYPE_RENAME,
        () if flags.contains(ReadFlags::ATTRIB) => EventType::EVENT_TYPE_CHMOD,
        () => return None,
    })
}

/// Whether a path is on a file system whose changes are made elsewhere.
fn is_network(path: &Path) -> bool {
    /// NFS, SMB, CIFS, SMB2 and FUSE.
    const KINDS: [u64; 5] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546];
    rustix::fs::statfs(path).is_ok_and(|found| KINDS.contains(&(found.f_type.cast_unsigned() & 0xffff_ffff)))
}

/// A watch as a stream: `start`, then events and keepalives, until `limit` or the client leaves.
pub(crate) fn events(
    watch: Watch,
    keepalive: Duration,
    limit: Option<Instant>,
) -> impl Stream<Item = Result<WatchDirResponse, ConnectError>> + Send + 'static {
    enum Stage {
        Start,
        Running,
        Done,
    }
    let response = |event| WatchDirResponse {
        event: Some(event),
        ..WatchDirResponse::default()
    };
    stream::unfold((watch, Stage::Start), move |(mut watch, stage)| async move {
        match stage {
            Stage::Start => Some((
                Ok(response(Event::Start(Box::<StartEvent>::default()))),
                (watch, Stage::Running),
            )),
            Stage::Done => None,
            Stage::Running => {
                let time_up = async {
                    match limit {
                        Some(limit) => tokio::time::sleep_until(limit).await,
                        None => std::future::pending().await,
                    }
                };
                let item = tokio::select! {
                    biased;
                    event = watch.next() => event.map(|event| Event::Filesystem(Box::new(event))).map_err(ConnectError::from),
                    () = time_up => Err(ConnectError::deadline_exceeded("the time given for this watch has passed")),
                    () = tokio::time::sleep(keepalive) => Ok(Event::Keepalive(Box::<KeepAlive>::default())),
                };
                let stage = if item.is_ok() { Stage::Running } else { Stage::Done };
                Some((item.map(response), (watch, stage)))
            }
        }
    })
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<FilesystemEvent>,
    dropped: u64,
}

#[derive(Debug)]
struct Watcher {
    queue: Arc<Mutex<Queue>>,
    task: tokio::task::AbortHandle,
    polled: Instant,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Watches whose events wait to be fetched.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    all: Mutex<(u64, HashMap<String, Watcher>)>,
}

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, (u64, HashMap<String, Watcher>)> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to collect a watch's events and returns its id.
    pub(crate) fn add(&self, mut watch: Watch) -> Result<String, FileError> {
        let mut all = self.lock();
        all.1.retain(|_, watcher| watcher.polled.elapsed() < ABANDONED);
        if all.1.len() >= MAX_WATCHERS {
            return Err(FileError::TooMany {
                what: "there are 256 watchers already; remove some",
            });
        }
        let queue = Arc::new(Mutex::new(Queue::default()));
        let filled = Arc::clone(&queue);
        let task = tokio::spawn(async move {
            while let Ok(event) = watch.next().await {
                let mut queue = filled.lock().unwrap_or_else(PoisonError::into_inner);
                if queue.events.len() >= MAX_QUEUED {
                    queue.events.pop_front();
                    queue.dropped += 1;
                }
                queue.events.push_back(event);
            }
        });
        all.0 += 1;
        let id = format!("w{}", all.0);
        all.1.insert(
            id.clone(),
            Watcher {
                queue,
                task: task.abort_handle(),
                polled: Instant::now(),
            },
        );
        Ok(id)
    }

    /// The events since the last call.
    pub(crate) fn take_events(&self, id: &str) -> Result<Vec<FilesystemEvent>, FileError> {
        let mut all = self.lock();
        let watcher = all
            .1
            .get_mut(id)
            .ok_or_else(|| FileError::NoWatcher { id: id.to_owned() })?;
        watcher.polled = Instant::now();
        let mut queue = watcher.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped = std::mem::take(&mut queue.dropped);
        let mut events: Vec<_> = queue.events.drain(..).collect();
        if let Some(first) = events.first_mut() {
            first.dropped += dropped;
        }
        Ok(events)
    }

    pub(crate) fn remove(&self, id: &str) -> Result<(), FileError> {
        let removed = self.lock().1.remove(id);
        removed
            .map(drop)
            .ok_or_else(|| FileError::NoWatcher { id: id.to_owned() })
    }
}
