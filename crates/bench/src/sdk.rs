//! E2B's Python SDK, unmodified: a create with its first command, beside the same command in a running sandbox.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    platform::Platform,
    pool::Pool,
    report::{Promise, Report},
    statistics::{Times, round},
};

const SCRIPT: &str = include_str!("../sdk.py");
/// How long one process of it may take beyond its sandboxes' intervals.
const LIMIT: Duration = Duration::from_secs(120);
/// Most that the first command may take over the same one in a running sandbox.
const RATIO: f64 = 1.3;

/// How it is measured.
#[derive(Debug, Clone)]
pub(crate) struct SdkRun {
    /// A Python that has the SDK.
    pub(crate) python: PathBuf,
    /// Sandboxes for each version of HTTP.
    pub(crate) n: u32,
    /// From one create to the next.
    pub(crate) interval: Duration,
}

/// Measures over both versions of HTTP, each in a process of its own.
pub(crate) async fn measure(platform: &Platform, run: &SdkRun, report: &mut Report) -> Result<()> {
    let mut rows = Vec::new();
    for (key, version) in [("h1", "1.1"), ("h2", "2")] {
        Pool::full(&platform.client()?).await?;
        let said = script(platform, run, version).await?;
        let [create, create_run, warm] =
            ["create", "create_run", "warm"].map(|name| times(&said[name], run.n));
        let (create, create_run, warm) = (create?, create_run?, warm?);
        let [made, answered, running] = [&create, &create_run, &warm].map(|times| times.percentile(50));
        let ratio = (answered - made) / running;
        report.value(
            &format!("sdk.{key}"),
            json!({
                "n": create.count(),
                "create_ms": round(made),
                "create_run_ms": round(answered),
                "warm_ms": round(running),
                "ratio": round(ratio),
                "create": create.json(),
                "create_run": create_run.json(),
                "warm": warm.json(),
            }),
        );
        report.promise(Promise::at_most(&format!("sdk.{key}.ratio"), ratio, RATIO));
        rows.push(vec![
            format!("HTTP/{version}"),
            format!("{made:.1}"),
            format!("{answered:.1}"),
            format!("{running:.1}"),
            format!("{ratio:.2}"),
        ]);
    }
    report.table(
        "E2B's SDK, p50 ms",
        &["create", "create and run", "run in a running one", "ratio"],
        rows,
    );
    Ok(())
}

async fn script(platform: &Platform, run: &SdkRun, version: &str) -> Result<Value> {
    let mut command = tokio::process::Command::new(&run.python);
    command.args(["-c", SCRIPT, "--http", version]);
    command.arg("--n").arg(run.n.to_string());
    command
        .arg("--interval")
        .arg(run.interval.as_secs_f64().to_string());
    command
        .env("E2B_API_URL", platform.url())
        .env("E2B_SANDBOX_URL", platform.url())
        .env("E2B_API_KEY", platform.key());
    // Whatever else the user has set for E2B's own service would lead elsewhere.
    for other in ["E2B_DOMAIN", "E2B_DEBUG", "E2B_ACCESS_TOKEN", "E2B_HTTP_VERSION"] {
        command.env_remove(other);
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    let limit = LIMIT + run.interval * run.n;
    let output = tokio::time::timeout(limit, command.output())
        .await
        .with_context(|| format!("the SDK did not end within {} s", limit.as_secs()))?
        .with_context(|| format!("cannot start {}", shown(&run.python)))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "the SDK over HTTP/{version} failed ({}): {}",
        output.status,
        said.trim()
    );
    serde_json::from_slice(&output.stdout).context("the SDK's figures are no JSON")
}

fn times(list: &Value, n: u32) -> Result<Times> {
    let list = list.as_array().context("the SDK gave no list of times")?;
    let times: Times = list
        .iter()
        .filter_map(Value::as_f64)
        .map(|ms| Duration::from_secs_f64(ms / 1e3))
        .collect();
    ensure!(
        u32::try_from(times.count()) == Ok(n),
        "the SDK gave {} times, not {n}",
        times.count()
    );
    Ok(times)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
