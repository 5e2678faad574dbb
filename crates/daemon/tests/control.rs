//! What the host learns and does over the control port about the agent's processes.

#![expect(clippy::unwrap_used, reason = "also in the tests' helpers")]

mod stand;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use space_channel::{Activity, Event, GuestState, HostControl, IdentityMode, capabilities};
use stand::{LIMIT, OwnGroup, Stand, identity, run, tunnel};
use tokio::{io::AsyncWriteExt, net::TcpListener};

async fn until(what: &str, mut ready: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !ready().await {
        assert!(begun.elapsed() < LIMIT, "{what} did not come true");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn activity(control: &HostControl) -> Activity {
    control
        .health(LIMIT)
        .await
        .unwrap()
        .activity
        .expect("it can tell")
}

/// Starts a program that writes to a file as long as it runs; returns when it does.
async fn counting(stand: &Stand, control: &HostControl) -> std::path::PathBuf {
    let mut sender = stand.session(control).await;
    let counter = stand.path("counter");
    let script = format!("while :; do echo . >> {}; sleep 0.01; done", counter.display());
    tokio::spawn(async move { run(&mut sender, &script).await });
    until("the program runs", async || size(&counter) > 0).await;
    counter
}

fn size(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |data| data.len())
}

#[tokio::test]
async fn the_agents_processes_freeze_and_thaw() {
    let Some(group) = OwnGroup::make() else {
        println!("SKIPPED: needs root and a cgroup v2 hierarchy");
        return;
    };
    let stand = Stand::start(Some(&group.0));
    let (control, ack) = stand.control().await;
    assert_ne!(ack.capabilities & capabilities::FREEZE, 0);
    let counter = counting(&stand, &control).await;
    let size = || size(&counter);
    let report = control.freeze(Duration::from_secs(2), LIMIT).await.unwrap();
    assert!(report.frozen, "{report:?}");
    let frozen_at = size();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(size(), frozen_at);
    drop(control);
    let goes_on = async |since: u64| until("the program goes on", async || size() != since).await;
    let (control, ack) = stand.control().await;
    assert_eq!(ack.state, GuestState::Frozen);
    control.thaw(5, LIMIT).await.unwrap();
    goes_on(frozen_at).await;

    // As in a machine that is started from a snapshot of frozen processes: its identity lets them go on.
    assert!(
        control
            .freeze(Duration::from_secs(2), LIMIT)
            .await
            .unwrap()
            .frozen
    );
    let frozen_at = size();
    control
        .identity(identity(IdentityMode::New), LIMIT)
        .await
        .unwrap();
    goes_on(frozen_at).await;
    drop(control);
    let (_control, ack) = stand.control().await;
    assert_eq!(ack.state, GuestState::Ready);
}

/// As an agent that is root and reaches the daemon's own mount might do: the freeze is held, and the host is told that the
/// snapshot it is taking is not of one instant.
#[tokio::test]
async fn a_freeze_that_is_ended_from_inside_is_held_and_told() {
    let Some(group) = OwnGroup::make() else {
        println!("SKIPPED: needs root and a cgroup v2 hierarchy");
        return;
    };
    let stand = Stand::start(Some(&group.0));
    let (control, _) = stand.control().await;
    let mut events = control.take_events().unwrap();
    let counter = counting(&stand, &control).await;
    assert!(
        control
            .freeze(Duration::from_secs(2), LIMIT)
            .await
            .unwrap()
            .frozen
    );
    fs::write(group.0.join("cgroup.freeze"), "0").unwrap();
    let event = tokio::time::timeout(LIMIT, events.recv()).await.unwrap();
    assert_eq!(event, Some(Event::AgentThawed));
    until("it stands still again", async || {
        let before = size(&counter);
        tokio::time::sleep(Duration::from_millis(100)).await;
        size(&counter) == before
    })
    .await;
    control.thaw(5, LIMIT).await.unwrap();
    let frozen_at = size(&counter);
    until("the program goes on", async || size(&counter) != frozen_at).await;
}

/// Idle is who does no work, not who has no client: work, tunnels and followed commands are told apart.
#[tokio::test]
async fn what_the_agent_does_is_told() {
    let Some(group) = OwnGroup::make() else {
        println!("SKIPPED: needs root and a cgroup v2 hierarchy");
        return;
    };
    let stand = Stand::start(Some(&group.0));
    let (control, ack) = stand.control().await;
    assert_ne!(ack.capabilities & capabilities::ACTIVITY, 0);
    let idle = activity(&control).await;
    assert_eq!((idle.tunnels, idle.requests), (0, 0));

    let mut sender = stand.session(&control).await;
    let mut busy = sender.clone();
    let followed = tokio::spawn(async move { run(&mut busy, "while :; do :; done").await });
    until("work is seen", async || {
        let now = activity(&control).await;
        now.requests == 1 && now.cpu_micros > idle.cpu_micros + 50_000
    })
    .await;

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepted = tokio::spawn(async move { listener.accept().await.unwrap().0 });
    let mut open = tunnel(&mut sender, port).await;
    open.write_all(b"x").await.unwrap();
    let inner = accepted.await.unwrap();
    assert_eq!(activity(&control).await.tunnels, 1);
    drop((open, inner));
    until("the tunnel is gone", async || {
        activity(&control).await.tunnels == 0
    })
    .await;
    // Nobody follows the command any more; it works on.
    followed.abort();
    until("its follower is gone", async || {
        activity(&control).await.requests == 0
    })
    .await;
    let before = activity(&control).await.cpu_micros;
    until("it works on", async || {
        activity(&control).await.cpu_micros > before
    })
    .await;
}

/// A machine of the warm pool has run commands of nobody's; the sandbox that it becomes knows none of them.
#[tokio::test]
async fn a_new_identity_forgets_the_commands_before_it() {
    let stand = Stand::start(None);
    let (control, _) = stand.control().await;
    control
        .identity(identity(IdentityMode::New), LIMIT)
        .await
        .unwrap();
    let mut sender = stand.session(&control).await;
    run(&mut sender, "echo of the first").await;
    let listed = async |sender: &mut stand::Sender| {
        let answer = stand::call(sender, "process.Process/List", r#"{"includeEnded":true}"#).await;
        String::from_utf8_lossy(&answer).into_owned()
    };
    until("the command is remembered", async || {
        listed(&mut sender).await.contains("echo of the first")
    })
    .await;

    let second = space_channel::Identity {
        hostname: "two".into(),
        ..identity(IdentityMode::New)
    };
    control.identity(second, LIMIT).await.unwrap();
    until("it is forgotten", async || {
        !listed(&mut sender).await.contains("echo")
    })
    .await;
    assert_eq!(fs::read_to_string(stand.path("hostname")).unwrap(), "two\n");
}
