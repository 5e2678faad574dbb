//! Starting one program: a single `clone3` straight into its cgroup, no helper process.
//!
//! The child shares this process's memory until `execve` (as `vfork` does), so nothing is copied,
//! and its cgroup is given at birth, because moving a process later waits for an RCU grace period.
//! Between the two the child makes only plain system calls on memory prepared beforehand:
//!
//! ```text
//!   clone3(VM, VFORK, PIDFD, INTO_CGROUP) ─▶ cgroup namespace ─▶ setsid ─▶ terminal ─▶ 0,1,2 ─▶ close the rest
//!     ─▶ signals, oom score, nice ─▶ groups, gid, uid ─▶ chdir ─▶ execve
//! ```
//!
//! The thread that launches waits until the program runs or has failed: call it from a thread that
//! may block. While the child already has the new identity it cannot be traced by programs of that
//! identity, since the kernel marks the shared memory undumpable.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

/// Enough for the child's few frames; it calls nothing that allocates.
const STACK_BYTES: usize = 64 * 1024;

/// Open files that a program may have, and may ask for.
const OPEN_FILES: u64 = 65_536;
const MAX_OPEN_FILES: u64 = 1_048_576;

/// Everything a child needs, prepared before it exists.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Absolute paths to try in order.
    pub(crate) candidates: Vec<CString>,
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) directory: CString,
    /// Absent: keep this process's own identity (it is not root).
    pub(crate) identity: Option<Identity>,
    pub(crate) stdio: [OwnedFd; 3],
    /// Descriptor 0 is a terminal that becomes the controlling one.
    pub(crate) terminal: bool,
    /// A cgroup v2 directory.
    pub(crate) cgroup: Option<RawFd>,
    /// A cgroup namespace for the program to see, and to be held in.
    pub(crate) cgroup_namespace: Option<RawFd>,
    /// Set the out-of-memory score back to neutral.
    pub(crate) reset_oom_score: bool,
}

/// Whom the program runs as.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

/// The part of a launch that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Step {
    Clone = 1,
    Namespace,
    Session,
    Terminal,
    Descriptors,
    Identity,
    Directory,
    Execute,
}

#[derive(Debug, thiserror::Error)]
#[error("launch failed at step {step:?}")]
pub(crate) struct LaunchError {
    pub(crate) step: Step,
    #[source]
    pub(crate) source: io::Error,
}

/// What the child reads, and where it leaves word of a failure.
struct Shared {
    candidates: Vec<*const c_char>,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    directory: *const c_char,
    identity: Option<(u32, u32, usize, *const u32)>,
    stdio: [c_int; 3],
    terminal: bool,
    cgroup_namespace: Option<c_int>,
    /// Signals that this process ignores and the program must not.
    ignored: &'static [c_int],
    reset_oom_score: bool,
    failure: Option<(Step, c_int)>,
}

#[repr(C, align(8))]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// The stack of a launching thread's children, one after the other: the thread waits for each. Fresh memory for every
/// child would cost a page fault per page.
struct Stack(NonNull<u8>);

impl Stack {
    const LAYOUT: std::alloc::Layout = match std::alloc::Layout::from_size_align(STACK_BYTES, 16) {
        Ok(layout) => layout,
        Err(_) => panic!("a stack's size is a multiple of its alignment"),
    };

    fn new() -> Self {
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { std::alloc::alloc(Self::LAYOUT) };
        Self(NonNull::new(memory).unwrap_or_else(|| std::alloc::handle_alloc_error(Self::LAYOUT)))
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with the same layout, and no child uses it when its thread ends.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), Self::LAYOUT) };
    }
}

thread_local! {
    static STACK: Stack = Stack::new();
}

