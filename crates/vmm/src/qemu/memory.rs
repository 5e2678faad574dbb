//! A machine's memory from outside: which pages differ from the base file, copying them out and laying them in.
//!
//! The base file is mapped privately, so the pages that differ are exactly the anonymous ones of that mapping.

use std::{
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
};

use bytes::BytesMut;
use space_node_manager::MachineMemory;

use crate::{MemoryDelta, MemoryRun, VmmError, io_error};

/// Bytes per page.
const PAGE: u64 = 4096;

/// Regions taken from the kernel per call.
const REGIONS: usize = 1024;

/// A part of the memory file and where it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    start: u64,
    end: u64,
    offset: u64,
}

impl Segment {
    pub(super) fn length(&self) -> u64 {
        self.end - self.start
    }
}

/// Copies out the pages that differ from the base file.
pub(super) fn read_delta(opened: MachineMemory, base: &Path, size: u64) -> Result<MemoryDelta, VmmError> {
    let segments = segments(&opened.maps, base, size)?;
    let pages =
        scan(&opened.pagemap, &segments).map_err(|e| io_error("find the changed pages of", base, e))?;
    let memory = std::fs::File::from(opened.memory);
    let total = pages
        .iter()
        .map(|(segment, start, end)| (end - start, segment))
        .map(|(n, _)| n)
        .sum::<u64>();
    let total = usize::try_from(total).map_err(|e| io_error("copy pages of", base, io::Error::other(e)))?;
    let mut content = BytesMut::zeroed(total);
    let mut runs = Vec::with_capacity(pages.len());
    for (segment, start, end) in pages {
        #[expect(clippy::cast_possible_truncation, reason = "at most the sum, which fits")]
        let mut bytes = content.split_to((end - start) as usize);
        memory
            .read_exact_at(&mut bytes, start)
            .map_err(|e| io_error("copy pages of", base, e))?;
        runs.push(MemoryRun {
            offset: segment.offset + (start - segment.start),
            bytes: bytes.freeze(),
        });
    }
    Ok(MemoryDelta { runs })
}

