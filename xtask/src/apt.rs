//! Edits the machine's own apt sources so that Debian 12's backports are offered too.
//!
//! Only the list of suites of an entry that is there already grows: mirror, components and keys stay the machine's own.
//! Security entries are left alone, for there is no such suite under them.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

/// The suite that is added.
pub(crate) const BACKPORTS: &str = "bookworm-backports";
const RELEASE: &str = "bookworm";
const UPDATES: &str = "bookworm-updates";

/// What [`enable_backports`] did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Some entry offers them already.
    AlreadyThere,
    /// This file was changed; the earlier one lies beside it.
    Edited { file: PathBuf, backup: PathBuf },
}

/// Makes sure that one entry under `apt` (usually `/etc/apt`) offers backports.
pub(crate) fn enable_backports(apt: &Path) -> Result<Change> {
    let files = source_files(apt)?;
    let mut texts = Vec::new();
    for file in files {
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        texts.push((file, text));
    }
    if texts
        .iter()
        .any(|(file, text)| offers(&suites(file, text), BACKPORTS))
    {
        return Ok(Change::AlreadyThere);
    }
    for wanted in [UPDATES, RELEASE] {
        for (file, text) in &texts {
            let edited = if is_deb822(file) {
                with_suite_deb822(text, wanted)
            } else {
                with_suite_list(text, wanted)
            };
            let Some(edited) = edited else { continue };
            let backup = with_suffix(file, "before-backports");
            std::fs::copy(file, &backup)
                .with_context(|| format!("cannot keep a copy as {}", backup.display()))?;
            // Written beside and renamed: apt never sees half a file. apt ignores both names' endings.
            let fresh = with_suffix(file, "new");
            std::fs::write(&fresh, edited).with_context(|| format!("cannot write {}", fresh.display()))?;
            std::fs::rename(&fresh, file).with_context(|| format!("cannot replace {}", file.display()))?;
            return Ok(Change::Edited {
                file: file.clone(),
                backup,
            });
        }
    }
    bail!(
        "no apt source under {} offers the suite {RELEASE}, so {BACKPORTS} cannot be added beside it; add it by hand and run this again",
        apt.display()
    )
}

/// The files apt reads, in its order.
fn source_files(apt: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = [apt.join("sources.list")]
        .into_iter()
        .filter(|file| file.is_file())
        .collect();
    let directory = apt.join("sources.list.d");
    let mut more = Vec::new();
    if directory.is_dir() {
        for entry in
            std::fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?
        {
            let path = entry
                .with_context(|| format!("cannot read {}", directory.display()))?
                .path();
            if path.extension() == Some(OsStr::new("list")) || is_deb822(&path) {
                more.push(path);
            }
        }
    }
    more.sort();
    files.extend(more);
    Ok(files)
}

fn is_deb822(file: &Path) -> bool {
    file.extension() == Some(OsStr::new("sources"))
}

fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn offers(suites: &[String], wanted: &str) -> bool {
    suites.iter().any(|suite| suite == wanted)
}

/// All suites that the active entries of a file offer binary packages from.
fn suites(file: &Path, text: &str) -> Vec<String> {
    if is_deb822(file) {
        stanzas(text)
            .into_iter()
            .filter(Stanza::is_active)
            .flat_map(|stanza| stanza.suites())
            .collect()
    } else {
        text.lines()
            .filter_map(ListEntry::parse)
            .map(|entry| entry.suite.to_owned())
            .collect()
    }
}

/// Lines `first..end` of a deb822 file that belong together.
struct Stanza<'a> {
    lines: Vec<(usize, &'a str)>,
}

fn stanzas(text: &str) -> Vec<Stanza<'_>> {
    let mut all = vec![Stanza { lines: Vec::new() }];
    for (number, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            all.push(Stanza { lines: Vec::new() });
        } else if let Some(last) = all.last_mut() {
            last.lines.push((number, line));
        }
    }
    all.retain(|stanza| !stanza.lines.is_empty());
    all
}

