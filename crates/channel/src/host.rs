//! The host's side of the control port.
//!
//! ```text
//!  open ──► hello sent ──HelloAck(nonce)──► greeted ──► requests and answers, events
//!               │                              │
//!               └──────── end of file, error, drop ──► closed (every waiting request ends)
//! ```

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU32, atomic::Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

use crate::{
    Activity, ChannelError, Event, FrameDecoder, GuestMessage, Hello, HelloAck, HostMessage, Identity, Nonce,
    PROTOCOL_MAX, PROTOCOL_MIN, Status, capabilities,
};

/// Frames waiting to be written; more wait in their senders.
const OUTGOING: usize = 16;
/// Events not yet taken; further ones are dropped.
const EVENTS: usize = 64;
/// Bytes read at once.
const CHUNK: usize = 8 * 1024;

/// How a freeze went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreezeReport {
    /// Whether every process of the agent stands still.
    pub frozen: bool,
    /// How long the guest took, by its own clock.
    pub took: Duration,
}

/// What the guest says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthReport {
    /// Since the guest's kernel started, by its own clock.
    pub uptime: Duration,
    /// Processes that run for the host.
    pub processes: u32,
    /// What the agent does; `None` from a daemon that is too old to tell.
    pub activity: Option<Activity>,
}

/// One connection to a guest's control port. Dropping it closes the connection.
///
/// Requests may be made from any task, also before the guest runs or has answered the hello: they then wait in order.
/// Every method is cancellation safe; a request that was dropped may still be carried out.
#[derive(Debug)]
pub struct HostControl {
    nonce: Nonce,
    outgoing: mpsc::Sender<Vec<u8>>,
    sequence: AtomicU32,
    pending: Pending,
    greeted: watch::Receiver<Option<HelloAck>>,
    events: Mutex<Option<mpsc::Receiver<Event>>>,
    task: JoinHandle<()>,
}

impl Drop for HostControl {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl HostControl {
    /// Begins a connection with a fresh nonce and does not wait for the guest, which may not even run yet.
    /// Must be called within a tokio runtime.
    pub fn open<S>(stream: S, generation: u64) -> Result<Self, ChannelError>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let nonce = Nonce::random()?;
        let hello = Hello {
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            nonce,
            generation,
        };
        let mut first = Vec::new();
        HostMessage::Hello(hello)
            .encode(0, &mut first)
            .map_err(|source| ChannelError::Encode {
                what: "hello",
                source,
            })?;

        let (outgoing, frames) = mpsc::channel(OUTGOING);
        let (event_sender, events) = mpsc::channel(EVENTS);
        let (greet, greeted) = watch::channel(None);
        let pending = Pending::default();
        let (reader, writer) = tokio::io::split(stream);
        let incoming = Incoming {
            nonce,
            greet,
            events: event_sender,
            pending: pending.clone(),
        };
        let task = tokio::spawn(async move {
            // Either end means the end of both; what waits learns it from its dropped sender.
            tokio::select! {
                _ = write_frames(writer, first, frames) => {}
                _ = incoming.read(reader) => {}
            }
        });
        Ok(Self {
            nonce,
            outgoing,
            sequence: AtomicU32::new(1),
            pending,
            greeted,
            events: Mutex::new(Some(events)),
            task,
        })
    }

