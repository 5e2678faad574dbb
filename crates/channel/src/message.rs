//! The messages on the control port.
//!
//! Payloads have a fixed form: fields in order, little endian, strings as a 16-bit length and UTF-8. A payload that is
//! shorter or longer than its form is refused.

use std::fmt;

use crate::{
    EncodeError, Frame, MessageError, Nonce, frame,
    wire::{Reader, clipped, put_string},
};

/// Most bytes of a host name.
pub const MAX_HOSTNAME: usize = 63;
/// Most bytes of the token for programs inside the guest.
pub const MAX_TOKEN: usize = 64;
/// Most bytes of a daemon version.
pub const MAX_VERSION: usize = 32;
/// Most bytes of words for people.
pub const MAX_DETAIL: usize = 256;
/// Bytes of entropy given with an identity.
pub const ENTROPY_LENGTH: usize = 64;

pub(crate) const HELLO: u16 = 0x0001;
const IDENTITY: u16 = 0x0002;
const FREEZE: u16 = 0x0003;
const THAW: u16 = 0x0004;
const CLOCK: u16 = 0x0005;
const HEALTH: u16 = 0x0006;
const SHUTDOWN: u16 = 0x0007;
const QUIESCE: u16 = 0x0008;
const ACTIVITY: u16 = 0x0009;
pub(crate) const HELLO_ACK: u16 = 0x0101;
const ACK: u16 = 0x0102;
const FREEZE_ACK: u16 = 0x0103;
const HEALTH_ACK: u16 = 0x0104;
const EVENT: u16 = 0x0105;
const ACTIVITY_ACK: u16 = 0x0106;

pub(crate) const KINDS: [u16; 15] = [
    HELLO,
    IDENTITY,
    FREEZE,
    THAW,
    CLOCK,
    HEALTH,
    SHUTDOWN,
    QUIESCE,
    ACTIVITY,
    HELLO_ACK,
    ACK,
    FREEZE_ACK,
    HEALTH_ACK,
    EVENT,
    ACTIVITY_ACK,
];

/// Bits of [`HelloAck::capabilities`].
pub mod capabilities {
    /// Freezing and thawing the agent's processes.
    pub const FREEZE: u64 = 1 << 0;
    /// Tunnels to the guest's loopback.
    pub const TUNNEL: u64 = 1 << 1;
    /// `Quiesce`.
    pub const QUIESCE: u64 = 1 << 2;
    /// `Activity`. A daemon without it answers only `Health`.
    pub const ACTIVITY: u64 = 1 << 3;
}

/// First message of every host connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Oldest protocol the host speaks.
    pub protocol_min: u16,
    /// Newest protocol the host speaks.
    pub protocol_max: u16,
    /// Fresh for this connection; opens the data port too.
    pub nonce: Nonce,
    /// Generation of the sandbox on the host.
    pub generation: u64,
}

/// What an identity is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityMode {
    /// Create or fork: everything in the message applies.
    New,
    /// Wake or rollback: only clock, entropy and generation apply.
    Kept,
}

/// What a guest needs at its start.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// Which parts apply.
    pub mode: IdentityMode,
    /// Nanoseconds since 1970.
    pub realtime_ns: u64,
    /// Fresh random bytes for the kernel's generator.
    pub entropy: [u8; ENTROPY_LENGTH],
    /// Generation of the sandbox, to be named in later hellos.
    pub generation: u64,
    /// For `/etc/machine-id`.
    pub machine_id: [u8; 16],
    /// For `/proc/sys/kernel/random/boot_id`.
    pub boot_id: [u8; 16],
    /// At most [`MAX_HOSTNAME`] bytes.
    pub hostname: String,
    /// Secret for the service on the guest's loopback, at most [`MAX_TOKEN`] bytes.
    pub guest_token: String,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("mode", &self.mode)
            .field("realtime_ns", &self.realtime_ns)
            .field("generation", &self.generation)
            .field("hostname", &self.hostname)
            .finish_non_exhaustive()
    }
}

/// What the host says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostMessage {
    /// Begins a connection.
    Hello(Hello),
    /// Gives the guest what its start needs.
    Identity(Box<Identity>),
    /// Freezes the agent's processes. Answered by [`GuestMessage::FreezeAck`].
    Freeze {
        /// How long to try, milliseconds.
        deadline_ms: u32,
    },
    /// Lets the agent's processes run again and sets the clock.
    Thaw {
        /// Nanoseconds since 1970.
        realtime_ns: u64,
    },
    /// Sets the clock.
    Clock {
        /// Nanoseconds since 1970.
        realtime_ns: u64,
    },
    /// Answered by [`GuestMessage::HealthAck`].
    Health,
    /// Answered by [`GuestMessage::ActivityAck`]. Only for a daemon with [`capabilities::ACTIVITY`].
    Activity,
    /// Writes everything to disk and powers off.
    Shutdown,
    /// Writes everything to disk; the answer says that the disks are clean.
    Quiesce,
}

