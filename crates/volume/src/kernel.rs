//! The guest's kernel: Debian's own, fetched once into the cache and never installed, and the initramfs around the
//! space daemon.
//!
//! Layout of one kernel in the cache: `vmlinuz`, `order` (module names, one a line, in load order) and `NAME.ko`.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use fs_err as fs;

use crate::{
    VolumeError,
    command::Program,
    cpio::{self, Entry},
    debian, modules,
};

const LIMIT: Duration = Duration::from_secs(120);
/// Raise when what is kept of a kernel changes.
const FORMAT: &str = "1";

/// A kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Package name without `linux-image-`, for example `6.12.95+deb12-cloud-amd64`.
    pub(crate) version: String,
    directory: PathBuf,
}

impl Kernel {
    /// The newest cached one; if there is none, or `refresh` asks for it, the newest that apt offers.
    pub(crate) async fn ensure(cache: &Path, refresh: bool) -> Result<Self, VolumeError> {
        let kernels = Self::cache(cache);
        fs::create_dir_all(&kernels).map_err(VolumeError::io("make the kernel cache"))?;
        if !refresh && let Some(kernel) = newest_cached(&kernels)? {
            return Ok(kernel);
        }
        let package = debian::newest_kernel_package().await?;
        let version = package.trim_start_matches("linux-image-").to_owned();
        let directory = kernels.join(&version);
        if !directory.exists() {
            fetch(&package, &kernels, &directory).await?;
        }
        Ok(Self { version, directory })
    }

    /// Where the cache keeps kernels.
    pub(crate) fn cache(cache: &Path) -> PathBuf {
        cache.join(format!("kernels-{FORMAT}"))
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// The initramfs that starts `daemon` as PID 1: `/init`, `/modules/order` (file names, one a line) and the modules.
    ///
    /// It is not compressed: the guest would spend longer unpacking it under emulation than the host reading it.
    pub(crate) fn initramfs(&self, daemon: &[u8]) -> Result<Vec<u8>, VolumeError> {
        let read = |name: &str| {
            fs::read(self.directory.join(name)).map_err(VolumeError::io("read the cached kernel's modules"))
        };
        let order = String::from_utf8_lossy(&read("order")?).into_owned();
        let names: Vec<String> = order.lines().map(|name| format!("{name}.ko")).collect();
        let modules = names
            .iter()
            .map(|name| Ok((format!("modules/{name}"), read(name)?)))
            .collect::<Result<Vec<_>, VolumeError>>()?;
        let listing = names
            .iter()
            .fold(String::new(), |listing, name| listing + name + "\n");
        let mut entries: Vec<_> = ["dev", "proc", "sys", "run", "modules", "root"]
            .into_iter()
            .map(|path| Entry::Directory { path })
            .collect();
        // The kernel opens the console for PID 1 before anything could mount devtmpfs.
        entries.push(Entry::Device {
            path: "dev/console",
            mode: 0o600,
            major: 5,
            minor: 1,
        });
        entries.push(Entry::Device {
            path: "dev/null",
            mode: 0o666,
            major: 1,
            minor: 3,
        });
        entries.push(Entry::File {
            path: "modules/order",
            mode: 0o444,
            content: listing.as_bytes(),
        });
        entries.extend(modules.iter().map(|(path, content)| Entry::File {
            path,
            mode: 0o444,
            content,
        }));
        entries.push(Entry::File {
            path: "init",
            mode: 0o755,
            content: daemon,
        });
        cpio::archive(&entries).ok_or_else(|| VolumeError::BadRecipe {
            what: "the daemon program is larger than 4 GiB".to_owned(),
        })
    }
}

fn newest_cached(kernels: &Path) -> Result<Option<Kernel>, VolumeError> {
    let step = "read the kernel cache";
    let mut versions = Vec::new();
    for entry in fs::read_dir(kernels).map_err(VolumeError::io(step))? {
        let name = entry.map_err(VolumeError::io(step))?.file_name();
        // Half-made ones start with a dot.
        versions.extend(
            name.to_str()
                .filter(|name| !name.starts_with('.'))
                .map(str::to_owned),
        );
    }
    Ok(versions
        .into_iter()
        .max_by_key(|version| debian::numbers(version))
        .map(|version| Kernel {
            directory: kernels.join(&version),
            version,
        }))
}

/// Downloads and unpacks `package`, keeps what is needed of it, and moves the result to `directory` in one step.
async fn fetch(package: &str, kernels: &Path, directory: &Path) -> Result<(), VolumeError> {
    let step = "unpack the kernel";
    let work = tempfile::Builder::new()
        .prefix(".fetch-")
        .tempdir_in(kernels)
        .map_err(VolumeError::io(step))?;
    let unpacked = work.path().join("unpacked");
    debian::download(package, work.path()).await?;
    let archive = only_file(work.path(), "deb")?;
    Program::new("dpkg-deb", "dpkg", LIMIT)
        .args(["-x".as_ref(), archive.as_os_str(), unpacked.as_os_str()])
        .output()
        .await?;

    let result = work.path().join("result");
    fs::create_dir(&result).map_err(VolumeError::io(step))?;
    let boot = unpacked.join("boot");
    let image = find(&boot, &|name| name.starts_with("vmlinuz-"))?;
    fs::rename(image, result.join("vmlinuz")).map_err(VolumeError::io(step))?;

    let files = module_files(&unpacked)?;
    let builtin = builtin_modules(&unpacked)?;
    let mut needs: BTreeMap<String, Vec<String>> =
        builtin.into_iter().map(|name| (name, Vec::new())).collect();
    let mut pending: Vec<String> = modules::WANTED.iter().map(|&name| name.to_owned()).collect();
    while let Some(name) = pending.pop() {
        if needs.contains_key(&name) {
            continue;
        }
        let file = files.get(&name).ok_or_else(|| VolumeError::PackageSource {
            what: format!("{package} has no module {name}"),
        })?;
        let content = read_module(file).await?;
        let needed = modules::dependencies(&content);
        pending.extend(needed.iter().cloned());
        needs.insert(name.clone(), needed);
        fs::write(result.join(format!("{name}.ko")), content).map_err(VolumeError::io(step))?;
    }
    let order = modules::load_order(modules::WANTED, &needs).map_err(|name| VolumeError::PackageSource {
        what: format!("{package} has no module {name}"),
    })?;
    // What is built in needs no loading.
    let order = order
        .into_iter()
        .filter(|name| result.join(format!("{name}.ko")).exists());
    let order = order.fold(String::new(), |order, name| order + &name + "\n");
    fs::write(result.join("order"), order).map_err(VolumeError::io(step))?;
    fs::rename(&result, directory).map_err(VolumeError::io(step))
}

/// A module's bytes, unpacked if need be.
async fn read_module(file: &Path) -> Result<Vec<u8>, VolumeError> {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => {
            Program::new("xz", "xz-utils", LIMIT)
                .args(["-dc".as_ref(), file.as_os_str()])
                .output()
                .await
        }
        Some("zst") => {
            Program::new("zstd", "zstd", LIMIT)
                .args(["-dcq".as_ref(), file.as_os_str()])
                .output()
                .await
        }
        _ => fs::read(file).map_err(VolumeError::io("read a kernel module")),
    }
}

