//! The list of behaviours is as true as its names are.

use std::{collections::BTreeSet, path::Path};

/// A behaviour whose test was renamed or removed would be promised and not kept.
#[test]
fn every_test_that_the_list_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut defined = BTreeSet::new();
    for directory in ["crates", "xtask"] {
        functions(&root.join(directory), &mut defined);
    }
    let list = fs_err::read_to_string(root.join("docs/behaviours.md")).expect("the list");
    // A test's name is in code and has many words; what else is in code has not.
    let named: Vec<&str> = list
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| name.matches('_').count() >= 3)
        .collect();
    assert!(named.len() > 50, "{}", named.len());
    let missing: Vec<_> = named.iter().filter(|name| !defined.contains(**name)).collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}

/// The names of all functions in the Rust sources below a directory.
fn functions(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs_err::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs_err::read_to_string(&path).expect("a source");
            let names = text.lines().filter_map(|line| {
                let (_, rest) = line.split_once("fn ")?;
                rest.split(['(', '<']).next()
            });
            found.extend(names.map(str::to_owned));
        }
    }
}
