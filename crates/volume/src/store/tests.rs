use std::collections::BTreeMap;

use super::*;

fn store() -> (tempfile::TempDir, TemplateStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(directory.path().join("store")).unwrap();
    (directory, store)
}

fn label(text: &str) -> Label {
    text.parse().unwrap()
}

fn publish(store: &TemplateStore, name: &str, tag: &str, root: &str) -> Template {
    let manifest = Manifest {
        format: Manifest::FORMAT,
        architecture: "x86_64".to_owned(),
        root: store.import_bytes(root.as_bytes()).unwrap(),
        kernel: store.import_bytes(b"kernel").unwrap(),
        kernel_version: "6.12".to_owned(),
        initramfs: store.import_bytes(b"initramfs").unwrap(),
        packages: BTreeMap::from([("bash".to_owned(), "5".to_owned())]),
        run: Vec::new(),
        environment: BTreeMap::new(),
        start: None,
        ready: None,
        default_size: SizeClass::DEFAULT,
    };
    store.publish(&label(name), &label(tag), &manifest).unwrap()
}

fn blob_count(store: &TemplateStore) -> usize {
    entries(&store.directory().join("blobs")).unwrap().len()
}

#[test]
fn a_published_template_is_found_by_name_tag_and_digest() {
    let (_directory, store) = store();
    let template = publish(&store, "base", "latest", "root");
    assert_eq!(store.resolve("base").unwrap(), template);
    assert_eq!(store.resolve("base:latest").unwrap(), template);
    assert_eq!(store.resolve(&template.digest.to_string()).unwrap(), template);
    assert_eq!(template.reference(), "base:latest");
    assert_eq!(store.list().unwrap(), [template]);
    for missing in ["other", "base:v2", &Digest::of(b"?").to_string()] {
        let error = store.resolve(missing).unwrap_err();
        assert!(
            matches!(error, VolumeError::TemplateNotFound { .. }),
            "{missing}: {error}"
        );
    }
}

#[test]
fn the_same_content_has_the_same_digest_and_one_copy() {
    let (_directory, store) = store();
    let one = publish(&store, "one", "latest", "root");
    let two = publish(&store, "two", "latest", "root");
    assert_eq!(one.digest, two.digest);
    assert_eq!(blob_count(&store), 3);
}

#[test]
fn files_are_read_only_and_directories_open_to_all() {
    let (_directory, store) = store();
    let template = publish(&store, "base", "latest", "root");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&store.blob_path(template.manifest.root.digest)), 0o444);
    for directory in DIRECTORIES {
        assert_eq!(mode(&store.directory().join(directory)), 0o755);
    }
}

#[test]
fn removing_a_name_removes_what_only_it_needed() {
    let (_directory, store) = store();
    let one = publish(&store, "one", "latest", "root 1");
    publish(&store, "two", "latest", "root 2");
    fs::create_dir_all(store.machines_path(one.digest).join("1x512x4096-abc")).unwrap();
    store.remove("one").unwrap();
    assert!(matches!(
        store.resolve("one"),
        Err(VolumeError::TemplateNotFound { .. })
    ));
    assert!(!store.machines_path(one.digest).exists());
    assert_eq!(blob_count(&store), 3);
    store.resolve("two").unwrap();
    let again = store.remove("one").unwrap_err();
    assert!(matches!(again, VolumeError::TemplateNotFound { .. }), "{again}");
    store.remove("two:latest").unwrap();
    assert_eq!(blob_count(&store), 0);
}

#[test]
fn what_is_in_use_stays_until_it_is_not() {
    let (_directory, store) = store();
    let template = publish(&store, "base", "latest", "root");
    let lease = store.lease(template.digest).unwrap();
    store.remove("base").unwrap();
    assert_eq!(blob_count(&store), 3);
    let by_digest = store.resolve(&template.digest.to_string()).unwrap();
    assert_eq!(by_digest.name, None);
    drop(lease);
    store.collect().unwrap();
    assert_eq!(blob_count(&store), 0);
    assert!(matches!(
        store.lease(template.digest),
        Err(VolumeError::TemplateNotFound { .. })
    ));
}

#[test]
fn a_name_moves_to_the_newer_build() {
    let (_directory, store) = store();
    let old = publish(&store, "base", "latest", "root 1");
    let new = publish(&store, "base", "latest", "root 2");
    assert_ne!(old.digest, new.digest);
    assert_eq!(store.resolve("base").unwrap(), new);
    store.resolve(&old.digest.to_string()).unwrap();
    store.collect().unwrap();
    let error = store.resolve(&old.digest.to_string()).unwrap_err();
    assert!(matches!(error, VolumeError::TemplateNotFound { .. }), "{error}");
}

