//! Under which conditions was measured: figures mean nothing without them.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// The machine, its software, and the state of the source.
#[derive(Debug, Clone)]
pub(crate) struct Conditions {
    cpu: String,
    cores: usize,
    memory_mib: u64,
    kernel: String,
    vmm: String,
    commit: String,
    load: String,
}

impl Conditions {
    /// Reads them; `vmm` is what the node says of its driver.
    pub(crate) fn gather(vmm: &str) -> Result<Self> {
        let cpuinfo = fs_err::read_to_string("/proc/cpuinfo")?;
        let meminfo = fs_err::read_to_string("/proc/meminfo")?;
        let release = fs_err::read_to_string("/proc/sys/kernel/osrelease")?;
        let load = fs_err::read_to_string("/proc/loadavg")?;
        Ok(Self {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: field(&meminfo, "MemTotal")
                .and_then(|value| value.split(' ').next())
                .and_then(|kib| kib.parse::<u64>().ok())
                .context("/proc/meminfo has no MemTotal")?
                / 1024,
            kernel: release.trim().to_owned(),
            vmm: vmm.to_owned(),
            commit: commit(),
            load: load.split(' ').next().unwrap_or_default().to_owned(),
        })
    }

    /// Name and value of each, for people.
    pub(crate) fn rows(&self) -> Vec<(&'static str, String)> {
        vec![
            ("CPU", format!("{}, {} cores", self.cpu, self.cores)),
            ("memory", format!("{} MiB", self.memory_mib)),
            ("kernel", self.kernel.clone()),
            ("monitor", self.vmm.clone()),
            ("commit", self.commit.clone()),
            ("load before", self.load.clone()),
        ]
    }

    /// The same for programs.
    pub(crate) fn json(&self) -> Value {
        json!({
            "cpu": self.cpu,
            "cores": self.cores,
            "memory_mib": self.memory_mib,
            "kernel": self.kernel,
            "vmm": self.vmm,
            "commit": self.commit,
            "load": self.load,
        })
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

/// The commit of the source, with a mark when the tree differs from it; unknown outside of a checkout.
fn commit() -> String {
    Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .filter(|commit| !commit.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files_are_found() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nMemTotal:       24105 kB\n";
        assert_eq!(field(text, "model name"), Some("Some CPU @ 2.00GHz"));
        assert_eq!(field(text, "MemTotal"), Some("24105 kB"));
        assert_eq!(field(text, "none"), None);
    }
}
