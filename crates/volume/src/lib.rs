//! Templates: how they are built, kept and turned into machines that sandboxes start from.
//!
//! ```text
//!  recipe ──► root image (erofs) ─┐
//!  daemon ──► initramfs ──────────┼─► manifest ──► name:tag            TemplateBuilder::build, TemplateStore
//!  apt ─────► kernel ─────────────┘      │
//!                                        ▼  per size class and monitor, on demand
//!              boot ► warm up ► recipe's commands ► quiesce ► snapshot  TemplateBuilder::ensure_machine
//! ```
//!
//! The root image is cached by what it is made of, so a new daemon costs a new initramfs and a new machine only.

mod builder;
mod command;
mod cpio;
mod debian;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest;
mod kernel;
mod lock;
mod machine;
mod manifest;
mod modules;
mod name;
mod owner;
mod progress;
mod recipe;
mod root;
mod sparse;
mod store;
mod tree;
mod warm;

pub use builder::{BuildOptions, MachineRequest, TemplateBuilder, VolumeConfig};
pub use error::VolumeError;
pub use manifest::{Blob, MachineFiles, Manifest, Template};
pub use name::{Digest, Label, Reference};
pub use progress::{Progress, Step, quiet};
pub use recipe::{CopiedFile, ReadyCommand, Recipe, StartCommand};
pub use store::TemplateStore;
