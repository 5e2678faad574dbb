//! The warm pool: creates at a steady rate, many at once, and as many as can be for a minute; what each costs.

use std::{
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use futures_util::future::{join_all, try_join_all};
use serde_json::{Map, Value, json};
use space_api::rest::PoolRecord;
use space_client::{Client, Command, SandboxOptions};
use tokio::time::MissedTickBehavior;

use crate::{
    create,
    platform::Platform,
    processes::{CpuMeter, CpuUse, Role, exact_cpu},
    report::{Promise, Report},
    statistics::{Times, round},
};

/// How long a pool of any size may take to be full.
const FULL_LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at it.
const PAUSE: Duration = Duration::from_secs(1);
/// Rates that are measured at unless told otherwise, creates per second.
const RATES: (f64, f64) = (0.5, 2.0);
/// The part of what refilling sustains that a steady rate takes.
const STEADY_SHARE: f64 = 0.5;
/// Creates at once in a burst.
pub(crate) const BURST: u32 = 32;

/// What the pool says of itself, all templates and sizes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Machines that stand ready.
    pub(crate) ready: usize,
    /// Machines it wants.
    pub(crate) target: usize,
    /// Creates that took one, since the start.
    pub(crate) hits: u64,
    /// Creates that found none.
    pub(crate) misses: u64,
}

impl Pool {
    /// Asks for it.
    pub(crate) async fn of(client: &Client) -> Result<Self> {
        Ok(Self::sum(&client.node().await?.pool))
    }

    fn sum(shelves: &[PoolRecord]) -> Self {
        let mut sum = Self::default();
        for shelf in shelves {
            sum.ready += shelf.ready;
            sum.target += shelf.target;
            sum.hits += shelf.hits;
            sum.misses += shelf.misses;
        }
        sum
    }

    /// Waits until it has all the machines it wants, and says how long that took.
    pub(crate) async fn full(client: &Client) -> Result<(Self, Duration)> {
        Self::reach(client, 1).await
    }

