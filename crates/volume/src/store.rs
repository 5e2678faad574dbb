//! The template store: files by digest, manifests, names, and the machines made of them.
//!
//! ```text
//!  lock, open.lock                    who may change it; who has it open
//!  blobs/sha256-HEX                   root images, kernels, initramfs
//!  manifests/sha256-HEX.json          what belongs together; a shared lock on one keeps all of it
//!  names/NAME/TAG                     digest of a manifest, one line
//!  machines/sha256-HEX/CLASS-MONITOR/ memory, state, disk.raw, machine.json
//!  locks/                             one builder per machine
//!  work/                              half-made things; emptied when nobody else has the store open
//! ```
//!
//! Everything is made in `work`, flushed and renamed into place, so a crash leaves nothing half made where it could be
//! found. Files are read-only for all, directories can be passed by all. All of it belongs to the owner of the store's
//! directory, whoever makes it (see `owner`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use fs_err::{self as fs, File};
use sha2::{Digest as _, Sha256};
use space_api::size::SizeClass;

use crate::{
    Digest, Label, Manifest, Reference, Template, VolumeError, lock,
    manifest::{Blob, MAX_MANIFEST},
    owner::{Acting, Owner},
};

/// Manifests kept in memory at most; beyond that they are read again.
const MAX_VERIFIED: usize = 64;
const DIRECTORIES: [&str; 6] = ["blobs", "manifests", "names", "machines", "locks", "work"];

/// An open store. Any number of processes may have the same one open.
#[derive(Debug)]
pub struct TemplateStore {
    directory: PathBuf,
    owner: Owner,
    /// Held shared as long as the store is open.
    _open: File,
    /// Manifests that were read and found to be what their digest says: every create asks for one. Read again when their
    /// file has changed since.
    verified: Mutex<BTreeMap<Digest, (FileVersion, Arc<Manifest>)>>,
}