/// Lays pages over the base in a machine that has not loaded its state yet.
pub(super) fn write_delta(
    opened: MachineMemory,
    base: &Path,
    size: u64,
    delta: &MemoryDelta,
) -> Result<(), VmmError> {
    check(delta, size)?;
    let segments = segments(&opened.maps, base, size)?;
    let memory = std::fs::File::from(opened.memory);
    for run in &delta.runs {
        let (mut offset, mut bytes) = (run.offset, &run.bytes[..]);
        while !bytes.is_empty() {
            let found = segments
                .iter()
                .find(|s| (s.offset..s.offset + (s.end - s.start)).contains(&offset));
            let segment = found.ok_or_else(|| unmapped(base))?;
            let room = segment.offset + (segment.end - segment.start) - offset;
            let (now, later) = bytes.split_at(bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            memory
                .write_all_at(now, segment.start + (offset - segment.offset))
                .map_err(|e| io_error("lay pages over", base, e))?;
            offset += now.len() as u64;
            bytes = later;
        }
    }
    Ok(())
}

/// Whole pages, in order, within the memory.
fn check(delta: &MemoryDelta, size: u64) -> Result<(), VmmError> {
    let mut free_from = 0;
    for run in &delta.runs {
        let length = run.bytes.len() as u64;
        let end = run.offset.checked_add(length);
        let sound = run.offset.is_multiple_of(PAGE)
            && length.is_multiple_of(PAGE)
            && run.offset >= free_from
            && end.is_some_and(|end| end <= size);
        if !sound {
            let what = format!(
                "a run of {length} bytes at {} does not fit the machine's memory",
                run.offset
            );
            return Err(VmmError::Unsupported { what });
        }
        free_from = run.offset + length;
    }
    Ok(())
}

fn unmapped(base: &Path) -> VmmError {
    io_error(
        "find in the monitor's memory",
        base,
        io::Error::from(io::ErrorKind::NotFound),
    )
}

/// Where the file is mapped, in order; together they cover it.
fn segments(maps: &str, base: &Path, size: u64) -> Result<Vec<Segment>, VmmError> {
    let metadata = fs_err::metadata(base).map_err(|e| io_error("find", base, e))?;
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // Not by its name, which is another one in the monitor's own mounts.
    let file = format!("{major:02x}:{minor:02x} {} ", metadata.ino());
    let found = maps.lines().filter_map(|line| segment(line, &file)).collect();
    covering(found, size).ok_or_else(|| unmapped(base))
}

/// The segments in order, if they cover the file without gap or overlap.
pub(super) fn covering(mut segments: Vec<Segment>, size: u64) -> Option<Vec<Segment>> {
    segments.sort_by_key(|segment| segment.offset);
    let covered = segments.iter().try_fold(0_u64, |at, segment| {
        if segment.offset == at {
            at.checked_add(segment.length())
        } else {
            None
        }
    });
    (covered == Some(size)).then_some(segments)
}

/// `start-end perms offset device inode   path`; `file` is the part `device inode ` of the one that is looked for.
pub(super) fn segment(line: &str, file: &str) -> Option<Segment> {
    let (range, rest) = line.split_once(' ')?;
    let (_permissions, rest) = rest.split_once(' ')?;
    let (offset, rest) = rest.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let segment = Segment {
        start: number(start)?,
        end: number(end)?,
        offset: number(offset)?,
    };
    (rest.starts_with(file) && segment.start <= segment.end).then_some(segment)
}

/// Runs of private pages: their segment, first and last address.
fn scan(pagemap: &OwnedFd, segments: &[Segment]) -> io::Result<Vec<(Segment, u64, u64)>> {
    let mut pages = Vec::new();
    for segment in segments {
        let found = match scan_by_ioctl(pagemap, *segment) {
            // Linux before 6.7.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                scan_by_reading(pagemap, *segment)?
            }
            other => other?,
        };
        pages.extend(found.into_iter().map(|(start, end)| (*segment, start, end)));
    }
    Ok(pages)
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

fn scan_by_ioctl(pagemap: &OwnedFd, segment: Segment) -> io::Result<Vec<(u64, u64)>> {
    let mut regions = vec![Region::default(); REGIONS];
    let mut found = Vec::new();
    let mut at = segment.start;
    while at < segment.end {
        let mut arguments = ScanArguments {
            size: size_of::<ScanArguments>() as u64,
            start: at,
            end: segment.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            // Not of the file, and present or swapped out.
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_FILE,
            ..ScanArguments::default()
        };
        // SAFETY: the kernel reads and writes `arguments` and writes at most `vec_len` regions; both live until
        // after the call. There is no safe wrapper.
        let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arguments) };
        let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error())?;
        for region in regions.iter().take(filled) {
            push(&mut found, region.start, region.end);
        }
        if arguments.walk_end <= at {
            return Err(io::Error::other("the page scan does not advance"));
        }
        at = arguments.walk_end;
    }
    Ok(found)
}

fn scan_by_reading(pagemap: &OwnedFd, segment: Segment) -> io::Result<Vec<(u64, u64)>> {
    let pagemap = std::fs::File::from(pagemap.try_clone()?);
    let mut found = Vec::new();
    let mut entries = [0; 64 * 1024];
    let mut at = segment.start;
    while at < segment.end {
        let pages = ((segment.end - at) / PAGE).min(entries.len() as u64 / 8);
        let entries = &mut entries[..usize::try_from(pages * 8).map_err(io::Error::other)?];
        pagemap.read_exact_at(entries, at / PAGE * 8)?;
        for entry in entries.chunks_exact(8) {
            let entry = entry.try_into().map(u64::from_ne_bytes).unwrap_or(0);
            let (present, swapped, file) = (entry >> 63 & 1 == 1, entry >> 62 & 1 == 1, entry >> 61 & 1 == 1);
            if (present && !file) || swapped {
                push(&mut found, at, at + PAGE);
            }
            at += PAGE;
        }
    }
    Ok(found)
}