    /// The same, and it wants at least so many.
    async fn reach(client: &Client, least: usize) -> Result<(Self, Duration)> {
        let begin = Instant::now();
        loop {
            let pool = Self::of(client).await?;
            if pool.ready >= pool.target.max(least) {
                return Ok((pool, begin.elapsed()));
            }
            if begin.elapsed() > FULL_LIMIT {
                bail!(
                    "the pool did not have {} machines within {} s: {pool:?}",
                    pool.target.max(least),
                    FULL_LIMIT.as_secs()
                );
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Makes it want `size` machines, which follows from having been asked for as many at once, and waits until it has
    /// them. Says how long it took to make them all.
    pub(crate) async fn hold(client: &Client, size: u32, options: &SandboxOptions) -> Result<Duration> {
        let taken = try_join_all((0..size).map(|_| client.create(options))).await?;
        for sandbox in &taken {
            create::end(client, sandbox).await?;
        }
        let (_, took) = Self::reach(client, usize::try_from(size)?).await?;
        Ok(took)
    }

    /// The part of the creates since `earlier` that took a machine from it, percent.
    fn hit_percent(self, earlier: Self) -> f64 {
        let (hits, misses) = (self.hits - earlier.hits, self.misses - earlier.misses);
        percent(hits, hits + misses)
    }
}

/// How fast creates follow each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate(f64);

impl Rate {
    /// That many per second.
    pub(crate) const fn per_second(rate: f64) -> Self {
        Self(rate)
    }

    /// What a pool sustains that was filled in that time with that many machines, with room to spare.
    pub(crate) fn sustained_by(machines: u32, took: Duration) -> Self {
        let refill = f64::from(machines) / took.as_secs_f64().max(0.001);
        // Whole tenths: a rate that people can name.
        Self(((refill * STEADY_SHARE * 10.0).floor() / 10.0).clamp(RATES.0, RATES.1))
    }

    /// From one create to the next.
    pub(crate) fn interval(self) -> Duration {
        Duration::from_secs_f64(1.0 / self.0)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}/s", self.0)
    }
}

/// Fills the pool and decides the rate, unless one is given.
pub(crate) async fn fill(
    client: &Client,
    size: u32,
    given: Option<f64>,
    report: &mut Report,
) -> Result<Rate> {
    let options = create::options();
    let first = Pool::hold(client, size, &options).await?;
    // Emptied at once and filled again, with nothing else to do: this is what refilling takes.
    let again = Pool::hold(client, size, &options).await?;
    let rate = given.map_or_else(|| Rate::sustained_by(size, again), Rate::per_second);
    report.value("pool_size", json!(size));
    report.value("pool_first_fill_s", json!(round(first.as_secs_f64())));
    report.value("pool_refill_s", json!(round(again.as_secs_f64())));
    report.value("pool_rate_per_s", json!(round(rate.0)));
    report.note(format!(
        "a pool of {size} was refilled in {:.1} s; the steady rate is {rate}",
        again.as_secs_f64()
    ));
    Ok(rate)
}

/// Creates at a steady rate with refill running, each deleted as soon as it is ready.
pub(crate) async fn steady(
    platform: &Platform,
    client: &Client,
    n: u32,
    rate: Rate,
    report: &mut Report,
) -> Result<()> {
    let before = Pool::full(client).await?.0;
    let meter = CpuMeter::begin(&platform.data_directory(), platform.installation())?;
    let bar = create::progress("pool, steady", n);
    let (mut ready, mut on_node, mut deletes) = (Times::default(), Times::default(), Times::default());
    let mut ticks = ticks(rate);
    for _ in 0..n {
        ticks.tick().await;
        let begin = Instant::now();
        let sandbox = create::create(client).await?;
        ready.push(begin.elapsed());
        if let Some(ms) = client.inspect(sandbox.id()).await?.ready_ms {
            on_node.push(Duration::from_secs_f64(ms.max(0.0) / 1e3));
        }
        let begin = Instant::now();
        create::end(client, &sandbox).await?;
        deletes.push(begin.elapsed());
        bar.inc(1);
    }
    bar.finish_and_clear();
    let used = meter.end()?;
    let after = Pool::of(client).await?;

    for (percentile, bound) in [(50, 10.0), (90, 20.0), (99, 60.0)] {
        let key = format!("pool.p{percentile}_ms");
        report.promise(Promise::at_most(&key, ready.percentile(percentile), bound));
    }
    report.times("pool", ready);
    report.times("pool_on_node", on_node);
    report.times("delete", deletes);
    report.value("pool_hit_percent", json!(round(after.hit_percent(before))));
    report.promise(Promise::at_least(
        "pool_hit_percent",
        after.hit_percent(before),
        99.0,
    ));

    report.value("platform_cpu_per_create", per_create(&used, n));
    Ok(())
}

/// What a create, a delete and the making of the next machine each cost the platform itself. Refilling holds back while
/// creates come, so a full pool that is emptied at once tells them apart.
pub(crate) async fn cpu_split(
    platform: &Platform,
    client: &Client,
    size: u32,
    report: &mut Report,
) -> Result<()> {
    let now = || exact_cpu(&platform.data_directory(), platform.installation());
    Pool::hold(client, size, &create::options()).await?;
    let mut at = vec![now()?];
    let mut sandboxes = Vec::new();
    for _ in 0..size {
        sandboxes.push(create::create(client).await?);
    }
    at.push(now()?);
    for sandbox in &sandboxes {
        create::end(client, sandbox).await?;
    }
    at.push(now()?);
    Pool::reach(client, usize::try_from(size)?).await?;
    at.push(now()?);
    let names = ["create_ms", "delete_ms", "refill_ms"];
    for (name, pair) in names.into_iter().zip(at.windows(2)) {
        let [before, after] = pair else { continue };
        let each = after.saturating_sub(*before).as_secs_f64() * 1e3 / f64::from(size);
        if name == "create_ms" {
            report.promise(Promise::at_most("platform_cpu_split.create_ms", each, 3.0));
        }
        report.value(&format!("platform_cpu_split.{name}"), json!(round(each)));
        report.row(
            "the platform's own CPU, ms per sandbox",
            &["ms"],
            vec![name.trim_end_matches("_ms").to_owned(), format!("{each:.2}")],
        );
    }
    Ok(())
}

/// Create to the result of the first command, from the pool at the steady rate.
pub(crate) async fn first_results(client: &Client, n: u32, rate: Rate, report: &mut Report) -> Result<()> {
    let commands = [
        ("first_result", Command::new("/bin/true")),
        ("first_result_shell", Command::shell("true")),
    ];
    for (key, command) in commands {
        Pool::full(client).await?;
        let bar = create::progress(key, n);
        let mut times = Times::default();
        let mut ticks = ticks(rate);
        for _ in 0..n {
            ticks.tick().await;
            let begin = Instant::now();
            let sandbox = create::create(client).await?;
            create::run(&sandbox, &command).await?;
            times.push(begin.elapsed());
            create::end(client, &sandbox).await?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        if key == "first_result" {
            report.promise(Promise::at_most(
                "first_result.p50_ms",
                times.percentile(50),
                35.0,
            ));
        }
        report.times(key, times);
    }
    Ok(())
}

/// All creates of a burst at once; every one must succeed. `size` is the pool's, 0 for none.
pub(crate) async fn burst(
    client: &Client,
    size: u32,
    at_once: u32,
    rounds: u32,
    report: &mut Report,
) -> Result<()> {
    let mut times = Times::default();
    let mut busy = Duration::ZERO;
    for _ in 0..rounds {
        if size > 0 {
            Pool::hold(client, size, &create::options()).await?;
        }
        let begin = Instant::now();
        let made = join_all((0..at_once).map(|_| async {
            let begin = Instant::now();
            let sandbox = create::create(client).await?;
            anyhow::Ok((sandbox, begin.elapsed()))
        }))
        .await;
        busy += begin.elapsed();
        let mut failed = Vec::new();
        for each in made {
            match each {
                Ok((sandbox, took)) => {
                    times.push(took);
                    create::end(client, &sandbox).await?;
                }
                Err(error) => failed.push(format!("{error:#}")),
            }
        }
        ensure!(
            failed.is_empty(),
            "{} of {at_once} creates at once failed, the first: {}",
            failed.len(),
            failed[0]
        );
    }
    let per_second = f64::from(at_once * rounds) / busy.as_secs_f64();
    let mut json = times.json();
    if let Value::Object(fields) = &mut json {
        fields.insert("per_second".to_owned(), json!(round(per_second)));
    }
    report.value(&format!("burst.pool_{size}"), json);
    let mut row = vec![format!("pool of {size}"), format!("{per_second:.1}")];
    row.extend([50, 90, 100].map(|percent| format!("{:.1}", times.percentile(percent))));
    report.row(
        &format!("{at_once} creates at once"),
        &["per second", "p50 ms", "p90 ms", "max ms"],
        row,
    );
    Ok(())
}

/// As many rounds of create, run, delete as `clients` clients get done in that time, and who used the CPUs.
pub(crate) async fn sustained(
    platform: &Platform,
    clients: u32,
    time: Duration,
    report: &mut Report,
) -> Result<()> {
    let client = platform.client()?;
    let before = Pool::full(&client).await?.0;
    let meter = CpuMeter::begin(&platform.data_directory(), platform.installation())?;
    let begin = Instant::now();
    let end = begin + time;
    let command = Command::new("/bin/true");
    let rounds = try_join_all((0..clients).map(|_| async {
        let client = platform.client()?;
        let mut creates = Times::default();
        while Instant::now() < end {
            let begin = Instant::now();
            let sandbox = create::create(&client).await?;
            creates.push(begin.elapsed());
            create::run(&sandbox, &command).await?;
            create::end(&client, &sandbox).await?;
        }
        anyhow::Ok(creates)
    }))
    .await?;
    let took = begin.elapsed();
    let used = meter.end()?;
    let hits = Pool::of(&client).await?.hit_percent(before);
    let mut creates = Times::default();
    for each in rounds {
        creates.extend(each);
    }
    let n = u32::try_from(creates.count()).unwrap_or(u32::MAX);
    let per_second = f64::from(n) / took.as_secs_f64();
    let share = |part: Duration| 100.0 * part.as_secs_f64() / used.whole.as_secs_f64().max(0.001);
    let (guests, ours) = (share(used.guests), share(used.platform_total()));
    let (bench, idle) = (share(used.own), share(used.idle));
    report.value(
        &format!("sustained.clients_{clients}"),
        json!({
            "creates": n,
            "seconds": round(took.as_secs_f64()),
            "per_second": round(per_second),
            "create": creates.json(),
            "pool_hit_percent": round(hits),
            "cpu_percent": {
                "guests": round(guests),
                "platform": round(ours),
                "benchmark": round(bench),
                "idle": round(idle),
            },
            "platform_cpu_per_create": per_create(&used, n),
        }),
    );
    report.row(
        "create, run, delete without a pause",
        &[
            "per second",
            "create p50",
            "p99",
            "from pool %",
            "CPU guests %",
            "platform %",
            "benchmark %",
            "idle %",
        ],
        vec![
            format!("{clients} clients"),
            format!("{per_second:.1}"),
            format!("{:.1}", creates.percentile(50)),
            format!("{:.1}", creates.percentile(99)),
            format!("{hits:.0}"),
            format!("{guests:.1}"),
            format!("{ours:.1}"),
            format!("{bench:.1}"),
            format!("{idle:.1}"),
        ],
    );
    Ok(())
}

/// CPU milliseconds of the platform's processes for each of `n` creates with all that follows from one.
fn per_create(used: &CpuUse, n: u32) -> Value {
    let of = |time: Duration| round(time.as_secs_f64() * 1e3 / f64::from(n.max(1)));
    let mut json = Map::new();
    for role in Role::PLATFORM {
        let time = used.platform.get(&role).copied().unwrap_or_default();
        json.insert(format!("{}_ms", role.as_str()), json!(of(time)));
    }
    json.insert("total_ms".to_owned(), json!(of(used.platform_total())));
    Value::Object(json)
}

/// One tick per create; a create that takes longer does not make the next ones hurry.
fn ticks(rate: Rate) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(rate.interval());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

fn percent(part: u64, whole: u64) -> f64 {
    let float = |number: u64| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
    if whole == 0 {
        0.0
    } else {
        100.0 * float(part) / float(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_leaves_refilling_room_and_can_be_named() {
        let rate = |machines, seconds| Rate::sustained_by(machines, Duration::from_secs(seconds)).0;
        assert_eq!(round(rate(16, 5)), 1.6);
        assert_eq!(round(rate(16, 1)), RATES.1, "no faster than is meant");
        assert_eq!(round(rate(16, 600)), RATES.0);
        assert_eq!(Rate::per_second(2.0).interval(), Duration::from_millis(500));
    }

    #[test]
    fn hits_are_those_in_between() {
        let pool = |hits, misses| Pool {
            hits,
            misses,
            ..Pool::default()
        };
        assert_eq!(round(pool(13, 3).hit_percent(pool(10, 2))), 75.0);
        assert_eq!(round(pool(5, 5).hit_percent(pool(5, 5))), 0.0);
    }

    #[test]
    fn all_shelves_count() {
        let shelf = |ready, hits| PoolRecord {
            template: "base:latest".to_owned(),
            size: "1x512x4096".to_owned(),
            ready,
            warming: 1,
            target: 4,
            hits,
            misses: 1,
        };
        let pool = Pool::sum(&[shelf(3, 10), shelf(1, 0)]);
        assert_eq!((pool.ready, pool.target, pool.hits, pool.misses), (4, 8, 10, 2));
        assert_eq!(Pool::sum(&[]), Pool::default());
    }
}
