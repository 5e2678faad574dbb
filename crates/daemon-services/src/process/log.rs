//! The output of one process: one bounded log, read by any number of subscribers.
//!
//! ```text
//!   pump ──push──▶ [ chunk chunk chunk … chunk ] ──▶ subscriber (cursor)
//!     ▲               oldest            newest   ──▶ subscriber (cursor)
//!     └── waits while the slowest subscriber is more than a window behind
//! ```
//!
//! With a subscriber attached nothing is lost: the pump stops reading, the pipe fills, the program
//! waits. With none attached the program must not stand still, so the log keeps the newest bytes
//! and forgets the oldest; offsets tell a later subscriber exactly what is missing.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// How far the slowest subscriber may be behind before reading stops, in bytes.
const WINDOW: u64 = 256 * 1024;
/// What one log keeps for subscribers to come, in bytes.
const KEEP: usize = 1024 * 1024;
/// What all logs keep together, in bytes (a log never keeps less than [`KEEP_MIN`]).
const KEEP_TOTAL: usize = 16 * 1024 * 1024;
const KEEP_MIN: usize = 16 * 1024;
/// Book-keeping charged per chunk, so that a program that writes single bytes is bounded too.
const CHUNK_OVERHEAD: usize = 96;

/// Which stream a chunk belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
    Terminal,
}

impl Stream {
    /// A terminal is alone, so it shares the place of standard output.
    pub(crate) fn index(self) -> usize {
        match self {
            Self::Stdout | Self::Terminal => 0,
            Self::Stderr => 1,
        }
    }
}

/// Consecutive bytes of one stream.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub(crate) stream: Stream,
    /// Position of the first byte in its stream.
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
    /// Bytes of all streams before this chunk.
    position: u64,
}

/// Number of logs that exist, to share [`KEEP_TOTAL`].
#[derive(Debug, Default, Clone)]
pub(crate) struct Budget(Arc<AtomicUsize>);