/// How far the guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestState {
    /// Still setting itself up.
    Booting,
    /// Serving.
    Ready,
    /// Serving, the agent's processes are frozen.
    Frozen,
}

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloAck {
    /// The protocol both speak from now on; zero if there is none.
    pub protocol: u16,
    /// The nonce of the hello.
    pub nonce_echo: Nonce,
    /// The daemon's version, at most [`MAX_VERSION`] bytes.
    pub daemon_version: String,
    /// Bits of [`capabilities`].
    pub capabilities: u64,
    /// Generation of the last identity, zero before the first.
    pub generation: u64,
    /// How far the guest is.
    pub state: GuestState,
}

/// How a request went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// The frame was whole but its message was not understood.
    NotUnderstood,
    /// A part of it failed; the rest was done.
    Failed,
    /// Not possible in this state.
    WrongState,
    /// A code of a newer protocol.
    Other(u16),
}

impl Status {
    fn code(self) -> u16 {
        match self {
            Self::Ok => 0,
            Self::NotUnderstood => 1,
            Self::Failed => 2,
            Self::WrongState => 3,
            Self::Other(code) => code,
        }
    }

    fn from_code(code: u16) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::NotUnderstood,
            2 => Self::Failed,
            3 => Self::WrongState,
            code => Self::Other(code),
        }
    }
}

/// What the agent has done and is doing, for telling whether a sandbox is idle. The counters begin with the guest's kernel
/// and only grow; work is the difference of two answers. The guest's word: an agent that is root can make it up, and
/// harms itself alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    /// Processor time of the agent's processes, the ended ones too, microseconds. The daemon's own is not in it.
    pub cpu_micros: u64,
    /// Bytes that they read from and wrote to disks.
    pub io_bytes: u64,
    /// Processes and threads of the agent that exist now, sleeping ones too.
    pub tasks: u32,
    /// Tunnels open now.
    pub tunnels: u32,
    /// Requests of the data port being answered now, tunnels not counted: commands that somebody follows, transfers.
    pub requests: u32,
}

/// Something that happened in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Memory ran out in the agent's group and something was killed.
    AgentOutOfMemory {
        /// In words, at most [`MAX_DETAIL`] bytes.
        detail: String,
    },
    /// The host did not thaw in time and the guest did it by itself.
    ThawedByWatchdog,
    /// A freeze was on and processes of the agent ran all the same: what was saved meanwhile is not of one instant.
    AgentThawed,
    /// The agent has as many processes as it may have, and was refused another.
    AgentProcessLimit {
        /// In words, at most [`MAX_DETAIL`] bytes.
        detail: String,
    },
    /// A code of a newer protocol.
    Other {
        /// As received.
        code: u16,
        /// In words, at most [`MAX_DETAIL`] bytes.
        detail: String,
    },
}

/// What the guest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestMessage {
    /// Answers [`HostMessage::Hello`].
    HelloAck(HelloAck),
    /// Answers any message that has no answer of its own.
    Ack {
        /// Sequence of the message answered.
        of_sequence: u32,
        /// How it went.
        status: Status,
        /// In words, cut at [`MAX_DETAIL`] bytes.
        detail: String,
    },
    /// Answers [`HostMessage::Freeze`].
    FreezeAck {
        /// Sequence of the message answered.
        of_sequence: u32,
        /// Whether every process stands still. If not, those that could be frozen still are.
        frozen: bool,
        /// How long it took.
        micros: u32,
    },
    /// Answers [`HostMessage::Health`].
    HealthAck {
        /// Sequence of the message answered.
        of_sequence: u32,
        /// Time since the guest's kernel started.
        uptime_ms: u64,
        /// Processes started over the data port that still run.
        processes: u32,
    },
    /// Answers [`HostMessage::Activity`].
    ActivityAck {
        /// Sequence of the message answered.
        of_sequence: u32,
        /// Time since the guest's kernel started.
        uptime_ms: u64,
        /// Processes started over the data port that still run.
        processes: u32,
        /// What the agent does.
        activity: Activity,
    },
    /// Unasked.
    Event(Event),
}

