//! What a monitor sees of the file system: the files of its machine, each where its command line names it.
//!
//! The directory of the machine's sockets is never among them: sockets are passed as descriptors, and so is the file that
//! a device state is saved to.

use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use space_node_manager::View;

use crate::{DiskLayer, MachineSpec, VmmError, io_error};

/// Files that differ with the way a machine comes to life.
pub(super) enum Sources<'a> {
    /// The memory file is written.
    Boot { memory: &'a Path },
    /// Nothing is.
    Restore { memory: &'a Path, state: &'a Path },
}

/// The views of a machine; every file must exist.
pub(super) fn views(spec: &MachineSpec, sources: &Sources<'_>) -> Result<Vec<View>, VmmError> {
    let mut views = vec![view(&spec.root, false)?];
    match sources {
        Sources::Boot { memory } => {
            views.push(view(memory, true)?);
            views.push(view(&spec.kernel, false)?);
            views.push(view(&spec.initramfs, false)?);
        }
        Sources::Restore { memory, state } => {
            views.push(view(memory, false)?);
            views.push(view(state, false)?);
        }
    }
    views.extend(disk(&spec.disk)?);
    Ok(views)
}

/// A layer above a template's disk is followed by others that are made beside it, so its directory is seen; the files
/// in it are the monitor's by their owner. The rest are files, and not written.
fn disk(layers: &[DiskLayer]) -> Result<Vec<View>, VmmError> {
    let [top, below @ ..] = layers else {
        return Ok(Vec::new());
    };
    if below.is_empty() {
        return Ok(vec![view(&top.path, true)?]);
    }
    let directory = top.path.parent().unwrap_or(Path::new("/"));
    let mut views = vec![view(directory, true)?];
    for layer in below {
        if layer.path.parent() != Some(directory) {
            views.push(view(&layer.path, false)?);
        }
    }
    Ok(views)
}

fn view(path: &Path, writable: bool) -> Result<View, VmmError> {
    let plain = |part: &Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    // Without doubled slashes and dots; the kernel finds the same by either form.
    let parts = path.components().collect::<Vec<_>>();
    if !path.is_absolute() || !parts.iter().all(plain) || parts.len() < 2 {
        let what = format!("the path {} is not absolute and plain", path.display());
        return Err(VmmError::Unsupported { what });
    }
    let source = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| io_error("open", path, e))?;
    Ok(View {
        path: parts.iter().collect::<PathBuf>(),
        source,
        writable,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn seen(views: &[View]) -> Vec<(String, bool)> {
        let text = |view: &View| (view.path.to_string_lossy().into_owned(), view.writable);
        views.iter().map(text).collect()
    }

    #[test]
    fn a_machine_sees_its_own_files_and_writes_only_to_its_disk() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["template", "own", "sockets"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        let files =
            ["root", "memory", "state", "disk", "kernel", "initramfs"].map(|name| at("template").join(name));
        let layers = ["0.qcow2", "1.qcow2"].map(|name| at("own").join(name));
        for file in files.iter().chain(&layers) {
            File::create(file).unwrap();
        }
        let [root, memory, state, disk, kernel, initramfs] = files;
        let null = || File::open("/dev/null").unwrap().into();
        let mut spec = MachineSpec {
            name: space_node_manager::ObjectName::new("m").unwrap(),
            uid: 1,
            directory: at("sockets"),
            vcpus: 1,
            memory_mib: 128,
            root: root.clone(),
            disk: [&layers[1], &layers[0], &disk]
                .map(|path| DiskLayer { path: path.clone() })
                .into(),
            network_namespace: null(),
            tap: null(),
            kernel: kernel.clone(),
            initramfs: initramfs.clone(),
            kernel_arguments: String::new(),
        };
        let text = |path: &Path, writable| (path.to_string_lossy().into_owned(), writable);
        let restored = views(
            &spec,
            &Sources::Restore {
                memory: &memory,
                state: &state,
            },
        )
        .unwrap();
        assert_eq!(
            seen(&restored),
            [
                text(&root, false),
                text(&memory, false),
                text(&state, false),
                text(&at("own"), true),
                text(&disk, false),
            ]
        );

        spec.disk = vec![DiskLayer { path: disk.clone() }];
        let booted = views(&spec, &Sources::Boot { memory: &memory }).unwrap();
        assert_eq!(
            seen(&booted),
            [
                text(&root, false),
                text(&memory, true),
                text(&kernel, false),
                text(&initramfs, false),
                text(&disk, true),
            ]
        );

        for wrong in ["relative", "/a/../b", "/"] {
            spec.root = wrong.into();
            assert!(
                views(&spec, &Sources::Boot { memory: &memory }).is_err(),
                "{wrong}"
            );
        }
        let doubled = format!("{}//./root", at("template").display());
        assert_eq!(
            seen(&[view(Path::new(&doubled), false).unwrap()]),
            [text(&root, false)]
        );
    }
}
