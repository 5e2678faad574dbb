//! The node's side against a node manager that has a bad day.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::{
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recv, send, sockopt,
};
use serde_json::{Value, json};
use space_node_manager::{ExitStatus, Privileges, ProcessIdentity, RemotePrivileges};

const LIMIT: Duration = Duration::from_secs(10);

const PROCESS: ProcessIdentity = ProcessIdentity {
    pid: 7,
    start_ticks: 9,
};

/// A node manager that answers as it is told.
struct Manager(OwnedFd);

impl Manager {
    fn listen(path: &Path) -> Self {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 4).unwrap();
        Self(socket)
    }

    /// The next connection, greeted.
    fn accept(&self) -> Peer {
        let peer = Peer(rustix::net::accept(&self.0).unwrap());
        sockopt::set_socket_timeout(&peer.0, sockopt::Timeout::Recv, Some(LIMIT)).unwrap();
        assert_eq!(peer.next()["Hello"]["version"], 1);
        peer.say(&json!({"Welcome": {"version": 1}}));
        peer
    }
}

struct Peer(OwnedFd);

impl Peer {
    fn next(&self) -> Value {
        let mut buffer = vec![0; 128 << 10];
        let (read, _) = recv(&self.0, &mut buffer[..], RecvFlags::empty()).unwrap();
        serde_json::from_slice(&buffer[..read]).unwrap()
    }

    fn say(&self, message: &Value) {
        send(&self.0, message.to_string().as_bytes(), SendFlags::NOSIGNAL).unwrap();
    }

    /// Takes an adoption and answers it.
    fn adoption(&self, outcome: &Value) {
        let request = self.next();
        let request = &request["Request"];
        assert_eq!(request["call"]["Adopt"]["process"]["pid"], 7, "{request}");
        self.say(&json!({"Answer": {"id": request["id"], "outcome": outcome}}));
    }
}

/// A process that cannot be looked at now has not ended; one that is gone has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_passing_error_is_no_end() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: needs root, for a node trusts no other manager");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("manager.sock");
    let manager = Manager::listen(&path);
    let failure = |errno: i32| json!({"Err": {"System": {"act": "x", "errno": errno, "words": "x"}}});
    let watched = json!({"Ok": {"Process": {"identity": PROCESS, "executable": vec![1; 32]}}});
    let (tell, asked_again) = std::sync::mpsc::channel();
    let answering = std::thread::spawn(move || {
        let first = manager.accept();
        first.adoption(&watched);
        drop(first);
        let second = manager.accept();
        for errno in [libc::EMFILE, libc::ENOMEM] {
            second.adoption(&failure(errno));
        }
        second.adoption(&watched);
        tell.send(()).unwrap();
        drop(second);
        let third = manager.accept();
        third.adoption(&failure(libc::ESRCH));
        // Until the other end has gone.
        recv(&third.0, &mut [0; 16][..], RecvFlags::empty()).ok();
    });
    let remote = RemotePrivileges::connect(&path).await.unwrap();
    let start = Instant::now();
    let mut exit = remote.adopt(PROCESS).await.unwrap().spawned.exit;
    tokio::task::spawn_blocking(move || asked_again.recv_timeout(LIMIT).unwrap())
        .await
        .unwrap();
    let ended = tokio::time::timeout(LIMIT, exit.wait_for(Option::is_some)).await;
    assert_eq!(*ended.expect("it ends").unwrap(), Some(ExitStatus::Unknown));
    assert!(start.elapsed() < LIMIT);
    drop(remote);
    answering.join().unwrap();
}
