//! Starts a monitor: one child that gives up everything before it runs the program.
//!
//! It joins its cgroups, leaves the host's view of files, processes, hosts and messages for namespaces of its own
//! (see `jail`), then gives up every right, and last of all the system calls that it does not need (see `seccomp`).
//!
//! The child is made like `posix_spawn` makes it: it shares the parent's memory, on a stack of its own, while the
//! calling thread sleeps, until it runs the program or fails. That costs the same however large the parent is
//! (a plain fork copies page tables), and a failure is reported through the shared memory. Between `clone` and
//! `execve` the child therefore makes raw system calls only: no allocation, no locks, no libc function that keeps
//! state of its own (`setuid` of glibc, for one, would signal every thread of the parent).

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int, c_long, c_void},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    ptr,
};

use rustix::{
    fs::{Mode, OFlags},
    mm::{MapFlags, ProtFlags},
};

use crate::{
    PrivilegeError, ProcessIdentity, VmmProcess, failed,
    jail::{self, Jail},
    process, seccomp,
};

/// Most files a monitor may have open.
const OPEN_FILES: u64 = 1024;

/// The host's OOM killer takes a monitor before it takes what looks after all of them.
const OOM_SCORE: &CStr = c"500";

/// Host name inside, where nobody but a monitor asks for it.
const HOST_NAME: &CStr = c"space";

/// Do not slow the monitor down by mitigations meant for untrusted code in the same process.
const FILTER: c_long = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW.cast_signed();

/// And note refusals in the kernel's log.
const NOTING_FILTER: c_long = FILTER | libc::SECCOMP_FILTER_FLAG_LOG.cast_signed();

/// Stack of the child until it runs the program, bytes.
const STACK: usize = 64 * 1024;

/// More capabilities than any kernel has; dropping one that does not exist is refused and does no harm.
const CAPABILITIES: c_long = 64;

/// A started process.
pub(crate) struct Started {
    pub(crate) identity: ProcessIdentity,
    pub(crate) pidfd: OwnedFd,
}

/// Root is never handed out, nor the id that means "no change" to the kernel.
pub(crate) fn check_uid(uid: u32) -> Result<(), PrivilegeError> {
    if uid == 0 || uid == u32::MAX {
        return Err(PrivilegeError::Refused {
            what: format!("user id {uid} is not an ordinary user"),
        });
    }
    Ok(())
}

/// What the child works through, in this order; all of it made before.
struct Plan {
    membership: Vec<OwnedFd>,
    namespace: Option<OwnedFd>,
    jail: Option<Jail>,
    filters: Vec<(libc::sock_fprog, c_long)>,
    standard: [OwnedFd; 3],
    passed: Vec<(c_int, OwnedFd)>,
    uid: u32,
    limits: [(u32, u64); 4],
    program: CString,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    /// Step and errno of a failure.
    failure: Option<(&'static str, c_int)>,
}

/// How much a process is shut in.
pub(crate) struct Walls<'a> {
    /// Namespaces of its own.
    pub(crate) jail: Option<&'a jail::Empty>,
    /// The filter of system calls.
    pub(crate) filter: bool,
    /// User of the node, whose directories may be seen.
    pub(crate) owner: u32,
}

