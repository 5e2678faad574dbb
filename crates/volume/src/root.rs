//! The root image: a Debian tree made by mmdebstrap, cleaned of everything that differs between two builds, packed
//! as erofs.
//!
//! The same packages, files and builder give the same bits. What makes it so: packages bring their files with their
//! own times; what is written during the build is newer than the build's start, and erofs clamps all of it to the
//! newest time that came with a package. (A fixed time for every file would be simpler, but Python compares the
//! times of its sources with those in its compiled files, and would compile them anew in every sandbox.)
//!
//! The image is not compressed: under emulation the guest unpacks lz4 slower than the host's page cache hands out
//! plain pages, and all sandboxes share those.

use std::{
    collections::BTreeMap,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    Digest, Recipe, VolumeError,
    command::{Program, require},
    debian,
    manifest::Blob,
    progress::Part,
    store::{digest_of, set_mode},
    tree,
};

/// Raise when the builder changes what it makes of the same packages.
const BUILDER: &str = "space-root-1";
/// What package scripts see as the time, where they ask politely.
const SCRIPT_TIME: &str = "1700000000";
/// Any constant will do; two images are told apart by their digest.
const IMAGE_UUID: &str = "5f0d2c1e-8a4b-4f6e-9d3c-7b1a2e4c6d80";

/// A built root image in the cache.
#[derive(Debug, Clone)]
pub(crate) struct RootImage {
    pub(crate) path: PathBuf,
    pub(crate) packages: BTreeMap<String, String>,
    /// Its digest, if that is known without reading it.
    pub(crate) blob: Option<Blob>,
}

