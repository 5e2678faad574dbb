//! Output collected within bounds: nothing is cut silently.

use std::collections::VecDeque;

use crate::ProcessEnd;

/// How much of each stream is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectLimits {
    /// Bytes kept from the beginning.
    pub head: usize,
    /// Bytes kept from the end, of what lies after the head.
    pub tail: usize,
}

impl Default for CollectLimits {
    /// 1 MiB of each.
    fn default() -> Self {
        Self {
            head: 1 << 20,
            tail: 1 << 20,
        }
    }
}

/// One collected stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// The beginning.
    pub head: Vec<u8>,
    /// The end, of what lies after the head; empty if the head holds everything.
    pub tail: Vec<u8>,
    /// Bytes written in all.
    pub total: u64,
    /// Whether bytes between head and tail were dropped.
    pub truncated: bool,
}

impl Collected {
    /// Everything that was kept, in order.
    pub fn bytes(&self) -> Vec<u8> {
        [self.head.as_slice(), self.tail.as_slice()].concat()
    }

    /// The same as text, with a replacement character for every byte sequence that is not UTF-8.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }
}

/// What a program that ran to its end has written, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub end: ProcessEnd,
    /// Standard output, or what the terminal showed.
    pub stdout: Collected,
    /// Standard error.
    pub stderr: Collected,
}

#[derive(Debug, Default)]
struct Stream {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Stream {
    fn add(&mut self, bytes: &[u8], limits: CollectLimits) {
        self.total += bytes.len() as u64;
        let room = limits.head - self.head.len();
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(limits.tail)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(limits.tail);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    fn finish(self) -> Collected {
        let kept = (self.head.len() + self.tail.len()) as u64;
        Collected {
            head: self.head,
            tail: self.tail.into(),
            total: self.total,
            truncated: kept < self.total,
        }
    }
}

/// Gathers both streams of a process.
#[derive(Debug)]
pub(crate) struct Collector {
    limits: CollectLimits,
    stdout: Stream,
    stderr: Stream,
}

impl Collector {
    pub(crate) fn new(limits: CollectLimits) -> Self {
        Self {
            limits,
            stdout: Stream::default(),
            stderr: Stream::default(),
        }
    }

    pub(crate) fn stdout(&mut self, bytes: &[u8]) {
        self.stdout.add(bytes, self.limits);
    }

    pub(crate) fn stderr(&mut self, bytes: &[u8]) {
        self.stderr.add(bytes, self.limits);
    }

    pub(crate) fn finish(self, end: ProcessEnd) -> Output {
        Output {
            end,
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_tail_and_total_are_right_however_the_bytes_are_cut() {
        let limits = CollectLimits { head: 4, tail: 3 };
        let text = b"0123456789abcdef";
        for length in 0..=text.len() {
            for chunk in 1..=6 {
                let mut stream = Stream::default();
                for part in text[..length].chunks(chunk) {
                    stream.add(part, limits);
                }
                let got = stream.finish();
                assert_eq!(got.total, length as u64);
                assert_eq!(got.head, &text[..length.min(4)]);
                assert_eq!(
                    got.tail,
                    &text[4.max(length.saturating_sub(3)).min(length)..length]
                );
                assert_eq!(got.truncated, length > 7, "length {length}, chunk {chunk}");
            }
        }
    }
}