const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Starts the program and returns its pid and pidfd once it runs.
pub(crate) fn launch(plan: &Plan) -> Result<(i32, OwnedFd), LaunchError> {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let mut shared = Shared {
        candidates: pointers(&plan.candidates),
        arguments: pointers(&plan.arguments),
        environment: pointers(&plan.environment),
        directory: plan.directory.as_ptr(),
        identity: plan
            .identity
            .as_ref()
            .map(|i| (i.uid, i.gid, i.groups.len(), i.groups.as_ptr())),
        stdio: [
            plan.stdio[0].as_raw_fd(),
            plan.stdio[1].as_raw_fd(),
            plan.stdio[2].as_raw_fd(),
        ],
        terminal: plan.terminal,
        cgroup_namespace: plan.cgroup_namespace,
        ignored: ignored_signals(),
        reset_oom_score: plan.reset_oom_score,
        failure: None,
    };
    let stack = STACK.with(|stack| stack.0.as_ptr());
    let mut pidfd: c_int = -1;
    let base = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD).cast_unsigned();
    let mut arguments = CloneArguments {
        flags: u64::from(base) | CLONE_CLEAR_SIGHAND,
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        stack: stack as u64,
        stack_size: STACK_BYTES as u64,
        ..CloneArguments::default()
    };
    if let Some(cgroup) = plan.cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.cast_unsigned());
    }

    let blocked = BlockedSignals::all();
    // SAFETY: `arguments`, `shared` and the stack outlive the call, since VFORK suspends this
    // thread until the child has executed a program or exited; the child runs only `child_main`,
    // on its own stack, with all signals blocked.
    let pid = unsafe { clone_and_call(&raw const arguments, ptr::from_mut(&mut shared)) };
    drop(blocked);

    if pid < 0 {
        let errno = i32::try_from(-pid).unwrap_or(libc::EIO);
        return Err(LaunchError {
            step: Step::Clone,
            source: io::Error::from_raw_os_error(errno),
        });
    }
    let pid = i32::try_from(pid).unwrap_or(i32::MAX);
    // SAFETY: the kernel has stored a fresh descriptor there, which nothing else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    if let Some((step, errno)) = shared.failure {
        // It has exited already; under PID 1 the reaper may be faster, which is just as well.
        let options = rustix::process::WaitIdOptions::EXITED;
        let waited = rustix::process::waitid(
            rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&pidfd)),
            options,
        );
        if let Err(error) = waited {
            tracing::debug!(pid, %error, "a failed launch was reaped by someone else");
        }
        return Err(LaunchError {
            step,
            source: io::Error::from_raw_os_error(errno),
        });
    }
    Ok((pid, pidfd))
}

/// The signals that this process ignores, as asked once: it changes none of them later. Handlers need no care, the kernel
/// takes them from the child.
fn ignored_signals() -> &'static [c_int] {
    static IGNORED: OnceLock<Vec<c_int>> = OnceLock::new();
    IGNORED.get_or_init(|| {
        // Of the kernel itself, since the C library keeps some signals to itself. The handler is the first word of the
        // kernel's structure, which is shorter than this.
        let is_ignored = |signal: &c_int| {
            let mut action = [0_usize; 8];
            // SAFETY: only reads the action into memory that is large enough.
            let asked = unsafe {
                libc::syscall(
                    libc::SYS_rt_sigaction,
                    *signal,
                    ptr::null::<usize>(),
                    action.as_mut_ptr(),
                    8usize,
                )
            };
            asked == 0 && action[0] == libc::SIG_IGN
        };
        (1..=64).filter(is_ignored).collect()
    })
}

/// Blocks every signal of this thread while it lives.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: both sets are plain memory that the calls fill in.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut previous: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut previous);
            Self(previous)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled by the kernel.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut());
        }
    }
}

