//! What can go wrong on the channel.

use std::{io, time::Duration};

use crate::message::Status;

/// Why a frame's payload is not the message its kind says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The kind is unknown, or belongs to the other direction.
    #[error("unknown message kind {kind:#06x}")]
    Kind {
        /// As received.
        kind: u16,
    },
    /// Flags are set that this protocol does not define.
    #[error("unknown flags {flags:#06x}")]
    Flags {
        /// As received.
        flags: u16,
    },
    /// The payload ends within a field.
    #[error("the payload ends within {field}")]
    Short {
        /// Which.
        field: &'static str,
    },
    /// There are bytes behind the last field.
    #[error("{bytes} bytes too many")]
    Long {
        /// How many.
        bytes: usize,
    },
    /// A field's value is not allowed.
    #[error("{field} has a value that is not allowed")]
    Value {
        /// Which.
        field: &'static str,
    },
    /// A string is longer than its bound.
    #[error("{field} is longer than {limit} bytes")]
    TooLong {
        /// Which.
        field: &'static str,
        /// Bound, bytes.
        limit: usize,
    },
}

/// Why a message cannot be put into a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A string is longer than its bound. Shorten it.
    #[error("{field} is longer than {limit} bytes")]
    TooLong {
        /// Which.
        field: &'static str,
        /// Bound, bytes.
        limit: usize,
    },
}

/// Why the host could not do something over the channel.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Reading or writing a port failed. The connection is of no further use: open the port again.
    #[error("cannot {step}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The other end of the port is gone; the machine has most likely ended. See its exit reason.
    #[error("the guest's port was closed while waiting for {what}")]
    Closed {
        /// What was waited for.
        what: &'static str,
    },
    /// No answer in time. The guest may be stuck, paused or overloaded.
    #[error("the guest did not answer {what} within {} ms", limit.as_millis())]
    TimedOut {
        /// What was asked.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The guest's daemon speaks no protocol that this host speaks. Rebuild its template.
    #[error("the guest's daemon speaks protocol {guest}, this host {min} to {max}: rebuild the template", min = crate::PROTOCOL_MIN, max = crate::PROTOCOL_MAX)]
    Protocol {
        /// The guest's.
        guest: u16,
    },
    /// The guest answered that it did not do it.
    #[error("the guest refused {what}: {detail} ({status:?})")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// Its reason.
        status: Status,
        /// Its words, at most 256 bytes, not to be trusted.
        detail: String,
    },
    /// The guest answered with a message that does not fit the question.
    #[error("the guest answered {what} with another message")]
    Unexpected {
        /// What was asked.
        what: &'static str,
    },
    /// A field of the request is out of bounds.
    #[error("cannot encode {what}")]
    Encode {
        /// What was to be asked.
        what: &'static str,
        /// Why.
        #[source]
        source: EncodeError,
    },
    /// The operating system gave no random bytes.
    #[error("no random bytes from the operating system: {reason}")]
    Random {
        /// In words.
        reason: String,
    },
}
