//! How many things of each kind a platform has on the machine: what must be back where it was after any number of
//! sandboxes and crashes.

use std::{
    collections::BTreeMap,
    fmt,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Remains;

/// Files that come and go with a database's use.
const DATABASE_ENDINGS: [&str; 3] = ["-wal", "-shm", "-journal"];
/// Not the platform's alone, and large.
const TEMPLATES: &str = "templates";
/// Most names of one kind that a difference shows.
const SHOWN: usize = 12;

/// Everything counted, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Census(BTreeMap<&'static str, Vec<String>>);

/// One kind of which there are more, or fewer, than there were.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Of what.
    pub kind: &'static str,
    /// How many there were.
    pub before: usize,
    /// How many there are.
    pub now: usize,
    /// Some that were not there before.
    pub new: Vec<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} instead of {}", self.kind, self.now, self.before)?;
        if self.new.is_empty() {
            return Ok(());
        }
        write!(f, ", new: {}", self.new.join(", "))
    }
}

impl Census {
    /// Counts what belongs to the installation `name` whose state is in `data`; `processes` are the platform's own.
    pub fn take(name: &str, data: &Path, processes: &[u32]) -> Self {
        let remains = Remains::of(name, data);
        let run = Path::new("/run/space").join(name);
        let mut all: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        let monitors: Vec<u32> = remains.monitors.iter().copied().collect();
        all.insert("taps", taps(&remains));
        all.insert("namespaces", namespaces(&monitors));
        all.insert("dead processes", dead_children(processes));
        all.insert(
            "descriptors",
            processes.iter().flat_map(|pid| descriptors(*pid)).collect(),
        );
        all.insert("sockets", sockets(&run));
        all.insert("run files", files(&run));
        all.insert("data files", files(data));
        all.insert("processes", processes.iter().map(u32::to_string).collect());
        all.insert("machines", monitors.iter().map(u32::to_string).collect());
        all.insert("networks", remains.networks.into_iter().collect());
        all.insert("cgroups", remains.groups.into_iter().collect());
        all.insert("mounts", remains.mounts.into_iter().collect());
        Self(all)
    }

    /// How many of each kind.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.0.iter().map(|(kind, names)| (*kind, names.len())).collect()
    }

    /// Where it differs from what was before. Names are random: what counts is how many there are.
    pub fn differences(&self, before: &Self) -> Vec<Difference> {
        let none = Vec::new();
        let mut found = Vec::new();
        for (kind, names) in &self.0 {
            let earlier = before.0.get(kind).unwrap_or(&none);
            if names.len() == earlier.len() {
                continue;
            }
            let mut left = BTreeMap::new();
            for name in earlier {
                *left.entry(shape(name)).or_insert(0) += 1;
            }
            let new = names.iter().filter(|name| {
                let count: &mut i32 = left.entry(shape(name)).or_default();
                *count -= 1;
                *count < 0
            });
            found.push(Difference {
                kind,
                before: earlier.len(),
                now: names.len(),
                new: new.take(SHOWN).cloned().collect(),
            });
        }
        found
    }
}

/// A name without what is random in it.
fn shape(name: &str) -> String {
    let mut shape = String::new();
    for word in name.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let random = word.chars().any(|c| c.is_ascii_digit());
        shape.push_str(if random { "#" } else { word });
    }
    shape
}

/// Devices in the networks made for machines, beside the loopback.
fn taps(remains: &Remains) -> Vec<String> {
    let of = |network: &String| {
        let network = network.clone();
        // A thread of its own: it stays in that namespace.
        let looked = std::thread::spawn(move || {
            let namespace = fs_err::File::open(Path::new("/run/netns").join(&network)).ok()?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).ok()?;
            let table = fs_err::read_to_string("/proc/thread-self/net/dev").ok()?;
            let devices = table.lines().filter_map(|line| line.split_once(':'));
            let names = devices.map(|(device, _)| device.trim().to_owned());
            let taps = names.filter(|device| device != "lo");
            Some(
                taps.map(|device| format!("{network}/{device}"))
                    .collect::<Vec<_>>(),
            )
        });
        looked.join().ok().flatten().unwrap_or_default()
    };
    remains.networks.iter().flat_map(of).collect()
}

