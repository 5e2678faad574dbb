//! What an idle sandbox costs in memory at each size, and what that is made of; and that no guest changes what all share.

use std::{
    collections::BTreeMap,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use space_api::size::SizeClass;
use space_client::{Client, Command, SandboxOptions};

use crate::{
    create,
    machine::BaseFiles,
    memory::{mebibytes, monitor_of},
    pool::Pool,
    report::Report,
    smaps::{self, Kind, Parts},
    statistics::round,
};

/// Sizes that are measured, MiB.
pub(crate) const SIZES: [u32; 3] = [128, 256, 512];
/// How long a sandbox is left alone before its memory is read.
const IDLE: Duration = Duration::from_secs(2);
/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// Measures `n` sandboxes of one size.
pub(crate) async fn measure(client: &Client, memory_mib: u32, n: u32, report: &mut Report) -> Result<()> {
    // The first of a size makes the machine that all of them start from, and tells which size class that is.
    let first = create::create(client).await?;
    let record = client.inspect(first.id()).await?;
    create::end(client, &first).await?;
    let size = SizeClass {
        vcpus: record.vcpus,
        memory_mib,
        disk_mib: record.disk_mib,
    };
    let options = SandboxOptions {
        size: Some(size),
        ..create::options()
    };
    let first = client.create(&options).await?;
    let monitor = monitor_of(create::machine_of(&client.inspect(first.id()).await?))?;
    let files = BaseFiles::of_command_line(&monitor)?;
    create::end(client, &first).await?;
    let before = digests(&files.all())?;
    let inode = fs_err::metadata(&files.memory)?.ino();

    Pool::hold(client, n, &options).await?;
    let pool = Pool::of(client).await?;
    let bar = create::progress("idle sandboxes", n);
    let mut sandboxes = Vec::new();
    for _ in 0..n {
        sandboxes.push(client.create(&options).await?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    tokio::time::sleep(IDLE).await;
    let mut parts = Parts::new();
    for sandbox in &sandboxes {
        let record = client.inspect(sandbox.id()).await?;
        for (kind, amount) in smaps::parts_of(&monitor_of(create::machine_of(&record))?, inode)? {
            parts.entry(kind).or_default().add(amount);
        }
    }
    let hits = Pool::of(client).await?.hits - pool.hits;

    // Guests that write to as much memory and disk as they can, before the shared files are looked at again.
    let line = "head -c 20000000 /dev/urandom > /var/tmp/x && sync && sha256sum /var/tmp/x";
    for sandbox in &sandboxes {
        create::run(sandbox, &Command::shell(line).user("root")).await?;
    }
    for sandbox in &sandboxes {
        create::end(client, sandbox).await?;
    }
    let untouched = before == digests(&files.all())?;
    add(report, memory_mib, n, hits, &parts, untouched);
    ensure!(
        untouched,
        "a file that all sandboxes share has changed: {:?}",
        files.all()
    );
    Ok(())
}

fn add(report: &mut Report, memory_mib: u32, n: u32, hits: u64, parts: &Parts, untouched: bool) {
    let mean = |bytes: u64| round(mebibytes(bytes) / f64::from(n));
    let amount = |amount: smaps::Amount| {
        json!({
            "resident_mib": mean(amount.resident),
            "pss_mib": mean(amount.proportional),
            "private_mib": mean(amount.private),
        })
    };
    let by_kind: Map<String, Value> = Kind::ALL
        .into_iter()
        .map(|kind| {
            let part = parts.get(&kind).copied().unwrap_or_default();
            (kind.key().to_owned(), amount(part))
        })
        .collect();
    let sum = smaps::sum(parts);
    report.value(
        &format!("density.{memory_mib}"),
        json!({
            "n": n,
            "from_pool": hits,
            "pss_mib": mean(sum.proportional),
            "private_mib": mean(sum.private),
            "resident_mib": mean(sum.resident),
            "parts": by_kind,
            "base_files_untouched": untouched,
        }),
    );
    let title = format!("MiB of an idle sandbox of {memory_mib} MiB ({n} of them)");
    let mut rows: Vec<Vec<String>> = Kind::ALL
        .into_iter()
        .map(|kind| row(kind.what(), parts.get(&kind).copied().unwrap_or_default(), mean))
        .collect();
    rows.push(row("together", sum, mean));
    report.table(&title, &["resident", "PSS", "private"], rows);
}

fn row(what: &str, amount: smaps::Amount, mean: impl Fn(u64) -> f64) -> Vec<String> {
    let mut row = vec![what.to_owned()];
    row.extend(
        [amount.resident, amount.proportional, amount.private].map(|bytes| format!("{:.1}", mean(bytes))),
    );
    row
}

fn digests(files: &[&Path]) -> Result<BTreeMap<PathBuf, String>> {
    files
        .iter()
        .map(|file| {
            let digest = digest(file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(((*file).to_owned(), digest))
        })
        .collect()
}

fn digest(file: &Path) -> Result<String> {
    let mut file = fs_err::File::open(file)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(space_api::key::hex(&digest.finalize())),
            read => digest.update(&buffer[..read]),
        }
    }
}
