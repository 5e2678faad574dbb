//! A sandbox that lives through the soak, with a command that counts: whatever of the platform is killed, the sandbox, the
//! command and all it has said must be there afterwards.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use space_client::{Client, Command, ProcessEvent, Replay, Sandbox, SandboxOptions};

use super::{
    client::{self, RECOVERY_LIMIT, Verdict},
    ledger::Ledger,
};
use crate::create;

/// Between two looks at it.
const INTERVAL: Duration = Duration::from_secs(1);
/// Before the next look when something was wrong.
const PAUSE: Duration = Duration::from_millis(100);
/// Counts, slowly enough to cost next to nothing.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 1; done";

/// Watches one sandbox after the other, each as long as its monitor lives.
pub(super) async fn watch(client: &Client, ledger: &Ledger, number: u32) {
    while !ledger.is_over() {
        if let Err(error) = one(client, ledger, number).await {
            ledger.fault(format!("resident {number}: {error:#}"));
        }
    }
}

async fn one(client: &Client, ledger: &Ledger, number: u32) -> Result<()> {
    let options = SandboxOptions {
        timeout: Some(Duration::from_secs(24 * 3600)),
        ..SandboxOptions::default()
    };
    let sandbox = match client.create(&options).await {
        Ok(sandbox) => sandbox,
        // The platform is on its way back. What became of this create is seen at the end.
        Err(error) if client::is_passing(&error) => {
            tokio::time::sleep(INTERVAL).await;
            return Ok(());
        }
        Err(error) => return Err(error).context("a create was refused"),
    };
    let id = sandbox.id().clone();
    ledger.keep(&id);
    let watched = live(client, ledger, &sandbox, number).await;
    client::remove(client, &id).await?;
    watched
}

/// Looks at it until it is over or its monitor was killed.
async fn live(client: &Client, ledger: &Ledger, sandbox: &Sandbox, number: u32) -> Result<()> {
    let id = sandbox.id();
    let word = format!("resident {number}");
    let mut machine = String::new();
    let mut counter = None;
    // Since when it has not counted, though the platform says that the sandbox is usable.
    let mut missing: Option<Instant> = None;
    while !ledger.is_over() {
        let looked = async {
            if machine.is_empty() {
                machine = create::machine_of(&client.inspect(id).await?).to_owned();
            }
            let pid = match counter {
                Some(pid) => pid,
                None => *counter.insert(sandbox.start(&Command::shell(COUNT)).await?.pid()),
            };
            counts(sandbox, pid).await
        }
        .await;
        let Err(error) = looked else {
            missing = None;
            tokio::time::sleep(INTERVAL).await;
            continue;
        };
        match client::verdict(client, sandbox, &word).await {
            // Then so must be what ran in it; unless something else was killed just now.
            Ok(Verdict::Usable) => {
                let since = *missing.get_or_insert_with(Instant::now);
                ensure!(
                    since.elapsed() < RECOVERY_LIMIT,
                    "sandbox {id} came back without its command: {error:#}"
                );
            }
            Ok(Verdict::Ended(_)) if machine.is_empty() || ledger.was_killed(&machine) => return Ok(()),
            Ok(Verdict::Ended(cause)) => {
                bail!("sandbox {id} was lost though nobody killed its monitor: {cause:?} after {error:#}")
            }
            Err(worse) => bail!("sandbox {id}: {worse:#}, after {error:#}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// The command runs, and its output can be read from the first byte on.
async fn counts(sandbox: &Sandbox, pid: u32) -> Result<()> {
    let reading = async {
        let mut process = sandbox.attach(pid, Some(Replay::default())).await?;
        loop {
            match process.next().await? {
                ProcessEvent::Stdout { bytes, dropped } => {
                    ensure!(dropped == 0, "{dropped} bytes of its output are lost");
                    ensure!(bytes.starts_with(b"1\n"), "its output begins with {bytes:?}");
                    return Ok(());
                }
                ProcessEvent::End(end) => bail!("it ended: {end:?}"),
                _ => {}
            }
        }
    };
    tokio::time::timeout(RECOVERY_LIMIT, reading)
        .await
        .context("its output did not come")?
}
