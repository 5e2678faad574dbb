//! What `create` and `density` measure, in which order, and on which platforms.
//!
//! ```text
//!  create:   no pool ► floor against platform, cold boots, curve, burst
//!            pool of 16 ► steady rate, first results, SDK, burst, warm answers, memory, files, a minute of 1, 2, 4 clients
//!            pool of 8 ► burst             machine of the floor ► control port beside unread streams
//! ```

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use space_api::size::SizeClass;

use crate::{
    conditions::Conditions,
    create, density, files,
    machine::Host,
    memory,
    platform::{Platform, Programs},
    pool::{self, Rate},
    report::Report,
    sdk::{self, SdkRun},
    streams,
};

/// Options of `create`
#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    programs: Programs,
    /// Starts of each kind without a pool; fewer than 50 are no result
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    n: u32,
    /// Creates from the pool; fewer than 200 are no result
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pool_n: u32,
    /// Creates per second from the pool [default: half of what refilling sustains, 0.5 to 2]
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,
    /// Cold boots, at least 3 for a result
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    cold: u32,
    /// Seconds of each sustained run
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Python that has E2B's SDK
    #[arg(long, value_name = "PATH")]
    python: PathBuf,
    /// Only see whether everything can be measured: few of each, and small
    #[arg(long)]
    smoke: bool,
    /// Write the figures here as JSON, after each section
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Options of `density`
#[derive(Debug, Args)]
pub(crate) struct Density {
    #[command(flatten)]
    programs: Programs,
    /// Idle sandboxes of each size
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    n: u32,
    /// Their memory, MiB
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_values_t = density::SIZES)]
    memory: Vec<u32>,
    /// Write the figures here as JSON, after each size
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Most machines of the default size that a pool keeps though nobody asks for them.
const PINNED: u32 = 2;

/// How much of each there is.
#[derive(Debug)]
struct Amounts {
    n: u32,
    pool_n: u32,
    first: u32,
    cold: u32,
    largest: u32,
    rounds: u32,
    burst: u32,
    pools: [u32; 2],
    sdk: u32,
    seconds: u64,
    clients: &'static [u32],
    idle: u32,
    mib: usize,
}

impl Amounts {
    fn of(options: &Create) -> Self {
        if options.smoke {
            return Self {
                n: 3,
                pool_n: 4,
                first: 2,
                cold: 1,
                largest: 2,
                rounds: 1,
                burst: 4,
                pools: [3, 2],
                sdk: 2,
                seconds: 2,
                clients: &[2],
                idle: 2,
                mib: 4,
            };
        }
        Self {
            n: options.n,
            pool_n: options.pool_n,
            first: 50,
            cold: options.cold,
            largest: 16,
            rounds: 3,
            burst: pool::BURST,
            pools: [16, 8],
            sdk: 30,
            seconds: options.seconds,
            clients: &[1, 2, 4],
            idle: 8,
            mib: 64,
        }
    }
}

/// Measures creates; `true` if everything could be measured.
pub(crate) async fn create(options: &Create) -> Result<bool> {
    let amounts = Amounts::of(options);
    let platform = without_pool(&options.programs).await?;
    let client = platform.client()?;
    let host = Host::open(platform.templates()).await?;
    let node = client.node().await.context("the platform does not answer")?;
    let conditions = Conditions::gather(&node.vmm)?;
    let mut report = Report::new(conditions, amounts.n, options.smoke, options.json.clone());
    let report = &mut report;

    create::warm_up(&client, &host).await?;
    let measured = create::against_floor(&client, &host, amounts.n, report).await;
    report.section("floor", measured)?;
    let measured = create::cold_boots(&host, amounts.cold, report).await;
    report.section("cold boots", measured)?;
    let measured = create::curve(&client, amounts.largest, amounts.rounds, report).await;
    report.section("curve", measured)?;
    let measured = pool::burst(&client, 0, amounts.burst, amounts.rounds, report).await;
    report.section("burst without a pool", measured)?;
    let measured = stop(platform).await;
    report.section("stop without a pool", measured)?;

    let measured = with_pool(options, &amounts, &host, report).await;
    report.section("pool", measured)?;
    let measured = burst_of_pool(&options.programs, &amounts, report).await;
    report.section("burst of a smaller pool", measured)?;
    let measured = streams::control_answers(&host, amounts.n, report).await;
    report.section("unread streams", measured)?;
    host.close().await?;
    finish(report)
}

