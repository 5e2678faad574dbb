//! The processes of one platform: which they are, what CPU time they used, and how to kill one for certain.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, PidfdFlags, Signal};

/// Clock ticks per second in what `/proc` tells: part of the kernel's interface, whatever it ticks at inside.
const USER_HZ: u64 = 100;

/// What a process is to its platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Role {
    /// `space up`, which the user started.
    Up,
    /// The one root process that acts for the node.
    NodeManager,
    /// Control plane, node and edge.
    Node,
    /// A virtual machine monitor.
    Monitor,
}

impl Role {
    /// Those of the platform itself.
    pub(crate) const PLATFORM: [Self; 3] = [Self::Up, Self::NodeManager, Self::Node];

    /// Its name, as keys have it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::NodeManager => "node_manager",
            Self::Node => "node",
            Self::Monitor => "monitor",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Up => "space up",
            Self::NodeManager => "node manager",
            Self::Node => "node",
            Self::Monitor => "QEMU",
        })
    }
}

/// One process, as it was when it was looked at.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    /// Its id, which another process may have later.
    pub(crate) pid: i32,
    /// Clock ticks from boot to its start: with the pid, an identity.
    pub(crate) start: u64,
    /// What it is.
    pub(crate) role: Role,
    /// Of a monitor: its machine's name.
    pub(crate) machine: Option<String>,
}

impl Process {
    /// Kills it with a signal that it cannot see. `false` if it is gone already.
    pub(crate) fn kill(&self) -> Result<bool> {
        let pid = Pid::from_raw(self.pid).context("a pid is positive")?;
        let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
            return Ok(false);
        };
        // The handle is of whoever has the pid now.
        if Stat::of(self.pid).is_none_or(|stat| stat.start != self.start) {
            return Ok(false);
        }
        match rustix::process::pidfd_send_signal(&handle, Signal::KILL) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot kill {self}")),
        }
    }

    /// Whether it still lives.
    pub(crate) fn lives(&self) -> bool {
        Stat::of(self.pid).is_some_and(|stat| stat.start == self.start && !matches!(stat.state, 'Z' | 'X'))
    }

    /// CPU time it has used so far, to a clock tick; nothing once it is gone.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        Stat::of(self.pid)
            .filter(|stat| stat.start == self.start)
            .map(|stat| stat.cpu)
    }
}

/// CPU time that the platform's own processes have used so far, exactly: of every thread that lives.
pub(crate) fn exact_cpu(data: &Path, installation: &str) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for process in of_platform(data, installation) {
        if process.role == Role::Monitor {
            continue;
        }
        for thread in fs_err::read_dir(format!("/proc/{}/task", process.pid))? {
            // A thread that ends meanwhile has done little.
            let Ok(text) = std::fs::read_to_string(thread?.path().join("schedstat")) else {
                continue;
            };
            let nanos = text.split(' ').next().unwrap_or_default().parse();
            sum += Duration::from_nanos(nanos.context("schedstat has another form than expected")?);
        }
    }
    ensure!(sum > Duration::ZERO, "no process of the platform is to be seen");
    Ok(sum)
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.pid)?;
        match &self.machine {
            Some(machine) => write!(f, " ({machine})"),
            None => Ok(()),
        }
    }
}

/// What `/proc/PID/stat` says.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    start: u64,
    cpu: Duration,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name in parentheses may hold anything, parentheses too.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        Some(Self {
            state: fields.first()?.chars().next()?,
            cpu: ticks(number(11)? + number(12)?),
            start: number(19)?,
        })
    }
}

/// Clock ticks as time.
pub(crate) fn ticks(count: u64) -> Duration {
    Duration::from_millis(count.saturating_mul(1000 / USER_HZ))
}

/// Finds all processes of the platform whose state is in `data` and whose objects carry the name `installation`.
pub(crate) fn of_platform(data: &Path, installation: &str) -> Vec<Process> {
    let group = format!(":/space-{installation}/");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes end while we look; a dead one that is not reaped yet has no command line.
        let Some(stat) = Stat::of(pid) else { continue };
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else {
            continue;
        };
        let words: Vec<String> = line
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let groups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if let Some((role, machine)) = role_of(&words, data, groups.contains(&group)) {
            found.push(Process {
                pid,
                start: stat.start,
                role,
                machine,
            });
        }
    }
    found
}

