//! Creates without a pool: against the floor, cold, many at once; and the round trip of a warm sandbox.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use indicatif::{ProgressBar, ProgressStyle};
use space_api::rest::SandboxRecord;
use space_client::{Client, CollectLimits, Command, Sandbox, SandboxOptions};

use crate::{
    cold, floor,
    machine::Host,
    report::{Bound, CurvePoint, Report},
    statistics::Times,
};

/// How long a sandbox of the benchmark lives at most, should the benchmark die.
pub(crate) const LIFETIME: Duration = Duration::from_secs(600);

/// Makes and ends one sandbox, so that files are in the page cache and connections are open; and makes sure that its
/// machine is the floor's.
pub(crate) async fn warm_up(client: &Client, host: &Host) -> Result<()> {
    let sandbox = create(client).await.context("the first create failed")?;
    let record = client.inspect(sandbox.id()).await?;
    let same = host.compare(machine_of(&record));
    end(client, &sandbox).await?;
    same
}

/// Alternates the floor with creates through the platform.
pub(crate) async fn against_floor(client: &Client, host: &Host, n: u32, report: &mut Report) -> Result<()> {
    let bar = progress("floor and platform", n);
    let (mut answers, mut acknowledged, mut ready, mut node) = (
        Times::default(),
        Times::default(),
        Times::default(),
        Times::default(),
    );
    // The first floor start reads what the platform does not, such as the benchmark's own pages.
    drop(floor::restore(host).await?);
    for _ in 0..n {
        let floor = floor::restore(host).await?;
        answers.push(floor.times.answer);
        acknowledged.push(floor.times.ready);
        floor.end()?;

        let begin = Instant::now();
        let sandbox = create(client).await?;
        ready.push(begin.elapsed());
        if let Some(ms) = client.inspect(sandbox.id()).await?.ready_ms {
            node.push(Duration::from_secs_f64(ms.max(0.0) / 1e3));
        }
        end(client, &sandbox).await?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    report.times("floor", answers);
    report.times("floor_ready", acknowledged);
    report.times("ready", ready);
    report.times("ready_on_node", node);
    report.ratio("ready_over_floor", "ready", "floor", Some(Bound::AtMost(1.25)));
    report.ratio("ready_over_floor_ready", "ready", "floor_ready", None);
    Ok(())
}

/// Boots the same machine without a snapshot.
pub(crate) async fn cold_boots(host: &Host, n: u32, report: &mut Report) -> Result<()> {
    let bar = progress("cold boots", n);
    let mut times = Times::default();
    for _ in 0..n {
        times.push(cold::boot(host).await?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    report.times("cold_boot", times);
    report.ratio(
        "cold_boot_over_ready",
        "cold_boot",
        "ready",
        Some(Bound::AtLeast(40.0)),
    );
    Ok(())
}

/// 1, 2, 4 … creates at once, `rounds` times each.
pub(crate) async fn curve(client: &Client, largest: u32, rounds: u32, report: &mut Report) -> Result<()> {
    let mut at_once = 1;
    let bar = progress("creates at once", largest.ilog2() + 1);
    while at_once <= largest {
        let mut latency = Times::default();
        let mut busy = Duration::ZERO;
        for _ in 0..rounds {
            let begin = Instant::now();
            let made = try_join_all((0..at_once).map(|_| async {
                let begin = Instant::now();
                let sandbox = create(client).await?;
                anyhow::Ok((sandbox, begin.elapsed()))
            }))
            .await?;
            busy += begin.elapsed();
            for (sandbox, took) in made {
                latency.push(took);
                end(client, &sandbox).await?;
            }
        }
        let per_second = f64::from(at_once * rounds) / busy.as_secs_f64();
        report.curve(CurvePoint {
            at_once,
            per_second,
            latency,
        });
        bar.inc(1);
        at_once *= 2;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Commands in a sandbox that has run them before.
pub(crate) async fn round_trips(client: &Client, n: u32, report: &mut Report) -> Result<()> {
    let sandbox = create(client).await?;
    for (key, command) in [
        ("exec", Command::new("/bin/true")),
        ("exec_shell", Command::shell("true")),
    ] {
        let bar = progress(key, n);
        for _ in 0..5 {
            run(&sandbox, &command).await?;
        }
        let mut times = Times::default();
        for _ in 0..n {
            let begin = Instant::now();
            run(&sandbox, &command).await?;
            times.push(begin.elapsed());
            bar.inc(1);
        }
        bar.finish_and_clear();
        report.times(key, times);
    }
    end(client, &sandbox).await
}

/// A sandbox of the template `base`, in its default size.
pub(crate) fn options() -> SandboxOptions {
    SandboxOptions {
        timeout: Some(LIFETIME),
        ..SandboxOptions::default()
    }
}

/// Makes one.
pub(crate) async fn create(client: &Client) -> Result<Sandbox> {
    Ok(client.create(&options()).await?)
}

/// Ends one, which must still be there.
pub(crate) async fn end(client: &Client, sandbox: &Sandbox) -> Result<()> {
    ensure!(
        client.delete(sandbox.id()).await?,
        "sandbox {} was gone already",
        sandbox.id()
    );
    Ok(())
}

/// Runs a command that must succeed.
pub(crate) async fn run(sandbox: &Sandbox, command: &Command) -> Result<()> {
    let output = sandbox.run(command, CollectLimits::default()).await?;
    ensure!(
        output.end.exit_code == 0,
        "a command failed: {}",
        output.stderr.text()
    );
    Ok(())
}

/// A bar on a terminal, nothing elsewhere.
pub(crate) fn progress(what: &'static str, length: u32) -> ProgressBar {
    let bar = ProgressBar::new(u64::from(length)).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg:<22} {bar:32} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// The name by which a sandbox's machine is found on the host; empty when it has none.
pub(crate) fn machine_of(record: &SandboxRecord) -> &str {
    record.machine.as_deref().unwrap_or_default()
}
