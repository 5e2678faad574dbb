//! Compiles what the demo, the tests and the benchmarks run. One profile for all of them.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::session::Session;

/// The programs that were built.
#[derive(Debug)]
pub(crate) struct Built {
    /// The platform and its command line.
    pub(crate) space: PathBuf,
    /// PID 1 of the guest, static.
    pub(crate) daemon: PathBuf,
}

/// The guest has no libraries: its one program is linked statically. A target of its own keeps the flag away from
/// procedural macros and build scripts.
const GUEST_TARGET: &str = "x86_64-unknown-linux-gnu";
const GUEST_FLAGS: (&str, &str) = (
    "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
    "-C target-feature=+crt-static",
);

/// How much is built besides the guest's daemon.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scope {
    /// The `space` binary.
    Space,
    /// `space` and the benchmark.
    Benchmark,
    /// All programs and all tests. In one go: test-only features of a dependency mean compiling it again, and so
    /// everything that a test run uses is built with the same ones.
    Everything,
}

/// Builds the guest's daemon, and what else is in scope.
pub(crate) fn all(session: &Session, scope: Scope) -> Result<Built> {
    let daemon = daemon(session)?;
    let (step, what): (_, &[&str]) = match scope {
        Scope::Space => ("build space", &["-p", "space"]),
        Scope::Benchmark => ("build space and bench", &["-p", "space", "-p", "space-bench"]),
        Scope::Everything => ("build everything", &["--workspace", "--bins", "--tests"]),
    };
    session.run(step, session.cargo().args(["build", "--locked"]).args(what))?;
    let space = session.target().join("debug/space");
    if !space.is_file() {
        bail!("the build left no {}", space.display());
    }
    Ok(Built { space, daemon })
}

/// Builds the guest's daemon.
fn daemon(session: &Session) -> Result<PathBuf> {
    let mut cargo = session.cargo();
    cargo.args([
        "build",
        "--locked",
        "-p",
        "space-daemon",
        "--target",
        GUEST_TARGET,
    ]);
    session.run("build guest daemon", cargo.env(GUEST_FLAGS.0, GUEST_FLAGS.1))?;
    let daemon = session.target().join(GUEST_TARGET).join("debug/space-daemon");
    let bytes = std::fs::read(&daemon)?;
    // A dynamic loader's name would mean that the guest could not start it.
    if bytes[..bytes.len().min(65_536)]
        .windows(8)
        .any(|window| window == b"ld-linux")
    {
        bail!("{} is not static: it names a dynamic loader", daemon.display());
    }
    Ok(daemon)
}