/// What a process with that command line is; `ours` says that it is in a group of the installation.
fn role_of(words: &[String], data: &Path, ours: bool) -> Option<(Role, Option<String>)> {
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    if program.starts_with("qemu-system") {
        let name = words.iter().skip_while(|word| *word != "-name").nth(1)?;
        let machine = name.strip_prefix("space-")?.to_owned();
        return ours.then_some((Role::Monitor, Some(machine)));
    }
    let role = match words.get(1)?.as_str() {
        "up" => Role::Up,
        "node-manager" => Role::NodeManager,
        "node" => Role::Node,
        _ => return None,
    };
    let data = data.to_str()?;
    (program == "space" && words.iter().any(|word| word.contains(data))).then_some((role, None))
}

/// CPU time by role, as it grows over a stretch of time. Processes that come and go meanwhile count for what was seen.
#[derive(Debug)]
pub(crate) struct CpuMeter {
    data: PathBuf,
    installation: String,
    at_begin: BTreeMap<(i32, u64), Duration>,
    guests: u64,
    host: HostCpu,
    own: Duration,
}

/// What was used between begin and end.
#[derive(Debug, Clone, Default)]
pub(crate) struct CpuUse {
    /// By each role of the platform.
    pub(crate) platform: BTreeMap<Role, Duration>,
    /// By all machines of the installation, those that ended among them.
    pub(crate) guests: Duration,
    /// By the benchmark itself.
    pub(crate) own: Duration,
    /// By nobody.
    pub(crate) idle: Duration,
    /// By all and nobody: the time that passed on all CPUs.
    pub(crate) whole: Duration,
}

impl CpuUse {
    /// All of the platform's.
    pub(crate) fn platform_total(&self) -> Duration {
        self.platform.values().sum()
    }
}

impl CpuMeter {
    /// Begins.
    pub(crate) fn begin(data: &Path, installation: &str) -> Result<Self> {
        let at_begin = of_platform(data, installation)
            .into_iter()
            .filter_map(|process| Some(((process.pid, process.start), process.cpu()?)))
            .collect();
        Ok(Self {
            data: data.to_owned(),
            installation: installation.to_owned(),
            at_begin,
            guests: group_cpu_micros(installation)?,
            host: HostCpu::now()?,
            own: own_cpu()?,
        })
    }

    /// What was used since then.
    pub(crate) fn end(&self) -> Result<CpuUse> {
        let mut platform = BTreeMap::new();
        for process in of_platform(&self.data, &self.installation) {
            if process.role == Role::Monitor {
                continue;
            }
            let before = self
                .at_begin
                .get(&(process.pid, process.start))
                .copied()
                .unwrap_or_default();
            let used = process.cpu().unwrap_or_default().saturating_sub(before);
            *platform.entry(process.role).or_default() += used;
        }
        ensure!(!platform.is_empty(), "no process of the platform is to be seen");
        let host = HostCpu::now()?;
        let guests = group_cpu_micros(&self.installation)?.saturating_sub(self.guests);
        Ok(CpuUse {
            platform,
            guests: Duration::from_micros(guests),
            own: own_cpu()?.saturating_sub(self.own),
            idle: host.idle.saturating_sub(self.host.idle),
            whole: host.whole.saturating_sub(self.host.whole),
        })
    }
}

/// The host's CPUs together since boot.
#[derive(Debug)]
struct HostCpu {
    idle: Duration,
    whole: Duration,
}

impl HostCpu {
    fn now() -> Result<Self> {
        Self::parse(&fs_err::read_to_string("/proc/stat")?)
            .context("/proc/stat has another form than expected")
    }

