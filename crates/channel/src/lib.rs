//! The private channel between host and guest: control messages and the start of a data session.
//!
//! Two byte streams that are not the guest's network join host and guest. `control` carries small checksummed
//! [frames](frame) with fixed-form [messages](message); `data` carries HTTP/2. Restoring a machine leaves half-spoken
//! connections inside the guest, and the guest may see no sign that its peer changed, so every host connection begins
//! anew:
//!
//! ```text
//!  host                               guest
//!   │ control: Hello(nonce) ──────────► drops its data session, discards data input from here on
//!   │ ◄────────────── HelloAck(nonce)   frames before it are of an earlier life: the host discards them
//!   │ data: nonce ────────────────────► discards input until it has seen it
//!   │ ◄────────────────────────── nonce the host discards input until it has seen it
//!   │ ◄════════════ HTTP/2 ══════════►
//! ```
//!
//! Start reading at [`HostControl`] for the host's side, at [`GuestControl`] for the guest's. Both treat what they read
//! as hostile: it is parsed once, with bounds, and a bad byte costs at most the frame it is in.

#![forbid(unsafe_code)]

pub mod data;
mod error;
pub mod frame;
mod guest;
mod host;
pub mod message;
mod nonce;
mod wire;

pub use data::{Prefixed, open_data};
pub use error::{ChannelError, EncodeError, MessageError};
pub use frame::{Frame, FrameDecoder};
pub use guest::{GuestControl, HostRequest};
pub use host::{FreezeReport, HealthReport, HostControl};
pub use message::{
    Activity, Event, GuestMessage, GuestState, Hello, HelloAck, HostMessage, Identity, IdentityMode, Status,
    capabilities,
};
pub use nonce::{NONCE_LENGTH, Nonce, NonceSearch};

/// Name of the control port, under which the guest finds it.
pub const CONTROL_PORT: &str = "space.control";
/// Name of the data port.
pub const DATA_PORT: &str = "space.data";
/// Oldest protocol this crate speaks.
pub const PROTOCOL_MIN: u16 = 1;
/// Newest protocol this crate speaks.
pub const PROTOCOL_MAX: u16 = 1;

/// HTTP/2 flow control on the data port, set alike on both sides: the connection's window holds all streams' windows
/// together, so a peer that leaves [`http2::STREAMS`] streams unread holds nobody up.
pub mod http2 {
    /// Bytes that may be on the way unread on one stream.
    pub const STREAM_WINDOW: u32 = 256 * 1024;
    /// Streams that may be open at once.
    pub const STREAMS: u32 = 256;
    /// Bytes that may be on the way unread on the connection: every stream's window, and one to spare.
    pub const CONNECTION_WINDOW: u32 = (STREAMS + 1) * STREAM_WINDOW;
    /// Largest frame to receive. Small, so that no stream holds the port for long.
    pub const FRAME_SIZE: u32 = 32 * 1024;
    /// Bytes of one stream that the sender buffers.
    pub const SEND_BUFFER: usize = 256 * 1024;
}

/// Runs every parser of this crate over `input`; for fuzzing. Never panics, never uses memory beyond its bounds.
pub fn decode_any(input: &[u8]) {
    let mut rest = input;
    let mut decoder = FrameDecoder::new();
    while let Some(frame) = decoder.next(&mut rest) {
        drop(HostMessage::decode(&frame));
        drop(GuestMessage::decode(&frame));
    }
    for kind in message::KINDS {
        let frame = Frame {
            kind,
            flags: 0,
            sequence: 0,
            payload: bytes::Bytes::copy_from_slice(input),
        };
        drop(HostMessage::decode(&frame));
        drop(GuestMessage::decode(&frame));
    }
    if let Some((nonce, stream)) = input.split_first_chunk::<NONCE_LENGTH>() {
        NonceSearch::new(&Nonce::from_bytes(*nonce)).feed(stream);
    }
}
