//! What a platform has on the machine outside its own processes' memory.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use crate::processes;

/// Names of things that belong to one platform.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remains {
    /// Process ids of the platform itself: `space up`, node manager, node.
    pub platform: BTreeSet<u32>,
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
    /// Files in them, by path.
    pub files: BTreeSet<String>,
    /// Unix sockets in the run and the data directory that a process has open.
    pub sockets: BTreeSet<String>,
}

impl Remains {
    /// Looks for everything of the platform whose state is in `data`, and of the installation `name`.
    pub fn of(name: &str, data: &Path) -> Self {
        let prefix = format!("space-{name}-");
        let run = Path::new("/run/space").join(name);
        // Below the installation's own group, which stays, in each hierarchy.
        let mut groups = BTreeSet::new();
        for hierarchy in hierarchies() {
            let own = hierarchy.join(format!("space-{name}"));
            let below = names(&own)
                .into_iter()
                .map(|each| own.join(each))
                .filter(|path| path.is_dir());
            groups.extend(below.map(|path| path.display().to_string()));
        }
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap_or_default();
        let sockets = fs_err::read_to_string("/proc/net/unix").unwrap_or_default();
        let ours = |path: &&str| Path::new(path).starts_with(&run) || Path::new(path).starts_with(data);
        let parents = [run.join("s"), data.join("disks")];
        let mut files = BTreeSet::new();
        for parent in &parents {
            collect(parent, &mut files);
        }
        Self {
            platform: processes::ids(&processes::of_platform(data)),
            monitors: processes::ids(&processes::monitors(name)),
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
            directories: parents.iter().flat_map(|parent| names(parent)).collect(),
            files,
            sockets: sockets
                .lines()
                .filter_map(|line| line.split_ascii_whitespace().nth(7))
                .filter(ours)
                .map(str::to_owned)
                .collect(),
        }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Removes what an installation keeps between its runs, which nobody will want again: empty groups, locks.
pub fn forget(name: &str) {
    if name.is_empty() {
        return;
    }
    for hierarchy in hierarchies() {
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

/// Where cgroup hierarchies may be mounted.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let below = names(root).into_iter().map(|each| root.join(each));
    below.chain([root.to_owned()]).collect()
}

/// Every file below a directory, by path. What goes away meanwhile is left out.
fn collect(directory: &Path, files: &mut BTreeSet<String>) {
    for entry in fs_err::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), files);
        } else {
            files.insert(entry.path().display().to_string());
        }
    }
}