impl RootImage {
    /// An image that was made elsewhere.
    pub(crate) fn ready_made(path: PathBuf) -> Self {
        Self {
            path,
            packages: BTreeMap::new(),
            blob: None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Record {
    blob: Blob,
    packages: BTreeMap<String, String>,
}

/// The cached image of the recipe, built first if there is none or `refresh` asks for it.
pub(crate) async fn ensure(
    recipe: &Recipe,
    cache: &Path,
    refresh: bool,
    part: &Part,
) -> Result<RootImage, VolumeError> {
    let roots = cache.join("roots");
    fs::create_dir_all(&roots).map_err(VolumeError::io("make the root cache"))?;
    let key = cache_key(recipe)?;
    let path = roots.join(format!("{key}.erofs"));
    let record_path = roots.join(format!("{key}.json"));
    // The record is renamed into place last: where it is, the image is whole.
    if !refresh
        && let Ok(text) = fs::read(&record_path)
        && path.exists()
    {
        let record: Record = serde_json::from_slice(&text).map_err(|error| VolumeError::Damaged {
            path: record_path,
            what: error.to_string(),
        })?;
        return Ok(RootImage {
            path,
            packages: record.packages,
            blob: Some(record.blob),
        });
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(VolumeError::NeedsRoot {
            act: "building a root image",
        });
    }
    let work = tempfile::Builder::new()
        .prefix(".build-")
        .tempdir_in(&roots)
        .map_err(VolumeError::io("make a directory for the root image"))?;
    let top = work.path().join("tree");
    let started = SystemTime::now();
    bootstrap(recipe, &top, part).await?;
    let packages = installed_packages(&top).await?;
    part.report("cleaning the root image", 0.9);
    let files = recipe.files.clone();
    let image_time = in_background(move || {
        tree::finish(&top, &files)?;
        tree::newest_before(&top, started)
    })
    .await?;
    part.report("packing the root image", 0.93);
    let tree = work.path().join("tree");
    let image = work.path().join("root.erofs");
    pack(&tree, &image, image_time).await?;

    let step = "keep the root image";
    let finished = image.clone();
    let blob = in_background(move || {
        // The store may share its blocks, so it must not change from here on.
        set_mode(&finished, 0o444, step)?;
        digest_of(&mut fs::File::open(&finished).map_err(VolumeError::io(step))?)
    })
    .await?;
    let record = serde_json::to_vec(&Record {
        blob: blob.clone(),
        packages: packages.clone(),
    })
    .map_err(|error| VolumeError::io(step)(error.into()))?;
    let new_record = work.path().join("record.json");
    fs::write(&new_record, record).map_err(VolumeError::io(step))?;
    fs::rename(image, &path).map_err(VolumeError::io(step))?;
    fs::rename(new_record, record_path).map_err(VolumeError::io(step))?;
    in_background(move || work.close().map_err(VolumeError::io("remove the unpacked root"))).await?;
    Ok(RootImage {
        path,
        packages,
        blob: Some(blob),
    })
}

/// What the image depends on. The mirror's state is not part of it: the newest packages are taken on `refresh` only,
/// so that a change of a recipe's other parts never costs a new root.
fn cache_key(recipe: &Recipe) -> Result<String, VolumeError> {
    let mut hasher = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(BUILDER.as_bytes());
    add(debian::SUITE.as_bytes());
    for package in recipe.all_packages()? {
        add(package.as_bytes());
    }
    for file in &recipe.files {
        add(b"file");
        add(file.guest.as_os_str().as_encoded_bytes());
        tree::walk(&file.host, &mut |path, kind| {
            let relative = path.strip_prefix(&file.host).unwrap_or(path);
            add(relative.as_os_str().as_encoded_bytes());
            let step = "read a file of the recipe";
            if kind.is_symlink() {
                let target = fs::read_link(path).map_err(VolumeError::io(step))?;
                add(target.as_os_str().as_encoded_bytes());
            } else if kind.is_file() {
                let mode = fs::metadata(path)
                    .map_err(VolumeError::io(step))?
                    .permissions()
                    .mode();
                add(&(mode & 0o111).to_le_bytes());
                add(&fs::read(path).map_err(VolumeError::io(step))?);
            }
            Ok(())
        })?;
    }
    Ok(Digest::from_hasher(hasher).hex()[..32].to_owned())
}

async fn bootstrap(recipe: &Recipe, tree: &Path, part: &Part) -> Result<(), VolumeError> {
    let sources = debian::host_sources().await?;
    let packages: Vec<String> = recipe.all_packages()?.into_iter().collect();
    part.report("downloading packages", 0.02);
    require("mmdebstrap", "mmdebstrap")?;
    // It mounts `/proc` and `/sys` into the tree. In a mount namespace of its own these end with it, however it ends,
    // so that removing the tree never meets a mount of the host.
    Program::new("unshare", "util-linux", Duration::from_secs(1800))
        .args(["--mount", "--propagation", "private", "mmdebstrap"])
        .env("SOURCE_DATE_EPOCH", SCRIPT_TIME)
        .args(["--mode=root", "--variant=apt", "--format=directory"])
        .args((!packages.is_empty()).then(|| format!("--include={}", packages.join(","))))
        .args([
            "--aptopt=APT::Install-Recommends \"false\"",
            "--dpkgopt=force-unsafe-io",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/info/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        ])
        .arg(debian::SUITE)
        .arg(tree)
        .args(sources.iter().map(debian::Source::line))
        .watch(|line| {
            for (begins, name, fraction) in [
                ("I: extracting archives", "unpacking the essential packages", 0.12),
                (
                    "I: installing essential",
                    "installing the essential packages",
                    0.18,
                ),
                ("I: installing remaining", "installing packages", 0.35),
                ("I: cleaning", "removing package caches", 0.86),
            ] {
                if line.starts_with(begins) {
                    part.report(name, fraction);
                }
            }
        })
        .await?;
    Ok(())
}

async fn installed_packages(tree: &Path) -> Result<BTreeMap<String, String>, VolumeError> {
    let output = Program::new("dpkg-query", "dpkg", Duration::from_secs(60))
        .arg(format!("--admindir={}", tree.join("var/lib/dpkg").display()))
        .args(["-W", "-f=${Package}\\t${Version}\\n"])
        .output()
        .await?;
    Ok(String::from_utf8_lossy(&output)
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(name, version)| (name.to_owned(), version.to_owned()))
        .collect())
}

async fn pack(tree: &Path, image: &Path, time: u64) -> Result<(), VolumeError> {
    Program::new("mkfs.erofs", "erofs-utils", Duration::from_secs(900))
        // Clamps newer times to this one, and is the image's own time.
        .env("SOURCE_DATE_EPOCH", time.to_string())
        .args(["--quiet", "-U", IMAGE_UUID])
        .args([image, tree])
        .output()
        .await?;
    Ok(())
}

/// Runs file work on a thread where it holds nobody up.
pub(crate) async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| VolumeError::Cancelled)?
}
