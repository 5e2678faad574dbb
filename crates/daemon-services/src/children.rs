//! Waiting for the children that the services started, each through its own pidfd.
//!
//! A child belongs to the thread that started it, and nobody waits for it but its [`Child`]: under PID 1, where orphans
//! become children too, the reaper must wait for its own thread's children only (`__WNOTHREAD`).

use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus};
use tokio::io::Interest;

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

/// Between two looks at a child that cannot be watched.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(20);

/// One started child.
#[derive(Debug)]
pub(crate) struct Child {
    pid: i32,
    pidfd: OwnedFd,
}

impl Child {
    /// A child that exists and has not been waited for.
    pub(crate) fn new(pid: i32, pidfd: OwnedFd) -> Self {
        Self { pid, pidfd }
    }

    /// Waits for the end, then reaps.
    pub(crate) async fn wait(self) -> ExitStatus {
        let Self { pid, pidfd } = self;
        let watched = match descriptor::watch(pidfd, Interest::READABLE) {
            Ok(watched) => watched,
            Err(error) => {
                tracing::warn!(pid, %error, "cannot watch a child, looking again and again");
                return look_until_ended(pid).await;
            }
        };
        // It fails only with its runtime; then the answer below is as good as it gets.
        drop(watched.readable().await);
        match rustix::process::waitid(
            WaitId::PidFd(watched.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        ) {
            Ok(Some(status)) => convert(&status),
            _ => ExitStatus::Unknown,
        }
    }
}

/// Waits without a descriptor. The pid stays this child's until it is reaped, which happens here alone.
async fn look_until_ended(pid: i32) -> ExitStatus {
    let Some(target) = Pid::from_raw(pid) else {
        return ExitStatus::Unknown;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    loop {
        match rustix::process::waitid(WaitId::Pid(target), options) {
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Ok(Some(status)) => return convert(&status),
            Err(_) => return ExitStatus::Unknown,
        }
        tokio::time::sleep(LOOK_AGAIN).await;
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
        for (script, expected) in [
            ("exit 7", ExitStatus::Exited(7)),
            ("kill -9 $$", ExitStatus::Signaled(9)),
        ] {
            let (pid, pidfd) = spawn(script);
            assert_eq!(Child::new(pid, pidfd).wait().await, expected);
        }
    }

    /// As when the daemon has run out of descriptors: nothing else would ever tell the command's end.
    #[tokio::test]
    async fn a_child_that_cannot_be_watched_is_seen_to_end() {
        let (pid, _pidfd) = spawn("exit 5");
        let limit = std::time::Duration::from_secs(10);
        let status = tokio::time::timeout(limit, look_until_ended(pid))
            .await
            .expect("it ends");
        assert_eq!(status, ExitStatus::Exited(5));
    }
}
