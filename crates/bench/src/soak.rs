//! The soak: many rounds of create, run, delete while processes of the platform are killed at random, and afterwards a
//! count of everything that must be back where it was.
//!
//! ```text
//!  start ► a few rounds ► settle, count ► clients, residents ∥ kills, restarts ► every sandbox: ended, with a cause?
//!    ► settle, count again: as before? ► orderly stop ► nothing left?
//! ```

mod client;
mod killer;
mod ledger;
mod resident;

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Args;
use futures_util::future::join_all;
use rand::{SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use space_api::lifecycle::SandboxState;
use space_client::Client;
use space_test_support::{Census, Difference, Remains};

use self::{
    client::{RECOVERY_LIMIT, Verdict},
    ledger::Ledger,
};
use crate::{
    create,
    platform::{Platform, Programs},
    processes::Role,
    report::table,
};

/// How long the platform may take to put everything away.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);
/// How long counts must stay the same to be believed.
const STILL: Duration = Duration::from_secs(4);
/// Between two counts.
const PAUSE: Duration = Duration::from_millis(500);
/// Sandboxes looked at in one call; the API gives no more.
const RECORDS: u32 = 1000;
/// Rounds before the first count, so that everything that is made once is made.
const WARM_UP_ROUNDS: u32 = 4;
/// Descriptors that may come and go without a leak: connections of the count's own questions, idle ones in pools.
const DESCRIPTOR_SLACK: usize = 4;

/// Options of `soak`
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    programs: Programs,
    /// Rounds of create, run, delete
    #[arg(long, default_value_t = 2000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Processes killed meanwhile
    #[arg(long, default_value_t = 200, value_name = "N")]
    kills: u32,
    /// Clients at a time
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    clients: u32,
    /// End after so many seconds though rounds are left
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Repeats the choices of an earlier run
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Machines the platform keeps ready; with more than two their number follows demand, and counts are hard to compare
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    pool: u32,
    /// Write everything here as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Sandboxes that live through all of it.
const RESIDENTS: u32 = 2;

/// Runs one; `true` if nothing was wrong.
pub(crate) async fn run(options: &Options) -> Result<bool> {
    let seed = options.seed.unwrap_or_else(rand::random);
    println!("seed {seed}: the same choices again with --seed {seed}");
    let pool = options.pool.to_string();
    let platform = Platform::start(&options.programs, &["--pool", &pool, "--capacity", "32"]).await?;
    let platform = RefCell::new(platform);
    warm_up(&platform).await?;
    let before = settle(&platform, None).await;
    let ledger = Ledger::default();
    let begin = Instant::now();
    take_part(&platform, &ledger, options, seed).await?;
    let took = begin.elapsed();
    println!("looking at what is left after {:.0} s", took.as_secs_f64());

    let client = platform.borrow().client()?;
    every_end_is_known(&client, &ledger).await?;
    drop(client);
    let after = settle(&platform, Some(&before)).await;
    for difference in differences(&after, &before) {
        ledger.fault(format!("left on this machine: {difference}"));
    }
    let mut platform = platform.into_inner();
    stop(&mut platform, &ledger).await;
    let json = json!({
        "seed": seed,
        "seconds": took.as_secs_f64(),
        "clients": options.clients,
        "pool": options.pool,
        "soak": ledger.json(),
        "before": before.counts(),
        "after": after.counts(),
        "passed": ledger.fault_count() == 0,
    });
    show(&ledger, &before, &after, took);
    if ledger.fault_count() > 0 {
        println!("the platform's log: {}", platform.keep_log()?.display());
    }
    if let Some(file) = &options.json {
        write(file, &json)?;
    }
    Ok(ledger.fault_count() == 0)
}

/// Everybody at once, until the rounds are done or the time is over.
async fn take_part(
    platform: &RefCell<Platform>,
    ledger: &Ledger,
    options: &Options,
    seed: u64,
) -> Result<()> {
    let new_client = || platform.borrow().client();
    let each = (0..options.clients)
        .map(|_| new_client())
        .collect::<Result<Vec<Client>>>()?;
    let watchers = (0..RESIDENTS)
        .map(|_| new_client())
        .collect::<Result<Vec<Client>>>()?;
    let killing = new_client()?;
    let random = StdRng::seed_from_u64(seed);
    let working = async {
        let all = join_all(
            each.iter()
                .map(|each| client::rounds(each, ledger, options.rounds, seed)),
        );
        match options.seconds {
            Some(seconds) => {
                let watch = async {
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    // Rounds that have begun are not cut off.
                    ledger.no_more_rounds();
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    _ = all => {}
                    () = watch => {}
                }
            }
            None => drop(all.await),
        }
        ledger.finish();
    };
    let residents = watchers
        .iter()
        .zip(1..)
        .map(|(client, number)| resident::watch(client, ledger, number));
    let all = async {
        tokio::join!(
            working,
            join_all(residents),
            killer::kill(platform, &killing, ledger, options.rounds, options.kills, random),
            progress(ledger, options),
        );
        // The last kill may have been of `space up` itself, a moment ago.
        killer::answers(platform, &killing).await
    };
    tokio::select! {
        whole = all => whole.context("the platform did not come back"),
        () = killer::keep_up(platform, ledger) => Ok(()),
    }
}

/// Says now and then how far it is.
async fn progress(ledger: &Ledger, options: &Options) {
    let mut next = Instant::now();
    while !ledger.is_over() {
        if next.elapsed() > Duration::from_secs(15) {
            next = Instant::now();
            println!(
                "{} of {} rounds, {} of {} kills, {} faults",
                ledger.rounds(),
                options.rounds,
                ledger.kills(),
                options.kills,
                ledger.fault_count()
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn warm_up(platform: &RefCell<Platform>) -> Result<()> {
    let client = platform.borrow().client()?;
    for _ in 0..WARM_UP_ROUNDS {
        let sandbox = create::create(&client).await?;
        client::say(&sandbox, "warm").await?;
        create::end(&client, &sandbox).await?;
    }
    Ok(())
}

/// Every sandbox that was ever made: the last ones must end when they are told to, and each end must have a cause.
async fn every_end_is_known(client: &Client, ledger: &Ledger) -> Result<()> {
    // Creates whose answers nobody waited for have left sandboxes that must be usable, or go away by themselves.
    for listed in client.sandboxes().await? {
        let id = listed.sandbox_id.parse().context("a sandbox id")?;
        match client.connect(&id, None).await {
            Ok(sandbox) => match client::verdict(client, &sandbox, "still there").await {
                Ok(Verdict::Usable | Verdict::Ended(_)) => {}
                Err(error) => ledger.fault(format!("sandbox {id} at the end: {error:#}")),
            },
            Err(error) if error.is_not_found() => {}
            Err(error) => ledger.fault(format!("sandbox {id} at the end: {error:#}")),
        }
        if let Err(error) = client::remove(client, &id).await {
            ledger.fault(format!("{error:#}"));
        }
    }
    let begin = Instant::now();
    loop {
        let open: Vec<_> = client
            .records(RECORDS)
            .await?
            .into_iter()
            .filter(|record| record.state != SandboxState::Ended)
            .map(|record| format!("{} is {}", record.id, record.state.as_str()))
            .collect();
        if open.is_empty() {
            break;
        }
        if begin.elapsed() > RECOVERY_LIMIT {
            ledger.fault(format!("not ended: {}", open.join(", ")));
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    // The newest ones with those nobody knows of, and each one that a client had.
    let mut records = client.records(RECORDS).await?;
    for id in ledger.sandboxes() {
        if records.iter().all(|record| record.id != id) {
            records.push(client.inspect(&id).await?);
        }
    }
    for record in records {
        match &record.end_cause {
            Some(cause) => ledger.cause(
                serde_json::to_value(cause)?["kind"]
                    .as_str()
                    .unwrap_or("without a name"),
            ),
            None => ledger.fault(format!("sandbox {} ended without a cause", record.id)),
        }
    }
    Ok(())
}

/// Counts until nothing changes any more, or, with something to compare with, until it is as it was; at most for a while.
async fn settle(platform: &RefCell<Platform>, before: Option<&Census>) -> Census {
    let begin = Instant::now();
    let mut last = count(platform);
    let mut since = Instant::now();
    loop {
        tokio::time::sleep(PAUSE).await;
        let now = count(platform);
        if now.counts() != last.counts() {
            since = Instant::now();
        }
        last = now;
        let still = since.elapsed() > STILL;
        let good = before.is_none_or(|before| differences(&last, before).is_empty());
        if (still && good) || begin.elapsed() > SETTLE_LIMIT {
            return last;
        }
    }
}

fn count(platform: &RefCell<Platform>) -> Census {
    let platform = platform.borrow();
    let processes: Vec<u32> = Role::PLATFORM
        .into_iter()
        .flat_map(|role| platform.processes(role))
        .filter_map(|process| u32::try_from(process.pid).ok())
        .collect();
    Census::take(platform.installation(), &platform.data_directory(), &processes)
}

/// What is more than it was. Fewer is no leak, but a platform that has not come back whole.
fn differences(now: &Census, before: &Census) -> Vec<Difference> {
    let mut found = now.differences(before);
    found.retain(|difference| {
        difference.kind != "descriptors" || difference.now > difference.before + DESCRIPTOR_SLACK
    });
    found
}

/// Stops it in order; then nothing may be left.
async fn stop(platform: &mut Platform, ledger: &Ledger) {
    if let Err(error) = platform.stop().await {
        ledger.fault(format!("{error:#}"));
    }
    let left = Remains::of(platform.installation(), &platform.data_directory());
    if !left.is_empty() {
        ledger.fault(format!("left after an orderly stop: {left:?}"));
    }
}

fn show(ledger: &Ledger, before: &Census, after: &Census, took: Duration) {
    let title = format!("soak of {:.0} s", took.as_secs_f64());
    let mut outcomes = table(&[&title, ""], 1);
    for (what, value) in ledger.rows() {
        outcomes.add_row([what, value]);
    }
    let mut counts = table(&["on this machine", "before", "after"], 2);
    let now = after.counts();
    for (kind, count) in before.counts() {
        let now = now.get(kind).copied().unwrap_or(0);
        counts.add_row([kind.to_owned(), count.to_string(), now.to_string()]);
    }
    println!("\n{outcomes}\n\n{counts}");
}

fn write(file: &Path, json: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(json).context("the figures are no JSON")?;
    Ok(fs_err::write(file, text + "\n")?)
}
