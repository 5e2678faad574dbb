//! What the sandbox manager needs of the volume manager's templates.

use std::{any::Any, fmt, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use space_api::size::SizeClass;
use space_vmm::{MachineTemplate, VmmError};

use crate::seam::TemplateInfo;

/// A template that a name or digest led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedTemplate {
    /// `name:tag`.
    pub name: String,
    /// `sha256:…`.
    pub digest: String,
    /// Size if none is asked for.
    pub default_size: SizeClass,
}

/// Keeps the files of a starting point from being removed as long as it, or a clone of it, lives.
#[derive(Clone)]
pub struct Lease(#[expect(dead_code, reason = "held, not read")] Arc<dyn Any + Send + Sync>);

impl Lease {
    /// Holds on to `what`.
    pub fn new(what: impl Any + Send + Sync) -> Self {
        Self(Arc::new(what))
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

/// Everything a sandbox of one template and size starts from. All files are read-only for ever.
#[derive(Debug, Clone)]
pub struct StartingPoint {
    /// Held by the sandbox until its machine is gone.
    pub lease: Lease,
    /// Root image.
    pub root: PathBuf,
    /// Writable disk as it was when the snapshot was taken; the new layer rests on it.
    pub disk: PathBuf,
    /// Saved memory and devices.
    pub machine: MachineTemplate,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Kernel command line.
    pub kernel_arguments: String,
}

/// What can go wrong with templates.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// No such name, tag or digest.
    #[error("template \"{name}\" was not found")]
    NotFound {
        /// As asked.
        name: String,
    },
    /// The machine that makes the snapshot could not be run.
    #[error("the template's machine could not be run")]
    Vmm(#[source] VmmError),
    /// The file system is full.
    #[error("no space left for the template's machine: {what}")]
    NoSpace {
        /// In words.
        what: String,
    },
    /// Anything else, typed by the volume manager.
    #[error("{step}")]
    Failed {
        /// What was attempted.
        step: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The templates of a node.
#[async_trait]
pub trait Templates: Send + Sync + fmt::Debug {
    /// Finds a template by `name`, `name:tag` or digest. Quick: it is on the way of every create.
    async fn resolve(&self, name: &str) -> Result<ResolvedTemplate, TemplateError>;

    /// The snapshot of one size, made first if there is none; several calls at once make it once.
    /// Quick when there is one. May be dropped at any point.
    async fn ensure_machine(
        &self,
        template: &ResolvedTemplate,
        size: SizeClass,
    ) -> Result<StartingPoint, TemplateError>;

    /// Keeps the files of one size's snapshot for a machine that runs from it already. Makes nothing: `None` if there is
    /// no such snapshot any more.
    async fn hold(&self, digest: &str, size: SizeClass) -> Result<Option<Lease>, TemplateError>;

    /// All of them.
    async fn list(&self) -> Result<Vec<TemplateInfo>, TemplateError>;

    /// Removes a name and, as soon as nothing holds a lease on them, the files.
    async fn delete(&self, name: &str) -> Result<(), TemplateError>;
}