    /// Begins a connection and waits until the guest has answered the hello.
    pub async fn connect<S>(
        stream: S,
        generation: u64,
        limit: Duration,
    ) -> Result<(Self, HelloAck), ChannelError>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let control = Self::open(stream, generation)?;
        let ack = control.greeted(limit).await?;
        Ok((control, ack))
    }

    /// Waits until the guest has answered the hello.
    pub async fn greeted(&self, limit: Duration) -> Result<HelloAck, ChannelError> {
        let what = "hello";
        let mut greeted = self.greeted.clone();
        let ack = tokio::time::timeout(limit, greeted.wait_for(Option::is_some))
            .await
            .map_err(|_| ChannelError::TimedOut { what, limit })?
            .ok()
            .and_then(|ack| ack.clone())
            .ok_or(ChannelError::Closed { what })?;
        if (PROTOCOL_MIN..=PROTOCOL_MAX).contains(&ack.protocol) {
            Ok(ack)
        } else {
            Err(ChannelError::Protocol { guest: ack.protocol })
        }
    }

    /// This connection's nonce, which opens the data port too.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// The guest's events; `None` if taken before. At most 64 wait, further ones are dropped.
    pub fn take_events(&self) -> Option<mpsc::Receiver<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.task.is_finished()
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) {
        self.outgoing.closed().await;
    }

    /// Gives the guest what its start needs.
    pub async fn identity(&self, identity: Identity, limit: Duration) -> Result<(), ChannelError> {
        self.acknowledged("identity", &HostMessage::Identity(Box::new(identity)), limit)
            .await
    }

    /// Freezes the agent's processes, trying for `within` (whole milliseconds). A miss is no error: see the report.
    pub async fn freeze(&self, within: Duration, limit: Duration) -> Result<FreezeReport, ChannelError> {
        let deadline_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
        match self
            .request("freeze", &HostMessage::Freeze { deadline_ms }, limit)
            .await?
        {
            GuestMessage::FreezeAck { frozen, micros, .. } => Ok(FreezeReport {
                frozen,
                took: Duration::from_micros(micros.into()),
            }),
            other => Err(mismatch("freeze", other)),
        }
    }

    /// Lets the agent's processes run again and sets the clock to `realtime_ns` nanoseconds since 1970.
    pub async fn thaw(&self, realtime_ns: u64, limit: Duration) -> Result<(), ChannelError> {
        self.acknowledged("thaw", &HostMessage::Thaw { realtime_ns }, limit)
            .await
    }

    /// Sets the guest's clock to `realtime_ns` nanoseconds since 1970.
    pub async fn clock(&self, realtime_ns: u64, limit: Duration) -> Result<(), ChannelError> {
        self.acknowledged("clock", &HostMessage::Clock { realtime_ns }, limit)
            .await
    }

    /// Asks how the guest is, and what its agent does if its daemon has said that it can tell.
    pub async fn health(&self, limit: Duration) -> Result<HealthReport, ChannelError> {
        let question = if self.can(capabilities::ACTIVITY) {
            HostMessage::Activity
        } else {
            HostMessage::Health
        };
        let report = |uptime_ms, processes, activity| HealthReport {
            uptime: Duration::from_millis(uptime_ms),
            processes,
            activity,
        };
        match self.request("health", &question, limit).await? {
            GuestMessage::HealthAck {
                uptime_ms, processes, ..
            } => Ok(report(uptime_ms, processes, None)),
            GuestMessage::ActivityAck {
                uptime_ms,
                processes,
                activity,
                ..
            } => Ok(report(uptime_ms, processes, Some(activity))),
            other => Err(mismatch("health", other)),
        }
    }

    /// Has the guest write everything to disk and power off. The answer comes before the power-off.
    pub async fn shutdown(&self, limit: Duration) -> Result<(), ChannelError> {
        self.acknowledged("shutdown", &HostMessage::Shutdown, limit).await
    }

    /// Has the guest write everything to disk; on return its disks are clean.
    pub async fn quiesce(&self, limit: Duration) -> Result<(), ChannelError> {
        self.acknowledged("quiesce", &HostMessage::Quiesce, limit).await
    }

    /// Whether the guest has said that it can do this; no before its hello.
    fn can(&self, capability: u64) -> bool {
        let greeted = self.greeted.borrow();
        greeted
            .as_ref()
            .is_some_and(|ack| ack.capabilities & capability != 0)
    }

    async fn acknowledged(
        &self,
        what: &'static str,
        message: &HostMessage,
        limit: Duration,
    ) -> Result<(), ChannelError> {
        match self.request(what, message, limit).await? {
            GuestMessage::Ack {
                status: Status::Ok, ..
            } => Ok(()),
            other => Err(mismatch(what, other)),
        }
    }

    async fn request(
        &self,
        what: &'static str,
        message: &HostMessage,
        limit: Duration,
    ) -> Result<GuestMessage, ChannelError> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let mut frame = Vec::new();
        message
            .encode(sequence, &mut frame)
            .map_err(|source| ChannelError::Encode { what, source })?;
        let waiting = self.pending.wait_for(sequence);
        let exchange = async {
            self.outgoing
                .send(frame)
                .await
                .map_err(|_| ChannelError::Closed { what })?;
            tokio::select! {
                // An answer counts even if the guest hangs up right behind it.
                biased;
                answer = waiting.answer => answer.map_err(|_| ChannelError::Closed { what }),
                () = self.outgoing.closed() => Err(ChannelError::Closed { what }),
            }
        };
        tokio::time::timeout(limit, exchange)
            .await
            .map_err(|_| ChannelError::TimedOut { what, limit })?
    }
}

