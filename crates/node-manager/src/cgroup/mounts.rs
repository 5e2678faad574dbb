//! Where cgroup hierarchies are mounted, and how.

use std::path::{Path, PathBuf};

use rustix::{fs::CWD, mount::FsPickFlags};

/// The option that makes moves quick.
const QUICK: &str = "favordynmods";

/// Options of the v2 hierarchy that are kept when one is added.
const KEPT: [&str; 5] = [
    "nsdelegate",
    "memory_localevents",
    "memory_recursiveprot",
    "memory_hugetlb_accounting",
    "pids_localevents",
];

/// What stands among the options and is none of the hierarchy's.
const GENERAL: [&str; 3] = ["rw", "ro", "seclabel"];

/// `mountinfo`: … 4 mount point … - 1 type 2 source 3 super options.
pub(super) fn mounts(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    text.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let kind = right.next()?;
        Some((left.split(' ').nth(4)?, kind, right.nth(1).unwrap_or_default()))
    })
}

pub(super) fn v2_mount(text: &str) -> Option<PathBuf> {
    mounts(text)
        .find(|(_, kind, _)| *kind == "cgroup2")
        .map(|(at, ..)| PathBuf::from(at))
}

pub(super) fn v1_mount(text: &str, controller: &str) -> Option<PathBuf> {
    mounts(text)
        .find(|(_, kind, options)| *kind == "cgroup" && options.split(',').any(|o| o == controller))
        .map(|(at, ..)| PathBuf::from(at))
}

/// Makes moving a process between cgroups cheap (0.4 ms instead of 5 to 20 ms, which are RCU grace periods) at the
/// cost of slightly dearer forks: the kernel's mount option made for hosts that start many groups. Best effort; it
/// acts on v1 hierarchies too. Linux ≥ 6.0.
pub(super) fn favour_moves(v2: &Path, table: &str) {
    match plan(table) {
        Plan::Done => {}
        Plan::Unknown(option) => {
            tracing::info!(%option, "cgroup moves stay slow: the hierarchy has a mount option that is not known");
        }
        Plan::Set(options) => {
            if let Err(error) = set(v2, &options) {
                tracing::info!(%error, "cgroup moves stay slow: the mount option favordynmods was refused");
            }
        }
    }
}

/// What is to be done about the options of the v2 hierarchy.
#[derive(Debug, PartialEq, Eq)]
enum Plan<'a> {
    /// Nothing.
    Done,
    /// All of these are set: the kernel takes away whatever is not said anew.
    Set(Vec<&'a str>),
    /// Nothing, for this one might be lost.
    Unknown(&'a str),
}

fn plan(table: &str) -> Plan<'_> {
    let options = mounts(table)
        .find(|(_, kind, _)| *kind == "cgroup2")
        .map_or("", |(.., options)| options);
    let options = options
        .split(',')
        .filter(|o| !o.is_empty() && !GENERAL.contains(o));
    let mut set = Vec::new();
    for option in options {
        if option == QUICK {
            return Plan::Done;
        } else if !KEPT.contains(&option) {
            return Plan::Unknown(option);
        }
        set.push(option);
    }
    set.push(QUICK);
    Plan::Set(set)
}

/// Reconfigures the hierarchy itself and not the mount: a remount would also clear the mount's own flags.
fn set(v2: &Path, options: &[&str]) -> rustix::io::Result<()> {
    let context = rustix::mount::fspick(CWD, v2, FsPickFlags::FSPICK_CLOEXEC)?;
    for option in options {
        rustix::mount::fsconfig_set_flag(&context, *option)?;
    }
    rustix::mount::fsconfig_reconfigure(&context)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
36 35 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
37 35 0:33 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
41 35 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn hierarchies_are_found_with_and_without_optional_fields() {
        assert_eq!(v2_mount(HYBRID), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(v1_mount(HYBRID, "cpu"), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(v1_mount(HYBRID, "memory"), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(v1_mount(HYBRID, "pids"), None);
    }

    #[test]
    fn the_options_of_the_hierarchy_are_kept() {
        let table = |options: &str| {
            format!(
                "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec shared:4 - cgroup2 cgroup2 {options}\n"
            )
        };
        assert_eq!(plan(HYBRID), Plan::Set(vec!["favordynmods"]));
        let usual = table("rw,seclabel,nsdelegate,memory_recursiveprot");
        assert_eq!(
            plan(&usual),
            Plan::Set(vec!["nsdelegate", "memory_recursiveprot", "favordynmods"])
        );
        assert_eq!(plan(&table("rw,nsdelegate,favordynmods")), Plan::Done);
        assert_eq!(plan(&table("rw,nsdelegate,new")), Plan::Unknown("new"));
    }
}
