//! Virtual environments for the SDKs, one per requirements file, kept under the target directory.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::session::Session;

/// Makes the environment `name`, or brings it up to date, and returns its `python`.
///
/// `plain` is installed with its dependencies, `bare` without. Nothing is done when both files are as they were.
pub(crate) fn environment(
    session: &Session,
    name: &str,
    plain: &Path,
    bare: Option<&Path>,
) -> Result<PathBuf> {
    let place = session.target().join("venv").join(name);
    let python = place.join("bin/python");
    let stamp = place.join("installed.txt");
    let mut wanted = read(plain)?;
    if let Some(bare) = bare {
        wanted.push_str(&read(bare)?);
    }
    if python.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    session.run(
        &format!("python venv {name}"),
        session
            .command("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&place),
    )?;
    let pip = || {
        let mut pip = session.command(&python);
        pip.args([
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--retries",
            "5",
        ]);
        pip
    };
    session.run(&format!("pip install {name}"), pip().arg("-r").arg(plain))?;
    if let Some(bare) = bare {
        session.run(
            &format!("pip install {name} data"),
            pip().arg("--no-deps").arg("-r").arg(bare),
        )?;
    }
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(python)
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}