/// Changes whenever anybody writes to a file or puts another in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl FileVersion {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            bytes: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl TemplateStore {
    /// Opens the store, making it if there is none, and removes what a crash has left if nobody else has it open.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, VolumeError> {
        let directory = directory.into();
        let step = "open the template store";
        fs::create_dir_all(&directory).map_err(VolumeError::io(step))?;
        let owner = Owner::of(&directory)?;
        let _owner = owner.act();
        for name in std::iter::once("").chain(DIRECTORIES) {
            let path = directory.join(name);
            fs::create_dir_all(&path).map_err(VolumeError::io(step))?;
            // Whatever the umask: monitors of ordinary users must get through.
            set_mode(&path, 0o755, step)?;
        }
        let open = lock::open(&directory.join("open.lock"))?;
        if lock::try_exclusive(&open)? {
            let work = directory.join("work");
            for entry in fs::read_dir(&work).map_err(VolumeError::io(step))? {
                let path = entry.map_err(VolumeError::io(step))?.path();
                tracing::info!(path = %path.display(), "removing what an interrupted build has left");
                remove_all(&path)?;
            }
            open.file().unlock().map_err(VolumeError::io(step))?;
        }
        // Only another opening process holds it alone, and only for the moment of its sweep.
        let mut tries = 0;
        while !lock::try_shared(&open)? {
            tries += 1;
            if tries > 600 {
                return Err(VolumeError::io(step)(io::ErrorKind::TimedOut.into()));
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Ok(Self {
            directory,
            owner,
            _open: open,
            verified: Mutex::default(),
        })
    }

    /// As whom it is touched.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Every change of the store begins with this.
    pub(crate) fn act(&self) -> Acting {
        self.owner.act()
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Finds a template by `name`, `name:tag` or `sha256:…`.
    pub fn resolve(&self, reference: &str) -> Result<Template, VolumeError> {
        let parsed: Reference = reference.parse()?;
        match parsed {
            Reference::Named { name, tag } => {
                let digest = self.read_name(&name, &tag)?.ok_or_else(|| not_found(reference))?;
                self.read_template(Some((name, tag)), digest)
            }
            Reference::Digest(digest) => {
                let named = self.names()?.into_iter().find(|(_, _, of)| *of == digest);
                self.read_template(named.map(|(name, tag, _)| (name, tag)), digest)
            }
        }
    }

    /// All named templates, by name and tag. Damaged ones are left out, with a warning in the log.
    pub fn list(&self) -> Result<Vec<Template>, VolumeError> {
        let mut templates = Vec::new();
        for (name, tag, digest) in self.names()? {
            match self.read_template(Some((name.clone(), tag.clone())), digest) {
                Ok(template) => templates.push(template),
                Err(error) => tracing::warn!(%name, %tag, error = error.chain(), "a template is left out"),
            }
        }
        Ok(templates)
    }

    /// Removes a name; or, by digest, all names that lead to it. Files that nothing needs any more go too.
    pub fn remove(&self, reference: &str) -> Result<(), VolumeError> {
        let step = "remove a template's name";
        let _owner = self.act();
        {
            let _lock = self.lock()?;
            let parsed: Reference = reference.parse()?;
            let names: Vec<_> = self
                .names()?
                .into_iter()
                .filter(|(name, tag, digest)| match &parsed {
                    Reference::Named { name: n, tag: t } => n == name && t == tag,
                    Reference::Digest(wanted) => wanted == digest,
                })
                .collect();
            let unnamed = matches!(parsed, Reference::Digest(digest) if self.manifest_path(digest).exists());
            if names.is_empty() && !unnamed {
                return Err(not_found(reference));
            }
            for (name, tag, _) in names {
                let directory = self.directory.join("names").join(name.as_str());
                fs::remove_file(directory.join(tag.as_str())).map_err(VolumeError::io(step))?;
                // Other tags may be left; then it stays.
                drop(fs::remove_dir(directory));
            }
        }
        self.collect()
    }

    /// Removes manifests that have no name and are in use nowhere, with their machines, and files that no manifest
    /// needs.
    pub fn collect(&self) -> Result<(), VolumeError> {
        let step = "collect unused templates";
        let _owner = self.act();
        let _lock = self.lock()?;
        let named: BTreeSet<Digest> = self.names()?.into_iter().map(|(_, _, digest)| digest).collect();
        let mut kept = BTreeSet::new();
        let mut blobs = BTreeSet::new();
        let mut all_readable = true;
        for (path, file_name) in entries(&self.directory.join("manifests"))? {
            let digest = file_name.strip_suffix(".json").and_then(Digest::from_file_name);
            let Some(digest) = digest else { continue };
            let file = File::open(&path).map_err(VolumeError::io(step))?;
            if named.contains(&digest) || !lock::try_exclusive(&file)? {
                match self.read_template(None, digest) {
                    Ok(template) => blobs.extend(template.manifest.blobs().map(|blob| blob.digest)),
                    // What it needs is not known, so no file may go.
                    Err(error) => {
                        tracing::warn!(%digest, error = error.chain(), "a template is kept but cannot be read");
                        all_readable = false;
                    }
                }
                kept.insert(digest);
            } else {
                // Under our lock: whoever opened it meanwhile sees that it has gone.
                fs::remove_file(&path).map_err(VolumeError::io(step))?;
            }
        }
        for (path, file_name) in entries(&self.directory.join("machines"))? {
            if Digest::from_file_name(&file_name).is_none_or(|digest| !kept.contains(&digest)) {
                self.discard(&path)?;
            }
        }
        let importing = self.lock_file("import.lock")?;
        if all_readable && lock::try_exclusive(&importing)? {
            for (path, file_name) in entries(&self.directory.join("blobs"))? {
                if Digest::from_file_name(&file_name).is_none_or(|digest| !blobs.contains(&digest)) {
                    fs::remove_file(&path).map_err(VolumeError::io(step))?;
                }
            }
        }
        Ok(())
    }

    /// Bytes on disk of everything that belongs to a template, holes not counted, shared files counted in full.
    pub fn disk_bytes(&self, template: &Template) -> u64 {
        let machines = self.directory.join("machines").join(template.digest.file_name());
        let machine_files = entries(&machines)
            .unwrap_or_default()
            .into_iter()
            .flat_map(|(path, _)| entries(&path).unwrap_or_default())
            .map(|(path, _)| path);
        let blobs = template.manifest.blobs().map(|blob| self.blob_path(blob.digest));
        blobs
            .into_iter()
            .chain(machine_files)
            .filter_map(|path| fs::metadata(path).ok())
            .map(|metadata| metadata.blocks() * 512)
            .sum()
    }

    /// Gives `manifest` a name, replacing what had it. All its files must be there already.
    pub(crate) fn publish(
        &self,
        name: &Label,
        tag: &Label,
        manifest: &Manifest,
    ) -> Result<Template, VolumeError> {
        let step = "publish a template";
        let _owner = self.act();
        let _lock = self.lock()?;
        let bytes = manifest.to_bytes()?;
        let digest = Digest::of(&bytes);
        for blob in manifest.blobs() {
            let path = self.blob_path(blob.digest);
            if !path.exists() {
                return Err(VolumeError::Damaged {
                    path,
                    what: "it is missing".to_owned(),
                });
            }
        }
        let path = self.manifest_path(digest);
        if !path.exists() {
            self.put(&bytes, &path, step)?;
        }
        let names = self.directory.join("names").join(name.as_str());
        fs::create_dir_all(&names).map_err(VolumeError::io(step))?;
        set_mode(&names, 0o755, step)?;
        self.put(format!("{digest}\n").as_bytes(), &names.join(tag.as_str()), step)?;
        self.read_template(Some((name.clone(), tag.clone())), digest)
    }

    /// Held while files are brought in that no manifest names yet, so that they are not collected.
    pub(crate) async fn importing(&self) -> Result<File, VolumeError> {
        let file = self.lock_file("import.lock")?;
        while !lock::try_shared(&file)? {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        Ok(file)
    }

    /// Brings in bytes.
    pub(crate) fn import_bytes(&self, bytes: &[u8]) -> Result<Blob, VolumeError> {
        let digest = Digest::of(bytes);
        let path = self.blob_path(digest);
        if !path.exists() {
            self.put(bytes, &path, "store a file of a template")?;
        }
        Ok(Blob {
            digest,
            bytes: bytes.len() as u64,
        })
    }

    /// Brings in a file; `known` saves reading it when the store has it already. The file must never change: where
    /// possible the store shares its blocks.
    pub(crate) fn import_file(&self, from: &Path, known: Option<&Blob>) -> Result<Blob, VolumeError> {
        let step = "store a file of a template";
        if let Some(blob) = known
            && fs::metadata(self.blob_path(blob.digest)).is_ok_and(|there| there.len() == blob.bytes)
        {
            return Ok(blob.clone());
        }
        // As this process: the file may be anybody's.
        let source = File::open(from).map_err(VolumeError::io(step))?;
        let _owner = self.act();
        let work = self.work()?;
        let copy = work.path().join("file");
        if fs::hard_link(from, &copy).is_err() {
            let copied = File::create_new(&copy).map_err(VolumeError::io(step))?;
            // Between files of the standard library the kernel copies, or shares, by itself.
            io::copy(&mut source.file(), &mut copied.file()).map_err(VolumeError::io(step))?;
        }
        set_mode(&copy, 0o444, step)?;
        let mut file = File::open(&copy).map_err(VolumeError::io(step))?;
        file.sync_all().map_err(VolumeError::io(step))?;
        let blob = digest_of(&mut file)?;
        self.place(&copy, &self.blob_path(blob.digest), step)?;
        Ok(blob)
    }

    pub(crate) fn blob_path(&self, digest: Digest) -> PathBuf {
        self.directory.join("blobs").join(digest.file_name())
    }

    pub(crate) fn machines_path(&self, digest: Digest) -> PathBuf {
        self.directory.join("machines").join(digest.file_name())
    }

    /// Lock file of the one who builds `key`.
    pub(crate) fn build_lock(&self, key: &str) -> Result<File, VolumeError> {
        self.lock_file(&format!("locks/{key}"))
    }

    fn lock_file(&self, name: &str) -> Result<File, VolumeError> {
        let _owner = self.act();
        lock::open(&self.directory.join(name))
    }

    /// A fresh directory that all may pass; removed when dropped, or by the next one to open the store.
    pub(crate) fn work(&self) -> Result<tempfile::TempDir, VolumeError> {
        let step = "make a working directory";
        let _owner = self.act();
        let work = tempfile::Builder::new()
            .prefix("w")
            .rand_bytes(8)
            .tempdir_in(self.directory.join("work"))
            .map_err(VolumeError::io(step))?;
        set_mode(work.path(), 0o755, step)?;
        Ok(work)
    }

    /// Locks the template's files against being collected.
    pub(crate) fn lease(&self, digest: Digest) -> Result<Arc<File>, VolumeError> {
        let gone = || not_found(&digest.to_string());
        let file = match File::open(self.manifest_path(digest)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone()),
            Err(error) => return Err(VolumeError::io("open a manifest")(error)),
        };
        // Held alone only by a collector that is about to remove it, or that looks at it for a moment: ask again.
        let mut tries = 0;
        while !lock::try_shared(&file)? {
            tries += 1;
            if tries > 100 {
                return Err(gone());
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let links = file
            .metadata()
            .map_err(VolumeError::io("look at a manifest"))?
            .nlink();
        if links == 0 {
            Err(gone())
        } else {
            Ok(Arc::new(file))
        }
    }

    /// Renames a finished, flushed thing from a working directory to where it belongs.
    pub(crate) fn place(&self, from: &Path, to: &Path, step: &'static str) -> Result<(), VolumeError> {
        fs::rename(from, to).map_err(VolumeError::io(step))?;
        if let Some(parent) = to.parent() {
            let directory = File::open(parent).map_err(VolumeError::io(step))?;
            directory.sync_all().map_err(VolumeError::io(step))?;
        }
        Ok(())
    }

    /// Sizes of which `machine_names` (directory names) says that a machine is there.
    pub(crate) fn machine_sizes(&self, digest: Digest, monitor: &str) -> Vec<SizeClass> {
        let mut sizes: Vec<SizeClass> = entries(&self.machines_path(digest))
            .unwrap_or_default()
            .into_iter()
            .filter_map(|(_, name)| {
                let (class, of) = name.split_once('-')?;
                (of == monitor).then(|| class.parse().ok())?
            })
            .collect();
        sizes.sort_unstable();
        sizes
    }

    /// Moves a directory out of sight in one step, then removes it.
    fn discard(&self, path: &Path) -> Result<(), VolumeError> {
        let work = self.work()?;
        fs::rename(path, work.path().join("discarded"))
            .map_err(VolumeError::io("discard a template's machines"))?;
        work.close()
            .map_err(VolumeError::io("discard a template's machines"))
    }

    fn put(&self, bytes: &[u8], to: &Path, step: &'static str) -> Result<(), VolumeError> {
        let _owner = self.act();
        let work = self.work()?;
        let path = work.path().join("file");
        let mut file = File::create_new(&path).map_err(VolumeError::io(step))?;
        file.write_all(bytes).map_err(VolumeError::io(step))?;
        set_mode(&path, 0o444, step)?;
        file.sync_all().map_err(VolumeError::io(step))?;
        self.place(&path, to, step)
    }

    /// For changes of names and for collecting: short, so waiting for it blocks.
    fn lock(&self) -> Result<File, VolumeError> {
        let file = self.lock_file("lock")?;
        file.file()
            .lock()
            .map_err(VolumeError::io("lock the template store"))?;
        Ok(file)
    }

    fn manifest_path(&self, digest: Digest) -> PathBuf {
        self.directory
            .join("manifests")
            .join(format!("{}.json", digest.file_name()))
    }

    fn read_name(&self, name: &Label, tag: &Label) -> Result<Option<Digest>, VolumeError> {
        let path = self
            .directory
            .join("names")
            .join(name.as_str())
            .join(tag.as_str());
        match fs::read_to_string(&path) {
            Ok(text) => match text.trim_end().parse() {
                Ok(digest) => Ok(Some(digest)),
                Err(error) => Err(VolumeError::Damaged {
                    path,
                    what: error.to_string(),
                }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(VolumeError::io("read a template's name")(error)),
        }
    }

    /// All names that can be read, in order.
    fn names(&self) -> Result<Vec<(Label, Label, Digest)>, VolumeError> {
        let mut names = Vec::new();
        for (path, name) in entries(&self.directory.join("names"))? {
            let Ok(name) = name.parse::<Label>() else { continue };
            for (_, tag) in entries(&path)? {
                let Ok(tag) = tag.parse::<Label>() else { continue };
                match self.read_name(&name, &tag) {
                    Ok(Some(digest)) => names.push((name.clone(), tag, digest)),
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%name, %tag, error = error.chain(), "a name is left out"),
                }
            }
        }
        names.sort();
        Ok(names)
    }

    fn read_template(&self, name: Option<(Label, Label)>, digest: Digest) -> Result<Template, VolumeError> {
        let step = "read a manifest";
        let path = self.manifest_path(digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && name.is_none() => {
                return Err(not_found(&digest.to_string()));
            }
            Err(error) => return Err(VolumeError::io(step)(error)),
        };
        let metadata = file.metadata().map_err(VolumeError::io(step))?;
        let modified = metadata.modified().map_err(VolumeError::io(step))?;
        let version = FileVersion::of(&metadata);
        let known = self.verified().get(&digest).cloned();
        let manifest = match known {
            Some((of, manifest)) if of == version => manifest,
            _ => {
                let manifest = Arc::new(read_manifest(file, digest, &path)?);
                let mut verified = self.verified();
                if verified.len() >= MAX_VERIFIED {
                    verified.clear();
                }
                verified.insert(digest, (version, Arc::clone(&manifest)));
                manifest
            }
        };
        Ok(Template {
            name,
            digest,
            manifest,
            created_at: modified.try_into().unwrap_or(jiff::Timestamp::UNIX_EPOCH),
        })
    }

    fn verified(&self) -> MutexGuard<'_, BTreeMap<Digest, (FileVersion, Arc<Manifest>)>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_manifest(file: File, digest: Digest, path: &Path) -> Result<Manifest, VolumeError> {
    let mut bytes = Vec::new();
    file.take(MAX_MANIFEST as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(VolumeError::io("read a manifest"))?;
    Manifest::from_bytes(&bytes, digest, path)
}

/// Reads a file to its end.
pub(crate) fn digest_of(file: &mut File) -> Result<Blob, VolumeError> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let read = file
            .read(&mut buffer)
            .map_err(VolumeError::io("read a file of a template"))?;
        if read == 0 {
            let digest = Digest::from_hasher(hasher);
            return Ok(Blob { digest, bytes });
        }
        hasher.update(&buffer[..read]);
        bytes += read as u64;
    }
}

pub(crate) fn set_mode(path: &Path, mode: u32, step: &'static str) -> Result<(), VolumeError> {
    fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(VolumeError::io(step))
}

/// Paths and names in a directory, in no order; nothing if there is no such directory.
fn entries(directory: &Path) -> Result<Vec<(PathBuf, String)>, VolumeError> {
    let step = "look through the template store";
    let listing = match fs::read_dir(directory) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(VolumeError::io(step)(error)),
    };
    listing
        .map(|entry| {
            let entry = entry.map_err(VolumeError::io(step))?;
            Ok((entry.path(), entry.file_name().to_string_lossy().into_owned()))
        })
        .collect()
}

fn remove_all(path: &Path) -> Result<(), VolumeError> {
    let step = "remove what an interrupted build has left";
    let kind = fs::symlink_metadata(path).map_err(VolumeError::io(step))?;
    let removed = if kind.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.map_err(VolumeError::io(step))
}

fn not_found(reference: &str) -> VolumeError {
    VolumeError::TemplateNotFound {
        reference: reference.chars().take(128).collect(),
    }
}

#[cfg(test)]
mod tests;