impl HostMessage {
    /// Appends this message as one frame.
    pub fn encode(&self, sequence: u32, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let mut payload = Vec::with_capacity(320);
        let kind = match self {
            Self::Hello(hello) => {
                payload.extend_from_slice(&hello.protocol_min.to_le_bytes());
                payload.extend_from_slice(&hello.protocol_max.to_le_bytes());
                payload.extend_from_slice(hello.nonce.as_bytes());
                payload.extend_from_slice(&hello.generation.to_le_bytes());
                HELLO
            }
            Self::Identity(identity) => {
                payload.push(match identity.mode {
                    IdentityMode::New => 0,
                    IdentityMode::Kept => 1,
                });
                payload.extend_from_slice(&identity.realtime_ns.to_le_bytes());
                payload.extend_from_slice(&identity.entropy);
                payload.extend_from_slice(&identity.generation.to_le_bytes());
                payload.extend_from_slice(&identity.machine_id);
                payload.extend_from_slice(&identity.boot_id);
                put_string(&mut payload, "host name", &identity.hostname, MAX_HOSTNAME)?;
                put_string(&mut payload, "guest token", &identity.guest_token, MAX_TOKEN)?;
                IDENTITY
            }
            Self::Freeze { deadline_ms } => {
                payload.extend_from_slice(&deadline_ms.to_le_bytes());
                FREEZE
            }
            Self::Thaw { realtime_ns } => {
                payload.extend_from_slice(&realtime_ns.to_le_bytes());
                THAW
            }
            Self::Clock { realtime_ns } => {
                payload.extend_from_slice(&realtime_ns.to_le_bytes());
                CLOCK
            }
            Self::Health => HEALTH,
            Self::Shutdown => SHUTDOWN,
            Self::Quiesce => QUIESCE,
            Self::Activity => ACTIVITY,
        };
        frame::append(out, kind, 0, sequence, &payload);
        Ok(())
    }

    /// Reads the message in a frame.
    pub fn decode(frame: &Frame) -> Result<Self, MessageError> {
        let mut fields = begin(frame)?;
        let message = match frame.kind {
            HELLO => Self::Hello(Hello {
                protocol_min: fields.u16("oldest protocol")?,
                protocol_max: fields.u16("newest protocol")?,
                nonce: Nonce::from_bytes(fields.array("nonce")?),
                generation: fields.u64("generation")?,
            }),
            IDENTITY => Self::Identity(Box::new(Identity {
                mode: match fields.u8("mode")? {
                    0 => IdentityMode::New,
                    1 => IdentityMode::Kept,
                    _ => return Err(MessageError::Value { field: "mode" }),
                },
                realtime_ns: fields.u64("time")?,
                entropy: fields.array("entropy")?,
                generation: fields.u64("generation")?,
                machine_id: fields.array("machine id")?,
                boot_id: fields.array("boot id")?,
                hostname: fields.string("host name", MAX_HOSTNAME)?,
                guest_token: fields.string("guest token", MAX_TOKEN)?,
            })),
            FREEZE => Self::Freeze {
                deadline_ms: fields.u32("deadline")?,
            },
            THAW => Self::Thaw {
                realtime_ns: fields.u64("time")?,
            },
            CLOCK => Self::Clock {
                realtime_ns: fields.u64("time")?,
            },
            HEALTH => Self::Health,
            SHUTDOWN => Self::Shutdown,
            QUIESCE => Self::Quiesce,
            ACTIVITY => Self::Activity,
            kind => return Err(MessageError::Kind { kind }),
        };
        fields.end()?;
        Ok(message)
    }
}