/// Everything that is measured on one platform with a full pool.
async fn with_pool(options: &Create, amounts: &Amounts, host: &Host, report: &mut Report) -> Result<()> {
    let size = amounts.pools[0];
    let platform = pool_of(&options.programs, size).await?;
    let client = platform.client()?;
    let rate = pool::fill(&client, size, options.rate, report).await?;

    let measured = pool::steady(&platform, &client, amounts.pool_n, rate, report).await;
    report.section("pool, steady", measured)?;
    let measured = pool::cpu_split(&platform, &client, size, report).await;
    report.section("CPU by what it is for", measured)?;
    let measured = pool::first_results(&client, amounts.first, rate, report).await;
    report.section("first results", measured)?;
    let measured = measure_sdk(options, amounts, &platform, rate, report).await;
    report.section("SDK", measured)?;
    let measured = pool::burst(&client, size, amounts.burst, amounts.rounds, report).await;
    report.section("burst", measured)?;
    let measured = create::round_trips(&client, amounts.n, report).await;
    report.section("round trips", measured)?;
    let measured = memory::idle_sandboxes(&client, amounts.idle, report).await;
    report.section("memory", measured)?;
    let measured = files::throughput(&client, host, amounts.mib, report).await;
    report.section("files", measured)?;
    for &clients in amounts.clients {
        let time = Duration::from_secs(amounts.seconds);
        let measured = pool::sustained(&platform, clients, time, report).await;
        report.section("sustained", measured)?;
    }
    stop(platform).await
}

async fn measure_sdk(
    options: &Create,
    amounts: &Amounts,
    platform: &Platform,
    rate: Rate,
    report: &mut Report,
) -> Result<()> {
    let run = SdkRun {
        python: options.python.clone(),
        n: amounts.sdk,
        interval: rate.interval(),
    };
    sdk::measure(platform, &run, report).await
}

async fn burst_of_pool(programs: &Programs, amounts: &Amounts, report: &mut Report) -> Result<()> {
    let size = amounts.pools[1];
    let platform = pool_of(programs, size).await?;
    pool::burst(&platform.client()?, size, amounts.burst, amounts.rounds, report).await?;
    stop(platform).await
}

/// Measures the memory of idle sandboxes; `true` if all sizes could be.
pub(crate) async fn density(options: &Density) -> Result<bool> {
    make_machines(options)?;
    // What the default size is kept of all the time takes its part.
    let platform = pool_of(&options.programs, options.n + PINNED).await?;
    let client = platform.client()?;
    let node = client.node().await.context("the platform does not answer")?;
    let mut report = Report::new(
        Conditions::gather(&node.vmm)?,
        options.n,
        false,
        options.json.clone(),
    );
    for &memory_mib in &options.memory {
        let measured = density::measure(&client, memory_mib, options.n, &mut report).await;
        report.section("density", measured)?;
    }
    let measured = stop(platform).await;
    report.section("stop", measured)?;
    finish(&mut report)
}

/// Has the machines of all sizes made, where they are missing: a create would do so too, but with a limit in time that a
/// small machine's first start under emulation does not keep.
fn make_machines(options: &Density) -> Result<()> {
    let programs = &options.programs;
    println!("making machines of all sizes, where they are missing: this takes some minutes, once");
    let mut command = Command::new(&programs.space);
    command.args(["template", "build", "base", "--if-missing"]);
    for &memory_mib in &options.memory {
        let size = SizeClass {
            memory_mib,
            ..SizeClass::DEFAULT
        };
        command.arg("--size").arg(size.to_string());
    }
    command
        .arg("--templates")
        .arg(&programs.templates)
        .arg("--daemon")
        .arg(&programs.daemon);
    let status = command
        .stdin(Stdio::null())
        .status()
        .context("cannot start space template build")?;
    ensure!(status.success(), "space template build failed ({status})");
    Ok(())
}

fn finish(report: &mut Report) -> Result<bool> {
    let good = report.finish()?;
    println!("\n{report}");
    Ok(good)
}

async fn without_pool(programs: &Programs) -> Result<Platform> {
    Platform::start(programs, &["--pool", "0"]).await
}

async fn pool_of(programs: &Programs, size: u32) -> Result<Platform> {
    Platform::start(programs, &["--pool", &size.to_string()]).await
}

async fn stop(mut platform: Platform) -> Result<()> {
    platform.stop().await
}
