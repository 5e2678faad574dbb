//! What a template consists of. Its digest is the template's: the same content gives the same digest.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use space_api::size::SizeClass;
use space_vmm::MachineTemplate;

use crate::{
    Digest, Label, VolumeError,
    recipe::{ReadyCommand, StartCommand},
};

/// Longest manifest, bytes.
pub(crate) const MAX_MANIFEST: usize = 4 * 1024 * 1024;
/// The form of manifests this code writes and reads.
const FORMAT: u32 = 1;

/// A file of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blob {
    /// Of its content.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
}

/// The parts of a template and how its machine is brought up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always 1 today.
    pub format: u32,
    /// `x86_64`.
    pub architecture: String,
    /// Read-only root image (erofs).
    pub root: Blob,
    /// Kernel image.
    pub kernel: Blob,
    /// Its version, as the package says it.
    pub kernel_version: String,
    /// Initramfs with the space daemon.
    pub initramfs: Blob,
    /// Versions of the Debian packages in the root; empty for an image that was given ready-made.
    pub packages: BTreeMap<String, String>,
    /// Commands run as root before the snapshot.
    pub run: Vec<String>,
    /// Environment of every process started in a sandbox.
    pub environment: BTreeMap<String, String>,
    /// Left running in the snapshot.
    pub start: Option<StartCommand>,
    /// Tells when the machine is ready.
    pub ready: Option<ReadyCommand>,
    /// Size of a sandbox that asks for none.
    pub default_size: SizeClass,
}

impl Manifest {
    pub(crate) const FORMAT: u32 = FORMAT;

    /// The bytes whose digest names the template.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, VolumeError> {
        serde_json::to_vec_pretty(self).map_err(|error| VolumeError::io("write a manifest")(error.into()))
    }

    /// Reads what [`Manifest::to_bytes`] wrote, checking it against the digest that named it.
    pub(crate) fn from_bytes(bytes: &[u8], digest: Digest, path: &Path) -> Result<Self, VolumeError> {
        let damaged = |what: String| VolumeError::Damaged {
            path: path.to_owned(),
            what,
        };
        if bytes.len() > MAX_MANIFEST {
            return Err(damaged(format!("longer than {MAX_MANIFEST} bytes")));
        }
        if Digest::of(bytes) != digest {
            return Err(damaged("its content does not match its digest".to_owned()));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if manifest.format != FORMAT {
            return Err(damaged(format!(
                "format {} is not known to this version",
                manifest.format
            )));
        }
        Ok(manifest)
    }

    pub(crate) fn blobs(&self) -> [&Blob; 3] {
        [&self.root, &self.kernel, &self.initramfs]
    }
}

/// A template of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// Name and tag; absent if it was found by its digest and no name leads to it.
    pub name: Option<(Label, Label)>,
    /// Digest of the manifest.
    pub digest: Digest,
    /// Its content.
    pub manifest: Arc<Manifest>,
    /// When it was first published here.
    pub created_at: jiff::Timestamp,
}

impl Template {
    /// `name:tag`, or the digest.
    pub fn reference(&self) -> String {
        match &self.name {
            Some((name, tag)) => format!("{name}:{tag}"),
            None => self.digest.to_string(),
        }
    }
}

/// What a machine of one template and size starts from. All files are read-only and stay as long as this value, or a
/// clone of it, lives.
#[derive(Debug, Clone)]
pub struct MachineFiles {
    /// Read-only root image.
    pub root: PathBuf,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Kernel command line.
    pub kernel_arguments: String,
    /// Saved memory and device state.
    pub template: MachineTemplate,
    /// The writable disk (raw) at the instant of the snapshot; new machines lay their own layer over it.
    pub disk_base: PathBuf,
    /// Shared lock that keeps the files from being collected.
    pub(crate) _lease: std::sync::Arc<fs_err::File>,
}