/// Clones; the child calls [`child_main`] on the new stack. Returns the pid or a negative errno.
///
/// # Safety
///
/// As `clone3`; the stack in `arguments` must be large enough and 16-byte aligned at its end.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_and_call(arguments: *const CloneArguments, shared: *mut Shared) -> i64 {
    let result: i64;
    // SAFETY: the parent's path touches only the declared registers; the child leaves it for good.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {shared}",
            "call {entry}",
            "ud2",
            "2:",
            shared = in(reg) shared,
            entry = in(reg) child_main as unsafe extern "C" fn(*mut Shared) -> !,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") arguments,
            in("rsi") size_of::<CloneArguments>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

/// As above.
///
/// # Safety
///
/// As above.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_and_call(arguments: *const CloneArguments, shared: *mut Shared) -> i64 {
    let result: i64;
    // SAFETY: the parent's path touches only the declared registers; the child leaves it for good.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, {shared}",
            "blr {entry}",
            "brk 1",
            "2:",
            shared = in(reg) shared,
            entry = in(reg) child_main as unsafe extern "C" fn(*mut Shared) -> !,
            in("x8") libc::SYS_clone3,
            inlateout("x0") arguments => result,
            in("x1") size_of::<CloneArguments>(),
        );
    }
    result
}

/// The child's whole life before its program. Async-signal-safe; allocates and locks nothing.
///
/// # Safety
///
/// `shared` must point to a live `Shared` whose pointers are valid.
unsafe extern "C" fn child_main(shared: *mut Shared) -> ! {
    // SAFETY: the parent is suspended, so this is the only user of `shared`; every pointer in it
    // was made from memory that the parent keeps. The identity calls are made directly, because
    // the C library's own would change every thread of the parent.
    unsafe {
        let shared = &mut *shared;
        if let Err(step) = prepare(shared) {
            shared.failure = Some((step, errno()));
        } else {
            let mut last = libc::ENOENT;
            let mut candidate = shared.candidates.as_ptr();
            while !(*candidate).is_null() {
                libc::execve(*candidate, shared.arguments.as_ptr(), shared.environment.as_ptr());
                // As a shell does: what exists but may not be run is the better explanation.
                let error = errno();
                if !matches!(error, libc::ENOENT | libc::ENOTDIR) {
                    last = error;
                    if error != libc::EACCES {
                        break;
                    }
                }
                candidate = candidate.add(1);
            }
            shared.failure = Some((Step::Execute, last));
        }
        libc::_exit(127)
    }
}

/// # Safety
///
/// Only in the child, see [`child_main`].
unsafe fn prepare(shared: &Shared) -> Result<(), Step> {
    // SAFETY: plain system calls on valid pointers.
    unsafe {
        if let Some(namespace) = shared.cgroup_namespace {
            check(
                libc::syscall(libc::SYS_setns, namespace, libc::CLONE_NEWCGROUP),
                Step::Namespace,
            )?;
        }
        check(libc::syscall(libc::SYS_setsid), Step::Session)?;
        if shared.terminal {
            check(
                c_long::from(libc::ioctl(shared.stdio[0], libc::TIOCSCTTY, 0)),
                Step::Terminal,
            )?;
        }
        for (target, source) in (0..).zip(shared.stdio) {
            check(
                libc::syscall(libc::SYS_dup3, source, target as c_int, 0),
                Step::Descriptors,
            )?;
        }
        // Everything of ours is close-on-exec anyway; an old kernel without this call loses nothing.
        libc::syscall(libc::SYS_close_range, 3 as c_int, c_int::MAX, 0 as c_int);

        // Handlers are gone (CLEAR_SIGHAND); what this process ignores must not be ignored by its
        // children. All zero is the default action, however the structure is laid out.
        let default = [0u64; 4];
        for &signal in shared.ignored {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                ptr::null::<u64>(),
                8usize,
            );
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());

        if shared.reset_oom_score {
            let file = libc::open(
                c"/proc/self/oom_score_adj".as_ptr(),
                libc::O_WRONLY | libc::O_CLOEXEC,
            );
            if file >= 0 {
                libc::write(file, c"0".as_ptr().cast::<c_void>(), 1);
                libc::close(file);
            }
        }
        libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, 0);
        // Whatever this process needs for itself; without the right to raise it, it stays.
        let files = libc::rlimit {
            rlim_cur: OPEN_FILES,
            rlim_max: MAX_OPEN_FILES,
        };
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            &raw const files,
            ptr::null_mut::<libc::rlimit>(),
        );
        libc::umask(0o022);

        if let Some((uid, gid, count, groups)) = shared.identity {
            check(libc::syscall(libc::SYS_setgroups, count, groups), Step::Identity)?;
            check(libc::syscall(libc::SYS_setresgid, gid, gid, gid), Step::Identity)?;
            check(libc::syscall(libc::SYS_setresuid, uid, uid, uid), Step::Identity)?;
        }
        check(libc::syscall(libc::SYS_chdir, shared.directory), Step::Directory)?;
    }
    Ok(())
}