fn mismatch(what: &'static str, answer: GuestMessage) -> ChannelError {
    match answer {
        GuestMessage::Ack { status, detail, .. } if status != Status::Ok => {
            ChannelError::Refused { what, status, detail }
        }
        _ => ChannelError::Unexpected { what },
    }
}

async fn write_frames<S: AsyncWrite>(
    mut writer: WriteHalf<S>,
    first: Vec<u8>,
    mut frames: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let mut next = Some(first);
    while let Some(frame) = next {
        writer.write_all(&frame).await?;
        writer.flush().await?;
        next = frames.recv().await;
    }
    Ok(())
}

/// What the reading half hands on.
struct Incoming {
    nonce: Nonce,
    greet: watch::Sender<Option<HelloAck>>,
    events: mpsc::Sender<Event>,
    pending: Pending,
}

impl Incoming {
    async fn read<S: AsyncRead>(self, mut reader: ReadHalf<S>) -> io::Result<()> {
        let mut decoder = FrameDecoder::new();
        let mut buffer = vec![0; CHUNK];
        let mut greeted = false;
        loop {
            let length = reader.read(&mut buffer).await?;
            if length == 0 {
                return Ok(());
            }
            let mut rest = &buffer[..length];
            while let Some(frame) = decoder.next(&mut rest) {
                // A message of a newer protocol, or nonsense: whoever waits for it runs into its limit.
                let Ok(message) = GuestMessage::decode(&frame) else {
                    continue;
                };
                match message {
                    GuestMessage::HelloAck(ack) => {
                        if !greeted && ack.nonce_echo == self.nonce {
                            greeted = true;
                            self.greet.send_replace(Some(ack));
                        }
                    }
                    _ if !greeted => {}
                    GuestMessage::Event(event) => drop(self.events.try_send(event)),
                    GuestMessage::Ack { of_sequence, .. }
                    | GuestMessage::FreezeAck { of_sequence, .. }
                    | GuestMessage::HealthAck { of_sequence, .. }
                    | GuestMessage::ActivityAck { of_sequence, .. } => {
                        self.pending.answer(of_sequence, message);
                    }
                }
            }
        }
    }
}

/// Requests that wait for their answers, at most one per caller.
#[derive(Debug, Clone, Default)]
struct Pending(Arc<Mutex<HashMap<u32, oneshot::Sender<GuestMessage>>>>);

impl Pending {
    fn wait_for(&self, sequence: u32) -> Waiting {
        let (sender, answer) = oneshot::channel();
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(sequence, sender);
        Waiting {
            answer,
            _registered: Registered {
                pending: self.clone(),
                sequence,
            },
        }
    }

    fn answer(&self, sequence: u32, message: GuestMessage) {
        let waiting = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&sequence);
        if let Some(waiting) = waiting {
            // Nobody waits any more if its limit has just passed.
            drop(waiting.send(message));
        }
    }
}

struct Waiting {
    answer: oneshot::Receiver<GuestMessage>,
    _registered: Registered,
}

/// Takes the request off the list when its caller is gone.
struct Registered {
    pending: Pending,
    sequence: u32,
}

impl Drop for Registered {
    fn drop(&mut self) {
        drop(
            self.pending
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&self.sequence),
        );
    }
}
