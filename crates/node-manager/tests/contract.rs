//! One suite for every implementation of the trait: in this process, over the socket, and the fake as far as it acts.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests too"
)]

mod common;

use std::{
    collections::BTreeSet,
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use common::{Installation, LIMIT, SLEEP, UID, ended, limits, name};
use fs_err as fs;
use rustix::{
    event::{PollFd, PollFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use space_node_manager::{
    ExitStatus, LocalOptions, PrivilegeError, Privileges, ProcessIdentity, RecordingPrivileges,
    RemotePrivileges, Server, ServerConfig, protocol::MOST_KEPT,
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Most machines of a test's server.
const MACHINES: usize = 8;

fn socket(installation: &Installation) -> std::path::PathBuf {
    installation.directory.path().join("manager.sock")
}

fn opened(path: impl AsRef<Path>) -> OwnedFd {
    fs::File::open(path.as_ref()).unwrap().into_parts().0.into()
}

/// What every implementation does, and whether it really acts.
async fn contract(privileges: &dyn Privileges, installation: &Installation, acts: bool) {
    let (a, b) = (name("a"), name("b"));
    // Removals succeed where there is nothing.
    for missing in [&a, &b] {
        privileges.delete_network(missing).await.unwrap();
        privileges.kill_group(missing).await.unwrap();
        privileges.delete_group(missing).await.unwrap();
    }
    for name in [&a, &b] {
        let group = privileges.create_group(name, &limits()).await.unwrap();
        assert_eq!(group.name, *name);
    }
    // Made twice is limited anew.
    privileges.create_group(&a, &limits()).await.unwrap();
    privileges.set_group_weight(&a, 1).await.unwrap();
    privileges.set_group_weight(&a, 10_000).await.unwrap();
    let first = privileges.create_network(&a).await.unwrap();
    let network = privileges.create_network(&a).await.unwrap();
    if acts {
        let id = |fd| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_ne!(id(&first.namespace), id(&network.namespace), "it was made anew");
    }
    drop(first);

    let mut process = installation.sleeper(&a);
    process.network_namespace = Some(network.namespace);
    let mut running = privileges.spawn(process).await.unwrap();
    assert_eq!(*running.exit.borrow_and_update(), None);
    assert!(privileges.group_usage(&a).await.is_ok());

    // No second one beside it.
    let second = privileges.spawn(installation.sleeper(&a)).await;
    assert!(
        matches!(second, Err(PrivilegeError::Refused { .. })),
        "{second:?}"
    );

    // Watched twice, it is the same process, and both learn of its end.
    let adopted = privileges.adopt(running.identity).await.unwrap();
    assert_eq!(adopted.spawned.identity, running.identity);
    assert_eq!(adopted.spawned.executable, running.executable);

    let wrong = ProcessIdentity {
        start_ticks: running.identity.start_ticks + 1,
        ..running.identity
    };
    privileges.kill(wrong).await.unwrap();
    assert!(privileges.adopt(wrong).await.is_err());
    assert_eq!(*running.exit.borrow(), None, "the other one was not meant");
    if acts {
        assert!(privileges.open_memory(wrong).await.is_err());
        // A spawn returns when the program has been chosen, a little before it is mapped.
        let deadline = Instant::now() + LIMIT;
        loop {
            let maps = privileges.open_memory(running.identity).await.unwrap().maps;
            if maps.contains("[stack]") && maps.contains(&format!(" {SLEEP}\n")) {
                break;
            }
            assert!(Instant::now() < deadline, "{maps}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    privileges.kill(running.identity).await.unwrap();
    assert_eq!(ended(running.exit).await, ExitStatus::Signal(9));
    let second = ended(adopted.spawned.exit).await;
    assert!(
        matches!(second, ExitStatus::Signal(9) | ExitStatus::Unknown),
        "{second:?}"
    );
    privileges.kill(wrong).await.unwrap();

    // A file is given, and only a file.
    let path = installation.directory.path().join("file");
    fs::write(&path, "x").unwrap();
    privileges.give_file(opened(&path), UID).await.unwrap();
    privileges.give_file(opened(&path), UID).await.unwrap();
    if acts {
        assert!(privileges.give_file(opened("/dev/null"), UID).await.is_err());
        assert!(matches!(
            privileges.give_file(opened(&path), 0).await,
            Err(PrivilegeError::Refused { .. })
        ));
        let nowhere = privileges.group_usage(&name("nowhere")).await;
        assert!(
            matches!(nowhere, Err(PrivilegeError::System { .. })),
            "{nowhere:?}"
        );
    }

    // A sweep takes what is not kept.
    let left = privileges.spawn(installation.sleeper(&a)).await.unwrap();
    let kept = privileges.spawn(installation.sleeper(&b)).await.unwrap();
    let report = privileges.sweep(&BTreeSet::from([b.clone()])).await.unwrap();
    assert_eq!((report.processes, report.groups, report.networks), (1, 1, 1));
    assert_eq!(ended(left.exit).await, ExitStatus::Signal(9));
    assert_eq!(*kept.exit.borrow(), None);
    privileges.delete_group(&b).await.unwrap();
    assert_eq!(ended(kept.exit).await, ExitStatus::Signal(9));
    let report = privileges.sweep(&BTreeSet::new()).await.unwrap();
    assert_eq!((report.processes, report.groups, report.networks), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_this_process() {
    let Some(installation) = Installation::new() else {
        return;
    };
    contract(
        &installation.local_with(LocalOptions::default()),
        &installation,
        true,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_the_socket() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    contract(&*remote.privileges, &installation, true).await;
    remote.stop().await;
}

#[tokio::test]
async fn the_fake() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let fake = RecordingPrivileges::default();
    contract(&fake, &installation, false).await;
    assert_eq!(fake.remaining(), space_node_manager::SweepReport::default());
}

/// Machines outlive the node manager, and the next one tells of their end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_manager_that_is_restarted_loses_nothing() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let first = Remote::start(&installation).await;
    let privileges = first.privileges.clone();
    let (a, b) = (name("a"), name("b"));
    for name in [&a, &b] {
        privileges.create_group(name, &limits()).await.unwrap();
    }
    let running = privileges.spawn(installation.sleeper(&a)).await.unwrap();
    let ends = privileges.spawn(installation.sleeper(&b)).await.unwrap();
    first.stop_server().await;

    // A call that is made meanwhile waits for the next one.
    let asked = {
        let (privileges, a) = (privileges.clone(), a.clone());
        tokio::spawn(async move { privileges.group_usage(&a).await })
    };
    let pid = rustix::process::Pid::from_raw(i32::try_from(ends.identity.pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert!(!asked.is_finished());
    let second = Remote::serve(&installation);
    asked.await.unwrap().unwrap();
    // Here it is a child still, as it would not be of another process, so how it ended is known or not.
    let status = ended(ends.exit).await;
    assert!(
        matches!(status, ExitStatus::Signal(9) | ExitStatus::Unknown),
        "{status:?}"
    );
    assert_eq!(*running.exit.borrow(), None, "it lives");
    privileges.kill_group(&a).await.unwrap();
    let status = ended(running.exit).await;
    assert!(
        matches!(status, ExitStatus::Signal(9) | ExitStatus::Unknown),
        "{status:?}"
    );
    privileges.sweep(&BTreeSet::new()).await.unwrap();
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_may_not_ask_is_refused() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    let privileges = &remote.privileges;
    let a = name("a");
    privileges.create_group(&a, &limits()).await.unwrap();
    let refused = async |change: &dyn Fn(&mut space_node_manager::VmmProcess)| {
        let mut process = installation.sleeper(&a);
        change(&mut process);
        match privileges.spawn(process).await {
            Err(PrivilegeError::Refused { what }) => what,
            other => panic!("{other:?}"),
        }
    };
    refused(&|p| p.uid = 0).await;
    refused(&|p| p.uid = UID - 1).await;
    refused(&|p| p.program = "/usr/bin/env".into()).await;
    refused(&|p| p.network_namespace = Some(opened("/proc/self/ns/net"))).await;
    refused(&|p| p.log = Some(opened("/etc/hostname"))).await;
    refused(&|p| drop(p.descriptors.insert(3, opened("/")))).await;
    refused(&|p| drop(p.descriptors.insert(2, opened("/dev/null")))).await;
    refused(&|p| {
        p.views.push(space_node_manager::View {
            path: "/usr/bin".into(),
            source: opened("/tmp"),
            writable: true,
        });
    })
    .await;

    // Processes that are not of the installation are nobody's business.
    let own = identity(std::process::id());
    for outcome in [
        privileges.kill(own).await,
        privileges.open_memory(own).await.map(drop),
        privileges.adopt(own).await.map(drop),
    ] {
        assert!(
            matches!(outcome, Err(PrivilegeError::Refused { .. })),
            "{outcome:?}"
        );
    }

    // A file of somebody else is not given away.
    let path = installation.directory.path().join("foreign");
    fs::write(&path, "x").unwrap();
    std::os::unix::fs::chown(&path, Some(1), Some(1)).unwrap();
    let outcome = privileges.give_file(opened(&path), UID).await;
    assert!(
        matches!(outcome, Err(PrivilegeError::Refused { .. })),
        "{outcome:?}"
    );

    // No more machines than were configured.
    let mut made = 0;
    let refusal = loop {
        match privileges
            .create_group(&name(&format!("n{made}")), &limits())
            .await
        {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refusal, PrivilegeError::Refused { .. }), "{refusal:?}");
    assert_eq!(made, MACHINES - 1);
    // However it is asked: networks made and removed at once are counted right.
    let n = name("n");
    for _ in 0..10 {
        let (made, gone) = tokio::join!(privileges.create_network(&n), privileges.delete_network(&n));
        made.unwrap();
        gone.unwrap();
    }
    privileges.delete_network(&n).await.unwrap();
    for number in 0..2 * MACHINES {
        drop(
            privileges
                .create_network(&name(&format!("n{number}")))
                .await
                .unwrap(),
        );
    }
    let refusal = privileges.create_network(&n).await;
    assert!(
        matches!(refusal, Err(PrivilegeError::Refused { .. })),
        "{refusal:?}"
    );
    let namespaces = fs::read_dir("/run/netns").unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_str()
            .unwrap()
            .starts_with(&format!("space-{}-", installation.name))
    });
    assert_eq!(namespaces.count(), 2 * MACHINES);
    privileges.delete_group(&name("n0")).await.unwrap();
    privileges.create_group(&name("other"), &limits()).await.unwrap();

    // Nor limits that make no sense.
    let mut senseless = limits();
    senseless.pids = 0;
    let outcome = privileges.create_group(&a, &senseless).await;
    assert!(
        matches!(outcome, Err(PrivilegeError::Refused { .. })),
        "{outcome:?}"
    );
    privileges.create_group(&a, &limits()).await.unwrap();
    privileges.sweep(&BTreeSet::new()).await.unwrap();
    remote.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_nodes_user_may_connect() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let server = Remote::serve_for(&installation, 1);
    let connecting = RemotePrivileges::connect(socket(&installation));
    // The peer is root and not user 1: it is never welcomed, so it goes on trying.
    let outcome = tokio::time::timeout(Duration::from_secs(1), connecting).await;
    assert!(outcome.is_err(), "{outcome:?}");
    server.stop().await;
}

/// However often a process is asked for, its end is told, and to each who asks after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_adopted_often_ends_for_all() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    let privileges = &remote.privileges;
    let a = name("a");
    privileges.create_group(&a, &limits()).await.unwrap();
    let running = privileges.spawn(installation.sleeper(&a)).await.unwrap();
    let mut exits = vec![running.exit];
    for _ in 0..300 {
        exits.push(privileges.adopt(running.identity).await.unwrap().spawned.exit);
    }
    // While it ends it may still be adopted, and then ends at once.
    let (killed, late) = tokio::join!(
        privileges.kill(running.identity),
        privileges.adopt(running.identity)
    );
    killed.unwrap();
    exits.extend(late.ok().map(|adopted| adopted.spawned.exit));
    for exit in exits {
        ended(exit).await;
    }
    privileges.sweep(&BTreeSet::new()).await.unwrap();
    remote.stop().await;
}

/// As many as two names for each machine that can be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_may_keep_what_every_machine_has() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    let a = name("a");
    remote.privileges.create_group(&a, &limits()).await.unwrap();
    let kept = |count| {
        let names = (0..count).map(|n| name(&format!("{n:0>32}")));
        names.chain([a.clone()]).collect::<BTreeSet<_>>()
    };
    let report = remote.privileges.sweep(&kept(MOST_KEPT - 1)).await.unwrap();
    assert_eq!(report.groups, 0);
    let refusal = remote.privileges.sweep(&kept(MOST_KEPT)).await;
    assert!(
        matches!(refusal, Err(PrivilegeError::Refused { .. })),
        "{refusal:?}"
    );
    remote.privileges.sweep(&BTreeSet::new()).await.unwrap();
    remote.stop().await;
}

/// Bytes that are no message end the connection and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_bytes_end_the_connection_only() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    let hello = br#"{"Hello":{"version":1}}"#.as_slice();
    let requests: [&[&[u8]]; 7] = [
        &[b"\0"],
        &[b"{}"],
        &[br#"{"Request":{"id":1,"call":"OpenKvm"}}"#],
        &[hello, hello],
        &[
            hello,
            br#"{"Request":{"id":1,"call":{"KillGroup":{"name":"../x"}}}}"#,
        ],
        &[hello, br#"{"Request":{"id":1,"call":{"Reboot":{}}}}"#],
        &[hello, &[b'['; 60_000]],
    ];
    for request in requests {
        let socket = connect(&socket(&installation));
        for part in request {
            rustix::net::send(&socket, part, rustix::net::SendFlags::NOSIGNAL).ok();
        }
        assert!(is_closed(&socket), "{request:?}");
        remote.privileges.kill_group(&name("a")).await.unwrap();
    }
    remote.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_quick() {
    let Some(installation) = Installation::new() else {
        return;
    };
    let remote = Remote::start(&installation).await;
    let privileges: Arc<RemotePrivileges> = remote.privileges.clone();
    let a = name("a");
    privileges.create_group(&a, &limits()).await.unwrap();
    let mut times = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        privileges.set_group_weight(&a, 100).await.unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    println!(
        "set_group_weight over the socket: p50 {:?}, p90 {:?}",
        times[100], times[180]
    );
    // Generous for a busy host; what is to be caught are timers and copies on the way.
    assert!(times[100] < Duration::from_millis(2), "{:?}", times[100]);
    privileges.sweep(&BTreeSet::new()).await.unwrap();
    remote.stop().await;
}

/// A node manager in this process, and a node that is connected to it.
struct Remote {
    privileges: Arc<RemotePrivileges>,
    server: Serving,
}

/// A node manager in this process.
struct Serving {
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    /// After a failed assertion it lets go of the installation, which is then swept.
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Serving {
    async fn stop(mut self) {
        self.stop.cancel();
        let task = self.task.take().unwrap();
        tokio::time::timeout(LIMIT, task).await.unwrap().unwrap();
    }
}

impl Remote {
    async fn start(installation: &Installation) -> Self {
        let server = Self::serve(installation);
        let privileges = Arc::new(RemotePrivileges::connect(socket(installation)).await.unwrap());
        Self { privileges, server }
    }

    fn serve(installation: &Installation) -> Serving {
        Self::serve_for(installation, 0)
    }

    fn serve_for(installation: &Installation, owner: u32) -> Serving {
        let mut config = ServerConfig::new(
            &installation.name,
            installation.directory.path(),
            UID..=UID + 20,
            (owner, owner),
        );
        config.programs = vec![SLEEP.into()];
        config.machines = MACHINES;
        let server = Server::bind(config, &socket(installation)).unwrap();
        let stop = CancellationToken::new();
        let task = tokio::spawn(server.serve(stop.clone()));
        Serving {
            stop,
            task: Some(task),
        }
    }

    async fn stop_server(self) {
        self.server.stop().await;
    }

    async fn stop(self) {
        drop(self.privileges);
        self.server.stop().await;
    }
}

/// Who a process is.
fn identity(pid: u32) -> ProcessIdentity {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    ProcessIdentity {
        pid,
        start_ticks: rest.split_ascii_whitespace().nth(19).unwrap().parse().unwrap(),
    }
}

/// A connection without a node behind it.
fn connect(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Whether the other end closes, after whatever it still has to say.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut buffer = [0; 4096];
    loop {
        let mut poll = [PollFd::new(socket, PollFlags::IN)];
        let limit = rustix::time::Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        if rustix::event::poll(&mut poll, Some(&limit)) != Ok(1) {
            return false;
        }
        match rustix::net::recv(socket, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}
