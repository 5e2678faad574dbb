//! The parsers of what guests and a host's tools say, for the fuzz targets. Not part of what the crate offers.

use bytes::BytesMut;
use serde_json::Value;

use crate::{
    cpio::{Entry, archive as write_archive},
    debian, guest, modules,
};

/// The messages of a guest's answer that comes in these pieces, up to the first that is not understood.
pub fn messages(pieces: &[&[u8]]) -> Vec<(u8, Option<Value>)> {
    let mut buffer = BytesMut::new();
    let mut found = Vec::new();
    for piece in pieces {
        buffer.extend_from_slice(piece);
        loop {
            match guest::split_envelope(&mut buffer) {
                Ok(Some((flags, message))) => found.push((flags, serde_json::from_slice(&message).ok())),
                Ok(None) => break,
                Err(_) => return found,
            }
        }
    }
    found
}

/// The strings of a kernel module.
pub fn module(content: &[u8]) {
    modules::dependencies(content);
}

/// What apt prints.
pub fn lists(text: &str) {
    debian::select(text);
    debian::newest(text);
}

/// An archive with a file of this content; it begins and ends where it should.
pub fn archive(content: &[u8]) {
    let entry = Entry::File {
        path: "init",
        mode: 0o755,
        content,
    };
    let archive = write_archive(&[entry]).unwrap_or_default();
    // Header and name are 115 bytes, padded to 116.
    assert!(archive.starts_with(b"070701") && archive.len().is_multiple_of(512));
    assert_eq!(archive.get(116..116 + content.len()), Some(content));
}