/// Namespaces that processes are in and we are not.
fn namespaces(processes: &[u32]) -> Vec<String> {
    let link = |pid: &str, kind: &str| fs_err::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let mut found = std::collections::BTreeSet::new();
    for kind in ["mnt", "pid", "net", "ipc", "uts", "user"] {
        let ours = link("self", kind);
        for pid in processes {
            let theirs = link(&pid.to_string(), kind);
            if theirs != ours {
                found.extend(theirs.map(|theirs| theirs.display().to_string()));
            }
        }
    }
    found.into_iter().collect()
}

/// Children of these processes that have ended and were not waited for.
fn dead_children(parents: &[u32]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(stat) = fs_err::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let Some((before, after)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = after.split_ascii_whitespace();
        let (state, parent) = (
            fields.next(),
            fields.next().and_then(|parent| parent.parse().ok()),
        );
        if state == Some("Z") && parent.is_some_and(|parent| parents.contains(&parent)) {
            found.push(format!("{before})"));
        }
    }
    found
}

/// What a process has open.
fn descriptors(pid: u32) -> Vec<String> {
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let program = fs_err::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let role = program.split('\0').nth(1).unwrap_or_default().to_owned();
    let entries = fs_err::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| fs_err::read_link(entry.path()).ok())
        .map(|link| format!("{role}: {}", link.display()))
        .collect()
}

/// Sockets with a name below `run`.
fn sockets(run: &Path) -> Vec<String> {
    let table = fs_err::read_to_string("/proc/net/unix").unwrap_or_default();
    table
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(7))
        .filter(|path| Path::new(path).starts_with(run))
        .map(str::to_owned)
        .collect()
}

/// Files and directories below `root`.
fn files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs_err::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if DATABASE_ENDINGS.iter().any(|ending| name.ends_with(ending)) {
                continue;
            }
            found.push(path.display().to_string());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && name != TEMPLATES {
                left.push(path);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn census(kinds: &[(&'static str, &[&str])]) -> Census {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Census(kinds.iter().map(|&(kind, of)| (kind, names(of))).collect())
    }

    #[test]
    fn random_names_make_no_difference_and_more_of_a_kind_does() {
        let before = census(&[("cgroups", &["/a/m0123abcd", "/b/m0123abcd"])]);
        let renamed = census(&[("cgroups", &["/a/m99990000", "/b/m99990000"])]);
        assert_eq!(renamed.differences(&before), []);
        let more = census(&[("cgroups", &["/a/m99990000", "/b/m99990000", "/b/left"])]);
        let found = more.differences(&before);
        assert_eq!(found[0].to_string(), "cgroups: 3 instead of 2, new: /b/left");
        assert_eq!(
            before.differences(&more)[0].to_string(),
            "cgroups: 2 instead of 3"
        );
    }

    #[test]
    fn files_sockets_and_descriptors_are_seen() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        fs_err::create_dir_all(root.join("disks/m1")).expect("made");
        fs_err::create_dir_all(root.join("templates/large")).expect("made");
        fs_err::write(root.join("node.db"), "").expect("written");
        fs_err::write(root.join("node.db-wal"), "").expect("written");
        let listener = std::os::unix::net::UnixListener::bind(root.join("s")).expect("listens");
        // node.db, s, disks, disks/m1, templates
        assert_eq!(files(root).len(), 5, "{:?}", files(root));
        assert_eq!(sockets(root).len(), 1);
        drop(listener);
        assert_eq!(sockets(root).len(), 0);
        let before = descriptors(std::process::id()).len();
        let file = fs_err::File::open(root.join("node.db")).expect("opens");
        assert!(
            descriptors(std::process::id())
                .iter()
                .any(|each| each.ends_with("node.db"))
        );
        drop(file);
        assert!(before > 0);
    }

    #[test]
    fn a_child_that_is_not_waited_for_is_a_dead_process() {
        let mut child = std::process::Command::new("true").spawn().expect("starts");
        let own = [std::process::id()];
        crate::eventually("a dead child", std::time::Duration::from_secs(10), || {
            (dead_children(&own).len() == 1).then_some(())
        });
        child.wait().expect("waits");
        assert_eq!(dead_children(&own).len(), 0);
    }
}
