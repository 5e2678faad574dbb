//! How a process ended, in words and in numbers.

use space_proto::process::process_event::EndEvent;
use space_proto::process::process_event::end_event::Cause;

use crate::children::ExitStatus;

/// Everything that is known of an end.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) status: ExitStatus,
    pub(crate) cause: Cause,
    /// Processes it started that still lived when it ended.
    pub(crate) left_behind: u32,
    pub(crate) totals: [u64; 2],
}

/// What the supervisor knows besides the status.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Circumstances {
    pub(crate) deadline_passed: bool,
    pub(crate) killed: bool,
    pub(crate) out_of_memory: bool,
    /// The disk has no room now that it has ended.
    pub(crate) disk_full: bool,
}

impl Circumstances {
    /// The cause, from the nearest to the farthest explanation. A program that catches the signal
    /// and exits by itself has exited.
    pub(crate) fn cause(self, status: ExitStatus) -> Cause {
        match status {
            ExitStatus::Exited(0) => Cause::CAUSE_EXIT,
            ExitStatus::Exited(_) if self.disk_full => Cause::CAUSE_DISK_FULL,
            ExitStatus::Exited(_) => Cause::CAUSE_EXIT,
            // A page of a mapped file for which there is no room.
            ExitStatus::Signaled(libc::SIGBUS) if self.disk_full => Cause::CAUSE_DISK_FULL,
            ExitStatus::Signaled(libc::SIGKILL) if self.deadline_passed => Cause::CAUSE_DEADLINE,
            ExitStatus::Signaled(libc::SIGKILL) if self.killed => Cause::CAUSE_KILLED,
            ExitStatus::Signaled(libc::SIGKILL) if self.out_of_memory => Cause::CAUSE_OUT_OF_MEMORY,
            ExitStatus::Signaled(_) => Cause::CAUSE_SIGNAL,
            ExitStatus::Unknown => Cause::CAUSE_UNKNOWN,
        }
    }
}

impl End {
    /// The event that tells clients. `exit_code` is -1 unless the program exited by itself.
    pub(crate) fn to_message(&self) -> EndEvent {
        let (exit_code, exited, signal, status) = match self.status {
            ExitStatus::Exited(code) => (code, true, 0, format!("exit status {code}")),
            ExitStatus::Signaled(signal) => (-1, false, signal, format!("signal: {}", describe(signal))),
            ExitStatus::Unknown => (-1, false, 0, "unknown".to_owned()),
        };
        let error = match (self.cause, self.status) {
            (Cause::CAUSE_DEADLINE, _) => Some("the command reached its deadline and was killed".to_owned()),
            (Cause::CAUSE_OUT_OF_MEMORY, _) => {
                Some("the command was killed because the sandbox ran out of memory".to_owned())
            }
            (Cause::CAUSE_DISK_FULL, _) => Some(format!("{status}; the sandbox's disk is full")),
            (_, ExitStatus::Exited(0)) => None,
            (_, ExitStatus::Unknown) => Some("the exit status of the command was lost".to_owned()),
            _ => Some(status.clone()),
        };
        EndEvent {
            exit_code,
            exited,
            status,
            error,
            cause: self.cause.into(),
            signal,
            left_behind: self.left_behind,
            stdout_bytes: self.totals[0],
            stderr_bytes: self.totals[1],
            ..EndEvent::default()
        }
    }
}

/// The words that C libraries use.
fn describe(signal: i32) -> String {
    let words = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGSYS => "bad system call",
        other => return format!("signal {other}"),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_a_cause() {
        let calm = Circumstances {
            deadline_passed: false,
            killed: false,
            out_of_memory: false,
            disk_full: false,
        };
        let full = Circumstances {
            disk_full: true,
            ..calm
        };
        assert_eq!(full.cause(ExitStatus::Exited(1)), Cause::CAUSE_DISK_FULL);
        assert_eq!(full.cause(ExitStatus::Exited(0)), Cause::CAUSE_EXIT);
        assert_eq!(full.cause(ExitStatus::Signaled(9)), Cause::CAUSE_SIGNAL);
        let killed = ExitStatus::Signaled(9);
        assert_eq!(calm.cause(ExitStatus::Exited(3)), Cause::CAUSE_EXIT);
        assert_eq!(calm.cause(killed), Cause::CAUSE_SIGNAL);
        assert_eq!(
            Circumstances {
                out_of_memory: true,
                ..calm
            }
            .cause(killed),
            Cause::CAUSE_OUT_OF_MEMORY
        );
        assert_eq!(
            Circumstances { killed: true, ..calm }.cause(killed),
            Cause::CAUSE_KILLED
        );
        assert_eq!(
            Circumstances {
                deadline_passed: true,
                ..calm
            }
            .cause(killed),
            Cause::CAUSE_DEADLINE
        );
        assert_eq!(
            Circumstances { killed: true, ..calm }.cause(ExitStatus::Exited(0)),
            Cause::CAUSE_EXIT
        );
        assert_eq!(calm.cause(ExitStatus::Unknown), Cause::CAUSE_UNKNOWN);
    }
}
