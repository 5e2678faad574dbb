//! Kills processes of the platform at random moments, starts `space up` again, and watches it come back.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rand::{Rng as _, rngs::StdRng};
use space_client::Client;

use super::{client::RECOVERY_LIMIT, ledger::Ledger};
use crate::{
    platform::Platform,
    processes::{Process, Role},
};

/// Between two looks at anything.
const PAUSE: Duration = Duration::from_millis(20);
/// Between an end of `space up` and its next start.
const START_AGAIN: Duration = Duration::from_millis(200);
/// How long after a kill its next start may fail.
const START_LIMIT: Duration = Duration::from_secs(10);
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
            match answers(platform, client).await {
                Ok(()) => ledger.recovered(begin.elapsed()),
                Err(error) => ledger.fault(format!(
                    "the platform did not answer within {} s of a kill: {error:#}",
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

/// Waits until the platform is whole and answers, twice in a row: the first answer may still be the old process's.
pub(super) async fn answers(platform: &RefCell<Platform>, client: &Client) -> Result<()> {
    let begin = Instant::now();
    let mut good = 0;
    loop {
        let whole = Role::PLATFORM.iter().all(|role| {
            let processes = platform.borrow().processes(*role);
            processes.iter().filter(|process| process.lives()).count() == 1
        });
        match client.node().await {
            Ok(_) if whole => good += 1,
            Ok(_) => good = 0,
            Err(error) if begin.elapsed() > RECOVERY_LIMIT => return Err(error.into()),
            Err(_) => good = 0,
        }
        if good == 2 {
            return Ok(());
        }
        ensure!(begin.elapsed() < RECOVERY_LIMIT, "not all of its processes run");
        tokio::time::sleep(PAUSE * 2).await;
    }
}

/// Starts `space up` again whenever it has ended, as a service manager would. An end that no kill explains is a fault; but
/// what it kept running ends a moment after it, and until then a start finds the port taken.
pub(super) async fn keep_up(platform: &RefCell<Platform>, ledger: &Ledger) {
    let mut killed: Option<Instant> = None;
    loop {
        let ended = platform.borrow_mut().ended();
        match ended {
            Ok(None) => {}
            Ok(Some(status)) => {
                if ledger.explain_end() {
                    killed = Some(Instant::now());
                } else if killed.is_none_or(|killed| killed.elapsed() > START_LIMIT) {
                    let said = platform.borrow().log_tail();
                    ledger.fault(format!("space up ended by itself ({status}):\n{said}"));
                }
                tokio::time::sleep(START_AGAIN).await;
                if let Err(error) = platform.borrow_mut().spawn() {
                    ledger.fault(format!("{error:#}"));
                }
            }
            Err(error) => ledger.fault(format!("{error:#}")),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
