//! Reading and writing the fields of a payload.

use crate::{EncodeError, MessageError};

/// Takes fields off the front of a payload.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], MessageError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(MessageError::Short { field })?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, MessageError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, MessageError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, MessageError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, MessageError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A string of at most `limit` bytes.
    pub(crate) fn string(&mut self, field: &'static str, limit: usize) -> Result<String, MessageError> {
        let length = usize::from(self.u16(field)?);
        if length > limit {
            return Err(MessageError::TooLong { field, limit });
        }
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(MessageError::Short { field })?;
        self.rest = rest;
        let text = std::str::from_utf8(taken).map_err(|_| MessageError::Value { field })?;
        Ok(text.to_owned())
    }

    /// Refuses anything left over.
    pub(crate) fn end(self) -> Result<(), MessageError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(MessageError::Long { bytes }),
        }
    }
}

/// Appends a string with its length.
pub(crate) fn put_string(
    out: &mut Vec<u8>,
    field: &'static str,
    text: &str,
    limit: usize,
) -> Result<(), EncodeError> {
    let too_long = EncodeError::TooLong { field, limit };
    if text.len() > limit {
        return Err(too_long);
    }
    let length = u16::try_from(text.len()).map_err(|_| too_long)?;
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

/// The longest prefix of `text` that is at most `limit` bytes and ends between characters.
pub(crate) fn clipped(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