    /// user nice system idle iowait irq softirq steal (guest and guest_nice are in user and nice).
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let fields: Vec<u64> = line
            .split_ascii_whitespace()
            .take(8)
            .map_while(|field| field.parse().ok())
            .collect();
        let [_, _, _, idle, waiting, ..] = fields[..] else {
            return None;
        };
        Some(Self {
            idle: ticks(idle + waiting),
            whole: ticks(fields.iter().sum()),
        })
    }
}

/// CPU time of all machines of an installation since its group was made, those that ended among them, microseconds.
fn group_cpu_micros(installation: &str) -> Result<u64> {
    let name = format!("space-{installation}");
    let root = Path::new("/sys/fs/cgroup");
    for place in [root.join("unified"), root.to_owned()] {
        if let Ok(text) = std::fs::read_to_string(place.join(&name).join("cpu.stat"))
            && let Some(usage) = text.lines().find_map(|line| line.strip_prefix("usage_usec "))
        {
            return usage.trim().parse().context("cpu.stat holds no number");
        }
    }
    for controller in ["cpuacct", "cpu,cpuacct"] {
        if let Ok(text) = std::fs::read_to_string(root.join(controller).join(&name).join("cpuacct.usage")) {
            let nanos: u64 = text.trim().parse().context("cpuacct.usage holds no number")?;
            return Ok(nanos / 1000);
        }
    }
    anyhow::bail!("no cgroup {name} tells the machines' CPU time")
}

/// CPU time of this process and the programs it has waited for.
fn own_cpu() -> Result<Duration> {
    let stat = fs_err::read_to_string("/proc/self/stat")?;
    let of = || {
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let sum = (11..15).map(|at| fields.get(at)?.parse::<u64>().ok());
        sum.sum::<Option<u64>>().map(ticks)
    };
    of().context("/proc/self/stat has another form than expected")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_process_is_read() {
        let own = i32::try_from(std::process::id()).unwrap();
        let stat = Stat::of(own).unwrap();
        assert!(stat.start > 0 && stat.state != 'Z', "{stat:?}");
        let me = Process {
            pid: own,
            start: stat.start,
            role: Role::Up,
            machine: None,
        };
        assert!(me.lives() && me.cpu().is_some());
        let other = Process { start: 1, ..me };
        assert!(
            !other.lives() && !other.kill().unwrap(),
            "another process was meant"
        );
    }

    #[test]
    fn a_name_may_hold_parentheses() {
        let line = "7 (a) R (b) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 1 0 4242 1 1";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.state, stat.start), ('S', 4242));
        assert_eq!(stat.cpu, Duration::from_secs(3));
        assert_eq!(Stat::parse("7 (a) R 1"), None);
    }

    #[test]
    fn roles_are_told_by_the_command_line() {
        let data = Path::new("/var/tmp/x/data");
        let role = |line: &str, ours| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            role_of(&words, data, ours)
        };
        assert_eq!(
            role("/a/space up --data-dir /var/tmp/x/data", false),
            Some((Role::Up, None))
        );
        assert_eq!(
            role("/a/space node-manager --data-dir /var/tmp/x/data", false),
            Some((Role::NodeManager, None))
        );
        assert_eq!(
            role("/a/space node --data-dir /var/tmp/x/data", false),
            Some((Role::Node, None))
        );
        assert_eq!(role("/a/space up --data-dir /var/tmp/y", false), None);
        assert_eq!(role("/bin/vi up /var/tmp/x/data", false), None);
        let qemu = "/usr/bin/qemu-system-x86_64 -name space-m0123 -M microvm";
        assert_eq!(role(qemu, true), Some((Role::Monitor, Some("m0123".to_owned()))));
        assert_eq!(role(qemu, false), None);
    }

    #[test]
    fn the_hosts_idle_time_is_read() {
        let host = HostCpu::parse("cpu  10 0 20 300 5 0 1 0 7 0\ncpu0 1 1 1 1 1\n").unwrap();
        assert_eq!((host.idle, host.whole), (ticks(305), ticks(336)));
        assert!(HostCpu::parse("cpu 1 2 3\n").is_none());
        assert!(HostCpu::now().unwrap().whole > Duration::ZERO);
    }
}
