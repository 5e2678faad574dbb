//! Waiting for children without losing a status.
//!
//! ```text
//!   reserve ──▶ register(pid) ──▶ exited(status)
//!      │             ▲                 ▲
//!      └─ fails ─▶ dropped             ├── the owner's own wait through the pidfd
//!                                      └── reap(): statuses of all children, under PID 1
//! ```
//!
//! A child may end before its pid is registered. While any reservation is open, statuses that
//! [`Children::reap`] finds for unknown pids are therefore kept, and the registration that follows
//! picks its own up. Locks are held only for map operations, never across a system call that can
//! block.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus};
use tokio::io::Interest;
use tokio::sync::oneshot;

use crate::descriptor;

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// It called exit with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// The status was taken by someone else.
    Unknown,
}

/// Statuses for unknown pids kept while a process is being started; more are orphans for certain.
const MAX_UNCLAIMED: usize = 4096;

/// Between two looks at a child that cannot be watched.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(20);

#[derive(Debug, Default)]
struct State {
    /// Reservations not yet registered or dropped.
    starting: usize,
    waiting: HashMap<i32, oneshot::Sender<ExitStatus>>,
    unclaimed: HashMap<i32, ExitStatus>,
}

/// The children that the services started and have not yet seen the end of.
#[derive(Debug, Default)]
pub(crate) struct Children {
    state: Mutex<State>,
}

