//! Writes initramfs archives (cpio, `newc` format): the same entries give the same bytes.

/// One entry; all belong to root, with time zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry<'a> {
    Directory {
        path: &'a str,
    },
    File {
        path: &'a str,
        mode: u32,
        content: &'a [u8],
    },
    Device {
        path: &'a str,
        mode: u32,
        major: u32,
        minor: u32,
    },
}

const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;

/// The archive of `entries`, in their order (parents must come before what is in them), padded to 512 bytes.
///
/// A content of 4 GiB or more cannot be written in this format; it is refused with `None`.
pub(crate) fn archive(entries: &[Entry<'_>]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut inode = 0;
    for entry in entries {
        inode += 1;
        match *entry {
            Entry::Directory { path } => header(&mut out, inode, path, S_IFDIR | 0o755, 2, (0, 0), &[])?,
            Entry::File { path, mode, content } => {
                header(&mut out, inode, path, S_IFREG | mode, 1, (0, 0), content)?;
            }
            Entry::Device {
                path,
                mode,
                major,
                minor,
            } => {
                header(&mut out, inode, path, S_IFCHR | mode, 1, (major, minor), &[])?;
            }
        }
    }
    header(&mut out, 0, "TRAILER!!!", 0, 1, (0, 0), &[])?;
    pad(&mut out, 512);
    Some(out)
}

fn header(
    out: &mut Vec<u8>,
    inode: u32,
    path: &str,
    mode: u32,
    links: u32,
    device: (u32, u32),
    content: &[u8],
) -> Option<()> {
    let size = u32::try_from(content.len()).ok()?;
    let name_size = u32::try_from(path.len()).ok()? + 1;
    let fields = [
        inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0,
    ];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    pad(out, 4);
    out.extend_from_slice(content);
    pad(out, 4);
    Some(())
}

fn pad(out: &mut Vec<u8>, to: usize) {
    out.resize(out.len().next_multiple_of(to), 0);
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use super::*;
    use crate::Digest;

    fn sample() -> Vec<u8> {
        archive(&[
            Entry::Directory { path: "dev" },
            Entry::Device {
                path: "dev/console",
                mode: 0o600,
                major: 5,
                minor: 1,
            },
            Entry::File {
                path: "init",
                mode: 0o755,
                content: b"#!/bin/true\n",
            },
        ])
        .unwrap()
    }

    #[test]
    fn header_is_the_newc_form_to_the_byte() {
        let bytes = archive(&[Entry::File {
            path: "init",
            mode: 0o755,
            content: b"hello",
        }])
        .unwrap();
        let expected = "07070100000001000081ed00000000000000000000000100000000000000050000000000000000000000000000000000000005\
                        00000000init\0\0hello\0\0\0";
        let expected = expected.replace(' ', "");
        // 110 bytes of header + "init\0" = 115, padded to 116; the content 5 bytes, padded to 8.
        assert_eq!(&bytes[..110], &expected.as_bytes()[..110]);
        assert_eq!(&bytes[110..116], b"init\0\0");
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert_eq!(bytes.len() % 512, 0);
    }

    #[test]
    fn same_entries_same_bytes() {
        assert_eq!(sample(), sample());
        assert_eq!(Digest::of(&sample()), Digest::of(&sample()));
    }

    #[test]
    fn the_cpio_program_reads_it_back() {
        let Ok(mut child) = Command::new("cpio")
            .args(["-tv", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        else {
            println!("SKIPPED: the cpio program is not installed");
            return;
        };
        child.stdin.take().unwrap().write_all(&sample()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let listing = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<_> = listing.lines().collect();
        assert_eq!(lines.len(), 3, "{listing}");
        assert!(
            lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with("dev"),
            "{listing}"
        );
        assert!(
            lines[1].starts_with("crw-------") && lines[1].ends_with("dev/console"),
            "{listing}"
        );
        assert!(
            lines[2].starts_with("-rwxr-xr-x") && lines[2].contains(" 12 "),
            "{listing}"
        );
    }
}
