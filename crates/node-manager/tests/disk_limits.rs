//! Limits of disk traffic are set where the host can hold to them, and stop nothing where it cannot.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests too"
)]

mod common;

use std::collections::BTreeSet;

use common::{Installation, ended, limits, name};
use fs_err as fs;
use space_node_manager::{ExitStatus, GroupLimits, IoLimits, LocalOptions, Privileges, controllers};

fn with_io(io: IoLimits) -> GroupLimits {
    GroupLimits {
        io: Some(io),
        ..limits()
    }
}

#[tokio::test]
async fn traffic_is_limited_where_the_controller_is() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let privileges = installation.local_with(LocalOptions {
        data_directory: Some(installation.directory.path().to_owned()),
        ..LocalOptions::default()
    });
    let a = name("a");
    let io = IoLimits {
        read_bytes_per_second: Some(50_000_000),
        write_operations_per_second: Some(1_234),
        ..IoLimits::default()
    };
    privileges.create_group(&a, &with_io(io)).await.unwrap();
    let places = controllers().unwrap();
    let place = places.iter().find(|c| c.name == "io").unwrap();
    let group = |file: &str| {
        let mount = place.mount.clone().unwrap_or_default();
        let parent = format!("space-{}", installation.name);
        fs::read_to_string(mount.join(parent).join("a").join(file)).ok()
    };
    let set = match place.version {
        Some(1) => group("blkio.throttle.read_bps_device")
            .zip(group("blkio.throttle.write_iops_device"))
            .map(|(read, write)| format!("{read} {write}")),
        Some(_) => group("io.max"),
        None => None,
    };
    match set {
        Some(set) => assert!(set.contains("50000000") && set.contains("1234"), "{set}"),
        None => println!("SKIPPED: disk traffic cannot be limited here: {place:?}"),
    }
    // Whichever it is, a machine runs in the group, and the group goes.
    let running = privileges.spawn(installation.sleeper(&a)).await.unwrap();
    privileges.delete_group(&a).await.unwrap();
    assert_eq!(ended(running.exit).await, ExitStatus::Signal(9));
    privileges.sweep(&BTreeSet::new()).await.unwrap();
}

/// Memory is no disk: the group is made all the same.
#[tokio::test]
async fn a_file_system_without_a_disk_is_no_obstacle() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let privileges = installation.local_with(LocalOptions {
        data_directory: Some("/dev/shm".into()),
        ..LocalOptions::default()
    });
    let io = IoLimits {
        write_bytes_per_second: Some(1),
        ..IoLimits::default()
    };
    privileges.create_group(&name("a"), &with_io(io)).await.unwrap();
    privileges.delete_group(&name("a")).await.unwrap();
}

/// A disk that the kernel cannot limit, and one that was taken out, are no obstacle either; without a limit there is no
/// group to account traffic in.
#[tokio::test]
async fn no_limit_is_no_group_where_the_controller_has_its_own() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let privileges = installation.local_with(LocalOptions {
        data_directory: Some(installation.directory.path().to_owned()),
        ..LocalOptions::default()
    });
    let places = controllers().unwrap();
    let mount_of = |name: &str| {
        places
            .iter()
            .find(|c| c.name == name)
            .and_then(|c| c.mount.clone())
    };
    let Some(own) = mount_of("io").filter(|own| mount_of("memory").as_ref() != Some(own)) else {
        println!("SKIPPED: disk traffic has no hierarchy of its own here");
        return;
    };
    let directory = own.join(format!("space-{}", installation.name)).join("a");
    privileges.create_group(&name("a"), &limits()).await.unwrap();
    assert!(!directory.exists());
    let running = privileges.spawn(installation.sleeper(&name("a"))).await.unwrap();
    privileges.delete_group(&name("a")).await.unwrap();
    assert_eq!(ended(running.exit).await, ExitStatus::Signal(9));
    privileges.sweep(&BTreeSet::new()).await.unwrap();
}