impl GuestMessage {
    /// Appends this message as one frame. Strings beyond their bounds are cut: the guest always has an answer.
    pub fn encode(&self, sequence: u32, out: &mut Vec<u8>) {
        let mut payload = Vec::with_capacity(320);
        let kind = match self {
            Self::HelloAck(ack) => {
                payload.extend_from_slice(&ack.protocol.to_le_bytes());
                payload.extend_from_slice(ack.nonce_echo.as_bytes());
                put_clipped(&mut payload, &ack.daemon_version, MAX_VERSION);
                payload.extend_from_slice(&ack.capabilities.to_le_bytes());
                payload.extend_from_slice(&ack.generation.to_le_bytes());
                payload.push(match ack.state {
                    GuestState::Booting => 0,
                    GuestState::Ready => 1,
                    GuestState::Frozen => 2,
                });
                HELLO_ACK
            }
            Self::Ack {
                of_sequence,
                status,
                detail,
            } => {
                payload.extend_from_slice(&of_sequence.to_le_bytes());
                payload.extend_from_slice(&status.code().to_le_bytes());
                put_clipped(&mut payload, detail, MAX_DETAIL);
                ACK
            }
            Self::FreezeAck {
                of_sequence,
                frozen,
                micros,
            } => {
                payload.extend_from_slice(&of_sequence.to_le_bytes());
                payload.push(u8::from(*frozen));
                payload.extend_from_slice(&micros.to_le_bytes());
                FREEZE_ACK
            }
            Self::HealthAck {
                of_sequence,
                uptime_ms,
                processes,
            } => {
                payload.extend_from_slice(&of_sequence.to_le_bytes());
                payload.extend_from_slice(&uptime_ms.to_le_bytes());
                payload.extend_from_slice(&processes.to_le_bytes());
                HEALTH_ACK
            }
            Self::ActivityAck {
                of_sequence,
                uptime_ms,
                processes,
                activity,
            } => {
                payload.extend_from_slice(&of_sequence.to_le_bytes());
                payload.extend_from_slice(&uptime_ms.to_le_bytes());
                payload.extend_from_slice(&processes.to_le_bytes());
                payload.extend_from_slice(&activity.cpu_micros.to_le_bytes());
                payload.extend_from_slice(&activity.io_bytes.to_le_bytes());
                for count in [activity.tasks, activity.tunnels, activity.requests] {
                    payload.extend_from_slice(&count.to_le_bytes());
                }
                ACTIVITY_ACK
            }
            Self::Event(event) => {
                // Code 1 belonged to an event that was never sent.
                let (code, detail) = match event {
                    Event::AgentOutOfMemory { detail } => (2, detail.as_str()),
                    Event::ThawedByWatchdog => (3, ""),
                    Event::AgentThawed => (4, ""),
                    Event::AgentProcessLimit { detail } => (5, detail.as_str()),
                    Event::Other { code, detail } => (*code, detail.as_str()),
                };
                payload.extend_from_slice(&u16::to_le_bytes(code));
                put_clipped(&mut payload, detail, MAX_DETAIL);
                EVENT
            }
        };
        frame::append(out, kind, 0, sequence, &payload);
    }

    /// Reads the message in a frame.
    pub fn decode(frame: &Frame) -> Result<Self, MessageError> {
        let mut fields = begin(frame)?;
        let message = match frame.kind {
            HELLO_ACK => Self::HelloAck(HelloAck {
                protocol: fields.u16("protocol")?,
                nonce_echo: Nonce::from_bytes(fields.array("nonce")?),
                daemon_version: fields.string("version", MAX_VERSION)?,
                capabilities: fields.u64("capabilities")?,
                generation: fields.u64("generation")?,
                state: match fields.u8("state")? {
                    0 => GuestState::Booting,
                    1 => GuestState::Ready,
                    2 => GuestState::Frozen,
                    _ => return Err(MessageError::Value { field: "state" }),
                },
            }),
            ACK => Self::Ack {
                of_sequence: fields.u32("sequence")?,
                status: Status::from_code(fields.u16("status")?),
                detail: fields.string("detail", MAX_DETAIL)?,
            },
            FREEZE_ACK => Self::FreezeAck {
                of_sequence: fields.u32("sequence")?,
                frozen: match fields.u8("frozen")? {
                    0 => false,
                    1 => true,
                    _ => return Err(MessageError::Value { field: "frozen" }),
                },
                micros: fields.u32("duration")?,
            },
            HEALTH_ACK => Self::HealthAck {
                of_sequence: fields.u32("sequence")?,
                uptime_ms: fields.u64("uptime")?,
                processes: fields.u32("processes")?,
            },
            ACTIVITY_ACK => Self::ActivityAck {
                of_sequence: fields.u32("sequence")?,
                uptime_ms: fields.u64("uptime")?,
                processes: fields.u32("processes")?,
                activity: Activity {
                    cpu_micros: fields.u64("processor time")?,
                    io_bytes: fields.u64("disk bytes")?,
                    tasks: fields.u32("tasks")?,
                    tunnels: fields.u32("tunnels")?,
                    requests: fields.u32("requests")?,
                },
            },
            EVENT => {
                let code = fields.u16("code")?;
                let detail = fields.string("detail", MAX_DETAIL)?;
                Self::Event(match code {
                    2 => Event::AgentOutOfMemory { detail },
                    3 => Event::ThawedByWatchdog,
                    4 => Event::AgentThawed,
                    5 => Event::AgentProcessLimit { detail },
                    code => Event::Other { code, detail },
                })
            }
            kind => return Err(MessageError::Kind { kind }),
        };
        fields.end()?;
        Ok(message)
    }
}

fn begin(frame: &Frame) -> Result<Reader<'_>, MessageError> {
    match frame.flags {
        0 => Ok(Reader::new(&frame.payload)),
        flags => Err(MessageError::Flags { flags }),
    }
}

fn put_clipped(out: &mut Vec<u8>, text: &str, limit: usize) {
    let text = clipped(text, limit);
    out.extend_from_slice(&u16::try_from(text.len()).unwrap_or_default().to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
