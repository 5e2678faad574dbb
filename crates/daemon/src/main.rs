//! The guest's first process; see the library.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::Context;
use space_daemon::{
    cgroup::AgentGroup,
    init,
    kernel::Recording,
    log,
    reaper::Reaper,
    say,
    sockets::{self, Stand},
};
use space_daemon_services::{ServiceConfig, Services};

fn main() -> ExitCode {
    let outcome = if rustix::process::getpid().is_init() {
        init::run().map(|never| match never {})
    } else {
        on_host()
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // As the first process this ends in a kernel panic, so the words are the last on the console.
            say!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `--serve-sockets CONTROL DATA RUN [CGROUP]`: the protocol and services on Unix sockets, for tests outside a guest.
fn on_host() -> anyhow::Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let (control, data, run, cgroup) = match arguments.as_slice() {
        [mode, control, data, run] if mode.as_os_str() == "--serve-sockets" => (control, data, run, None),
        [mode, control, data, run, cgroup] if mode.as_os_str() == "--serve-sockets" => {
            (control, data, run, Some(cgroup))
        }
        _ => anyhow::bail!(
            "space-daemon is the first process of a guest; elsewhere: --serve-sockets CONTROL DATA RUN [CGROUP]"
        ),
    };
    log::install_tracing();
    let reaper = Reaper::new().context("cannot prepare reaping")?;
    let config = ServiceConfig {
        agent_cgroup: cgroup.cloned(),
        default_user: "root".into(),
        ..ServiceConfig::default()
    };
    let group = cgroup.map(|directory| AgentGroup::open(directory)).transpose()?;
    let stand = Stand {
        control,
        data,
        run,
        group,
        loopback: None,
    };
    sockets::start(stand, Arc::new(Recording::default()), Services::new(config)).context("cannot serve")?;
    Err(reaper.run()).context("cannot reap")
}
