//! The processes of a platform, as the kernel shows them.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

use rustix::process::{Pid, Signal};

/// Which of the two that `space up` keeps running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The root process.
    NodeManager,
    /// Control plane and node.
    Node,
}

impl Part {
    /// The command that it runs.
    fn command(self) -> &'static str {
        match self {
            Self::NodeManager => "node-manager",
            Self::Node => "node",
        }
    }
}

/// What `/proc` says of one process.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// Start time in clock ticks since boot: with the id it is the same process for ever.
    pub started: u64,
    /// Program and arguments.
    pub arguments: Vec<String>,
}

/// The same process, whatever has become of its parent.
impl PartialEq for Process {
    fn eq(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

impl Eq for Process {}

impl Process {
    /// Looks at a process; `None` if there is none, or only what a parent has not reaped yet.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        if matches!(fields.first(), Some(&("Z" | "X"))) {
            return None;
        }
        let line = fs_err::read(format!("/proc/{pid}/cmdline")).ok()?;
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
            arguments: line
                .split(|&byte| byte == 0)
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect(),
        })
    }

    /// All there are.
    pub fn all() -> Vec<Self> {
        let entries = fs_err::read_dir("/proc").into_iter().flatten().flatten();
        entries
            .filter_map(|entry| Self::of(entry.file_name().to_str()?.parse().ok()?))
            .collect()
    }

    /// Kills it if it is still the same.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends it a signal if it is still the same.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid
            && self.lives()
        {
            let _: Result<(), _> = rustix::process::kill_process(pid, signal);
        }
    }

    /// Whether it is there and still the same.
    pub fn lives(&self) -> bool {
        Self::of(self.pid).is_some_and(|now| now.started == self.started)
    }

    /// What it is doing, for a message about one that should be gone.
    pub(crate) fn describe(&self) -> String {
        let read =
            |file: &str| fs_err::read_to_string(format!("/proc/{}/{file}", self.pid)).unwrap_or_default();
        let state = self.status().remove("State").unwrap_or_default();
        format!(
            "{} {:?}, child of {}, {state}, waits in {}\n{}",
            self.pid,
            self.arguments,
            Self::of(self.pid).map_or(0, |now| now.parent),
            read("wchan"),
            read("stack")
        )
    }

    /// The fields of `/proc/PID/status`.
    pub fn status(&self) -> BTreeMap<String, String> {
        let text = fs_err::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        fields
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect()
    }

    /// Which namespace of a kind it is in, such as `net:[4026531840]`.
    pub fn namespace(&self, kind: &str) -> Option<String> {
        let link = fs_err::read_link(format!("/proc/{}/ns/{kind}", self.pid)).ok()?;
        Some(link.to_string_lossy().into_owned())
    }

    /// Its control groups, as `/proc/PID/cgroup` has them.
    pub(crate) fn groups(&self) -> String {
        fs_err::read_to_string(format!("/proc/{}/cgroup", self.pid)).unwrap_or_default()
    }
}

/// The child of a supervisor that plays `part`.
pub(crate) fn child_of(supervisor: u32, part: Part) -> Option<Process> {
    Process::all().into_iter().find(|process| {
        process.parent == supervisor
            && process
                .arguments
                .get(1)
                .is_some_and(|name| name == part.command())
    })
}

/// Every process that serves the platform whose state is in `data`.
pub(crate) fn of_platform(data: &Path) -> Vec<Process> {
    let data = data.as_os_str().as_bytes();
    let commands = ["up", Part::Node.command(), Part::NodeManager.command()];
    let serves = |process: &Process| {
        process
            .arguments
            .get(1)
            .is_some_and(|command| commands.contains(&command.as_str()))
            && process
                .arguments
                .iter()
                .any(|argument| argument.as_bytes() == data)
    };
    Process::all().into_iter().filter(serves).collect()
}

/// Every process in the control groups of the installation `name`: monitors, and nothing else.
pub(crate) fn monitors(name: &str) -> Vec<Process> {
    let group = format!("/space-{name}/");
    let all = Process::all().into_iter();
    all.filter(|process| process.groups().contains(&group)).collect()
}

/// Ids of processes.
pub(crate) fn ids(processes: &[Process]) -> BTreeSet<u32> {
    processes.iter().map(|process| process.pid).collect()
}
