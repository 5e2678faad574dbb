//! Copies files without their holes and zero pages.

use std::{
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::Path,
};

use fs_err::File;
use nix::{
    errno::Errno,
    unistd::{Whence, lseek64},
};

use crate::VolumeError;

/// Smallest piece that becomes a hole when it is all zero, bytes.
const PAGE: usize = 4096;
/// Read at once, bytes; a multiple of [`PAGE`].
const CHUNK: usize = 1 << 20;

/// Copies `from` (from its start, whatever its position) to the new file `to`, of the same length and durable when
/// this returns, leaving out everything that is zero.
pub(crate) fn copy(mut from: &File, to: &Path) -> Result<(), VolumeError> {
    let step = "copy a machine's file";
    let io = |error| VolumeError::io(step)(error);
    let length = from.metadata().map_err(io)?.len();
    let target = File::create_new(to).map_err(io)?;
    target.set_len(length).map_err(io)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at, length)? {
        // Runs begin and end on the file system's blocks; zero pages are counted from page boundaries of the file.
        at = start - start % PAGE as u64;
        from.seek(SeekFrom::Start(at)).map_err(io)?;
        while at < end {
            let want = usize::try_from(end - at).map_or(CHUNK, |rest| rest.min(CHUNK));
            let piece = &mut buffer[..want];
            from.read_exact(piece).map_err(io)?;
            write_nonzero(&target, piece, at).map_err(io)?;
            at += want as u64;
        }
    }
    target.sync_all().map_err(io)
}

fn write_nonzero(target: &File, piece: &[u8], at: u64) -> std::io::Result<()> {
    let zero = |page: &[u8]| page.iter().all(|&byte| byte == 0);
    let mut pages = piece.chunks(PAGE).enumerate().peekable();
    while let Some((first, page)) = pages.next() {
        if zero(page) {
            continue;
        }
        // Neighbours go out in one call.
        let mut length = page.len();
        while let Some((_, more)) = pages.next_if(|(_, page)| !zero(page)) {
            length += more.len();
        }
        let start = first * PAGE;
        target
            .file()
            .write_all_at(&piece[start..start + length], at + start as u64)?;
    }
    Ok(())
}

/// The next run of data at or after `at`, as start and end.
fn next_data(file: &File, at: u64, length: u64) -> Result<Option<(u64, u64)>, VolumeError> {
    let step = "find the data of a sparse file";
    let seek = |offset: u64, whence| -> Result<Option<u64>, VolumeError> {
        let offset = i64::try_from(offset)
            .map_err(|_| VolumeError::io(step)(std::io::ErrorKind::FileTooLarge.into()))?;
        match lseek64(file.file(), offset, whence) {
            Ok(found) => Ok(u64::try_from(found).ok()),
            Err(Errno::ENXIO) => Ok(None),
            Err(error) => Err(VolumeError::io(step)(error.into())),
        }
    };
    if at >= length {
        return Ok(None);
    }
    let Some(start) = seek(at, Whence::SeekData)? else {
        return Ok(None);
    };
    let end = seek(start, Whence::SeekHole)?.unwrap_or(length).min(length);
    Ok((start < end).then_some((start, end)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use fs_err as fs;

    use super::*;

    fn copied(content: impl Fn(&File), length: u64) -> (Vec<u8>, Vec<u8>, u64) {
        let directory = tempfile::tempdir().unwrap();
        let from_path = directory.path().join("from");
        let to = directory.path().join("to");
        let from = File::create(&from_path).unwrap();
        from.set_len(length).unwrap();
        content(&from);
        copy(&File::open(&from_path).unwrap(), &to).unwrap();
        let blocks = fs::metadata(&to).unwrap().blocks();
        (
            fs::read(&from_path).unwrap(),
            fs::read(&to).unwrap(),
            blocks * 512,
        )
    }

    #[test]
    fn content_is_equal_and_zeros_take_no_room() {
        let (from, to, used) = copied(
            |file| {
                let file = file.file();
                file.write_all_at(b"first", 0).unwrap();
                file.write_all_at(&vec![0; 3 << 20], 1 << 20).unwrap();
                file.write_all_at(&vec![7; 3 * PAGE + 5], (5 << 20) - 3).unwrap();
                file.write_all_at(b"last", (8 << 20) - 4).unwrap();
            },
            8 << 20,
        );
        assert!(from == to);
        assert!(used <= 64 * 1024, "{used}");
    }

    #[test]
    fn odd_lengths_and_empty_files_survive() {
        for (length, at) in [
            (0, None),
            (1, Some(0)),
            (4097, Some(4096)),
            (10_000, None),
            (1_048_577, Some(1_048_576)),
        ] {
            let (from, to, _) = copied(
                |file| {
                    if let Some(at) = at {
                        file.file().write_all_at(b"x", at).unwrap();
                    }
                },
                length,
            );
            assert!(from == to, "{length}");
        }
    }
}
