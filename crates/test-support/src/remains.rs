//! What a platform has on the machine outside its own process.

use std::{collections::BTreeSet, path::Path};

/// Names of things that belong to one platform.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remains {
    /// Process ids of monitors.
    pub monitors: BTreeSet<u32>,
    /// Network namespaces.
    pub networks: BTreeSet<String>,
    /// Control groups, by path.
    pub groups: BTreeSet<String>,
    /// Mounts.
    pub mounts: BTreeSet<String>,
    /// Disks and machine directories of sandboxes.
    pub directories: BTreeSet<String>,
}

impl Remains {
    /// Looks for everything of the platform whose state is in `data`, and of the installation `name`.
    pub fn of(name: &str, data: &Path) -> Self {
        let prefix = format!("space-{name}-");
        let run = Path::new("/run/space").join(name);
        // Below the installation's own group, which stays, in each hierarchy.
        let mut groups = BTreeSet::new();
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = names(root)
            .into_iter()
            .map(|each| root.join(each))
            .chain([root.to_owned()]);
        for hierarchy in hierarchies {
            let own = hierarchy.join(format!("space-{name}"));
            let below = names(&own)
                .into_iter()
                .map(|each| own.join(each))
                .filter(|path| path.is_dir());
            groups.extend(below.map(|path| path.display().to_string()));
        }
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap_or_default();
        Self {
            monitors: monitors(name),
            networks: names(Path::new("/run/netns"))
                .into_iter()
                .filter(|each| each.starts_with(&prefix))
                .collect(),
            groups,
            mounts: mounts
                .lines()
                .filter_map(|line| line.split(' ').nth(1))
                .filter(|point| point.contains(&prefix) || Path::new(point).starts_with(data))
                .map(str::to_owned)
                .collect(),
            directories: [run.join("s"), run.join("b"), data.join("disks")]
                .iter()
                .flat_map(|parent| names(parent))
                .collect(),
        }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Removes what an installation keeps between its runs, which nobody will want again: empty groups, locks.
pub(crate) fn forget(name: &str) {
    if name.is_empty() {
        return;
    }
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = names(root)
        .into_iter()
        .map(|each| root.join(each))
        .chain([root.to_owned()]);
    for hierarchy in hierarchies {
        // Only an empty group can be removed: what is in use stays.
        drop(fs_err::remove_dir(hierarchy.join(format!("space-{name}"))));
    }
    drop(fs_err::remove_dir_all(Path::new("/run/space").join(name)));
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(directory).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Processes in the installation's control groups: monitors, and nothing else.
fn monitors(name: &str) -> BTreeSet<u32> {
    let group = format!(":/space-{name}/");
    names(Path::new("/proc"))
        .into_iter()
        .filter_map(|each| each.parse::<u32>().ok())
        .filter(|pid| {
            let groups = fs_err::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            // A dead one that init has not reaped yet has no command line.
            groups.contains(&group)
                && fs_err::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
        })
        .collect()
}