impl Stanza<'_> {
    /// The value of a field with its continuation lines, and the number of its last line.
    fn field(&self, name: &str) -> Option<(String, usize)> {
        let mut found: Option<(String, usize)> = None;
        for (number, line) in &self.lines {
            if line.starts_with('#') {
                continue;
            }
            if line.starts_with([' ', '\t']) {
                if let Some((value, last)) = &mut found {
                    value.push(' ');
                    value.push_str(line.trim());
                    *last = *number;
                }
                continue;
            }
            if found.is_some() {
                break;
            }
            if let Some((key, value)) = line.split_once(':')
                && key.trim().eq_ignore_ascii_case(name)
            {
                found = Some((value.trim().to_owned(), *number));
            }
        }
        found
    }

    fn words(&self, name: &str) -> Vec<String> {
        self.field(name).map_or_else(Vec::new, |(value, _)| {
            value.split_whitespace().map(str::to_owned).collect()
        })
    }

    fn suites(&self) -> Vec<String> {
        self.words("Suites")
    }

    fn is_active(&self) -> bool {
        let disabled = self.words("Enabled").first().is_some_and(|word| {
            ["no", "false", "0", "off", "disable", "without"].contains(&word.to_ascii_lowercase().as_str())
        });
        !disabled && self.words("Types").iter().any(|kind| kind == "deb")
    }

    fn is_security(&self) -> bool {
        self.suites().iter().any(|suite| suite.contains("-security"))
            || self.words("URIs").iter().any(|uri| uri.contains("security"))
    }
}

/// The text with backports added to the first active stanza that offers `beside`; `None` if there is none.
fn with_suite_deb822(text: &str, beside: &str) -> Option<String> {
    let stanza = stanzas(text)
        .into_iter()
        .find(|stanza| stanza.is_active() && !stanza.is_security() && offers(&stanza.suites(), beside))?;
    let (_, last_line) = stanza.field("Suites")?;
    let mut edited = String::with_capacity(text.len() + BACKPORTS.len() + 1);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if number == last_line {
            let body = line.trim_end();
            edited.push_str(body);
            edited.push(' ');
            edited.push_str(BACKPORTS);
            edited.push_str(&line[body.len()..]);
        } else {
            edited.push_str(line);
        }
    }
    Some(edited)
}

/// A line `deb [options] URI suite components…`.
struct ListEntry<'a> {
    uri: &'a str,
    suite: &'a str,
    /// Where the suite begins in the line.
    at: usize,
}

impl<'a> ListEntry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut rest = line.trim_start().strip_prefix("deb")?;
        if !rest.starts_with([' ', '\t', '[']) {
            return None;
        }
        rest = rest.trim_start();
        if rest.starts_with('[') {
            rest = rest[rest.find(']')? + 1..].trim_start();
        }
        let uri = rest.split_whitespace().next()?;
        let after = rest[uri.len()..].trim_start();
        let suite = after.split_whitespace().next()?;
        Some(Self {
            uri,
            suite,
            at: line.len() - after.len(),
        })
    }
}

/// The text with a copy of the first line that offers `beside`, for backports; `None` if there is none.
fn with_suite_list(text: &str, beside: &str) -> Option<String> {
    let mut edited = String::with_capacity(text.len() * 2);
    let mut done = false;
    for line in text.split_inclusive('\n') {
        edited.push_str(line);
        if done {
            continue;
        }
        let Some(entry) = ListEntry::parse(line) else {
            continue;
        };
        if entry.suite == beside && !entry.uri.contains("security") {
            if !line.ends_with('\n') {
                edited.push('\n');
            }
            edited.push_str(&line[..entry.at]);
            edited.push_str(BACKPORTS);
            edited.push_str(line[entry.at + entry.suite.len()..].trim_end());
            edited.push('\n');
            done = true;
        }
    }
    done.then_some(edited)
}

#[cfg(test)]
mod tests;