impl Children {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces that a child is about to be started.
    pub(crate) fn reserve(self: &Arc<Self>) -> Reservation {
        self.lock().starting += 1;
        Reservation {
            children: Arc::clone(self),
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().waiting.len()
    }

    pub(crate) fn owns(&self, pid: i32) -> bool {
        let state = self.lock();
        state.starting > 0 || state.waiting.contains_key(&pid)
    }

    /// Waits without a descriptor. The pid stays this child's until it is reaped, which happens here or in `reap`.
    async fn look_until_ended(&self, pid: i32, mut receiver: oneshot::Receiver<ExitStatus>) -> ExitStatus {
        let Some(target) = Pid::from_raw(pid) else {
            return ExitStatus::Unknown;
        };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        loop {
            if let Ok(status) = receiver.try_recv() {
                return status;
            }
            {
                let mut state = self.lock();
                match rustix::process::waitid(WaitId::Pid(target), options) {
                    Ok(None) | Err(rustix::io::Errno::INTR) => {}
                    own => {
                        state.waiting.remove(&pid);
                        return match own {
                            Ok(Some(status)) => convert(&status),
                            _ => receiver.try_recv().unwrap_or(ExitStatus::Unknown),
                        };
                    }
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Reaps whatever has ended; see the crate's documentation.
    pub(crate) fn reap(&self) -> usize {
        let mut reaped = 0;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        loop {
            // Reaping is done under the lock so that a reservation cannot open between the two
            // steps; with NOHANG the call never blocks.
            let mut state = self.lock();
            // The pid is only known from a peek: `waitid` reports it there, and the reaping call
            // then names exactly that child.
            let Some(pid) = peek_any() else { return reaped };
            let Some(target) = Pid::from_raw(pid) else {
                return reaped;
            };
            // Nothing is there any more if its owner was faster.
            if let Ok(Some(status)) = rustix::process::waitid(WaitId::Pid(target), options) {
                reaped += 1;
                state.deliver(pid, convert(&status));
            }
        }
    }
}

impl State {
    fn deliver(&mut self, pid: i32, status: ExitStatus) {
        if let Some(waiting) = self.waiting.remove(&pid) {
            // A receiver that is gone no longer wants to know.
            let _ = waiting.send(status);
        } else if self.starting > 0 && self.unclaimed.len() < MAX_UNCLAIMED {
            self.unclaimed.insert(pid, status);
        }
    }

    fn finish_one(&mut self) {
        self.starting = self.starting.saturating_sub(1);
        if self.starting == 0 {
            self.unclaimed.clear();
        }
    }
}

/// The pid of some child that has ended, left unreaped.
fn peek_any() -> Option<i32> {
    use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match waitid(Id::All, flags) {
        Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _)) => Some(pid.as_raw()),
        _ => None,
    }
}

fn convert(status: &WaitIdStatus) -> ExitStatus {
    if let Some(code) = status.exit_status() {
        ExitStatus::Exited(code)
    } else if let Some(signal) = status.terminating_signal() {
        ExitStatus::Signaled(signal)
    } else {
        ExitStatus::Unknown
    }
}

/// The right to register one child; open from before the child exists.
#[derive(Debug)]
pub(crate) struct Reservation {
    children: Arc<Children>,
}

impl Reservation {
    /// Binds the reservation to a child that now exists.
    pub(crate) fn register(self, pid: i32, pidfd: OwnedFd) -> Child {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.children.lock();
        match state.unclaimed.remove(&pid) {
            // A pid may have been reused while the reservation was open: believe the kept status
            // only if this child has ended.
            Some(status) if has_ended(&pidfd) => {
                let _ = sender.send(status);
            }
            _ => {
                state.waiting.insert(pid, sender);
            }
        }
        drop(state);
        Child {
            pid,
            pidfd,
            receiver,
            children: Arc::clone(&self.children),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.children.lock().finish_one();
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&now)), Ok(1..))
}

/// One started child.
#[derive(Debug)]
pub(crate) struct Child {
    pid: i32,
    pidfd: OwnedFd,
    receiver: oneshot::Receiver<ExitStatus>,
    children: Arc<Children>,
}

impl Child {
    /// Waits for the end, then reaps. Cancel safe: nothing is lost if the future is dropped before
    /// it is ready, but the child is then reaped only by [`Children::reap`].
    pub(crate) async fn wait(self) -> ExitStatus {
        let Self {
            pid,
            pidfd,
            mut receiver,
            children,
        } = self;
        let watched = match descriptor::watch(pidfd, Interest::READABLE) {
            Ok(watched) => watched,
            Err(error) => {
                tracing::warn!(pid, %error, "cannot watch a child, looking again and again");
                return children.look_until_ended(pid, receiver).await;
            }
        };
        tokio::select! {
            biased;
            status = &mut receiver => return status.unwrap_or(ExitStatus::Unknown),
            ready = watched.readable() => drop(ready),
        }
        let own = rustix::process::waitid(
            WaitId::PidFd(watched.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        let mut state = children.lock();
        let status = match own {
            Ok(Some(status)) => convert(&status),
            // PID 1's reaper was faster: it delivered under the lock, or it is about to never.
            _ => receiver.try_recv().unwrap_or(ExitStatus::Unknown),
        };
        state.waiting.remove(&pid);
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::zombie_processes, reason = "the tests wait for it by its pid")]
    fn spawn(script: &str) -> (i32, OwnedFd) {
        let child = std::process::Command::new("/bin/sh")
            .args(["-c", script])
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pidfd =
            rustix::process::pidfd_open(Pid::from_raw(pid).unwrap(), rustix::process::PidfdFlags::empty())
                .unwrap();
        (pid, pidfd)
    }

    #[tokio::test]
    async fn an_owner_sees_its_childs_status() {
        let children = Arc::new(Children::default());
        let reservation = children.reserve();
        let (pid, pidfd) = spawn("exit 7");
        let child = reservation.register(pid, pidfd);
        assert!(children.owns(pid));
        assert_eq!(child.wait().await, ExitStatus::Exited(7));
        assert_eq!(children.len(), 0);
        assert!(!children.owns(pid));
    }

    /// As when the daemon has run out of descriptors: nothing else would ever tell the command's end.
    #[tokio::test]
    async fn a_child_that_cannot_be_watched_is_seen_to_end() {
        let children = Arc::new(Children::default());
        let (pid, _pidfd) = spawn("exit 5");
        let (_never, receiver) = oneshot::channel();
        let ended = children.look_until_ended(pid, receiver);
        let limit = std::time::Duration::from_secs(10);
        let status = tokio::time::timeout(limit, ended).await.expect("it ends");
        assert_eq!(status, ExitStatus::Exited(5));
    }

    #[tokio::test]
    async fn a_child_reaped_before_registration_keeps_its_status() {
        let children = Arc::new(Children::default());
        let reservation = children.reserve();
        let (pid, pidfd) = spawn("kill -9 $$");
        // The reaper runs first, as under PID 1. Other tests of this process may own children, so
        // only this one is reaped here.
        let status = rustix::process::waitid(WaitId::Pid(Pid::from_raw(pid).unwrap()), WaitIdOptions::EXITED)
            .unwrap()
            .unwrap();
        assert!(children.owns(pid), "an open reservation claims every pid");
        children.lock().deliver(pid, convert(&status));
        let child = reservation.register(pid, pidfd);
        assert_eq!(child.wait().await, ExitStatus::Signaled(9));
        assert!(children.lock().unclaimed.is_empty());
    }
}
