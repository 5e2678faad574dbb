//! Reaping orphans without taking anybody's exit status.
//!
//! The kernel gives every orphan to the *main thread* of the first process, while a child that a thread started belongs to
//! that thread. So the main thread starts nothing, and waits with `__WNOTHREAD` for its own children only: it sees all
//! orphans and none of the children that other threads wait for. Threads that start children must not end, because their
//! children would move to the main thread; see [`crate::serve`].

use std::{fs::File, io, io::Read, os::fd::OwnedFd};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
    process::{WaitOptions, getpid, set_child_subreaper, wait},
    thread::gettid,
};

/// Waits for the children of the calling thread only; from `linux/wait.h`.
const WNOTHREAD: u32 = 0x2000_0000;

/// The main thread's duty.
#[derive(Debug)]
pub struct Reaper {
    wake: File,
}

impl Reaper {
    /// Prepares reaping. Must be called on the main thread before any other thread starts a child.
    pub fn new() -> io::Result<Self> {
        if gettid() != getpid() {
            return Err(io::Error::other("orphans go to the main thread: reap there"));
        }
        if !getpid().is_init() {
            set_child_subreaper(Some(getpid()))?;
        }
        let wake: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC)?;
        let signal = wake.try_clone()?;
        let notify = move || {
            // Fails only when the counter is full, and then the reader is awake anyway.
            rustix::io::write(&signal, &1_u64.to_ne_bytes()).ok();
        };
        // SAFETY: the action is one write to a descriptor it owns, which is safe in a signal handler.
        unsafe { signal_hook_registry::register(libc::SIGCHLD, notify) }?;
        Ok(Self {
            wake: File::from(wake),
        })
    }

    /// Reaps for ever.
    pub fn run(mut self) -> io::Error {
        loop {
            reap_own();
            let mut count = [0; 8];
            match self.wake.read(&mut count) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error,
            }
        }
    }
}

/// Reaps the calling thread's children that have ended.
fn reap_own() {
    let options = WaitOptions::NOHANG | WaitOptions::from_bits_retain(WNOTHREAD);
    loop {
        match wait(options) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return,
        }
    }
}
