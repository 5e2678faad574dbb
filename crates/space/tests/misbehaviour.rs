//! Agents that do what they can to their own sandbox, as root in it: the sandbox goes on answering or ends with a cause,
//! and the one beside it notices nothing.

use std::{
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use space_test_support::{Platform, eventually};

const SPACE: &str = env!("CARGO_BIN_EXE_space");
/// No command that only answers takes longer, however busy the sandbox and the host are. Without emulation it is a matter
/// of milliseconds; what it truly takes is measured by the benchmark.
const PROMPT: Duration = Duration::from_secs(30);

/// A sandbox that misbehaves and one beside it.
struct Pair {
    platform: Platform,
    offender: String,
    neighbour: String,
}

impl Pair {
    fn start() -> Option<Self> {
        let platform = Platform::start(SPACE)?;
        let offender = platform.succeed(&["sandbox", "create"]);
        let neighbour = platform.succeed(&["sandbox", "create"]);
        let pair = Self {
            platform,
            offender,
            neighbour,
        };
        pair.root(&pair.neighbour, "echo kept > /root/state");
        Some(pair)
    }

    /// What a command line run as root prints.
    fn root(&self, id: &str, line: &str) -> String {
        let output = self.attempt(id, line);
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    fn attempt(&self, id: &str, line: &str) -> Output {
        self.platform
            .run(&["sandbox", "exec", "--user", "root", id, "--", "bash", "-c", line])
    }

    /// The same with how it ended; it is killed after `timeout`.
    fn ended(&self, timeout: &str, line: &str) -> Value {
        let arguments = [
            "--json",
            "sandbox",
            "exec",
            "--user",
            "root",
            "--timeout",
            timeout,
            &self.offender,
            "--",
            "bash",
            "-c",
            line,
        ];
        let output = self.platform.run(&arguments);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    /// Begins a command; it is killed with all that it has started after ten seconds.
    fn begin(&self, line: &str) -> std::process::Child {
        let arguments = [
            "sandbox",
            "exec",
            "--user",
            "root",
            "--timeout",
            "10s",
            &self.offender,
            "--",
            "bash",
            "-c",
            line,
        ];
        let mut command = self.platform.space(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("starts")
    }

    fn assert_prompt(&self, id: &str, line: &str, expected: &str) {
        let begun = Instant::now();
        let output = self.attempt(id, line);
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.trim_end(), expected, "{output:?}");
        assert!(begun.elapsed() < PROMPT, "{line} took {:?}", begun.elapsed());
    }

    fn assert_neighbour_is_well(&self) {
        self.assert_prompt(&self.neighbour, "cat /root/state", "kept");
    }

    fn assert_both_are_well(&self) {
        self.assert_neighbour_is_well();
        self.assert_prompt(&self.offender, "echo answers", "answers");
    }
}

/// Processes, memory and processors: all of them at once taken by one command, and the next one is still started.
#[test]
fn whoever_takes_all_processes_memory_or_processors_leaves_the_daemon_its_own() {
    let Some(pair) = Pair::start() else { return };

    // It meets the limit of processes or that of memory, whichever comes first.
    let bomb = "bomb() { bomb | bomb & }; bomb; sleep 1000";
    let mut running = pair.begin(bomb);
    pair.assert_neighbour_is_well();
    running.wait().expect("waits");
    pair.assert_both_are_well();
    let killed = pair.ended("8s", bomb);
    assert!(
        killed["cause"] == "deadline" || killed["cause"] == "out_of_memory",
        "{killed}"
    );
    let left = pair.root(&pair.offender, "pgrep -c -f bomb");
    assert!(
        left.parse::<u32>().is_ok_and(|left| left <= 2),
        "{left} of the bomb live on"
    );

    // Where memory is plenty it is the limit of processes: no command gets all that the agent may have.
    let limits = "cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/$(cut -d : -f 3 /proc/self/cgroup)/pids.max";
    let limits = pair.root(&pair.offender, limits);
    let numbers: Vec<u64> = limits.lines().filter_map(|line| line.parse().ok()).collect();
    let [agent, command] = numbers[..] else {
        panic!("{limits}")
    };
    assert!(command + 32 <= agent, "{limits}");

    let hog = pair.ended(
        "120s",
        "exec python3 -c 'b = []\nwhile True: b.append(bytearray(1 << 22))'",
    );
    assert_eq!(hog["cause"], "out_of_memory", "{hog}");
    pair.assert_both_are_well();
    // One that is never refused memory, for the pages of its own code can always be read again: it would go on for minutes.
    let begun = Instant::now();
    let thrashing = pair.ended(
        "120s",
        "exec python3 -c 'b = []\nwhile True: b.append(b\"x\" * (16 << 20))'",
    );
    assert_eq!(thrashing["cause"], "out_of_memory", "{thrashing}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    pair.assert_both_are_well();

    // The highest priority there is, on every processor.
    let mut spin = pair.begin("exec chrt -f 99 sh -c 'while :; do :; done'");
    pair.assert_neighbour_is_well();
    pair.assert_prompt(&pair.offender, "echo answers", "answers");
    spin.wait().expect("waits");
    pair.assert_both_are_well();
}

#[test]
fn a_full_disk_is_named_and_can_be_emptied_again() {
    let Some(pair) = Pair::start() else { return };
    let fill = "fallocate -l $(df --output=avail -B1 / | tail -n 1) /root/all; dd if=/dev/zero of=/root/more bs=64k 2>/dev/null";
    let full = pair.ended("60s", &format!("{fill}; dd if=/dev/zero of=/root/last bs=64k"));
    assert_eq!(full["cause"], "disk_full", "{full}");
    assert!(full["exit_code"].as_i64().is_some_and(|code| code > 0), "{full}");
    let upload = pair.platform.scratch().join("upload");
    fs_err::write(&upload, vec![7; 1 << 20]).expect("written");
    let upload = upload.to_str().expect("UTF-8");
    let to = format!("{}:/root/upload", pair.offender);
    let refused = pair.platform.run(&["sandbox", "cp", upload, &to]);
    assert!(!refused.status.success(), "{refused:?}");
    pair.assert_both_are_well();
    pair.root(&pair.offender, "rm -f /root/all /root/more /root/last");
    pair.assert_prompt(
        &pair.offender,
        "head -c 1000000 /dev/zero > /root/small && stat -c %s /root/small",
        "1000000",
    );
}

/// One after the other in the same sandbox: none of it takes the daemon away.
#[test]
fn root_can_end_everything_but_the_daemon() {
    let Some(pair) = Pair::start() else { return };
    let running = pair.begin("sleep 1000");
    pair.root(&pair.offender, "kill -9 -1");
    pair.assert_both_are_well();
    drop(running.wait_with_output());
    pair.root(
        &pair.offender,
        "kill -STOP 1; kill -9 1; kill -SEGV 1; kill -TERM 1",
    );
    pair.assert_both_are_well();

    // The private channel is not the guest's network.
    pair.root(&pair.offender, "ip link set lo down; ip link set eth0 down");
    pair.assert_both_are_well();
    pair.root(&pair.offender, "ip link set lo up");

    pair.root(
        &pair.offender,
        "date -s 2001-01-01; date -s 2099-01-01; date -s 1999-12-31",
    );
    pair.assert_both_are_well();
    let year = pair.root(&pair.neighbour, "date +%Y");
    assert!(
        year.parse::<u32>().is_ok_and(|year| (2024..2099).contains(&year)),
        "{year}"
    );
    // Deadlines are not of that clock.
    let begun = Instant::now();
    assert_eq!(
        pair.ended("2s", "date -s 2001-01-01; sleep 1000")["cause"],
        "deadline"
    );
    assert!(begun.elapsed() < PROMPT);

    // One opener per port, and that is the daemon.
    let ports = "for port in /dev/vport*p1 /dev/vport*p2; do (cat /dev/urandom > $port) 2>&1; done";
    let said = pair.root(&pair.offender, ports);
    assert_eq!(said.matches("busy").count(), 2, "{said}");
    pair.assert_both_are_well();
}

/// The agent's group begins where its programs see the root of all groups: above it there is nothing to write to.
#[test]
fn root_can_neither_thaw_nor_leave_nor_lift_the_limits_of_its_group() {
    let Some(pair) = Pair::start() else { return };
    for (file, value) in [
        ("cgroup.freeze", "0"),
        ("cgroup.kill", "1"),
        ("memory.max", "max"),
        ("pids.max", "max"),
        ("cpu.weight", "10000"),
    ] {
        let said = pair.root(
            &pair.offender,
            &format!("(echo {value} > /sys/fs/cgroup/{file}) 2>&1"),
        );
        assert!(said.contains("not permitted"), "{file}: {said}");
    }
    // A group of its own beside the command's is still within the agent's.
    let moved =
        "mkdir /sys/fs/cgroup/own && echo $$ > /sys/fs/cgroup/own/cgroup.procs && cat /proc/self/cgroup";
    assert_eq!(pair.root(&pair.offender, moved), "0::/own");
    let above = pair.root(
        &pair.offender,
        "ls -d /sys/fs/cgroup/daemon /sys/fs/cgroup/../daemon 2>/dev/null",
    );
    assert_eq!(above, "");
    pair.assert_both_are_well();
}

/// A daemon that root has cut off from the host cannot be saved; the sandbox ends, and its end has a cause.
#[test]
fn a_daemon_that_loses_its_ports_ends_the_sandbox_with_a_cause() {
    let Some(pair) = Pair::start() else { return };
    let unbind = "cd /sys/bus/virtio/drivers/virtio_console && for each in virtio*; do echo $each > unbind; done; sleep 60";
    let begun = Instant::now();
    drop(pair.attempt(&pair.offender, unbind));
    assert!(
        begun.elapsed() < PROMPT,
        "the stream did not end with its machine"
    );
    let kind = eventually("the end of the sandbox", PROMPT, || {
        let value = pair.platform.json(&["sandbox", "inspect", &pair.offender]);
        (value["state"] == "ended")
            .then(|| value["end_cause"]["kind"].as_str().unwrap_or_default().to_owned())
    });
    assert_eq!(kind, "guest_failed");
    pair.assert_neighbour_is_well();
}

/// Readers that do not read hold up neither each other nor whoever does, in the same sandbox or another.
#[test]
fn streams_that_nobody_reads_hold_up_nobody() {
    let Some(pair) = Pair::start() else { return };
    let mut unread: Vec<_> = (0..24)
        .map(|_| {
            let mut command = pair
                .platform
                .space(["sandbox", "exec", &pair.offender, "--", "yes"]);
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("starts")
        })
        .collect();
    eventually("all of them to run", Duration::from_secs(60), || {
        let count = pair.root(&pair.offender, "pgrep -c -x yes");
        (count == "24").then_some(())
    });
    pair.assert_both_are_well();
    let listed = pair.platform.json(&["sandbox", "inspect", &pair.offender]);
    assert_eq!(listed["state"], "running");
    for each in &mut unread {
        drop(each.kill());
        each.wait().expect("waits");
    }
    pair.assert_both_are_well();
}
