//! The services over a real socket, against real processes, cgroups and files.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "tests fail by panicking and say why they skip"
)]

mod client;
mod files;
mod harness;
mod origin;
mod process;
mod watch;
