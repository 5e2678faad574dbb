//! Learns from the host's own apt configuration where Debian packages come from.

use std::time::Duration;

use crate::{VolumeError, command::Program};

/// The release that templates are made of.
pub(crate) const SUITE: &str = "bookworm";

const LIMIT: Duration = Duration::from_secs(60);

/// One `deb` line of an apt source list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    uri: String,
    suite: String,
}

impl Source {
    pub(crate) fn line(&self) -> String {
        format!("deb {} {} main", self.uri, self.suite)
    }
}

/// The host's sources of [`SUITE`], the release itself first.
pub(crate) async fn host_sources() -> Result<Vec<Source>, VolumeError> {
    let output = Program::new("apt-get", "apt", LIMIT)
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)",
            "Created-By: Packages",
        ])
        .output()
        .await?;
    select(&String::from_utf8_lossy(&output)).ok_or_else(|| VolumeError::PackageSource {
        what: "apt on this host knows no Debian mirror: add one to its sources and run `apt-get update`"
            .to_owned(),
    })
}

/// Picks the sources of [`SUITE`] out of apt's own listing. On a host of another Debian release, its mirror is used:
/// mirrors carry all releases.
pub(crate) fn select(listing: &str) -> Option<Vec<Source>> {
    let mut sources: Vec<Source> = Vec::new();
    let mut any_mirror = None;
    for line in listing.lines() {
        let fields: Vec<&str> = line.split('|').collect();
        let [uri, release, "main", origin] = fields[..] else {
            continue;
        };
        let source = Source {
            uri: uri.to_owned(),
            suite: release.to_owned(),
        };
        let wanted = release == SUITE
            || release
                .strip_prefix(SUITE)
                .is_some_and(|rest| rest == "-updates" || rest == "-security");
        if wanted && !sources.contains(&source) {
            sources.push(source);
        } else if origin == "Debian" && !release.contains('-') {
            any_mirror.get_or_insert_with(|| uri.to_owned());
        }
    }
    sources.sort_by(|a, b| {
        a.suite
            .len()
            .cmp(&b.suite.len())
            .then_with(|| a.suite.cmp(&b.suite))
    });
    if sources.first().is_none_or(|first| first.suite != SUITE) {
        let uri = any_mirror?;
        sources.insert(
            0,
            Source {
                uri,
                suite: SUITE.to_owned(),
            },
        );
    }
    Some(sources)
}

/// The newest Debian package whose name is `linux-image-6.12…-cloud-amd64`, by apt's own lists.
pub(crate) async fn newest_kernel_package() -> Result<String, VolumeError> {
    let output = Program::new("apt-cache", "apt", LIMIT)
        .args(["search", "--names-only", r"^linux-image-6\.12\..*-cloud-amd64$"])
        .output()
        .await?;
    newest(&String::from_utf8_lossy(&output)).ok_or_else(|| VolumeError::PackageSource {
        what: "apt on this host offers no 6.12 cloud kernel: add the bookworm-backports suite to its sources and \
               run `apt-get update`"
            .to_owned(),
    })
}

pub(crate) fn newest(listing: &str) -> Option<String> {
    listing
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| name.starts_with("linux-image-6.12.") && name.ends_with("-cloud-amd64"))
        .max_by_key(|name| numbers(name))
        .map(str::to_owned)
}

/// The numbers in a name, for ordering: `6.12.9+deb12` < `6.12.10+deb12` < `6.12.10+deb12.1`; those of the flavour
/// (`-cloud-amd64`) do not count.
pub(crate) fn numbers(name: &str) -> Vec<u64> {
    let version = name.split("-cloud").next().unwrap_or(name);
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// Downloads one package as `.deb` into `directory`; apt verifies it by its signed lists.
pub(crate) async fn download(package: &str, directory: &std::path::Path) -> Result<(), VolumeError> {
    Program::new("apt-get", "apt", Duration::from_secs(600))
        .args(["-o", "APT::Sandbox::User=root", "-q", "download", package])
        .current_dir(directory)
        .output()
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_sources_of_the_release_are_picked() {
        let listing = "http://m/debian/|bookworm|main|Debian\n\
                       http://m/debian/|bookworm|contrib|Debian\n\
                       http://m/debian/|bookworm-backports|main|Debian Backports\n\
                       http://s/|bookworm-security|main|Debian\n\
                       http://other/|nodistro|main|Node\n\
                       broken line\n";
        let lines: Vec<_> = select(listing).unwrap().iter().map(Source::line).collect();
        assert_eq!(
            lines,
            [
                "deb http://m/debian/ bookworm main",
                "deb http://s/ bookworm-security main"
            ]
        );
    }

    #[test]
    fn a_host_of_another_release_lends_its_mirror() {
        let listing = "http://s/|trixie-security|main|Debian\nhttp://m/debian/|trixie|main|Debian\n";
        let lines: Vec<_> = select(listing).unwrap().iter().map(Source::line).collect();
        assert_eq!(lines, ["deb http://m/debian/ bookworm main"]);
        assert_eq!(select("http://other/|nodistro|main|Node\n"), None);
        assert_eq!(select(""), None);
    }

    #[test]
    fn the_newest_kernel_is_chosen_by_number() {
        let listing = "linux-image-6.12.9+deb12-cloud-amd64 - Linux\n\
                       linux-image-6.12.90+deb12.1-cloud-amd64 - Linux\n\
                       linux-image-6.12.90+deb12-cloud-amd64 - Linux\n\
                       linux-image-6.12.117+deb12-cloud-amd64-unsigned - Linux\n\
                       linux-image-6.12-cloud-amd64 - meta\n";
        assert_eq!(
            newest(listing).unwrap(),
            "linux-image-6.12.90+deb12.1-cloud-amd64"
        );
        assert_eq!(newest(""), None);
    }
}
