//! Tries what a monitor must not be able to do, and says how each attempt went. Run by `isolation.rs`.
//!
//! It uses the plain file functions, whose errors carry the kernel's number.
//!
//! Arguments are `ATTEMPT=OBJECT`; each is answered by a line `ATTEMPT=OBJECT ok` or `ATTEMPT=OBJECT ERRNO`.

#![expect(clippy::print_stdout, reason = "its output is its result")]

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io,
    os::unix::net::UnixStream,
    ptr,
};

fn main() {
    for argument in std::env::args().skip(1) {
        let (attempt, object) = argument.split_once('=').unwrap_or((&argument, ""));
        match make(attempt, object) {
            Ok(()) => println!("{argument} ok"),
            Err(error) => println!("{argument} {}", error.raw_os_error().unwrap_or(-1)),
        }
    }
}

fn make(attempt: &str, object: &str) -> io::Result<()> {
    let pid = || object.parse::<libc::pid_t>().map_err(io::Error::other);
    let path = || CString::new(object).map_err(io::Error::other);
    match attempt {
        "read" => File::open(object).map(drop),
        "write" => OpenOptions::new().write(true).open(object).map(drop),
        "create" => {
            File::create_new(object)?;
            std::fs::remove_file(object)
        }
        "list" => std::fs::read_dir(object).map(drop),
        "connect" => UnixStream::connect(object).map(drop),
        "connect-packets" => {
            let (kind, flags) = (
                rustix::net::SocketType::SEQPACKET,
                rustix::net::SocketFlags::CLOEXEC,
            );
            let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None)?;
            Ok(rustix::net::connect(
                &socket,
                &rustix::net::SocketAddrUnix::new(object)?,
            )?)
        }
        "connect-abstract" => {
            use std::os::linux::net::SocketAddrExt;
            let address = std::os::unix::net::SocketAddr::from_abstract_name(object)?;
            UnixStream::connect_addr(&address).map(drop)
        }
        // SAFETY: signal 0 only asks whether there is such a process.
        "see" => done(unsafe { libc::kill(pid()?, 0) }.into()),
        // SAFETY: attaches to another process, which the test has made for this, and leaves it again at once.
        "trace" => unsafe {
            done(libc::ptrace(libc::PTRACE_SEIZE, pid()?, 0, 0))?;
            libc::ptrace(libc::PTRACE_INTERRUPT, pid()?, 0, 0);
            libc::waitpid(pid()?, ptr::null_mut(), libc::__WALL);
            done(libc::ptrace(libc::PTRACE_DETACH, pid()?, 0, 0))
        },
        "read-memory" => {
            let (mut byte, pid) = ([0_u8; 1], pid()?);
            let (local, remote) = (
                libc::iovec {
                    iov_base: byte.as_mut_ptr().cast(),
                    iov_len: 1,
                },
                libc::iovec {
                    iov_base: first_mapping(pid)? as *mut libc::c_void,
                    iov_len: 1,
                },
            );
            // SAFETY: writes one byte to `byte`, which lives until after the call.
            let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
            done(i64::try_from(read).unwrap_or(-1))
        }
        "mount" => {
            let path = path()?;
            let (kind, none) = (c"tmpfs".as_ptr(), ptr::null());
            // SAFETY: all strings live until after the calls.
            unsafe {
                done(libc::mount(kind, path.as_ptr(), kind, 0, none).into())?;
                done(libc::umount2(path.as_ptr(), libc::MNT_DETACH).into())
            }
        }
        "device" => {
            let path = path()?;
            let number = libc::makedev(1, 3);
            // SAFETY: the string lives until after the calls.
            unsafe {
                done(libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, number).into())?;
                done(libc::unlink(path.as_ptr()).into())
            }
        }
        // SAFETY: changes the ids of this process only.
        "become" => done(unsafe { libc::setuid(object.parse().map_err(io::Error::other)?) }.into()),
        // SAFETY: changes the root of this process only.
        "chroot" => done(unsafe { libc::chroot(path()?.as_ptr()) }.into()),
        // SAFETY: makes a namespace for this process only.
        "namespace" => done(unsafe { libc::unshare(libc::CLONE_NEWNET) }.into()),
        // SAFETY: makes a namespace for this process only.
        "user-namespace" => done(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into()),
        "fork" => std::process::Command::new("/usr/bin/true").status().map(drop),
        other => Err(io::Error::other(format!("there is no attempt {other}"))),
    }
}

/// An address that a process has something at.
fn first_mapping(pid: libc::pid_t) -> io::Result<usize> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let address = maps.split('-').next().unwrap_or_default();
    usize::from_str_radix(address, 16).map_err(io::Error::other)
}

fn done(result: i64) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
