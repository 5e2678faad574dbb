//! One client of the soak: rounds of create, run, delete, and what to think of each that does not go as it should.
//!
//! ```text
//!  create ──(asked again with its key until answered)──► run ──► delete ──(asked again until it is gone)──► clean
//!    │ refused with a reason: create failed                │ no answer
//!    │                                                     ▼
//!    │                        within 30 s: usable ─────► recovered
//!    │                                     ended, cause ► lost, and only if we killed its monitor
//!    ▼                                     else ────────► a fault
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use space_api::{
    error::ErrorCode,
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
    rest::SandboxRecord,
};
use space_client::{Client, ClientError, CollectLimits, Command, Sandbox, SandboxOptions};

use super::ledger::{Ledger, Outcome};
use crate::create;

/// How long the platform may take to be itself again after anything.
pub(super) const RECOVERY_LIMIT: Duration = Duration::from_secs(30);
/// How long one command may take, on a machine that is busy with others.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a sandbox lives should the soak die.
const LIFETIME: Duration = Duration::from_secs(3600);

/// Rounds until there are no more.
pub(super) async fn rounds(client: &Client, ledger: &Ledger, most: u32, seed: u64) {
    while let Some(number) = ledger.begin_round(most) {
        let outcome = match round(client, ledger, number, seed).await {
            Ok(outcome) => outcome,
            Err(error) => {
                ledger.fault(format!("round {number}: {error:#}"));
                Outcome::Wrong
            }
        };
        ledger.end_round(outcome);
    }
}

async fn round(client: &Client, ledger: &Ledger, number: u32, seed: u64) -> Result<Outcome> {
    let monitors_killed = ledger.monitor_kills();
    let (sandbox, tries) = match make(client, ledger, &format!("soak-{seed:x}-{number}")).await? {
        Made::Sandbox(sandbox, tries) => (*sandbox, tries),
        Made::Refused => return Ok(Outcome::CreateFailed),
    };
    let id = sandbox.id();
    // Known only while it lives; without it a loss is explained by any kill of a monitor since the create.
    let machine = client
        .inspect(id)
        .await
        .ok()
        .map(|record| create::machine_of(&record).to_owned())
        .filter(|machine| !machine.is_empty());
    let word = format!("round {number}");
    let mut outcome = if tries == 1 {
        Outcome::Clean
    } else {
        Outcome::Recovered
    };
    if let Err(error) = say(&sandbox, &word).await {
        outcome = match verdict(client, &sandbox, &word).await {
            Ok(Verdict::Usable) => Outcome::Recovered,
            Ok(Verdict::Ended(cause)) => {
                let explained = match &machine {
                    Some(machine) => ledger.was_killed(machine),
                    None => ledger.monitor_kills() > monitors_killed,
                };
                ensure!(
                    explained,
                    "sandbox {id} was lost though nobody killed its monitor: {cause:?} after {error:#}"
                );
                Outcome::Lost
            }
            Err(worse) => bail!("sandbox {id}: {worse:#}, after {error:#}"),
        };
    }
    Ok(match remove(client, id).await? {
        1 => outcome,
        _ if outcome == Outcome::Lost => Outcome::Lost,
        _ => Outcome::Recovered,
    })
}

enum Made {
    /// With the number of tries it took.
    Sandbox(Box<Sandbox>, u32),
    Refused,
}

/// Creates one, asking again with the same key for as long as nobody can say what became of it.
async fn make(client: &Client, ledger: &Ledger, key: &str) -> Result<Made> {
    let options = SandboxOptions {
        timeout: Some(LIFETIME),
        idempotency_key: Some(key.to_owned()),
        ..SandboxOptions::default()
    };
    let begin = Instant::now();
    for tries in 1.. {
        let error = match client.create(&options).await {
            Ok(sandbox) => {
                ledger.keep(sandbox.id());
                return Ok(Made::Sandbox(Box::new(sandbox), tries));
            }
            Err(error) => error,
        };
        match error.error_code() {
            // Decided, and said so; the last look at all sandboxes sees that it ended with a cause.
            Some(ErrorCode::SandboxCreateFailed | ErrorCode::IdempotencyOutcomeUnknown) => {
                return Ok(Made::Refused);
            }
            _ if is_passing(&error) => {}
            _ => return Err(error).context("a create was refused"),
        }
        if begin.elapsed() > RECOVERY_LIMIT * 2 {
            return Err(error).context("a create did not come to an end");
        }
        tokio::time::sleep(PAUSE).await;
    }
    bail!("there are no more tries")
}

/// Whether the same question may have another answer in a moment.
pub(super) fn is_passing(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::Refused { body } => matches!(body.code, 409 | 429 | 500..),
        _ => false,
    }
}

/// Lets the sandbox say something.
pub(super) async fn say(sandbox: &Sandbox, word: &str) -> Result<()> {
    let command = Command::new("/bin/echo").arg(word);
    let output = tokio::time::timeout(COMMAND_LIMIT, sandbox.run(&command, CollectLimits::default()))
        .await
        .with_context(|| {
            format!(
                "a command neither ended nor failed within {} s",
                COMMAND_LIMIT.as_secs()
            )
        })??;
    let said = output.stdout.text();
    ensure!(
        output.end.exit_code == 0 && said.trim() == word,
        "a command said {said:?}, not {word:?}: {:?}",
        output.end
    );
    Ok(())
}

/// What a sandbox has become.
pub(super) enum Verdict {
    /// It does what it is told.
    Usable,
    /// It is gone, and it is known why.
    Ended(EndCause),
}

/// Waits until a sandbox is one or the other; anything else after the time that recovery may take is an error.
pub(super) async fn verdict(client: &Client, sandbox: &Sandbox, word: &str) -> Result<Verdict> {
    let begin = Instant::now();
    loop {
        let last = match client.inspect(sandbox.id()).await {
            Ok(record) if record.state == SandboxState::Ended => {
                let cause = record.end_cause.context("it ended without a cause")?;
                return Ok(Verdict::Ended(cause));
            }
            Ok(SandboxRecord { state, .. }) => match say(sandbox, word).await {
                Ok(()) => return Ok(Verdict::Usable),
                Err(error) => error.context(format!("it is {}", state.as_str())),
            },
            Err(error) => error.into(),
        };
        if begin.elapsed() > RECOVERY_LIMIT {
            return Err(last.context("it is neither usable nor ended"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Deletes one, asking again until it is gone; says how many times it had to be asked.
pub(super) async fn remove(client: &Client, id: &SandboxId) -> Result<u32> {
    let begin = Instant::now();
    let mut tries = 1;
    loop {
        match client.delete(id).await {
            Ok(_) => return Ok(tries),
            Err(error) if is_passing(&error) && begin.elapsed() < RECOVERY_LIMIT * 2 => {}
            Err(error) => return Err(error).with_context(|| format!("sandbox {id} could not be deleted")),
        }
        tries += 1;
        tokio::time::sleep(PAUSE).await;
    }
}
