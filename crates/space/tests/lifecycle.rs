//! A sandbox's life by the command line, on a real machine: labels, lists, pausing, extending, events.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
    sync::mpsc,
    time::Duration,
};

use serde_json::Value;
use space_test_support::{Platform, eventually};

const SPACE: &str = env!("CARGO_BIN_EXE_space");

fn listed(platform: &Platform, arguments: &[&str]) -> Vec<String> {
    let mut all = vec!["sandbox", "ls"];
    all.extend(arguments);
    let list = platform.json(&all);
    let records = list.as_array().expect("a list");
    records
        .iter()
        .map(|record| record["id"].as_str().expect("id").to_owned())
        .collect()
}

/// The state of a process as the kernel tells it, and its CPU time in ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    let number = |at: usize| fields[at].parse::<u64>().expect("a number");
    number(11) + number(12)
}

#[test]
fn a_sandbox_is_paused_found_labelled_prolonged_and_woken() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let mut follower = platform
        .space(["--json", "sandbox", "events", "--follow"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let events = BufReader::new(follower.stdout.take().expect("piped")).lines();
    let (tell, told) = mpsc::channel::<Value>();
    std::thread::spawn(move || {
        for line in events.map_while(Result::ok) {
            let event = serde_json::from_str(&line).expect("json");
            if tell.send(event).is_err() {
                return;
            }
        }
    });
    // It follows from when it is connected, which shows by its first event.
    let mut probes = Vec::new();
    eventually("the follower is connected", Duration::from_secs(30), || {
        probes.push(platform.succeed(&["sandbox", "create"]));
        told.recv_timeout(Duration::from_millis(500)).ok()
    });
    for probe in &probes {
        platform.succeed(&["sandbox", "rm", probe]);
    }
    let followed = move |id: &str| -> Value {
        loop {
            let event = told.recv_timeout(Duration::from_secs(30)).expect("goes on");
            if event["sandbox_id"] == id {
                return event;
            }
        }
    };

    let id = platform.succeed(&["sandbox", "create", "--label", "tier=free", "--timeout", "10m"]);
    let other = platform.succeed(&["sandbox", "create", "--metadata", "note=x", "--wake-on-traffic"]);
    for wanted in ["creating", "running"] {
        assert_eq!(followed(&id)["kind"], wanted);
    }
    assert_eq!(
        listed(&platform, &["--label", "tier=free"]),
        std::slice::from_ref(&id)
    );
    assert_eq!(listed(&platform, &[]).len(), 2);
    platform.succeed(&["sandbox", "label", &id, "tier=paid", "team=a"]);
    assert_eq!(platform.succeed(&["sandbox", "label", &id, "team-"]), "tier=paid");
    assert_eq!(listed(&platform, &["--label", "tier=free"]), [] as [String; 0]);
    assert_eq!(
        listed(&platform, &["--label", "tier=paid", "--state", "running"]),
        std::slice::from_ref(&id)
    );
    assert_eq!(
        platform.json(&["sandbox", "inspect", &other])["metadata"]["note"],
        "x"
    );

    platform.succeed(&["sandbox", "exec", &id, "--", "sh", "-c", "echo kept > /tmp/kept"]);
    assert_eq!(platform.succeed(&["sandbox", "pause", &id]), id);
    assert_eq!(
        listed(&platform, &["--state", "paused"]),
        std::slice::from_ref(&id)
    );
    let record = platform.json(&["sandbox", "inspect", &id]);
    assert_eq!(record["state"], "paused");
    let machine = record["machine"].as_str().expect("it has one").to_owned();
    // A machine that stands still uses no CPU: its monitor's time does not move while ten others pass by.
    let monitor = platform.monitor_of(&id);
    let before = cpu_ticks(monitor.pid);
    for _ in 0..10 {
        platform.succeed(&["sandbox", "ls"]);
    }
    assert!(
        cpu_ticks(monitor.pid) - before <= 2,
        "{machine} works while it is paused"
    );

    let ends = |id: &str| platform.json(&["sandbox", "inspect", id])["deadline"].to_string();
    let deadline = ends(&id);
    platform.succeed(&["sandbox", "extend", &id, "1m"]);
    assert_eq!(ends(&id), deadline, "extend never shortens");
    platform.succeed(&["sandbox", "extend", &id, "2h"]);
    assert!(ends(&id) > deadline);
    assert_eq!(platform.json(&["sandbox", "inspect", &id])["state"], "paused");

    // exec connects, which lets it run on where it was.
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &id, "--", "cat", "/tmp/kept"]),
        "kept"
    );
    assert_eq!(platform.json(&["sandbox", "inspect", &id])["state"], "running");
    platform.succeed(&["sandbox", "pause", &id]);
    assert_eq!(platform.succeed(&["sandbox", "resume", &id]), id);

    platform.succeed(&["sandbox", "rm", &id]);
    let told = platform.json(&["sandbox", "events", &id]);
    let kinds: Vec<&str> = told
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| event["kind"].as_str().expect("kind"))
        .collect();
    let wanted = [
        "creating", "running", "paused", "resumed", "paused", "resumed", "ended",
    ];
    assert_eq!(kinds, wanted);
    let mut seen = Vec::new();
    while seen.last().is_none_or(|kind| kind != "ended") {
        seen.push(followed(&id)["kind"].as_str().expect("kind").to_owned());
    }
    assert_eq!(seen, wanted[2..]);
    follower.kill().expect("ends");
    follower.wait().expect("ends");
    assert_eq!(
        listed(&platform, &["--state", "ended", "--label", "tier=paid"]),
        [id]
    );
}
