//! Links in the documents: each relative one leads to a file, each `#anchor` to a heading, and each path of the tree that
//! is named in backticks exists.

use std::{
    collections::BTreeSet,
    path::{Component, Path, PathBuf},
};

use anyhow::Result;

use super::text_of;

/// Directories whose files are named in prose by their path from the root.
const ROOTS: &[&str] = &[
    "crates/", "docs/", "demo/", "tests/", "xtask/", "proto/", ".ci/", ".config/",
];

/// Every link that leads nowhere, as `file:line: what`.
pub(super) fn findings(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "md"))
    {
        let Some(text) = text_of(root, file)? else {
            continue;
        };
        for (number, line) in prose(&text) {
            let mut say = |what: String| found.push(format!("{}:{number}: {what}", file.display()));
            for target in link_targets(line) {
                if let Some(problem) = problem_with(root, file, &text, target)? {
                    say(problem);
                }
            }
            for path in named_paths(line) {
                if !exists(root, path) {
                    say(format!("names `{path}`, which does not exist"));
                }
            }
        }
    }
    Ok(found)
}

/// Lines outside of code blocks, numbered from one.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            return None;
        }
        (!in_code).then_some((at + 1, line))
    })
}

/// Targets of `[text](target)`.
fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("](").filter_map(move |(at, mark)| {
        let rest = &line[at + mark.len()..];
        rest.find(')').map(|end| &rest[..end])
    })
}

/// Paths from the root in backticks; with a `*` or `{` they are patterns and not looked at.
fn named_paths(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter_map(|code| {
        let path = code.split("::").next()?;
        let plain = !path.contains(['*', '{', ' ', '<', '…']);
        (plain && ROOTS.iter().any(|root| path.starts_with(root))).then_some(path)
    })
}

fn exists(root: &Path, path: &str) -> bool {
    let path = path.split('#').next().unwrap_or(path);
    // `file.rs:12` names a line.
    let path = path
        .split_once(".rs:")
        .map_or(path.to_owned(), |(stem, _)| format!("{stem}.rs"));
    root.join(path).exists()
}

fn problem_with(root: &Path, file: &Path, text: &str, target: &str) -> Result<Option<String>> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(None);
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    if path.is_empty() {
        return Ok((!has_anchor(text, anchor))
            .then(|| format!("links to #{anchor}, but there is no such heading here")));
    }
    let aim = normal(&file.parent().unwrap_or(Path::new("")).join(path));
    if !root.join(&aim).exists() {
        return Ok(Some(format!("links to {target}, which does not exist")));
    }
    if anchor.is_empty() || aim.extension().is_none_or(|extension| extension != "md") {
        return Ok(None);
    }
    let there = text_of(root, &aim)?.unwrap_or_default();
    Ok((!has_anchor(&there, anchor))
        .then(|| format!("links to {target}, but there is no such heading there")))
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                result.pop();
            }
            Component::CurDir => {}
            other => result.push(other),
        }
    }
    result
}

fn has_anchor(text: &str, anchor: &str) -> bool {
    let anchors: BTreeSet<String> = prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| slug(line.trim_start_matches('#').trim()))
        .collect();
    anchors.contains(anchor)
}

/// The anchor that a heading gets from the usual renderers.
fn slug(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(text: &str) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("docs")).unwrap();
        std::fs::write(directory.path().join("docs/a.md"), text).unwrap();
        std::fs::write(directory.path().join("docs/b.md"), "# One `thing`, and another\n").unwrap();
        std::fs::write(directory.path().join("README.md"), "# Readme\n").unwrap();
        findings(directory.path(), &["docs/a.md".into()]).unwrap()
    }

    #[test]
    fn good_links_pass() {
        let text = "# Top\n[b](b.md) [b](b.md#one-thing-and-another) [r](../README.md) [t](#top) [w](https://x.example/y)\n\
                    `docs/b.md` `docs/b.md#x` `crates/*/src` ```[no](nowhere)```\n```\n[no](nowhere.md)\n```\n";
        assert_eq!(
            findings_of(text.replace("```[no](nowhere)```", "").as_str()),
            Vec::<String>::new()
        );
    }

    #[test]
    fn bad_links_are_found() {
        for bad in [
            "[b](c.md)",
            "[b](b.md#two)",
            "[t](#top)",
            "see `crates/none/src/lib.rs`",
            "[r](README.md)",
        ] {
            assert_eq!(findings_of(bad).len(), 1, "{bad}");
        }
    }
}