fn check(result: c_long, step: Step) -> Result<(), Step> {
    if result < 0 { Err(step) } else { Ok(()) }
}

/// # Safety
///
/// Only in the child; it shares the suspended parent thread's errno.
unsafe fn errno() -> c_int {
    // SAFETY: the location is valid for the life of the thread.
    unsafe { *libc::__errno_location() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(program: &str, arguments: &[&str], directory: &str) -> (Plan, std::fs::File) {
        let output = tempfile::tempfile().unwrap();
        let c = |s: &str| CString::new(s).unwrap();
        let plan = Plan {
            candidates: vec![c("/nonexistent/first"), c(program)],
            arguments: [program].iter().chain(arguments).map(|s| c(s)).collect(),
            environment: vec![c("GREETING=hello")],
            directory: c(directory),
            identity: None,
            stdio: [
                std::fs::File::open("/dev/null").unwrap().into(),
                output.try_clone().unwrap().into(),
                output.try_clone().unwrap().into(),
            ],
            terminal: false,
            cgroup: None,
            cgroup_namespace: None,
            reset_oom_score: false,
        };
        (plan, output)
    }

    fn wait(pidfd: &OwnedFd) -> Option<i32> {
        rustix::process::waitid(
            rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(pidfd)),
            rustix::process::WaitIdOptions::EXITED,
        )
        .unwrap()
        .unwrap()
        .exit_status()
    }

    #[test]
    fn runs_with_environment_directory_and_clean_descriptors() {
        use std::io::{Read, Seek};
        let script = "echo $GREETING $(pwd); ls /proc/self/fd | wc -l; grep -E '^Sig(Blk|Ign)' /proc/self/status; exit 5";
        let (plan, mut output) = plan("/bin/sh", &["-c", script], "/usr");
        let (_, pidfd) = launch(&plan).unwrap();
        assert_eq!(wait(&pidfd), Some(5));
        let mut text = String::new();
        output.rewind().unwrap();
        output.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "hello /usr");
        assert_eq!(lines[1].trim(), "4", "0, 1, 2 and the listing's own");
        assert!(lines[2].ends_with("0000000000000000"), "{text}");
        assert!(lines[3].ends_with("0000000000000000"), "{text}");
    }

    #[test]
    fn failures_name_their_step_and_leave_no_child() {
        let (missing, _) = plan("/nonexistent/program", &[], "/");
        let error = launch(&missing).unwrap_err();
        assert_eq!(
            (error.step, error.source.raw_os_error()),
            (Step::Execute, Some(libc::ENOENT))
        );
        let (denied, _) = plan("/etc/passwd", &[], "/");
        let error = launch(&denied).unwrap_err();
        assert_eq!(
            (error.step, error.source.raw_os_error()),
            (Step::Execute, Some(libc::EACCES))
        );
        let (lost, _) = plan("/bin/true", &[], "/nonexistent");
        assert_eq!(launch(&lost).unwrap_err().step, Step::Directory);
    }
}
