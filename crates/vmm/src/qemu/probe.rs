//! Finds out which QEMU there is and what it can do on this host.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use fs_err as fs;
use tokio::process::Command;

use crate::{AcceleratorChoice, Capabilities, QemuConfig, VmmError};

/// Name of the program on `PATH`.
const PROGRAM: &str = "qemu-system-x86_64";

/// The oldest version whose options are all there.
const OLDEST: (u32, u32) = (8, 2);

/// How long `--version` may take.
const LIMIT: Duration = Duration::from_secs(10);

/// How to get a QEMU that is new enough.
const HINT: &str =
    "install QEMU 8.2 or newer (Debian 12: `apt install -t bookworm-backports qemu-system-x86`)";

pub(super) async fn probe(config: &QemuConfig) -> Result<(PathBuf, Capabilities), VmmError> {
    let program = match &config.program {
        Some(program) => program.clone(),
        None => find_on_path(std::env::var_os("PATH").unwrap_or_default().as_os_str())
            .ok_or_else(|| unavailable(format!("{PROGRAM} is not on the PATH; {HINT}")))?,
    };
    let version = version(&program).await?;
    let supported = numbers(&version).is_some_and(|found| found >= OLDEST);
    if !supported {
        return Err(unavailable(format!(
            "{} is version {version}, too old or unknown; {HINT}",
            program.display()
        )));
    }
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let missing = kvm_missing(&cpu, Path::new("/dev/kvm"));
    let kvm = match (config.accelerator, missing) {
        (AcceleratorChoice::Kvm, Some(missing)) => {
            return Err(unavailable(format!("KVM cannot be used: {missing}")));
        }
        (AcceleratorChoice::Kvm | AcceleratorChoice::Auto, None) => true,
        (AcceleratorChoice::Auto, Some(missing)) => {
            tracing::info!(missing, "machines are emulated");
            false
        }
        (AcceleratorChoice::Tcg, _) => false,
    };
    let cpu_model = match (&config.cpu_model, kvm) {
        (Some(model), true) if model == "host" => {
            let what = "CPU model \"host\" ties snapshots to this machine; name a model instead".to_owned();
            return Err(VmmError::Unsupported { what });
        }
        (Some(model), true) => model.clone(),
        (None, true) if cpu.contains("AuthenticAMD") => "EPYC".to_owned(),
        (None, true) => "Haswell-noTSX".to_owned(),
        (_, false) => "max".to_owned(),
    };
    let capabilities = Capabilities {
        driver: "qemu",
        version,
        accelerator: if kvm { "kvm" } else { "tcg" },
        cpu_model,
        isolates_hostile_code: kvm,
        layered_disks: true,
    };
    Ok((program, capabilities))
}

fn unavailable(what: String) -> VmmError {
    VmmError::Unavailable { what }
}

fn find_on_path(path: &std::ffi::OsStr) -> Option<PathBuf> {
    std::env::split_paths(path)
        .map(|directory| directory.join(PROGRAM))
        .find(|p| p.is_file())
}

/// The text after `version`, as printed.
async fn version(program: &Path) -> Result<String, VmmError> {
    let run = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(LIMIT, run).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => {
            return Err(unavailable(format!(
                "{} cannot be run ({error}); {HINT}",
                program.display()
            )));
        }
        Err(_) => {
            return Err(VmmError::TimedOut {
                command: "--version".to_owned(),
                seconds: LIMIT.as_secs(),
            });
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .lines()
        .next()
        .and_then(|line| line.split_once(" version "))
        .map(|(_, version)| version);
    match version {
        Some(version) => Ok(version.chars().take(100).collect()),
        None => Err(unavailable(format!(
            "{} does not tell its version; {HINT}",
            program.display()
        ))),
    }
}

fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Why KVM cannot be used. The device file alone proves nothing: it may open, and even make a machine, on a
/// paravirtual host whose CPU has no virtualisation to offer, and guests then crawl.
fn kvm_missing(cpuinfo: &str, device: &Path) -> Option<&'static str> {
    let has_flag = cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("flags")?.split_once(':'))
        .any(|(_, flags)| {
            flags
                .split_ascii_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        });
    if !has_flag {
        return Some("the CPU has neither vmx nor svm");
    }
    if fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .is_err()
    {
        return Some("/dev/kvm cannot be opened");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(numbers("10.0.2 (Debian 1:10.0.2+ds-2)"), Some((10, 0)));
        assert_eq!(numbers("8.2.50"), Some((8, 2)));
        assert!(numbers("7.2.9").unwrap() < OLDEST);
        assert_eq!(numbers("unknown"), None);
    }

    #[test]
    fn the_device_file_alone_is_not_kvm() {
        let openable = Path::new("/dev/null");
        assert_eq!(
            kvm_missing("flags\t\t: fpu vme msr\n", openable),
            Some("the CPU has neither vmx nor svm")
        );
        assert_eq!(kvm_missing("flags\t\t: fpu vmx msr\n", openable), None);
        assert_eq!(
            kvm_missing("flags\t\t: fpu svm\n", Path::new("/nonexistent")),
            Some("/dev/kvm cannot be opened")
        );
        assert_eq!(
            kvm_missing("vmx flags\t\t: fpu\n", openable),
            Some("the CPU has neither vmx nor svm")
        );
    }
}
