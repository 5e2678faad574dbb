//! The guest's side of the control port, without any reading or writing of its own.

use crate::{
    Frame, FrameDecoder, GuestMessage, Hello, HostMessage, MessageError, PROTOCOL_MAX, PROTOCOL_MIN,
};

/// One request of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRequest {
    /// To be named in the answer.
    pub sequence: u32,
    /// What it says, or why that is not understood (answer with [`crate::Status::NotUnderstood`]).
    pub message: Result<HostMessage, MessageError>,
}

/// Decodes what the host says and numbers what the guest says.
///
/// Requests of a host connection whose hello was lost are dropped, as nobody waits for their answers.
#[derive(Debug, Default)]
pub struct GuestControl {
    decoder: FrameDecoder,
    greeted: bool,
    sequence: u32,
}

impl GuestControl {
    /// The guest's side before any hello.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes from the front of `input` until a request is whole. `None` means that `input` is used up.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<HostRequest> {
        loop {
            let frame: Frame = self.decoder.next(input)?;
            let message = HostMessage::decode(&frame);
            self.greeted |= matches!(message, Ok(HostMessage::Hello(_)));
            if self.greeted {
                return Some(HostRequest {
                    sequence: frame.sequence,
                    message,
                });
            }
        }
    }

    /// Appends a message to what is to be written.
    pub fn say(&mut self, message: &GuestMessage, out: &mut Vec<u8>) {
        self.sequence = self.sequence.wrapping_add(1);
        message.encode(self.sequence, out);
    }

    /// The newest protocol that both sides speak, or zero.
    pub fn agree(hello: &Hello) -> u16 {
        let newest = hello.protocol_max.min(PROTOCOL_MAX);
        if newest >= hello.protocol_min.max(PROTOCOL_MIN) {
            newest
        } else {
            0
        }
    }
}
