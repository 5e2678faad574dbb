//! Which system calls a monitor may make. Everything else answers EPERM and is noted in the kernel's log.
//!
//! The list holds what QEMU 10 was seen to need, under TCG and KVM, from the dynamic linker to the installation of the
//! stricter filter that it puts on itself. It stays in force after `execve`, and nothing can take it off.

use std::{collections::BTreeMap, sync::OnceLock};

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{PrivilegeError, failed};

/// Memory: the guest's, the heap, translated code. Huge pages and NUMA placement are asked for at the start.
const MEMORY: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_mbind,
];

/// Threads: vCPUs, the pool that does disk requests. How they are made is looked at in [`restricted`].
const THREADS: &[c_long] = &[
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Signals: kicks of vCPUs, the signal descriptor of the main loop.
const SIGNALS: &[c_long] = &[
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigpending,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_restart_syscall,
];

/// Time and timers, where the vDSO does not answer.
const TIME: &[c_long] = &[
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    libc::SYS_timer_gettime,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_delete,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
];

/// The main loop.
const EVENTS: &[c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
];

/// Files: libraries, firmware, the root image, disk layers with their locks, memory and state. What can be opened is
/// up to the jail and the permissions.
const FILES: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fadvise64,
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_unlinkat,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_umask,
];

/// Sockets that were passed to it. It makes none, and connects to nothing.
const SOCKETS: &[c_long] = &[
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
];

/// What it asks about itself and the host.
const QUESTIONS: &[c_long] = &[
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getpriority,
    libc::SYS_getrusage,
    libc::SYS_getrlimit,
    libc::SYS_prlimit64,
    libc::SYS_times,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
];

/// Its own filter, names of threads; and its start. `execve` cannot be allowed just once here: QEMU's own filter forbids
/// it, and until then there is nothing in the jail that would gain a process of this user anything.
const ITSELF: &[c_long] = &[libc::SYS_seccomp, libc::SYS_prctl, libc::SYS_execve];

/// Calls of old that other architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLD: &[c_long] = &[
    libc::SYS_arch_prctl,
    libc::SYS_access,
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[c_long] = &[];

/// Calls that QEMU tries at every start and does without. They are answered as by a kernel that does not have them, and
/// not noted: the flags of `clone3` are behind a pointer where a filter cannot look, and then the C library uses `clone`;
/// `io_uring` does much that a filter does not see.
const ABSENT: [c_long; 2] = [libc::SYS_clone3, libc::SYS_io_uring_setup];

/// Kinds of `ioctl` (the second byte of the request): KVM; terminals and taps; block devices; files; clones of ranges;
/// what XFS tells about alignment.
const IOCTLS: [u64; 6] = [0xae, 0x54, 0x12, 0x66, 0x94, 0x58];

/// Calls that are allowed with some arguments only.
fn restricted() -> Result<Vec<(c_long, Vec<SeccompRule>)>, seccompiler::Error> {
    let rule = |argument, mask: u64, value: u64| -> Result<SeccompRule, seccompiler::BackendError> {
        SeccompRule::new(vec![SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(mask),
            value,
        )?])
    };
    // A new thread of this process, never a new process.
    let thread = u64::from((libc::CLONE_THREAD | libc::CLONE_VM).cast_unsigned());
    let namespaces = libc::CLONE_NEWNS | libc::CLONE_NEWUSER | libc::CLONE_NEWNET | libc::CLONE_NEWPID;
    let namespaces = u64::from(namespaces.cast_unsigned());
    let ioctls = IOCTLS
        .into_iter()
        .map(|kind| rule(1, 0xff00, kind << 8))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(vec![
        (libc::SYS_clone, vec![rule(0, thread | namespaces, thread)?]),
        (libc::SYS_ioctl, ioctls),
    ])
}

/// The filters in the order of their installation; refusals by the second are noted. The second lets through what the
/// first answers.
pub(crate) fn filters() -> Result<&'static [BpfProgram; 2], PrivilegeError> {
    static FILTERS: OnceLock<[BpfProgram; 2]> = OnceLock::new();
    if let Some(filters) = FILTERS.get() {
        return Ok(filters);
    }
    let built =
        build().map_err(|e| failed("building the filter of system calls", std::io::Error::other(e)))?;
    Ok(FILTERS.get_or_init(|| built))
}

fn build() -> Result<[BpfProgram; 2], seccompiler::Error> {
    let groups = [
        MEMORY, THREADS, SIGNALS, TIME, EVENTS, FILES, SOCKETS, QUESTIONS, ITSELF, OLD,
    ];
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> = groups
        .into_iter()
        .flatten()
        .chain(&ABSENT)
        .map(|call| (*call, Vec::new()))
        .collect();
    allowed.extend(restricted()?);
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let list = SeccompFilter::new(
        allowed,
        refused,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let absent = SeccompFilter::new(
        ABSENT.into_iter().map(|call| (call, Vec::new())).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.cast_unsigned()),
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok([absent.try_into()?, list.try_into()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_fit_the_kernel_and_hold_nothing_twice() {
        let filters = filters().unwrap();
        // BPF_MAXINSNS.
        assert!(filters.iter().all(|f| (4..4096).contains(&f.len())));
        let all = [
            MEMORY, THREADS, SIGNALS, TIME, EVENTS, FILES, SOCKETS, QUESTIONS, ITSELF, OLD,
        ]
        .concat();
        let distinct = all.iter().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(distinct.len(), all.len());
        for never in [
            libc::SYS_ptrace,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_io_uring_setup,
            libc::SYS_process_vm_readv,
            libc::SYS_open_by_handle_at,
            libc::SYS_keyctl,
        ] {
            assert!(!distinct.contains(&never), "{never}");
        }
    }
}
