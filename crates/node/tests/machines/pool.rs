//! Machines kept ready, for real.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use jiff::Timestamp;
use space_node::{Node as _, PoolConfig};

use super::{
    guest::{known_commands, shell},
    stack::{Stack, request, within},
};

fn pool(machines: usize) -> PoolConfig {
    PoolConfig {
        max_machines: machines,
        min_per_key: machines,
        ..PoolConfig::default()
    }
}

/// Waits until as many are ready.
async fn ready(stack: &Stack, count: usize) {
    let start = std::time::Instant::now();
    loop {
        let ready: usize = stack
            .node
            .info()
            .await
            .pool
            .iter()
            .map(|status| status.ready)
            .sum();
        if ready >= count {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{ready} of {count} are ready"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_taken_have_twenty_identities_and_show_nothing_of_the_warm_up() {
    let Some(stack) = Stack::with_pool("pool", pool(2)).await else {
        return;
    };
    let (mut unique, mut times) = (BTreeSet::new(), Vec::new());
    for at in 0..20 {
        ready(&stack, 1).await;
        let request = request();
        let id = request.id.clone();
        let status = within(stack.node.create(request)).await.expect("is created");
        times.push(status.ready_ms.expect("is ready"));
        let data = within(stack.node.data(&id)).await.expect("opens");
        let listed = known_commands(&data).await;
        assert_eq!(
            listed
                .get("processes")
                .and_then(|all| all.as_array())
                .map_or(0, Vec::len),
            0,
            "{listed}"
        );
        let shown = within(shell(
            &data,
            "date +%s.%N; cat /etc/machine-id /proc/sys/kernel/random/boot_id /run/space/token; echo; hostname; \
             cat /etc/hostname; cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1",
        ))
        .await;
        let now = Timestamp::now().as_duration().as_secs_f64();
        let lines: Vec<_> = shown.lines().map(str::trim).collect();
        let [clock, machine, boot, token, hostname, hosts_name, uuid, random] = lines[..] else {
            panic!("{shown}");
        };
        let clock: f64 = clock.parse().expect("a time");
        assert!(
            (now - clock).abs() < 2.0,
            "the guest's clock says {clock}, it is {now}"
        );
        assert_eq!((hostname, hosts_name), (id.as_str(), id.as_str()));
        assert_eq!(token, stack.node.guest_token(&id).await.expect("lives"));
        for value in [machine, boot, token, uuid, random] {
            assert!(value.len() >= 16, "{shown}");
            assert!(
                unique.insert(value.to_owned()),
                "{value} was there before: {shown}"
            );
        }
        if at == 0 {
            let left = within(shell(
                &data,
                "ls -A /tmp; find / -xdev -name '*space-warm*'; ls -A /home/user /root | grep -i history; \
                 grep -c 'this sandbox' /etc/hosts; ps -eo args= | grep -v '^\\[' | grep -v -e '^ps ' -e '^grep ' -e '^/bin/sh -c (ls'",
            ))
            .await;
            let lines: Vec<_> = left
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .collect();
            assert_eq!(lines.first(), Some(&"1"), "a file or name is left: {left}");
            let programs: Vec<_> = lines[1..]
                .iter()
                .filter(|line| !line.contains("space") && **line != "/init")
                .collect();
            assert!(programs.is_empty(), "something runs: {left}");
        }
        within(stack.node.delete(&id)).await.expect("is deleted");
    }
    times.sort_by(f64::total_cmp);
    println!(
        "create to ready on the node: p50 {:.1} ms, p90 {:.1} ms, all {times:.1?}",
        times[10], times[18]
    );
    assert_eq!(unique.len(), 100);
    stack.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_larger_than_the_pool_all_works() {
    let Some(stack) = Stack::with_pool("burst", pool(2)).await else {
        return;
    };
    ready(&stack, 2).await;
    let requests: Vec<_> = (0..8).map(|_| request()).collect();
    let created = within(join_all(
        requests.iter().map(|request| stack.node.create(request.clone())),
    ))
    .await;
    let mut times: Vec<_> = created
        .iter()
        .map(|one| one.as_ref().expect("is created").ready_ms.expect("is ready"))
        .collect();
    times.sort_by(f64::total_cmp);
    println!("8 at once with 2 ready: {times:.1?} ms");
    for request in &requests {
        let data = within(stack.node.data(&request.id)).await.expect("opens");
        assert_eq!(within(shell(&data, "hostname")).await.trim(), request.id.as_str());
        within(stack.node.delete(&request.id)).await.expect("is deleted");
    }
    stack.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_is_right_however_long_a_machine_has_waited() {
    let Some(stack) = Stack::with_pool("clock", pool(1)).await else {
        return;
    };
    ready(&stack, 1).await;
    // It stands still meanwhile, and so does its clock.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let request = request();
    within(stack.node.create(request.clone()))
        .await
        .expect("is created");
    let data = within(stack.node.data(&request.id)).await.expect("opens");
    let clock: f64 = within(shell(&data, "date +%s.%N"))
        .await
        .trim()
        .parse()
        .expect("a time");
    let now = Timestamp::now().as_duration().as_secs_f64();
    assert!(
        (now - clock).abs() < 0.5,
        "the guest's clock says {clock}, it is {now}"
    );
    within(stack.node.delete(&request.id)).await.expect("is deleted");
    stack.close().await;
}
