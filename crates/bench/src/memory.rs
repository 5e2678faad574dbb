//! What an idle sandbox costs in memory.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use space_client::{Client, Command};

use crate::{
    create,
    report::{Figure, Report},
};

/// Memory of one process, bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Memory {
    /// Its share of everything: shared pages divided by those who share them.
    proportional: u64,
    /// What nobody shares.
    private: u64,
}

/// Makes `n` sandboxes, lets each run one command, and reads the memory of their monitors.
pub(crate) async fn idle_sandboxes(client: &Client, n: u32, report: &mut Report) -> Result<()> {
    let bar = create::progress("memory", n);
    let mut sandboxes = Vec::new();
    for _ in 0..n {
        let sandbox = create::create(client).await?;
        create::run(&sandbox, &Command::new("/bin/true")).await?;
        sandboxes.push(sandbox);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (mut proportional, mut private) = (0, 0);
    for sandbox in &sandboxes {
        let record = client.inspect(sandbox.id()).await?;
        let memory = memory_of(&monitor_of(create::machine_of(&record))?)?;
        proportional += memory.proportional;
        private += memory.private;
    }
    for sandbox in &sandboxes {
        create::end(client, sandbox).await?;
    }
    let mean = |bytes: u64| mebibytes(bytes) / f64::from(n);
    report.figure(Figure {
        key: "memory.pss_mib",
        what: "memory of an idle sandbox, proportional",
        value: mean(proportional),
        unit: "MiB",
    });
    report.figure(Figure {
        key: "memory.private_mib",
        what: "memory of an idle sandbox, private",
        value: mean(private),
        unit: "MiB",
    });
    Ok(())
}

/// The process directory of a machine's monitor: the one whose arguments name it.
pub(crate) fn monitor_of(machine: &str) -> Result<PathBuf> {
    ensure!(
        !machine.is_empty(),
        "the platform does not tell a sandbox's machine"
    );
    let name = format!("space-{machine}");
    for entry in fs_err::read_dir("/proc")? {
        let directory = entry?.path();
        // Processes end while we look.
        let Ok(command) = fs_err::read(directory.join("cmdline")) else {
            continue;
        };
        let mut words = command.split(|byte| *byte == 0);
        let is_monitor = words
            .next()
            .is_some_and(|program| String::from_utf8_lossy(program).contains("qemu-system"));
        if is_monitor && words.any(|word| word == name.as_bytes()) {
            return Ok(directory);
        }
    }
    anyhow::bail!("no monitor of machine {machine} runs here: the benchmark must run beside the platform")
}

fn memory_of(process: &Path) -> Result<Memory> {
    let text = fs_err::read_to_string(process.join("smaps_rollup"))?;
    parse(&text).context("smaps_rollup has another form than expected")
}

fn parse(text: &str) -> Result<Memory> {
    let mut memory = Memory::default();
    let mut found = 0;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (name, amount) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let target = match name {
            "Pss:" => &mut memory.proportional,
            "Private_Clean:" | "Private_Dirty:" => &mut memory.private,
            _ => continue,
        };
        *target += amount.parse::<u64>()? * 1024;
        found += 1;
    }
    ensure!(found == 3, "it has {found} of 3 lines");
    Ok(memory)
}

/// Bytes in MiB.
pub(crate) fn mebibytes(bytes: u64) -> f64 {
    // Whole KiB of any real machine fit into 32 bits.
    f64::from(u32::try_from(bytes / 1024).unwrap_or(u32::MAX)) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_memory_can_be_read() {
        let memory = memory_of(Path::new("/proc/self")).unwrap();
        assert!(
            memory.private > 0 && memory.proportional >= memory.private,
            "{memory:?}"
        );
    }

    #[test]
    fn a_file_of_another_form_is_an_error() {
        assert!(parse("Pss: 1 kB\n").is_err());
        assert!(parse("Pss: x kB\nPrivate_Clean: 1 kB\nPrivate_Dirty: 1 kB\n").is_err());
    }
}
