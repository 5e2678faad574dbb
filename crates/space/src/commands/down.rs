//! `space down`: ends every sandbox of a data directory whose platform is not running.
//!
//! It speaks to no machine and adopts none: it kills the processes, removes namespaces, groups and files by name. The
//! next platform on that directory finds them gone and records that they have ended.

use std::{
    collections::BTreeSet,
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use serde_json::json;
use space_node::{DISKS, MACHINES};
use space_node_manager::{LocalOptions, LocalPrivileges, PrivilegeError, Privileges as _, SweepReport};

use super::up::{
    ensure_root,
    installation::{Installation, Place},
    prepare,
};
use crate::{
    cli::Global,
    error::{CliError, Kind},
    output,
};

#[derive(Debug, Args)]
pub(crate) struct Down {
    #[command(flatten)]
    place: Place,
}

impl Down {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        ensure_root("ending sandboxes without their platform")?;
        let installation = self.place.installation()?;
        let (_, _claim) = prepare::claim(&installation.data_directory)?;
        let swept = remove_machines(&installation).await?;
        if global.json {
            output::json(&json!({
                "processes": swept.processes, "networks": swept.networks, "groups": swept.groups,
            }))?;
        } else {
            output::line(match swept.processes {
                0 => "No sandbox was running.".to_owned(),
                count => format!("Ended {count} processes of sandboxes."),
            })?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Kills every machine of an installation that nobody manages, and removes what belonged to it.
pub(crate) async fn remove_machines(installation: &Installation) -> Result<SweepReport, CliError> {
    let run = &installation.run_directory;
    let options = LocalOptions {
        // The disk's control groups are among what is removed.
        data_directory: Some(installation.data_directory.clone()),
        ..LocalOptions::default()
    };
    let privileges = LocalPrivileges::with(&installation.name, run, options).map_err(refused)?;
    let swept = privileges.sweep(&BTreeSet::new()).await;
    let swept =
        swept.map_err(|error| CliError::internal("cannot end what is left of the sandboxes", error))?;
    for directory in [run.join(MACHINES), installation.data_directory.join(DISKS)] {
        empty(&directory)
            .map_err(|error| CliError::internal(format!("cannot empty {}", directory.display()), error))?;
    }
    Ok(swept)
}

/// Removes what is in a directory of the node's user, who may have put a link in its place: none is followed.
fn empty(directory: &Path) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match rustix::fs::open(directory, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    // The directory itself, whatever has its name by now.
    let held = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    for entry in fs_err::read_dir(&held)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs_err::remove_dir_all(entry.path())?;
        } else {
            fs_err::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn refused(error: PrivilegeError) -> CliError {
    let held = matches!(error, PrivilegeError::Refused { .. });
    let error = CliError::new(
        Kind::Environment,
        anyhow::Error::new(error).context("cannot end the sandboxes"),
    );
    if held {
        error.with_hint("a platform manages them: stop it with Ctrl-C or `systemctl stop space.target`, or remove sandboxes with `space sandbox rm`")
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn a_directory_is_emptied_and_a_link_is_not_followed() {
        let outside = tempfile::tempdir().expect("a directory");
        let top = outside.path();
        fs::create_dir_all(top.join("disks/m1/deep")).expect("made");
        fs::write(top.join("disks/m1/deep/0.qcow2"), "x").expect("made");
        fs::write(top.join("disks/file"), "x").expect("made");
        fs::create_dir(top.join("kept")).expect("made");
        fs::write(top.join("kept/file"), "x").expect("made");
        std::os::unix::fs::symlink(top.join("kept"), top.join("disks/link")).expect("linked");
        std::os::unix::fs::symlink(top.join("kept"), top.join("s")).expect("linked");

        empty(&top.join("disks")).expect("emptied");
        assert_eq!(fs::read_dir(top.join("disks")).expect("there").count(), 0);
        assert!(empty(&top.join("s")).is_err());
        empty(&top.join("nothing")).expect("nothing to do");
        assert!(top.join("kept/file").exists());
    }
}
