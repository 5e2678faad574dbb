//! Finds out which QEMU there is and what it can do on this host.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use fs_err as fs;
use space_node_manager::Privileges;
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

/// With `privileges` to open what an ordinary user may not.
pub(super) async fn probe(
    config: &QemuConfig,
    privileges: Option<&dyn Privileges>,
) -> Result<(PathBuf, Capabilities), VmmError> {
    let program = match &config.program {
        Some(program) => program.clone(),
        None => find_on_path(std::env::var_os("PATH").unwrap_or_default().as_os_str())
            .ok_or_else(|| unavailable(format!("{PROGRAM} is not on the PATH; {HINT}")))?,
    };
    let program = real(&program)?;
    let version = version(&program).await?;
    let supported = numbers(&version).is_some_and(|found| found >= OLDEST);
    if !supported {
        return Err(unavailable(format!(
            "{} is version {version}, too old or unknown; {HINT}",
            program.display()
        )));
    }
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let missing = if config.accelerator == AcceleratorChoice::Tcg {
        Some("emulation was asked for")
    } else if !virtualises(&cpu) {
        Some("the CPU has neither vmx nor svm")
    } else if !kvm_opens(privileges).await {
        Some("/dev/kvm cannot be opened")
    } else {
        None
    };
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

/// The program itself, behind all links: the monitor's own file system holds no others. It must be root's alone, since the
/// node manager runs it for whoever asks.
fn real(program: &Path) -> Result<PathBuf, VmmError> {
    let cannot = |error| unavailable(format!("{} cannot be run ({error}); {HINT}", program.display()));
    let real = fs::canonicalize(program).map_err(cannot)?;
    let metadata = fs::metadata(&real).map_err(cannot)?;
    if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 {
        return Err(unavailable(format!(
            "{} can be changed by others than root; {HINT}",
            real.display()
        )));
    }
    Ok(real)
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

/// Whether the CPU has virtualisation to offer. The device file alone proves nothing: it may open, and even make a
/// machine, on a paravirtual host, and guests then crawl.
fn virtualises(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("flags")?.split_once(':'))
        .any(|(_, flags)| {
            flags
                .split_ascii_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        })
}

async fn kvm_opens(privileges: Option<&dyn Privileges>) -> bool {
    match privileges {
        Some(privileges) => privileges.open_kvm().await.is_ok(),
        None => fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok(),
    }
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
    fn a_program_that_others_can_change_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (program, link) = (directory.path().join("program"), directory.path().join("link"));
        fs::write(&program, "").unwrap();
        std::os::unix::fs::symlink(&program, &link).unwrap();
        let mode = |mode| {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&program, permissions).unwrap();
            real(&link)
        };
        assert!(mode(0o777).is_err());
        assert!(mode(0o775).is_err());
        assert!(real(&directory.path().join("missing")).is_err());
        if rustix::process::geteuid().is_root() {
            assert_eq!(mode(0o755).unwrap(), fs::canonicalize(&program).unwrap());
        } else {
            assert!(mode(0o755).is_err(), "it is not root's");
        }
    }

    #[test]
    fn the_device_file_alone_is_not_kvm() {
        assert!(!virtualises("flags\t\t: fpu vme msr\n"));
        assert!(virtualises("flags\t\t: fpu vmx msr\n"));
        assert!(virtualises("flags\t\t: fpu svm\n"));
        assert!(!virtualises("vmx flags\t\t: fpu\n"));
        assert!(!virtualises("flags\t\t: fpu vmxnot\n"));
    }

    #[tokio::test]
    async fn an_ordinary_user_has_the_device_opened_for_it() {
        let privileges = space_node_manager::RecordingPrivileges::default();
        assert!(kvm_opens(Some(&privileges)).await);
        privileges.fail_if(|act| matches!(act, space_node_manager::Act::OpenKvm));
        assert!(!kvm_opens(Some(&privileges)).await);
    }
}
