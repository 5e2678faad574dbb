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
        let mut groups = BTreeSet::new();
        find_groups(Path::new("/sys/fs/cgroup"), &prefix, 3, &mut groups);
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap_or_default();
        Self {
            monitors: monitors(&run),
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

fn names(directory: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(directory).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Processes whose command line names the run directory: monitors get every path explicitly.
fn monitors(run: &Path) -> BTreeSet<u32> {
    let needle = run.as_os_str().as_encoded_bytes();
    names(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.parse::<u32>().ok())
        .filter(|pid| {
            let line = fs_err::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.windows(4).any(|part| part == b"qemu")
                && line.windows(needle.len()).any(|part| part == needle)
        })
        .collect()
}

fn find_groups(directory: &Path, prefix: &str, depth: usize, found: &mut BTreeSet<String>) {
    for name in names(directory) {
        let path = directory.join(&name);
        if !path.is_dir() {
            continue;
        }
        if name.starts_with(prefix) {
            found.insert(path.display().to_string());
        }
        if depth > 1 {
            find_groups(&path, prefix, depth - 1, found);
        }
    }
}