/// Starts `process`, which enters the cgroups whose `cgroup.procs` are `membership`. Blocks until it runs.
pub(crate) fn spawn(
    process: VmmProcess,
    membership: &[PathBuf],
    walls: &Walls<'_>,
) -> Result<Started, PrivilegeError> {
    check_uid(process.uid)?;
    let act = format!("starting {}", process.program.display());
    if !process.program.is_absolute() {
        return Err(PrivilegeError::Refused {
            what: format!("{act}: the path is not absolute"),
        });
    }
    let output = match process.log {
        Some(log) => log,
        None => open(Path::new("/dev/null"), OFlags::WRONLY)?,
    };
    let standard = [
        open(Path::new("/dev/null"), OFlags::RDONLY)?,
        output.try_clone().map_err(|e| failed(act.as_str(), e))?,
        output,
    ];
    let membership = membership
        .iter()
        .map(|p| open(p, OFlags::WRONLY))
        .collect::<Result<Vec<_>, PrivilegeError>>()?;
    let highest = process.descriptors.keys().next_back().copied().unwrap_or(2);
    if process.descriptors.keys().next().is_some_and(|&first| first < 3) || highest > 255 {
        let what = format!("{act}: descriptors may be passed as 3 to 255 only");
        return Err(PrivilegeError::Refused { what });
    }
    let passed = process
        .descriptors
        .into_iter()
        .map(|(number, fd)| {
            // Out of the way of all wanted numbers, so that no dup2 in the child overwrites another's source.
            rustix::io::fcntl_dupfd_cloexec(&fd, highest + 1).map(|fd| (number, fd))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| failed(act.as_str(), e))?;

    let strings = std::iter::once(process.program.as_os_str())
        .chain(process.arguments.iter().map(|a| a.as_os_str()))
        .map(c_string)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| failed(act.as_str(), e))?;
    let environment = [
        c"PATH=/usr/sbin:/usr/bin:/sbin:/bin".as_ptr(),
        c"LANG=C".as_ptr(),
        ptr::null(),
    ];

    let jail = walls
        .jail
        .map(|empty| Jail::new(empty, &process.views, &process.program, walls.owner))
        .transpose()?;
    let filters = if walls.filter {
        let [absent, list] = seccomp::filters()?;
        vec![(program(absent), FILTER), (program(list), NOTING_FILTER)]
    } else {
        Vec::new()
    };
    let mut plan = Plan {
        membership,
        namespace: process.network_namespace,
        jail,
        filters,
        standard,
        passed,
        uid: process.uid,
        limits: [
            (libc::RLIMIT_FSIZE, process.file_size_limit),
            (libc::RLIMIT_CORE, 0),
            (libc::RLIMIT_NOFILE, OPEN_FILES),
            (libc::RLIMIT_MEMLOCK, 0),
        ],
        program: c_string(process.program.as_os_str()).map_err(|e| failed(act.as_str(), e))?,
        arguments: strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect(),
        environment: environment.to_vec(),
        failure: None,
    };
    let started = run(&mut plan).map_err(|e| failed(act.as_str(), e))?;
    drop(strings);
    if let Some((step, errno)) = plan.failure {
        reap(&started.1);
        return Err(failed(
            format!("{act}: {step}"),
            io::Error::from_raw_os_error(errno),
        ));
    }
    let (pid, pidfd) = started;
    // Not reaped yet, so it has a start time even if it has ended already.
    let read = process::start_ticks(pid)
        .and_then(|found| found.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH)));
    match read {
        Ok(start_ticks) => Ok(Started {
            identity: ProcessIdentity { pid, start_ticks },
            pidfd,
        }),
        Err(error) => {
            // Nobody would know it.
            rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL).ok();
            reap(&pidfd);
            Err(failed(format!("{act}: reading its start time"), error))
        }
    }
}

/// A filter as the kernel takes it.
fn program(filter: &'static [seccompiler::sock_filter]) -> libc::sock_fprog {
    libc::sock_fprog {
        // Checked by a test: far below.
        len: u16::try_from(filter.len()).unwrap_or(0),
        // The kernel only reads it, and the two types are the same structure of the kernel's.
        filter: filter.as_ptr().cast_mut().cast(),
    }
}

fn reap(pidfd: &OwnedFd) {
    use std::os::fd::AsFd;
    rustix::process::waitid(
        rustix::process::WaitId::PidFd(pidfd.as_fd()),
        rustix::process::WaitIdOptions::EXITED,
    )
    .ok();
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, PrivilegeError> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
        .map_err(|e| failed(format!("opening {}", path.display()), e))
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "it holds a NUL byte"))
}

fn run(plan: &mut Plan) -> io::Result<(u32, OwnedFd)> {
    let stack = Stack::new()?;
    // SAFETY: a `sigset_t` is plain data for which all zeroes is a valid value.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the set it is given.
    unsafe { libc::sigfillset(&raw mut all) };
    // No handler of the parent may run in the child, where it would act on the parent's memory.
    // SAFETY: both sets live until after the call.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    if blocked != 0 {
        return Err(io::Error::from_raw_os_error(blocked));
    }
    let mut pidfd: c_int = -1;
    let mut flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    if plan.jail.is_some() {
        // Its mount namespace is not made here: that would copy the host's mount table.
        flags |= libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        if plan.namespace.is_none() {
            flags |= libc::CLONE_NEWNET;
        }
    }
    // SAFETY: with CLONE_VFORK this thread sleeps until the child has run the program or exited, so `plan`, `pidfd`
    // and the stack outlive the child's use of them and nothing else refers to them meanwhile. `child` keeps to raw
    // system calls (see the module's documentation). std offers no way to do this without a full fork.
    let pid = unsafe {
        libc::clone(
            child,
            stack.top(),
            flags,
            ptr::from_mut(plan).cast::<c_void>(),
            &raw mut pidfd,
        )
    };
    let error = io::Error::last_os_error();
    // SAFETY: the set was filled by the first call.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    match u32::try_from(pid) {
        // SAFETY: the kernel stored a new descriptor there, which nothing else owns.
        Ok(pid) => Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) })),
        Err(_) => Err(error),
    }
}

