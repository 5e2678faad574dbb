//! A typed, asynchronous client of the platform: REST for lifecycle, the guest's Connect services for processes and
//! files. The CLI, the benchmarks and the tests use it.
//!
//! ```no_run
//! # async fn example() -> Result<(), space_client::ClientError> {
//! use space_client::{Client, Command, CollectLimits, Endpoint, SandboxOptions};
//!
//! let client = Client::new(Endpoint::new("http://127.0.0.1:3000", "e2b_…")?)?;
//! let sandbox = client.create(&SandboxOptions::default()).await?;
//! let output = sandbox.run(&Command::new("uname").arg("-a"), CollectLimits::default()).await?;
//! assert_eq!(output.end.exit_code, 0);
//! client.delete(sandbox.id()).await?;
//! # Ok(())
//! # }
//! ```

mod client;
mod endpoint;
mod error;
mod events;
mod files;
mod lifecycle;
mod output;
mod process;
mod sandbox;

pub use client::{Client, SandboxOptions};
pub use endpoint::Endpoint;
pub use error::ClientError;
pub use events::EventStream;
pub use files::{Entry, EntryKind, Written};
pub use lifecycle::RecordFilter;
pub use output::{CollectLimits, Collected, Output};
pub use process::{Cause, Command, Process, ProcessEnd, ProcessEvent, ProcessSummary, Replay, TerminalSize};
pub use sandbox::Sandbox;
