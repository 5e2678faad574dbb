//! Which crates may be in the tree, under which licences, from where: what `deny.toml` says.
//!
//! `cargo deny` reads the same file and is used where it is installed; the check built in here covers bans, licences
//! and sources, so that nobody needs to compile cargo-deny first.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};

use crate::{find_program, session::Session};

/// The parts of `deny.toml` that are checked here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Rules {
    banned: Vec<String>,
    licences: Vec<String>,
}

/// Checks the tree.
pub(super) fn check(session: &Session) -> Result<()> {
    if find_program("cargo-deny").is_some() {
        session.run(
            "dependencies",
            session
                .cargo()
                .args(["deny", "check", "bans", "licenses", "sources"]),
        )?;
        return Ok(());
    }
    let file = session.root().join("deny.toml");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let rules = rules(&text)?;
    // Not `cargo metadata`: that also lists what only a feature nobody enables would bring.
    let mut tree = session.cargo();
    tree.args([
        "tree",
        "--workspace",
        "--locked",
        "--target",
        "x86_64-unknown-linux-gnu",
    ]);
    tree.args([
        "--edges",
        "normal,build,dev",
        "--prefix",
        "none",
        "--format",
        "{p}\t{l}",
    ]);
    let findings = findings(&rules, &session.output(&mut tree)?)?;
    if findings.is_empty() {
        return Ok(());
    }
    bail!("{} found\n  {}", findings.len(), findings.join("\n  "))
}

fn rules(text: &str) -> Result<Rules> {
    let table: toml::Table = text.parse().context("deny.toml is no TOML")?;
    let list = |section: &str, key: &str| -> Result<Vec<toml::Value>> {
        let value = table.get(section).and_then(|section| section.get(key));
        let array = value.and_then(toml::Value::as_array);
        array
            .cloned()
            .with_context(|| format!("deny.toml has no list {section}.{key}"))
    };
    let banned = list("bans", "deny")?
        .iter()
        .map(|entry| {
            let name = entry.get("crate").or_else(|| entry.get("name")).unwrap_or(entry);
            name.as_str()
                .map(str::to_owned)
                .context("an entry of bans.deny names no crate")
        })
        .collect::<Result<_>>()?;
    let licences = list("licenses", "allow")?
        .iter()
        .map(|entry| {
            entry
                .as_str()
                .map(str::to_owned)
                .context("an entry of licenses.allow is no text")
        })
        .collect::<Result<_>>()?;
    Ok(Rules { banned, licences })
}

/// Looks at lines `name v1.2.3 (where from)<tab>licence`.
fn findings(rules: &Rules, tree: &str) -> Result<Vec<String>> {
    let packages: BTreeSet<&str> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    let mut found = Vec::new();
    for package in &packages {
        let Some((package, licence)) = package.split_once('\t') else {
            continue;
        };
        let (name, rest) = package.split_once(' ').unwrap_or((package, ""));
        let shown: Vec<&str> = package.split(' ').take(2).collect();
        let shown = shown.join(" ");
        if rules.banned.iter().any(|banned| banned == name) {
            found.push(format!("{shown} is banned (deny.toml says why)"));
        }
        if rest.contains("://") {
            found.push(format!(
                "{shown} comes from a repository of its own, not from the registry"
            ));
        }
        if !permits(licence, &rules.licences) {
            found.push(format!(
                "{shown} has the licence {licence:?}, which deny.toml does not allow"
            ));
        }
    }
    if packages.len() < 2 {
        bail!("cargo tree names no packages");
    }
    Ok(found)
}

/// Whether an SPDX expression can be satisfied by the allowed licences alone. Old manifests write `/` for `OR`.
fn permits(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        words: &words,
        at: 0,
        allowed,
    };
    parser
        .any()
        .is_some_and(|permitted| permitted && parser.at == words.len())
}

struct Parser<'a> {
    words: &'a [&'a str],
    at: usize,
    allowed: &'a [String],
}

impl Parser<'_> {
    fn take(&mut self, word: &str) -> bool {
        let there = self.words.get(self.at) == Some(&word);
        self.at += usize::from(there);
        there
    }

    fn any(&mut self) -> Option<bool> {
        let mut permitted = self.all()?;
        while self.take("OR") {
            permitted |= self.all()?;
        }
        Some(permitted)
    }

    fn all(&mut self) -> Option<bool> {
        let mut permitted = self.one()?;
        while self.take("AND") {
            permitted &= self.one()?;
        }
        Some(permitted)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let inner = self.any()?;
            return self.take(")").then_some(inner);
        }
        let mut name = (*self.words.get(self.at)?).to_owned();
        self.at += 1;
        if self.take("WITH") {
            name = format!("{name} WITH {}", self.words.get(self.at)?);
            self.at += 1;
        }
        Some(self.allowed.contains(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed() -> Vec<String> {
        ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
            .map(str::to_owned)
            .to_vec()
    }

    #[test]
    fn expressions_are_read_as_spdx_means_them() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0/MIT",
            "(MIT OR GPL-2.0) AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR BSL-1.0",
        ] {
            assert!(permits(good, &allowed()), "{good}");
        }
        for bad in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "MIT AND",
            "(MIT",
            "MIT MIT",
            "MIT WITH some-exception",
        ] {
            assert!(!permits(bad, &allowed()), "{bad}");
        }
    }

    #[test]
    fn banned_crates_git_sources_and_licences_are_found() {
        let rules = rules("[bans]\ndeny = [{ crate = \"ring\", reason = \"one crypto library\" }]\n[licenses]\nallow = [\"MIT\"]").unwrap();
        assert_eq!(rules.banned, ["ring"]);
        let tree = "ours v0.0.0 (/home/x)\tMIT\nring v0.17.0\tMIT\nforked v1.0.0 (https://x.example/y#1234)\tMIT\n\
                    viral v2.0.0\tGPL-3.0\ngood v1.0.0 (proc-macro)\tMIT\ngood v1.0.0 (proc-macro)\tMIT (*)\n";
        let found = findings(&rules, tree).unwrap();
        assert_eq!(found.len(), 3, "{found:?}");
    }
}
