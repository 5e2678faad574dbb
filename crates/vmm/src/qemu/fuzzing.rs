//! The parsers of what a monitor says and leaves behind, for the fuzz targets. Not part of what the crate offers.

use super::{memory, qcow2, qmp};

/// Where its memory file is mapped, by the kernel's listing.
pub fn memory_map(text: &str) {
    // The device and inode of the seeds.
    let file = "fe:00 9 ";
    for size in [0, 4096, 1 << 29] {
        let segments: Vec<_> = text
            .lines()
            .filter_map(|line| memory::segment(line, file))
            .collect();
        let Some(segments) = memory::covering(segments, size) else {
            continue;
        };
        let mapped: u64 = segments.iter().map(memory::Segment::length).sum();
        assert_eq!(mapped, size);
    }
}

/// The size that a disk layer's header tells.
pub fn disk_size(header: &[u8]) -> Option<u64> {
    qcow2::size_in(header)
}

/// Whole lines of the control socket.
pub fn monitor_lines(lines: &[u8]) {
    qmp::take_all(lines);
}
