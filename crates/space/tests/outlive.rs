//! Sandboxes outlive the platform's processes, each of them and all at once, and whoever comes next takes them over.

mod witness;

use std::time::Duration;

use space_client::SandboxOptions;
use space_test_support::{Part, Platform, eventually};
use witness::{RECOVERY, Witness, client};

const SPACE: &str = env!("CARGO_BIN_EXE_space");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_outlive_the_node() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let (mut first, mut second) = (Witness::new(&platform).await, Witness::new(&platform).await);
    for _ in 0..3 {
        platform.kill_part(Part::Node);
        first.check(&platform).await;
        second.check(&platform).await;
    }
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");
    first.end(&platform).await;
    second.check(&platform).await;
}

/// Neither do clients notice: the stream of a running command does not even break.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_and_their_streams_outlive_the_node_manager() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let mut witness = Witness::new(&platform).await;
    let sandbox = client(&platform)
        .create(&SandboxOptions::default())
        .await
        .expect("a sandbox");
    let mut stream = sandbox
        .start(&space_client::Command::shell("echo begin; read line; echo $line").stdin())
        .await
        .expect("started");
    let node = platform.part(Part::Node);
    platform.kill_part(Part::NodeManager);
    witness.check(&platform).await;
    let made = eventually("a create", RECOVERY, || {
        let output = platform.run(&["sandbox", "create"]);
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(id)
    });
    assert_eq!(
        platform.succeed(&["sandbox", "exec", &made, "echo works"]),
        "works"
    );
    sandbox
        .send_stdin(stream.pid(), b"through\n".to_vec().into())
        .await
        .expect("taken");
    let mut text = String::new();
    loop {
        match stream.next().await.expect("the stream goes on") {
            space_client::ProcessEvent::Stdout { bytes, .. } => {
                text.push_str(&String::from_utf8_lossy(&bytes));
            }
            space_client::ProcessEvent::End(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(text, "begin\nthrough\n");
    assert_eq!(platform.part(Part::Node), node, "the node went with the manager");
    // The new manager ends what the old one has started.
    witness.end(&platform).await;
    assert!(client(&platform).delete(sandbox.id()).await.expect("deleted"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_outlive_space_up_and_all_of_it() {
    let Some(mut platform) = Platform::start(SPACE) else {
        return;
    };
    let mut witness = Witness::new(&platform).await;
    let address = platform.url().trim_start_matches("http://").to_owned();

    // The node goes with the one that holds its socket: nobody is left on the port.
    platform.kill();
    // A process that has ended may have threads that hold its descriptors a moment longer.
    eventually("nobody listens", Duration::from_secs(20), || {
        std::net::TcpStream::connect(&address).is_err().then_some(())
    });
    platform.start_again();
    witness.check(&platform).await;

    platform.kill_all();
    platform.start_again();
    witness.check(&platform).await;
    witness.end(&platform).await;
    assert!(platform.stop().success());
    let remains = platform.remains();
    assert!(remains.is_empty(), "{remains:?}");
}

/// An upgrade: the platform is stopped and another version started, here the same one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_leaves_sandboxes_and_their_commands_running() {
    let Some(mut platform) = Platform::start_with(SPACE, &["--keep-sandboxes"]) else {
        return;
    };
    let mut witness = Witness::new(&platform).await;
    for _ in 0..2 {
        assert!(platform.stop().success(), "{}", platform.log());
        platform.start_again();
        witness.check(&platform).await;
    }
    assert_eq!(platform.succeed(&["run", "--", "echo", "works"]), "works");
    witness.end(&platform).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_that_dies_takes_one_sandbox_with_it_and_its_end_has_a_cause() {
    let Some(platform) = Platform::start(SPACE) else {
        return;
    };
    let mut witness = Witness::new(&platform).await;
    let victim = platform.succeed(&["sandbox", "create"]);
    platform.monitor_of(&victim).kill();
    let record = eventually("the end of the sandbox", RECOVERY, || {
        let record = platform.json(&["sandbox", "inspect", &victim]);
        (record["state"] == "ended").then_some(record)
    });
    assert_eq!(record["end_cause"]["kind"], "vmm_failed", "{record}");
    witness.check(&platform).await;

    // Adopted machines are watched just as well.
    let victim = platform.succeed(&["sandbox", "create"]);
    platform.kill_part(Part::Node);
    witness.check(&platform).await;
    platform.monitor_of(&victim).kill();
    let record = eventually("the end of the adopted sandbox", RECOVERY, || {
        let record = platform.json(&["sandbox", "inspect", &victim]);
        (record["state"] == "ended").then_some(record)
    });
    assert_eq!(record["end_cause"]["kind"], "vmm_failed", "{record}");
    witness.check(&platform).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_down_ends_what_a_dead_platform_has_left_and_nothing_else() {
    let Some(mut platform) = Platform::start(SPACE) else {
        return;
    };
    let mut witness = Witness::new(&platform).await;
    let data = platform.data_directory();
    let down = |platform: &Platform| {
        let output = platform.space(["down", "--data-dir"]).arg(&data).output();
        output.expect("runs")
    };
    let refused = down(&platform);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("another `space up`") && said.contains("Hint:"),
        "{said}"
    );
    witness.check(&platform).await;

    platform.kill();
    let output = down(&platform);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let remains = platform.remains();
    assert!(remains.is_empty(), "{remains:?}");
    platform.start_again();
    let record = platform.json(&["sandbox", "inspect", &witness.id]);
    assert_eq!(record["end_cause"]["kind"], "platform_restarted", "{record}");
}
