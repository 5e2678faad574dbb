//! Starts one of the platform's processes: this same program, with no more rights than its part needs.

use std::{
    ffi::OsString,
    io,
    os::fd::{AsRawFd as _, OwnedFd, RawFd},
    process::{ExitStatus, Stdio},
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Resource, Rlimit, Signal},
    thread::{CapabilitySet, CapabilitySets, Gid, Uid},
};
use tokio::process::{Child, Command};

use super::installation::Account;

/// Before everything else of equal standing: what they do is short, and every sandbox waits for it.
const NICE: i32 = -10;
/// Among the last that the kernel ends when memory runs out: without them nobody would end the right machine.
const OOM_SCORE: &[u8] = b"-900";
/// Most files a process of the platform may have open: a dozen for each sandbox.
const OPEN_FILES: u64 = 65_536;
/// More capabilities than any kernel has.
const CAPABILITIES: libc::c_ulong = 64;
/// What of our environment the platform sees. Others may be secrets of whoever started us.
const ENVIRONMENT: &[&str] = &[
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "SPACE_LOG",
    "RUST_BACKTRACE",
    "NO_COLOR",
];

/// What to start.
pub(crate) struct Launch {
    pub(crate) arguments: Vec<OsString>,
    /// An ordinary user to be, without any capability; `None` stays root.
    pub(crate) account: Option<Account>,
    /// Descriptors that it inherits, under the numbers they have here.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Whether it may print to our standard output.
    pub(crate) may_print: bool,
    /// Whether it is part of the running platform: then it ends with us, however we end, and goes before others.
    pub(crate) serves: bool,
}

impl Launch {
    /// Starts it, in a process group of its own: Ctrl-C is for us, who pass it on.
    ///
    /// To be called on the main thread only: the kernel ends the child when the *thread* that made it does.
    pub(crate) fn start(&self) -> io::Result<Child> {
        // What runs, even if another version has been put in its place meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("space")
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(if self.may_print {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .process_group(0);
        if self.serves {
            command.env_clear();
            for name in ENVIRONMENT {
                if let Some(value) = std::env::var_os(name) {
                    command.env(name, value);
                }
            }
        }
        let passed: Vec<RawFd> = self.descriptors.iter().map(OwnedFd::as_raw_fd).collect();
        let (account, serves) = (self.account, self.serves);
        let parent = rustix::process::getpid();
        // SAFETY: between fork and exec only system calls are made: nothing is allocated, no lock is taken.
        unsafe {
            command.pre_exec(move || {
                if serves {
                    favour();
                }
                for &descriptor in &passed {
                    keep(descriptor)?;
                }
                if let Some(account) = account {
                    become_ordinary(account)?;
                }
                if serves {
                    end_with(parent)?;
                }
                Ok(())
            });
        }
        command.spawn()
    }
}

/// Nice value, last choice of the OOM killer, many files. Where the host forbids one (a container may), it works without.
fn favour() {
    let _: Result<(), _> = rustix::process::setpriority_process(None, NICE);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty()) {
        let _: Result<usize, _> = rustix::io::write(&file, OOM_SCORE);
    }
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum;
    let limit = |most: u64| Rlimit {
        current: Some(OPEN_FILES.min(most)),
        maximum: Some(most),
    };
    let wanted = hard.unwrap_or(u64::MAX).max(OPEN_FILES);
    if rustix::process::setrlimit(Resource::Nofile, limit(wanted)).is_err() {
        let allowed = hard.unwrap_or(OPEN_FILES);
        let _: Result<(), _> = rustix::process::setrlimit(Resource::Nofile, limit(allowed));
    }
}

/// Lets a descriptor through the exec.
fn keep(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: sets one flag of a descriptor that is open: it was when the command was made, and nothing closes it.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives up root: no group but its own, no capability in any set, none to be had by running anything either.
fn become_ordinary(account: Account) -> io::Result<()> {
    for capability in 0..CAPABILITIES {
        // SAFETY: plain numbers; one that the kernel does not know is refused and does no harm.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    rustix::thread::clear_ambient_capability_set()?;
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    // The calls of the kernel, not glibc's: there is one thread, and glibc would look for others.
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    Ok(())
}

/// Asks the kernel to kill this process when its parent dies. After the change of user, which would undo it.
fn end_with(parent: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() == Some(parent) {
        Ok(())
    } else {
        // It died in between.
        Err(io::ErrorKind::BrokenPipe.into())
    }
}

/// Sends a signal to a child that has not been waited for.
pub(crate) fn signal(child: &Child, signal: Signal) {
    let pid = child
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // Gone already is what is wanted too.
        let _: Result<(), _> = rustix::process::kill_process(pid, signal);
    }
}

/// How a process ended, for people.
pub(crate) fn describe(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(error) => format!("it could not be waited for: {error}"),
    }
}
