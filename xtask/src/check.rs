//! What can be said about the tree without running it: format, lints, dependencies, hygiene, links.

mod dependencies;
mod errors;
mod hygiene;
mod links;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::{
    session::{Interrupted, Session},
    setup::{self, Purpose},
};

/// One check.
#[derive(Clone, Copy)]
pub(crate) struct Check {
    /// Its name, as `cargo xtask test --only` takes it.
    pub(crate) name: &'static str,
    /// Fails with everything that is wrong.
    pub(crate) run: fn(&Session) -> Result<()>,
}

/// All of them, the quickest first.
pub(crate) const ALL: &[Check] = &[
    Check {
        name: "hygiene",
        run: |session| verdict(hygiene::findings(session.root(), &tracked(session)?)),
    },
    Check {
        name: "links",
        run: |session| verdict(links::findings(session.root(), &tracked(session)?)),
    },
    Check {
        name: "errors",
        run: errors::check,
    },
    Check {
        name: "fmt",
        run: |session| step(session, "fmt", &["fmt", "--all", "--check"]),
    },
    Check {
        name: "dependencies",
        run: dependencies::check,
    },
    Check {
        name: "clippy",
        run: |session| {
            step(
                session,
                "clippy",
                &[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--locked",
                    "--",
                    "-D",
                    "warnings",
                ],
            )
        },
    },
];

/// Runs all checks, shows what is wrong, and says how many failed.
pub(crate) fn run(session: &Session) -> Result<usize> {
    setup::ensure(session, Purpose::Build)?;
    let mut failed = 0;
    for check in ALL {
        match (check.run)(session) {
            Ok(()) => eprintln!("✓ {}", check.name),
            Err(error) if error.downcast_ref::<Interrupted>().is_some() => return Err(error),
            Err(error) => {
                failed += 1;
                eprintln!("✗ {}: {error:#}", check.name);
            }
        }
    }
    println!("{} passed, {failed} failed", ALL.len() - failed);
    Ok(failed)
}

fn step(session: &Session, name: &str, arguments: &[&str]) -> Result<()> {
    session.run(name, session.cargo().args(arguments)).map(drop)
}

fn verdict(findings: Result<Vec<String>>) -> Result<()> {
    let findings = findings?;
    if findings.is_empty() {
        return Ok(());
    }
    bail!("{} found\n  {}", findings.len(), findings.join("\n  "))
}

/// Every file that is, or would be, under version control, relative to the root.
fn tracked(session: &Session) -> Result<Vec<PathBuf>> {
    let mut git = session.command("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = session.output(&mut git)?;
    let files = listed
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from);
    Ok(files.filter(|file| session.root().join(file).is_file()).collect())
}

/// The text of a file; `None` if it is not text.
fn text_of(root: &Path, file: &Path) -> Result<Option<String>> {
    let path = root.join(file);
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8(bytes).ok())
}

fn is_rust(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "rs")
}
