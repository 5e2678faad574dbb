//! Where the time of a restore goes: prints the median of each step over N machines.
//!
//! `cargo run -p space-vmm --example restore_timing [N]` (root; makes the lab guest on first use)

#![expect(clippy::print_stdout, reason = "its output is its purpose")]
#![expect(dead_code, reason = "the lab holds more than one program uses")]

#[path = "../tests/lab/mod.rs"]
mod lab;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::{Lab, Talk, Wish};

const STEPS: [&str; 4] = [
    "group, network, disk, start to state loaded",
    "cont",
    "first answer",
    "in all",
];

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let count = std::env::args()
        .nth(1)
        .map_or(Ok(30), |n| n.parse())
        .context("N is a number")?;
    let lab = lab::lab("timing").await?;
    let start = Instant::now();
    let template = lab.template().await?;
    println!("boot to template: {:.0} ms", milliseconds(start.elapsed()));
    let mut steps = [const { Vec::new() }; STEPS.len()];
    let mut memory = String::new();
    for _ in 0..count {
        memory = one(&lab, &template, &mut steps).await?;
    }
    for (name, times) in STEPS.iter().zip(&mut steps) {
        times.sort();
        let at = |percent: usize| milliseconds(times[(times.len() - 1) * percent / 100]);
        println!(
            "{name:45} p50 {:6.1} ms  p90 {:6.1}  min {:6.1}  (n = {count})",
            at(50),
            at(90),
            at(0)
        );
    }
    println!("memory of the last one: {memory}");
    lab.done().await
}

async fn one(
    lab: &Lab,
    template: &lab::Template,
    steps: &mut [Vec<Duration>; STEPS.len()],
) -> Result<String> {
    let start = Instant::now();
    let running = lab.restore(template, Wish::default()).await?;
    let loaded = start.elapsed();
    let mut port = Talk::control(&running).await?;
    // Said before it runs: it lies there when the guest looks.
    port.say("hello you").await?;
    running.machine.resume().await?;
    let resumed = start.elapsed();
    ensure!(port.hear().await? == "hello you");
    let answered = start.elapsed();
    for (times, time) in steps
        .iter_mut()
        .zip([loaded, resumed - loaded, answered - resumed, answered])
    {
        times.push(time);
    }
    let rollup = fs_err::read_to_string(format!("/proc/{}/smaps_rollup", running.machine.process().pid))?;
    let of = |key: &str| {
        rollup
            .lines()
            .find_map(|l| l.strip_prefix(key))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let memory = format!(
        "RSS {}, PSS {}, private {}",
        of("Rss:"),
        of("Pss:"),
        of("Private_Dirty:")
    );
    lab.remove(running).await?;
    Ok(memory)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