#[derive(Debug, Default)]
struct Inner {
    chunks: VecDeque<Chunk>,
    /// Number of the first chunk still kept.
    first: u64,
    /// Bytes kept, book-keeping included.
    kept: usize,
    /// Bytes of all streams ever pushed.
    position: u64,
    totals: [u64; 2],
    /// Next chunk number of each subscriber.
    cursors: HashMap<u64, u64>,
    next_cursor: u64,
    ended: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Log {
    inner: Mutex<Inner>,
    /// Something was pushed, or the log has ended.
    grown: Notify,
    /// A subscriber has read, or left.
    read: Notify,
    budget: Budget,
}

impl Log {
    pub(crate) fn new(budget: &Budget) -> Self {
        budget.0.fetch_add(1, Ordering::Relaxed);
        Self {
            inner: Mutex::default(),
            grown: Notify::new(),
            read: Notify::new(),
            budget: budget.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes ever pushed: standard output (or terminal), standard error.
    pub(crate) fn totals(&self) -> [u64; 2] {
        self.lock().totals
    }

    /// Appends. Does not wait: call [`Log::space`] first.
    pub(crate) fn push(&self, stream: Stream, data: Bytes) {
        if data.is_empty() {
            return;
        }
        let mut inner = self.lock();
        let length = data.len() as u64;
        let chunk = Chunk {
            stream,
            offset: inner.totals[stream.index()],
            data,
            position: inner.position,
        };
        inner.totals[stream.index()] += length;
        inner.position += length;
        inner.kept += chunk.data.len() + CHUNK_OVERHEAD;
        inner.chunks.push_back(chunk);
        let logs = self.budget.0.load(Ordering::Relaxed).max(1);
        inner.trim(KEEP.min((KEEP_TOTAL / logs).max(KEEP_MIN)));
        drop(inner);
        self.grown.notify_waiters();
    }

    /// Waits until every subscriber is within the window.
    pub(crate) async fn space(&self) {
        loop {
            let read = self.read.notified();
            tokio::pin!(read);
            read.as_mut().enable();
            if self.lock().lag() < WINDOW {
                return;
            }
            read.await;
        }
    }

    /// No more will be pushed.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.grown.notify_waiters();
    }

    /// Forgets what is kept; for the oldest of many that have ended.
    pub(crate) fn forget(&self) {
        self.lock().trim(0);
    }

    /// Bytes kept.
    pub(crate) fn kept(&self) -> usize {
        self.lock().kept
    }

    /// A subscriber that sees what is pushed from now on, or with `from` also what is kept from
    /// these stream positions.
    pub(crate) fn subscribe(self: &Arc<Self>, from: Option<[u64; 2]>) -> Subscriber {
        let mut inner = self.lock();
        let key = inner.next_cursor;
        inner.next_cursor += 1;
        let cursor = match from {
            Some(_) => inner.first,
            None => inner.first + inner.chunks.len() as u64,
        };
        inner.cursors.insert(key, cursor);
        let expected = from.unwrap_or(inner.totals);
        Subscriber {
            log: Arc::clone(self),
            key,
            expected,
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    fn trim(&mut self, keep: usize) {
        let needed = self.cursors.values().copied().min().unwrap_or(u64::MAX);
        while self.kept > keep && self.first < needed {
            let Some(chunk) = self.chunks.pop_front() else {
                return;
            };
            self.kept -= chunk.data.len() + CHUNK_OVERHEAD;
            self.first += 1;
        }
    }

    /// Bytes that the slowest subscriber has not read.
    fn lag(&self) -> u64 {
        let Some(slowest) = self.cursors.values().copied().min() else {
            return 0;
        };
        let index = usize::try_from(slowest.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.chunks
            .get(index)
            .map_or(0, |chunk| self.position - chunk.position)
    }
}

/// One reader of a log.
#[derive(Debug)]
pub(crate) struct Subscriber {
    log: Arc<Log>,
    key: u64,
    /// Next byte wanted of each stream.
    expected: [u64; 2],
}

impl Subscriber {
    /// The next chunk and how many bytes of its stream are missing before it; `None` at the end.
    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<(Chunk, u64)> {
        loop {
            let grown = self.log.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            {
                let mut inner = self.log.lock();
                let first = inner.first;
                let cursor = inner.cursors.get(&self.key).copied().unwrap_or(first).max(first);
                let index = usize::try_from(cursor - first).unwrap_or(usize::MAX);
                let found = inner.chunks.get(index).cloned();
                let ended = inner.ended;
                if let Some(mut chunk) = found {
                    inner.cursors.insert(self.key, cursor + 1);
                    drop(inner);
                    self.log.read.notify_waiters();
                    let expected = &mut self.expected[chunk.stream.index()];
                    let end = chunk.offset + chunk.data.len() as u64;
                    if end <= *expected {
                        continue;
                    }
                    if chunk.offset < *expected {
                        let skip = usize::try_from(*expected - chunk.offset).unwrap_or(usize::MAX);
                        chunk.data = chunk.data.slice(skip..);
                        chunk.offset = *expected;
                    }
                    let missing = chunk.offset - *expected;
                    *expected = end;
                    return Some((chunk, missing));
                }
                if ended {
                    return None;
                }
            }
            grown.await;
        }
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.log.lock().cursors.remove(&self.key);
        self.log.read.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn log() -> Arc<Log> {
        Arc::new(Log::new(&Budget::default()))
    }

    async fn is_full(log: &Log) -> bool {
        tokio::time::timeout(Duration::from_millis(20), log.space())
            .await
            .is_err()
    }

    #[tokio::test]
    async fn a_slow_subscriber_holds_the_pump_and_loses_nothing() {
        let log = log();
        let mut slow = log.subscribe(None);
        let block = Bytes::from(vec![1u8; 32 * 1024]);
        let mut pushed = 0u64;
        while !is_full(&log).await {
            log.push(Stream::Stdout, block.clone());
            pushed += 1;
            assert!(pushed < 100);
        }
        assert_eq!(pushed, WINDOW / (32 * 1024));
        slow.next().await.unwrap();
        assert!(!is_full(&log).await);
        log.end();
        let mut rest = 1;
        while let Some((_, missing)) = slow.next().await {
            assert_eq!(missing, 0);
            rest += 1;
        }
        assert_eq!(rest, pushed);
    }

    #[tokio::test]
    async fn without_subscribers_the_oldest_goes_and_the_loss_is_told() {
        let log = log();
        for _ in 0..64 {
            log.push(Stream::Stdout, Bytes::from(vec![0u8; 32 * 1024]));
            assert!(!is_full(&log).await);
        }
        assert!(log.kept() <= KEEP);
        let mut late = log.subscribe(Some([0, 0]));
        let (chunk, missing) = late.next().await.unwrap();
        assert_eq!(missing, chunk.offset);
        assert!(missing > 0);
    }

    #[tokio::test]
    async fn replay_starts_in_the_middle_of_a_chunk() {
        let log = log();
        log.push(Stream::Stdout, Bytes::from_static(b"hello "));
        log.push(Stream::Stderr, Bytes::from_static(b"oops"));
        log.push(Stream::Stdout, Bytes::from_static(b"world"));
        log.end();
        let mut replay = log.subscribe(Some([4, 4]));
        let (first, _) = replay.next().await.unwrap();
        assert_eq!((&first.data[..], first.offset), (&b"o "[..], 4));
        let (second, _) = replay.next().await.unwrap();
        assert_eq!((&second.data[..], second.offset), (&b"world"[..], 6));
        assert!(replay.next().await.is_none());
        assert!(log.subscribe(None).next().await.is_none());
    }
}
