//! Frames: what delimits and checks messages on the control port.
//!
//! ```text
//!  0        4      6       8          12       16      20         24
//!  ├ magic ─┼ kind ┼ flags ┼ sequence ┼ length ┼ crc32 ┼ reserved ┤ payload (length bytes)
//! ```
//!
//! Little endian. The checksum covers bytes 0 to 16 and the payload; the reserved word is zero. A reader that meets
//! anything else goes forward byte by byte to the next place where a whole frame checks out.

use bytes::Bytes;

/// First word of every frame; `SPC1` as bytes.
pub const MAGIC: u32 = 0x3143_5053;
/// Bytes before the payload.
pub const HEADER_LENGTH: usize = 24;
/// Most bytes of payload.
pub const MAX_PAYLOAD: usize = 4096;
/// Most bytes of a frame.
pub const MAX_FRAME: usize = HEADER_LENGTH + MAX_PAYLOAD;

/// Kinds of the messages that begin a connection, see [`FrameDecoder`].
pub(crate) const HELLO_KINDS: [u16; 2] = [crate::message::HELLO, crate::message::HELLO_ACK];
/// No message that begins a connection has a longer payload.
const MAX_HELLO_PAYLOAD: usize = 128;

/// One checked frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the message in the payload.
    pub kind: u16,
    /// Zero in protocol 1.
    pub flags: u16,
    /// Chosen by the sender; an answer names it.
    pub sequence: u32,
    /// The message, at most [`MAX_PAYLOAD`] bytes.
    pub payload: Bytes,
}

impl Frame {
    /// Appends the frame's bytes to `out`.
    ///
    /// The payload must be within [`MAX_PAYLOAD`]; messages of this crate always are. A longer one is cut off, and so
    /// does not decode as its message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        append(out, self.kind, self.flags, self.sequence, &self.payload);
    }
}

pub(crate) fn append(out: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, payload: &[u8]) {
    let payload = payload.get(..MAX_PAYLOAD).unwrap_or(payload);
    let length = u32::try_from(payload.len()).unwrap_or_default();
    let mut header = [0_u8; HEADER_LENGTH];
    header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..6].copy_from_slice(&kind.to_le_bytes());
    header[6..8].copy_from_slice(&flags.to_le_bytes());
    header[8..12].copy_from_slice(&sequence.to_le_bytes());
    header[12..16].copy_from_slice(&length.to_le_bytes());
    let crc = checksum(&header, payload);
    header[16..20].copy_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
}

/// Finds the frames in a byte stream, whatever lies between them.
///
/// Holds at most two frames' worth of bytes. A frame that was cut short (the peer was restored in the middle of it) would
/// make the reader wait for its rest and so swallow what follows; therefore a whole, valid *hello* found within an
/// unfinished frame wins over it. No other message can contain a hello of the host: its strings are too short. Whoever
/// sends one byte at a time makes it look at each byte a bounded number of times all the same.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    start: usize,
    skipped: u64,
    /// Bytes of the unfinished frame in which no whole hello has been found.
    looked: usize,
}

impl FrameDecoder {
    /// A decoder at the beginning of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes from the front of `input` until a frame is whole. `None` means that `input` is used up.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Frame> {
        loop {
            if let Some(frame) = self.scan() {
                return Some(frame);
            }
            if input.is_empty() {
                return None;
            }
            // What is left is the beginning of at most one frame, so there is always room.
            self.buffer.drain(..self.start);
            self.start = 0;
            let room = (2 * MAX_FRAME).saturating_sub(self.buffer.len()).min(input.len());
            let (now, later) = input.split_at(room);
            self.buffer.extend_from_slice(now);
            *input = later;
        }
    }

    /// Bytes passed over so far because they belonged to no valid frame.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn scan(&mut self) -> Option<Frame> {
        loop {
            let pending = self.buffer.get(self.start..)?;
            match parse(pending) {
                Parsed::Whole(frame, length) => {
                    self.start += length;
                    self.looked = 0;
                    return Some(frame);
                }
                Parsed::Garbage => self.skip(1 + distance_to_magic(&pending[1..])),
                Parsed::Unfinished => {
                    // One that was not whole before may have begun among the bytes already looked at.
                    let from = self
                        .looked
                        .saturating_sub(HEADER_LENGTH + MAX_HELLO_PAYLOAD)
                        .max(1);
                    let Some(ahead) = hello_within(pending, from) else {
                        self.looked = pending.len();
                        return None;
                    };
                    self.skip(ahead);
                }
            }
        }
    }

    fn skip(&mut self, bytes: usize) {
        self.start += bytes;
        self.looked = 0;
        self.skipped += bytes as u64;
    }
}

enum Parsed {
    Whole(Frame, usize),
    Unfinished,
    Garbage,
}

fn parse(bytes: &[u8]) -> Parsed {
    let magic = MAGIC.to_le_bytes();
    let Some(header) = bytes.first_chunk::<HEADER_LENGTH>() else {
        let begun = bytes.len().min(magic.len());
        return if bytes[..begun] == magic[..begun] {
            Parsed::Unfinished
        } else {
            Parsed::Garbage
        };
    };
    let length = word(header, 12) as usize;
    if header[..4] != magic || word(header, 20) != 0 || length > MAX_PAYLOAD {
        return Parsed::Garbage;
    }
    let Some(payload) = bytes.get(HEADER_LENGTH..HEADER_LENGTH + length) else {
        return Parsed::Unfinished;
    };
    if checksum(header, payload) != word(header, 16) {
        return Parsed::Garbage;
    }
    let frame = Frame {
        kind: u16::from_le_bytes([header[4], header[5]]),
        flags: u16::from_le_bytes([header[6], header[7]]),
        sequence: word(header, 8),
        payload: Bytes::copy_from_slice(payload),
    };
    Parsed::Whole(frame, HEADER_LENGTH + length)
}

/// Where in an unfinished frame, at `from` or later, a whole hello begins.
fn hello_within(pending: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += distance_to_magic(pending.get(at..)?);
        let rest = pending.get(at..)?;
        if may_be_hello(rest) && matches!(parse(rest), Parsed::Whole(..)) {
            return Some(at);
        }
        at += 1;
    }
}

/// Whether a header says so; the checksum of what is long is not worth computing for everything that looks like a beginning.
fn may_be_hello(bytes: &[u8]) -> bool {
    bytes.first_chunk::<HEADER_LENGTH>().is_some_and(|header| {
        HELLO_KINDS.contains(&u16::from_le_bytes([header[4], header[5]]))
            && word(header, 12) as usize <= MAX_HELLO_PAYLOAD
    })
}

/// Bytes until the next place where a magic begins, or the end.
fn distance_to_magic(bytes: &[u8]) -> usize {
    let magic = MAGIC.to_le_bytes();
    (0..bytes.len())
        .find(|&at| {
            let rest = &bytes[at..];
            let begun = rest.len().min(magic.len());
            rest[..begun] == magic[..begun]
        })
        .unwrap_or(bytes.len())
}

fn word(header: &[u8; HEADER_LENGTH], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

fn checksum(header: &[u8; HEADER_LENGTH], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..16]);
    hasher.update(payload);
    hasher.finalize()
}
