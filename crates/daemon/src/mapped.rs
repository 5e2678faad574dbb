//! A small file whose content is replaced without going through the kernel.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    ptr::{self, NonNull},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes that are mapped; no file of this kind is larger.
const PAGE: usize = 4096;

/// A file on a file system in memory, mapped for its whole life. Only the daemon's control thread writes it through here;
/// others may do what they like with the file itself.
#[derive(Debug)]
pub(crate) struct MappedFile {
    file: File,
    page: NonNull<u8>,
    /// Bytes of text, without padding, put last.
    text: usize,
}

// SAFETY: the mapping belongs to this value alone and is reached only through `&mut self`.
unsafe impl Send for MappedFile {}

impl MappedFile {
    /// Makes the file `length` newlines long (at most one page), which is the room for texts that need no system call to
    /// be put.
    pub(crate) fn new(file: File, length: usize) -> io::Result<Self> {
        assert!(length <= PAGE, "a mapped file is at most a page long");
        file.set_len(0)?;
        file.write_all_at(&vec![b'\n'; length], 0)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let page = unsafe {
            mmap(
                ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                &file,
                0,
            )
        }?;
        let page = NonNull::new(page.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { file, page, text: 0 })
    }

    /// Replaces the content by a text, padded with newlines to the length the file has. A text that is longer than the
    /// file, which then was cut or trimmed before, is written in the ordinary way.
    pub(crate) fn put(&mut self, text: &[u8]) -> io::Result<()> {
        self.text = text.len();
        // Anybody with the right may have cut the file, and a page without a byte of the file must not be touched.
        let length = usize::try_from(self.file.metadata()?.len())
            .unwrap_or(PAGE)
            .min(PAGE);
        if length == 0 || text.len() > length {
            self.file.write_all_at(text, 0)?;
            return self.file.set_len(text.len() as u64);
        }
        // SAFETY: `length` bytes lie within the mapping, and the file is at least that long; see `put` for who cuts it:
        // the agent's programs, which do not run while an identity is applied (none is started yet, or all are frozen).
        let content = unsafe { std::slice::from_raw_parts_mut(self.page.as_ptr(), length) };
        let (head, padding) = content.split_at_mut(text.len());
        head.copy_from_slice(text);
        padding.fill(b'\n');
        Ok(())
    }

    /// Cuts the padding off but for some newlines.
    pub(crate) fn trim(&mut self, newlines: usize) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        let wanted = (self.text + newlines) as u64;
        if length > wanted {
            self.file.set_len(wanted)?;
        } else if length < wanted {
            self.file.write_all_at(b"\n", self.text as u64)?;
        }
        Ok(())
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and nothing refers to it any more.
        unsafe { munmap(self.page.as_ptr().cast(), PAGE) }.ok();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    fn content(file: &mut MappedFile) -> String {
        let mut text = String::new();
        file.file.rewind().unwrap();
        file.file.read_to_string(&mut text).unwrap();
        text
    }

    /// Also after somebody has emptied the file, as people do with `/etc/machine-id`.
    #[test]
    fn texts_of_any_length_arrive_whatever_became_of_the_file() {
        let mut file = MappedFile::new(tempfile::tempfile().unwrap(), 8).unwrap();
        file.put(b"one").unwrap();
        assert_eq!(content(&mut file), "one\n\n\n\n\n");
        file.trim(1).unwrap();
        assert_eq!(content(&mut file), "one\n");
        for (text, newlines, whole) in [("longer", 1, "longer\n"), ("x", 0, "x"), ("four", 1, "four\n")] {
            file.put(text.as_bytes()).unwrap();
            file.trim(newlines).unwrap();
            assert_eq!(content(&mut file), whole);
        }
        file.file.set_len(0).unwrap();
        file.put(b"again").unwrap();
        assert_eq!(content(&mut file), "again");
        file.trim(1).unwrap();
        assert_eq!(content(&mut file), "again\n");
    }
}
