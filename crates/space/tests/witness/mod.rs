//! A sandbox that would notice if it were not the same any more: a command that counts without pause, a file, a monitor.

use std::time::Duration;

use space_client::{Client, CollectLimits, Command, Endpoint, Process, ProcessEvent, Replay, SandboxOptions};
use space_test_support::{Platform, Process as HostProcess};

/// For anything to work again after a crash.
pub(crate) const RECOVERY: Duration = Duration::from_secs(30);
/// Counts for ever, a line every few milliseconds.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done";
const FILE: &str = "/home/user/witness";
const CONTENT: &[u8] = b"written before";

pub(crate) struct Witness {
    pub(crate) id: String,
    pid: u32,
    monitor: HostProcess,
    /// All that the command was seen to write.
    output: Vec<u8>,
}

/// A client of the platform as it is now: nothing is left of connections to one that is gone.
pub(crate) fn client(platform: &Platform) -> Client {
    Client::new(Endpoint::new(platform.url(), platform.key()).expect("valid")).expect("a client")
}

impl Witness {
    pub(crate) async fn new(platform: &Platform) -> Self {
        let sandbox = client(platform)
            .create(&SandboxOptions::default())
            .await
            .expect("a sandbox");
        sandbox
            .write_file(FILE, CONTENT.to_vec().into(), None)
            .await
            .expect("written");
        let mut process = sandbox.start(&Command::shell(COUNT)).await.expect("started");
        let id = sandbox.id().to_string();
        let mut witness = Self {
            monitor: platform.monitor_of(&id),
            pid: process.pid(),
            id,
            output: Vec::new(),
        };
        witness.read(&mut process, 5).await;
        witness
    }

    /// Reads until the command has counted `more` further, and checks that nothing is missing.
    async fn read(&mut self, process: &mut Process, more: usize) {
        let wanted = self.lines() + more;
        while self.lines() < wanted {
            let event = tokio::time::timeout(RECOVERY, process.next()).await;
            match event.expect("output in time").expect("the stream goes on") {
                ProcessEvent::Stdout { bytes, dropped } => {
                    assert_eq!(dropped, 0, "output was lost");
                    self.output.extend_from_slice(&bytes);
                }
                other => panic!("{other:?}"),
            }
        }
        let complete = self
            .output
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |at| at + 1);
        let text = String::from_utf8_lossy(&self.output[..complete]).into_owned();
        for (at, line) in text.lines().enumerate() {
            assert_eq!(
                line,
                (at + 1).to_string(),
                "the count has a gap: it began anew, or output is missing"
            );
        }
    }

    fn lines(&self) -> usize {
        self.output.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// The command runs on, all its output is there, the file too, and it is still the same machine.
    pub(crate) async fn check(&mut self, platform: &Platform) {
        let client = client(platform);
        let id = self.id.parse().expect("an id");
        let begin = std::time::Instant::now();
        let replay = Replay {
            stdout: self.output.len() as u64,
            ..Replay::default()
        };
        let (sandbox, mut process) = loop {
            let attached = match client.connect(&id, None).await {
                Ok(sandbox) => sandbox
                    .attach(self.pid, Some(replay))
                    .await
                    .map(|process| (sandbox, process)),
                Err(error) => Err(error),
            };
            match attached {
                Ok(attached) => break attached,
                Err(error) => assert!(begin.elapsed() < RECOVERY, "it does not answer again: {error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.read(&mut process, 10).await;
        let content = sandbox.read_file(FILE, None).await.expect("read");
        assert_eq!(content, CONTENT);
        let output = sandbox
            .run(&Command::new("echo").arg("alive"), CollectLimits::default())
            .await
            .expect("runs");
        assert_eq!(output.stdout.text(), "alive\n");
        assert!(self.monitor.lives(), "its monitor is another one");
        assert_eq!(platform.monitor_of(&self.id), self.monitor);
    }

    /// Ends it, and sees its monitor go.
    pub(crate) async fn end(self, platform: &Platform) {
        let client = client(platform);
        let id = self.id.parse().expect("an id");
        assert!(client.delete(&id).await.expect("deleted"));
        space_test_support::eventually("the end of its monitor", RECOVERY, || {
            (!self.monitor.lives()).then_some(())
        });
    }
}