extern "C" fn child(argument: *mut c_void) -> c_int {
    // SAFETY: `run` passes a `Plan` that nothing else touches until this process has exited or run the program.
    let plan = unsafe { &mut *argument.cast::<Plan>() };
    plan.failure = Some(carry_out(plan));
    // SAFETY: ends this process only, without running anything of the parent.
    unsafe { libc::syscall(libc::SYS_exit_group, 127 as c_long) };
    127
}

/// Step and errno of what failed.
type Failure = (&'static str, c_int);

/// Makes a system call; on failure ends the function with the step and errno.
macro_rules! make {
    ($wrap:expr, $step:literal, $number:expr $(, $argument:expr)*) => {{
        // SAFETY: a raw system call whose pointers all lead into the plan or to constants, which outlive it.
        let result = unsafe { libc::syscall($number $(, $argument)*) };
        if result < 0 {
            // SAFETY: reads the errno of this thread (shared with the sleeping parent thread).
            return $wrap(($step, unsafe { *libc::__errno_location() }));
        }
        result
    }};
}

/// Makes the host's OOM killer choose this process early. Since its parent waits as for `vfork`, it alone is meant.
fn prefer_for_oom() -> Result<(), Failure> {
    let file = make!(
        Err,
        "opening its OOM score",
        libc::SYS_openat,
        libc::AT_FDCWD,
        c"/proc/self/oom_score_adj".as_ptr(),
        libc::O_WRONLY | libc::O_CLOEXEC
    );
    make!(
        Err,
        "setting its OOM score",
        libc::SYS_write,
        file,
        OOM_SCORE.as_ptr(),
        OOM_SCORE.count_bytes()
    );
    make!(Err, "closing a file", libc::SYS_close, file);
    Ok(())
}

/// Makes the jail this process's whole file system.
fn enter(jail: &Jail) -> Result<(), Failure> {
    let empty_path = libc::MOVE_MOUNT_F_EMPTY_PATH as c_long;
    let root = jail.root.as_raw_fd();
    make!(
        Err,
        "entering the empty mount namespace",
        libc::SYS_setns,
        jail.namespace.as_raw_fd(),
        libc::CLONE_NEWNS
    );
    make!(
        Err,
        "making a mount namespace",
        libc::SYS_unshare,
        libc::CLONE_NEWNS
    );
    make!(
        Err,
        "mounting its root",
        libc::SYS_move_mount,
        root,
        c"".as_ptr(),
        libc::AT_FDCWD,
        jail::ROOT.as_ptr(),
        empty_path
    );
    for (tree, path) in &jail.mounts {
        make!(
            Err,
            "mounting what it sees",
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            root,
            path.as_ptr(),
            empty_path
        );
    }
    make!(Err, "entering its root", libc::SYS_fchdir, root);
    make!(Err, "changing its root", libc::SYS_chroot, c".".as_ptr());
    make!(
        Err,
        "naming its host",
        libc::SYS_sethostname,
        HOST_NAME.as_ptr(),
        HOST_NAME.count_bytes()
    );
    Ok(())
}

/// Returns only if a step failed.
fn carry_out(plan: &Plan) -> Failure {
    macro_rules! call {
        ($($rest:tt)*) => {{ make!(std::convert::identity, $($rest)*); }};
    }
    // Whole registers where the kernel looks at whole registers: an i32 would leave the upper half undefined.
    let (zero, all_numbers): (c_long, c_long) = (0, c_long::from(u32::MAX));
    for file in &plan.membership {
        call!(
            "entering its cgroup",
            libc::SYS_write,
            file.as_raw_fd(),
            c"0".as_ptr(),
            1 as c_long
        );
    }
    if let Some(namespace) = &plan.namespace {
        call!(
            "entering its network",
            libc::SYS_setns,
            namespace.as_raw_fd(),
            libc::CLONE_NEWNET
        );
    }
    if let Err(failure) = prefer_for_oom() {
        return failure;
    }
    // What looks after monitors may be preferred by the scheduler; they are not.
    call!(
        "taking the usual priority",
        libc::SYS_setpriority,
        libc::PRIO_PROCESS,
        0 as c_long,
        zero
    );
    call!("making a session", libc::SYS_setsid);
    match &plan.jail {
        Some(jail) => {
            if let Err(failure) = enter(jail) {
                return failure;
            }
        }
        None => call!("changing directory", libc::SYS_chdir, c"/".as_ptr()),
    }
    // SAFETY: sets a number of this process.
    unsafe { libc::syscall(libc::SYS_umask, 0o077 as c_long) };
    for (resource, most) in &plan.limits {
        let limit = [*most, *most];
        call!(
            "limiting it",
            libc::SYS_prlimit64,
            0 as c_long,
            *resource as c_long,
            limit.as_ptr(),
            ptr::null::<u64>()
        );
    }

    call!(
        "closing descriptors",
        libc::SYS_close_range,
        3 as c_long,
        all_numbers,
        libc::CLOSE_RANGE_CLOEXEC as c_long
    );
    for (number, file) in (0..).zip(&plan.standard) {
        call!(
            "passing standard streams",
            libc::SYS_dup3,
            file.as_raw_fd(),
            number as c_int,
            0 as c_long
        );
    }
    for (number, file) in &plan.passed {
        call!(
            "passing descriptors",
            libc::SYS_dup3,
            file.as_raw_fd(),
            *number,
            0 as c_long
        );
    }

    for capability in 0..CAPABILITIES {
        // Refused for numbers that are not capabilities; the sets themselves are emptied below.
        // SAFETY: changes a set of this process only.
        unsafe {
            libc::syscall(
                libc::SYS_prctl,
                libc::PR_CAPBSET_DROP,
                capability,
                zero,
                zero,
                zero,
            )
        };
    }
    call!(
        "leaving all groups",
        libc::SYS_setgroups,
        0 as c_long,
        ptr::null::<u32>()
    );
    call!(
        "changing group",
        libc::SYS_setresgid,
        plan.uid,
        plan.uid,
        plan.uid
    );
    call!("changing user", libc::SYS_setresuid, plan.uid, plan.uid, plan.uid);
    let header: [u32; 2] = [0x2008_0522, 0]; // _LINUX_CAPABILITY_VERSION_3, this process
    let none = [0_u32; 6];
    call!(
        "giving up capabilities",
        libc::SYS_capset,
        header.as_ptr(),
        none.as_ptr()
    );
    call!(
        "forbidding new privileges",
        libc::SYS_prctl,
        libc::PR_SET_NO_NEW_PRIVS,
        1 as c_long,
        zero,
        zero,
        zero
    );

    reset_signals();
    let none_blocked = 0_u64;
    call!(
        "setting the signal mask",
        libc::SYS_rt_sigprocmask,
        libc::SIG_SETMASK,
        &raw const none_blocked,
        ptr::null::<u64>(),
        8 as c_long
    );
    for (filter, flags) in &plan.filters {
        call!(
            "installing its filter",
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER as c_long,
            *flags,
            ptr::from_ref(filter)
        );
    }
    call!(
        "running it",
        libc::SYS_execve,
        plan.program.as_ptr(),
        plan.arguments.as_ptr(),
        plan.environment.as_ptr()
    );
    ("running it", libc::ENOEXEC)
}

/// All signals to their defaults, but a file that grows too large fails the write instead of killing the monitor.
fn reset_signals() {
    for signal in 1..=64 as c_int {
        let handler = if signal == libc::SIGXFSZ {
            libc::SIG_IGN
        } else {
            libc::SIG_DFL
        };
        // struct sigaction of the kernel: handler, flags, restorer, mask.
        let action: [usize; 4] = [handler, 0, 0, 0];
        // SAFETY: reads `action`; this process has its own table of handlers. SIGKILL and SIGSTOP are refused.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                action.as_ptr(),
                ptr::null::<usize>(),
                8 as c_long,
            )
        };
    }
}

/// A mapping that the child uses as its stack.
struct Stack {
    base: *mut c_void,
}

impl Stack {
    fn new() -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                STACK,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        Ok(Self { base })
    }

    fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, where a stack that grows downwards begins. Page-aligned.
        unsafe { self.base.byte_add(STACK) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and the child that used it is gone or has memory of its own by now.
        unsafe { rustix::mm::munmap(self.base, STACK) }.ok();
    }
}
