//! Kernel modules for the initramfs, in the order they must be loaded.

use std::collections::{BTreeMap, BTreeSet};

/// What the guest needs before it can mount its root: its disks, its network and its file systems. The virtio console
/// and ext4 are built into the kernel.
pub(crate) const WANTED: &[&str] = &["virtio_mmio", "virtio_blk", "virtio_net", "erofs", "overlay"];

/// The modules that `module` itself names as needed, from its `.modinfo` strings.
pub(crate) fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    // The strings of `.modinfo` are separated by zero bytes; the first string may start the section.
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &module[at + KEY.len()..];
    let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(plain_name)
        .collect()
}

/// Module names mean the same with `-` and `_`; file names use either.
pub(crate) fn plain_name(name: &str) -> String {
    name.replace('-', "_")
}

/// `wanted` and all they need, each after what it needs, otherwise in the order of `wanted`. A module that is missing
/// from `needs` is an error, given by name.
pub(crate) fn load_order(
    wanted: &[&str],
    needs: &BTreeMap<String, Vec<String>>,
) -> Result<Vec<String>, String> {
    fn visit(
        name: &str,
        needs: &BTreeMap<String, Vec<String>>,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<String>,
    ) -> Result<(), String> {
        // A cycle cannot be loaded anyway; marking before descending keeps it from recursing for ever.
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        for needed in needs.get(name).ok_or_else(|| name.to_owned())? {
            visit(needed, needs, seen, order)?;
        }
        order.push(name.to_owned());
        Ok(())
    }
    let mut seen = BTreeSet::new();
    let mut order = Vec::new();
    for name in wanted {
        visit(name, needs, &mut seen, &mut order)?;
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        let module = b"\x7fELF..\0license=GPL\0depends=net_failover,foo-bar\0name=virtio_net\0";
        assert_eq!(dependencies(module), ["net_failover", "foo_bar"]);
        assert!(dependencies(b"\0depends=\0name=x\0").is_empty());
        assert!(dependencies(b"nothing of the kind").is_empty());
        assert!(dependencies(b"\0depends=").is_empty());
    }

    #[test]
    fn every_module_comes_after_what_it_needs_and_once() {
        let needs: BTreeMap<String, Vec<String>> = [
            ("virtio_net", vec!["net_failover"]),
            ("net_failover", vec!["failover"]),
            ("failover", vec![]),
            ("erofs", vec!["libcrc32c", "failover"]),
            ("libcrc32c", vec![]),
        ]
        .into_iter()
        .map(|(name, needs)| (name.to_owned(), needs.into_iter().map(str::to_owned).collect()))
        .collect();
        assert_eq!(
            load_order(&["virtio_net", "erofs"], &needs).unwrap(),
            ["failover", "net_failover", "virtio_net", "libcrc32c", "erofs"]
        );
        assert_eq!(load_order(&["overlay"], &needs).unwrap_err(), "overlay");
    }

    #[test]
    fn a_cycle_ends() {
        let needs = BTreeMap::from([
            ("a".to_owned(), vec!["b".to_owned()]),
            ("b".to_owned(), vec!["a".to_owned()]),
        ]);
        assert_eq!(load_order(&["a"], &needs).unwrap().len(), 2);
    }
}
