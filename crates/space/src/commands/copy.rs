//! `space sandbox cp`: which way it goes, and the report.

mod download;
mod upload;

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;
use serde_json::json;
use space_api::id::SandboxId;

use crate::{cli::Global, error::CliError, output};

/// Deepest directory that is followed.
const MAX_DEPTH: usize = 128;
/// Most files and directories of one copy.
const MAX_ENTRIES: usize = 1_000_000;

#[derive(Debug, Args)]
pub(crate) struct Copy {
    /// What to copy: PATH here, or SANDBOX:PATH
    source: OsString,
    /// Where to: PATH here, or SANDBOX:PATH; into it if it is a directory
    destination: OsString,
    /// Account inside the sandbox [default: user]
    #[arg(long, short = 'u', value_name = "NAME")]
    user: Option<String>,
}

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Here(PathBuf),
    Inside(SandboxId, Vec<u8>),
}

impl Place {
    /// `SANDBOX:PATH` is inside; a path here that looks like it is written `./SANDBOX:PATH`.
    fn parse(given: &OsStr) -> Self {
        let bytes = given.as_bytes();
        if let Some(at) = bytes.iter().position(|&byte| byte == b':')
            && let Ok(name) = std::str::from_utf8(&bytes[..at])
            && let Ok(id) = name.parse()
        {
            let path = match &bytes[at + 1..] {
                b"" => b".".to_vec(),
                path => path.to_vec(),
            };
            return Self::Inside(id, path);
        }
        Self::Here(PathBuf::from(given))
    }
}

/// What a copy has moved.
#[derive(Debug, Default)]
struct Moved {
    files: u64,
    directories: u64,
    links: u64,
    bytes: u64,
    /// SHA-256 of the content, if it was a single file.
    digest: Option<String>,
    /// What could not be copied, because it is neither file, directory nor link.
    skipped: Vec<String>,
}

impl Copy {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let user = self.user.as_deref();
        let moved = match (Place::parse(&self.source), Place::parse(&self.destination)) {
            (Place::Here(source), Place::Inside(id, destination)) => {
                let sandbox = global.client()?.connect(&id, None).await?;
                upload::copy(&sandbox, &source, destination, user).await?
            }
            (Place::Inside(id, source), Place::Here(destination)) => {
                let sandbox = global.client()?.connect(&id, None).await?;
                download::copy(&sandbox, source, &destination, user).await?
            }
            (Place::Here(_), Place::Here(_)) => {
                return Err(CliError::usage("neither of the two is in a sandbox")
                    .with_hint("write the one inside as SANDBOX:PATH; `space sandbox ls` shows ids"));
            }
            (Place::Inside(..), Place::Inside(..)) => {
                return Err(CliError::usage("both of the two are in a sandbox")
                    .with_hint("copy by way of a path here"));
            }
        };
        if global.json {
            output::json(&json!({
                "files": moved.files, "directories": moved.directories, "links": moved.links,
                "bytes": moved.bytes, "sha256": moved.digest, "skipped": moved.skipped,
            }))?;
        } else {
            for path in &moved.skipped {
                output::note(format!(
                    "space: left out {}: no file, directory or link",
                    output::printable(path)
                ));
            }
            let digest = moved
                .digest
                .map(|digest| format!(", sha256 {digest}"))
                .unwrap_or_default();
            output::note(format!(
                "{} in {} files, {} directories, {} links{digest}",
                output::bytes(moved.bytes),
                moved.files,
                moved.directories,
                moved.links
            ));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// `directory/name` inside.
fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = directory.to_vec();
    if !path.ends_with(b"/") && !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// The last part of a path inside; `None` if that is no name.
fn last_part(path: &[u8]) -> Option<OsString> {
    let name = path.split(|&byte| byte == b'/').rfind(|part| !part.is_empty())?;
    (!matches!(name, b"." | b"..")).then(|| OsString::from_vec(name.to_vec()))
}

fn lossy(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        let id: SandboxId = "abcdefghij0123456789".parse().expect("valid");
        let parse = |text: &str| Place::parse(OsStr::new(text));
        assert_eq!(
            parse("abcdefghij0123456789:/x:y"),
            Place::Inside(id.clone(), b"/x:y".to_vec())
        );
        assert_eq!(parse("abcdefghij0123456789:"), Place::Inside(id, b".".to_vec()));
        for here in ["./abcdefghij0123456789:/x", "/a:b", "a:b", "x"] {
            assert_eq!(parse(here), Place::Here(PathBuf::from(here)));
        }
        assert_eq!(last_part(b"/a/b/"), Some("b".into()));
        assert_eq!(last_part(b"/"), None);
        assert_eq!(last_part(b"a/.."), None);
        assert_eq!(join(b"/", b"x"), b"/x");
    }
}
