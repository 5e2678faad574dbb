//! What the machine shares out: user ids, swap, and the kernel's word on how short things are.

use std::{ops::Range, path::Path};

use super::Check;
use crate::{commands::up::installation::Account, output};

/// The user ids of machines must be nobody else's: whoever runs as one could kill a monitor and read its disk.
pub(super) fn users(machines: &Range<u32>, node: Account) -> Check {
    let read = |path: &str| fs_err::read_to_string(path).unwrap_or_default();
    let (passwd, subuid) = (read("/etc/passwd"), read("/etc/subuid"));
    let taken = accounts_within(&passwd, machines).or_else(|| range_within(&subuid, machines));
    let range = format!("{}–{}", machines.start, machines.end - 1);
    match taken {
        Some(who) => Check::fail(
            "users",
            format!("machines run as {range}, which {who} has too"),
            "give that account other ids; machines must share theirs with nobody",
        ),
        None => Check::ok(
            "users",
            format!("machines run as {range}, the node as {}", node.uid),
        ),
    }
}

/// An account whose id is in the range.
fn accounts_within(passwd: &str, range: &Range<u32>) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, uid) = (fields.next()?, fields.nth(1)?.parse().ok()?);
        range.contains(&uid).then(|| format!("the account {name}"))
    })
}

/// A range of subordinate ids that meets ours.
fn range_within(subuid: &str, range: &Range<u32>) -> Option<String> {
    subuid.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let first: u32 = fields.next()?.parse().ok()?;
        let count: u32 = fields.next()?.parse().ok()?;
        let meets = first < range.end && range.start < first.saturating_add(count);
        meets.then(|| format!("{name} (in /etc/subuid)"))
    })
}

/// Memory of machines is not to be written to a disk that nobody encrypts.
pub(super) fn swap() -> Check {
    let swaps = fs_err::read_to_string("/proc/swaps").unwrap_or_default();
    let kib: u64 = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok())
        .sum();
    if kib == 0 {
        return Check::ok("swap", "none");
    }
    let found = output::bytes(kib * 1024);
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let counted = Path::new("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists();
    if unified || counted {
        Check::ok("swap", format!("{found}; machines are kept out of it"))
    } else {
        Check::warn(
            "swap",
            format!("{found}, and this kernel cannot keep machines out of it"),
            "`swapoff -a`, or boot with swapaccount=1: memory of sandboxes may end up on the disk",
        )
    }
}

/// Pressure stall information tells a machine that is full from one that is short.
pub(super) fn pressure() -> Check {
    if fs_err::read_to_string("/proc/pressure/memory").is_ok() {
        Check::ok("pressure", "the kernel tells how short memory, CPU and disk are")
    } else {
        Check::warn(
            "pressure",
            "not told by this kernel; room is judged by what is free",
            "boot with psi=1 (and a kernel with CONFIG_PSI)",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_others_have_are_found() {
        let passwd = "root:x:0:0::/root:/bin/sh\nmallory:x:200005:200005::/:/bin/sh\n";
        assert_eq!(
            accounts_within(passwd, &(200_000..204_096)),
            Some("the account mallory".to_owned())
        );
        assert_eq!(accounts_within(passwd, &(204_096..208_192)), None);
        let subuid = "alice:100000:65536\nbob:165536:65536\n";
        assert_eq!(
            range_within(subuid, &(200_000..204_096)),
            Some("bob (in /etc/subuid)".to_owned())
        );
        assert_eq!(range_within(subuid, &(231_072..232_000)), None);
        assert_eq!(range_within("garbage\na:b:c\n", &(0..10)), None);
    }
}