fn push(found: &mut Vec<(u64, u64)>, start: u64, end: u64) {
    match found.last_mut() {
        Some((_, last)) if *last == start => *last = end,
        _ => found.push((start, end)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use bytes::Bytes;
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;

    #[test]
    fn a_mapping_in_parts_is_put_together_and_a_hole_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("base file");
        fs_err::write(&file, "").unwrap();
        let metadata = fs_err::metadata(&file).unwrap();
        let (device, inode) = (metadata.dev(), metadata.ino());
        let device = format!(
            "{:02x}:{:02x}",
            rustix::fs::major(device),
            rustix::fs::minor(device)
        );
        // The second by another name, as in other mounts, and others that only look alike.
        let maps = format!(
            "7f02000-7f04000 r-xp 00000000 fe:00 7 /usr/lib/x\n7f00000-7f02000 rw-p 00002000 {device} {inode}    /a\n\
             7e00000-7e02000 rw-p 00000000 {device} {inode}    {0}\n7e09000-7e0a000 rw-p 00000000 00:00 0\n\
             7e0b000-7e0d000 rw-p 00004000 {device} {inode}9    {0}\n7e0e000-7e10000 rw-p 00004000 0{device} {inode}\n",
            file.display()
        );
        let found = segments(&maps, &file, 0x4000).unwrap();
        assert_eq!(found.iter().map(|s| s.offset).collect::<Vec<_>>(), [0, 0x2000]);
        assert_eq!(found[0].start, 0x7e0_0000);
        assert!(segments(&maps, &file, 0x5000).is_err());
        assert!(segments("", &file, 0x4000).is_err());
    }

    #[test]
    fn a_delta_that_does_not_fit_is_refused() {
        let run = |offset, length| MemoryRun {
            offset,
            bytes: Bytes::from(vec![0; length]),
        };
        let size = 16 * PAGE;
        let ok = |runs| check(&MemoryDelta { runs }, size).is_ok();
        assert!(ok(vec![run(0, 4096), run(4096, 8192), run(15 * PAGE, 4096)]));
        assert!(!ok(vec![run(15 * PAGE, 8192)]));
        assert!(!ok(vec![run(u64::MAX - 4095, 4096)]));
        assert!(!ok(vec![run(1, 4096)]));
        assert!(!ok(vec![run(0, 100)]));
        assert!(!ok(vec![run(4096, 4096), run(0, 4096)]));
        assert!(!ok(vec![run(0, 8192), run(4096, 4096)]));
    }

    #[test]
    fn both_ways_of_scanning_see_exactly_the_written_pages() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("base");
        fs_err::write(&path, vec![1; 64 * 4096]).unwrap();
        let file = fs_err::File::open(&path).unwrap();
        let length = 64 * 4096;
        // SAFETY: a new private mapping at an address of the kernel's choice, within the file's length.
        let at = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            rustix::mm::mmap(std::ptr::null_mut(), length, prot, flags, file.as_fd(), 0).unwrap()
        };
        // SAFETY: the mapping above; nothing else refers to it.
        let memory = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), length) };
        assert_eq!(memory[20 * 4096], 1, "a page that was only read");
        for page in [3, 4, 5, 40, 63] {
            memory[page * 4096 + 7] = 2;
        }
        let start = at as u64;
        let segment = Segment {
            start,
            end: start + length as u64,
            offset: 0,
        };
        let expected = [(3, 6), (40, 41), (63, 64)]
            .map(|(a, b)| (start + a * PAGE, start + b * PAGE))
            .to_vec();
        let pagemap = OwnedFd::from(std::fs::File::open("/proc/self/pagemap").unwrap());
        assert_eq!(scan_by_reading(&pagemap, segment).unwrap(), expected);
        match scan_by_ioctl(&pagemap, segment) {
            Ok(found) => assert_eq!(found, expected),
            Err(e) => println!("SKIPPED: PAGEMAP_SCAN: {e}"),
        }
        // SAFETY: made above, and not used any more.
        unsafe { rustix::mm::munmap(at, length) }.unwrap();
    }
}
