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
    let mut rows = Vec::<(&str, Vec<Duration>)>::new();
    let mut memory = String::new();
    for _ in 0..count {
        let (steps, used) = one(&lab, &template).await?;
        memory = used;
        for (name, time) in steps {
            match rows.iter_mut().find(|(row, _)| *row == name) {
                Some((_, times)) => times.push(time),
                None => rows.push((name, vec![time])),
            }
        }
    }
    for (name, mut times) in rows {
        times.sort();
        let at = |percent: usize| milliseconds(times[(times.len() - 1) * percent / 100]);
        println!(
            "{name:40} p50 {:6.2} ms  p90 {:6.2}  min {:6.2}  (n = {count})",
            at(50),
            at(90),
            at(0)
        );
    }
    println!("memory of the last one: {memory}");
    lab.done().await
}

async fn one(lab: &Lab, template: &lab::Template) -> Result<(Vec<(&'static str, Duration)>, String)> {
    let start = Instant::now();
    let running = lab.restore(template, Wish::default()).await?;
    let mut steps = running.steps.clone();
    let loaded = Instant::now();
    let mut port = Talk::control(&running).await?;
    // Said before it runs: it lies there when the guest looks.
    port.say("hello you").await?;
    running.machine.resume().await?;
    steps.push(("monitor: cont", loaded.elapsed()));
    let resumed = Instant::now();
    ensure!(port.hear().await? == "hello you");
    steps.push(("guest: to its answer", resumed.elapsed()));
    steps.push(("in all", start.elapsed()));
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
    Ok((steps, memory))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
