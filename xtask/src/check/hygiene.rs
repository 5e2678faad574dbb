//! House rules that no compiler knows.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{is_rust, text_of};

/// Longest source file, in lines; beyond it a file is to be split.
const MOST_LINES: usize = 700;

/// Registry hosts are the machine's business: a mirror's user must not find one of ours in the way.
/// (Written in two pieces, so that this file does not name any.)
const HOST_NAMES: &[&str] = &["crates", "pypi", "pythonhosted", "npmjs"];
const HOST_ENDINGS: &[&str] = &[".io", ".org", ".com"];
/// Lock files name registries by their nature.
const MAY_NAME_HOSTS: &[&str] = &["Cargo.lock", "package-lock.json"];

/// A path of the machine that the project is developed on.
const MACHINE_PATH: &str = concat!("/wo", "rk/");

/// What must not be in Rust source: unfinished work and tests that never run.
const UNFINISHED: &[&str] = &[
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("#[", "ignore"),
];

/// The one reason to leave a test out: it is no test but the process that another one starts and kills.
const HELPER_PROCESS: &str = " = \"another test runs it, as a process of its own\"]";

/// Everything that is against the rules, as `file:line: what`.
pub(super) fn findings(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in files {
        let Some(text) = text_of(root, file)? else {
            continue;
        };
        findings_in(file, &text, &mut found);
    }
    Ok(found)
}

fn findings_in(file: &Path, text: &str, found: &mut Vec<String>) {
    let mut say = |line: usize, what: String| found.push(format!("{}:{line}: {what}", file.display()));
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let may_name_hosts = MAY_NAME_HOSTS.contains(&name.as_ref());
    let rust = is_rust(file);
    let mut count = 0;
    for (at, line) in text.lines().enumerate() {
        count = at + 1;
        if !may_name_hosts && names_registry(line) {
            say(count, "names the host of a package registry".to_owned());
        }
        if names_machine_path(line) {
            say(count, "names a path of a developer's machine".to_owned());
        }
        let unfinished = |what: &&&str| line.contains(**what) && !line.contains(HELPER_PROCESS);
        if rust && let Some(what) = UNFINISHED.iter().find(unfinished) {
            say(count, format!("holds {what}"));
        }
    }
    if rust && count > MOST_LINES {
        say(count, format!("has more than {MOST_LINES} lines: split it"));
    }
}

fn names_registry(line: &str) -> bool {
    HOST_NAMES.iter().any(|name| {
        line.match_indices(name).any(|(at, _)| {
            let rest = &line[at + name.len()..];
            HOST_ENDINGS.iter().any(|ending| rest.starts_with(ending))
        })
    })
}

fn names_machine_path(line: &str) -> bool {
    line.match_indices(MACHINE_PATH).any(|(at, _)| {
        line[..at]
            .chars()
            .next_back()
            .is_none_or(|before| " \"'=(`".contains(before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        findings_in(Path::new(file), text, &mut found);
        found
    }

    #[test]
    fn hosts_and_paths_are_found_where_they_matter() {
        let host = ["see https://py", "pi.org/simple"].concat();
        assert_eq!(found("docs/a.md", &host).len(), 1);
        assert_eq!(found("sub/Cargo.lock", &host).len(), 0);
        let path = ["run /wo", "rk/main/x"].concat();
        assert_eq!(found("a.sh", &path).len(), 1);
        assert_eq!(found("a.sh", "/usr/share/network/x and /home/work").len(), 0);
    }

    #[test]
    fn long_files_and_unfinished_work_are_found_in_rust_only() {
        let long = "//\n".repeat(MOST_LINES + 1);
        assert_eq!(found("a.rs", &long).len(), 1);
        assert_eq!(found("a.txt", &long).len(), 0);
        assert_eq!(found("a.rs", &"//\n".repeat(MOST_LINES)).len(), 0);
        for what in UNFINISHED {
            assert_eq!(found("a.rs", &format!("  {what}]")).len(), 1, "{what}");
        }
        let helper = format!("{}{HELPER_PROCESS}", concat!("#[", "ignore"));
        assert!(found("a.rs", &helper).is_empty());
    }
}