#[test]
fn what_a_crash_left_is_invisible_and_swept_by_the_next_one_alone() {
    let (directory, store) = store();
    let path = directory.path().join("store");
    publish(&store, "base", "latest", "root");
    // Killed while a blob was being written, and while a machine was being put together.
    let leftover = store.work().unwrap().keep();
    fs::write(leftover.join("file"), "half").unwrap();
    fs::create_dir(leftover.join("machine")).unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
    // Somebody else still has it open, so the work may be theirs.
    let second = TemplateStore::open(&path).unwrap();
    assert!(leftover.exists());
    drop((store, second));
    let third = TemplateStore::open(&path).unwrap();
    assert!(!leftover.exists());
    assert_eq!(third.list().unwrap().len(), 1);
    assert_eq!(blob_count(&third), 3);
}

#[test]
fn an_import_that_is_under_way_is_not_collected() {
    let (_directory, store) = store();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let importing = runtime.block_on(store.importing()).unwrap();
    store.import_bytes(b"not yet named").unwrap();
    store.collect().unwrap();
    assert_eq!(blob_count(&store), 1);
    drop(importing);
    store.collect().unwrap();
    assert_eq!(blob_count(&store), 0);
}

#[test]
fn damage_is_found_and_named() {
    let (_directory, store) = store();
    let template = publish(&store, "base", "latest", "root");
    let path = store.manifest_path(template.digest);
    fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let text = fs::read_to_string(&path).unwrap().replace("6.12", "6.13");
    fs::write(&path, text).unwrap();
    let error = store.resolve("base").unwrap_err();
    assert!(matches!(error, VolumeError::Damaged { .. }), "{error}");
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn a_file_is_imported_once_and_its_digest_is_its_content() {
    let (directory, store) = store();
    let from = directory.path().join("image");
    fs::write(&from, "image").unwrap();
    let blob = store.import_file(&from, None).unwrap();
    assert_eq!(
        blob,
        Blob {
            digest: Digest::of(b"image"),
            bytes: 5
        }
    );
    fs::remove_file(&from).unwrap();
    assert_eq!(store.import_file(&from, Some(&blob)).unwrap(), blob);
    assert_eq!(fs::read(store.blob_path(blob.digest)).unwrap(), b"image");
}

#[test]
fn what_root_makes_in_the_store_of_another_is_the_others() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    set_mode(directory.path(), 0o755, "test").unwrap();
    let path = directory.path().join("store");
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(40_430), Some(40_431)).unwrap();
    let image = directory.path().join("image");
    fs::write(&image, "only root reads it").unwrap();
    set_mode(&image, 0o400, "test").unwrap();

    let store = TemplateStore::open(&path).unwrap();
    let template = publish(&store, "base", "latest", "root");
    let blob = store.import_file(&image, None).unwrap();
    let machine = store.machines_path(template.digest);
    {
        let _owner = store.act();
        fs::create_dir_all(machine.join("1x128x256-abc")).unwrap();
    }
    drop(store.build_lock("key").unwrap());
    store.resolve("base").unwrap();
    let mut left = vec![path.clone()];
    let mut seen = 0;
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        assert_eq!(
            (metadata.uid(), metadata.gid()),
            (40_430, 40_431),
            "{}",
            path.display()
        );
        seen += 1;
        if metadata.is_dir() {
            left.extend(entries(&path).unwrap().into_iter().map(|(path, _)| path));
        }
    }
    assert!(seen > 15, "{seen}");
    assert_eq!(
        fs::metadata(&image).unwrap().permissions().mode() & 0o777,
        0o400,
        "the source is as it was"
    );

    // A link put in its way leads root nowhere that the owner could not go.
    let precious = directory.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    set_mode(&precious, 0o600, "test").unwrap();
    fs::remove_file(path.join("lock")).unwrap();
    std::os::unix::fs::symlink(&precious, path.join("lock")).unwrap();
    assert!(store.remove("base").is_err());
    fs::remove_file(path.join("lock")).unwrap();

    // And its owner goes on with it.
    {
        let _owner = store.act();
        let owners = TemplateStore::open(&path).unwrap();
        owners.remove("base").unwrap();
        assert!(!owners.blob_path(blob.digest).exists());
    }
}
