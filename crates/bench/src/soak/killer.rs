//! Kills processes of the platform at random moments, starts `space up` again, and watches it come back.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use rand::{Rng as _, rngs::StdRng};
use space_client::Client;

use super::{client::RECOVERY_LIMIT, ledger::Ledger};
use crate::{
    platform::Platform,
    processes::{Process, Role},
};

/// Between two looks at anything.
const PAUSE: Duration = Duration::from_millis(20);
/// After a start that failed; what the killed one left may still be going.
const START_AGAIN: Duration = Duration::from_millis(200);
/// Longest wait between the moment a kill is due and the kill.
const JITTER: Duration = Duration::from_millis(300);
/// One kill in so many is followed at once by another: recovery must survive that too.
const AGAIN_ONE_IN: u32 = 5;
/// How likely each is to be the victim, in parts.
const VICTIMS: [(Role, u32); 4] = [
    (Role::Monitor, 9),
    (Role::Node, 5),
    (Role::NodeManager, 4),
    (Role::Up, 2),
];

/// Kills `most` processes, spread over `rounds` rounds.
pub(super) async fn kill(
    platform: &RefCell<Platform>,
    client: &Client,
    ledger: &Ledger,
    rounds: u32,
    most: u32,
    mut random: StdRng,
) {
    while ledger.kills() < most && !ledger.is_over() {
        // In the middle of its stretch of rounds.
        let due = (2 * u64::from(ledger.kills()) + 1) * u64::from(rounds) / (2 * u64::from(most));
        while u64::from(ledger.rounds()) < due {
            if ledger.is_over() {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        tokio::time::sleep(JITTER.mul_f64(random.random())).await;
        let mut disturbed = one(platform, ledger, &mut random);
        if random.random_ratio(1, AGAIN_ONE_IN) && ledger.kills() < most {
            tokio::time::sleep(JITTER.mul_f64(random.random())).await;
            disturbed |= one(platform, ledger, &mut random);
        }
        if disturbed {
            let begin = Instant::now();
            match answers(client).await {
                Ok(()) => ledger.recovered(begin.elapsed()),
                Err(error) => ledger.fault(format!(
                    "the platform did not answer within {} s of a kill: {error}",
                    RECOVERY_LIMIT.as_secs()
                )),
            }
        }
    }
}

/// Kills one process; says whether it was one that the platform's answers need.
fn one(platform: &RefCell<Platform>, ledger: &Ledger, random: &mut StdRng) -> bool {
    let whole: u32 = VICTIMS.iter().map(|(_, parts)| parts).sum();
    let mut at = random.random_range(0..whole);
    let role = VICTIMS
        .iter()
        .find(|(_, parts)| {
            let here = at < *parts;
            at = at.saturating_sub(*parts);
            here
        })
        .map_or(Role::Monitor, |(role, _)| *role);
    let candidates: Vec<Process> = platform
        .borrow()
        .processes(role)
        .into_iter()
        .filter(Process::lives)
        .collect();
    // There may be none just now: it was killed a moment ago.
    if candidates.is_empty() {
        return false;
    }
    let victim = &candidates[random.random_range(0..candidates.len())];
    // Before the deed: a client may learn of it at once.
    match victim.kill() {
        Ok(true) => ledger.killed(role, victim.machine.as_deref()),
        Ok(false) => return false,
        Err(error) => {
            ledger.fault(format!("{error:#}"));
            return false;
        }
    }
    role != Role::Monitor
}

/// Waits until the platform answers twice in a row with a pause between: the first may still be the old process.
pub(super) async fn answers(client: &Client) -> Result<(), space_client::ClientError> {
    let begin = Instant::now();
    let mut good = 0;
    loop {
        match client.node().await {
            Ok(_) => good += 1,
            Err(error) if begin.elapsed() > RECOVERY_LIMIT => return Err(error),
            Err(_) => good = 0,
        }
        if good == 2 {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Starts `space up` again whenever it has ended; an end that no kill explains is a fault.
pub(super) async fn keep_up(platform: &RefCell<Platform>, ledger: &Ledger) {
    while !ledger.is_over() {
        let ended = platform.borrow_mut().ended();
        match ended {
            Ok(None) => {}
            Ok(Some(status)) => {
                if !ledger.explain_end() {
                    let said = platform.borrow().log_tail();
                    ledger.fault(format!("space up ended by itself ({status}):\n{said}"));
                    // What is wrong may be wrong for good.
                    tokio::time::sleep(START_AGAIN).await;
                }
                if let Err(error) = platform.borrow_mut().spawn() {
                    ledger.fault(format!("{error:#}"));
                }
            }
            Err(error) => ledger.fault(format!("{error:#}")),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