/// All module files below the unpacked package, by plain name.
fn module_files(unpacked: &Path) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
    let mut files = BTreeMap::new();
    let mut directories = vec![unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")];
    while let Some(directory) = directories.pop() {
        for (path, kind) in list(&directory)? {
            if kind.is_dir() {
                directories.push(path);
            } else if let Some((name, _)) = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.split_once(".ko"))
            {
                files.insert(modules::plain_name(name), path);
            }
        }
    }
    Ok(files)
}

fn builtin_modules(unpacked: &Path) -> Result<Vec<String>, VolumeError> {
    let mut names = Vec::new();
    for modules in [unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")] {
        for (version, _) in list(&modules)? {
            let listing = match fs::read_to_string(version.join("modules.builtin")) {
                Ok(listing) => listing,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(VolumeError::io("read the kernel's list of modules")(error)),
            };
            names.extend(listing.lines().filter_map(|line| {
                line.rsplit('/')
                    .next()?
                    .strip_suffix(".ko")
                    .map(modules::plain_name)
            }));
        }
    }
    Ok(names)
}

fn list(directory: &Path) -> Result<Vec<(PathBuf, std::fs::FileType)>, VolumeError> {
    let step = "look through the unpacked kernel";
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(VolumeError::io(step)(error)),
    };
    entries
        .map(|entry| {
            let entry = entry.map_err(VolumeError::io(step))?;
            Ok((entry.path(), entry.file_type().map_err(VolumeError::io(step))?))
        })
        .collect()
}

fn find(directory: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<PathBuf, VolumeError> {
    list(directory)?
        .into_iter()
        .map(|(path, _)| path)
        .find(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(wanted)
        })
        .ok_or_else(|| VolumeError::Damaged {
            path: directory.to_owned(),
            what: "the kernel package lacks an expected file".to_owned(),
        })
}

fn only_file(directory: &Path, extension: &str) -> Result<PathBuf, VolumeError> {
    find(directory, &|name| name.ends_with(&format!(".{extension}")))
}
