//! Every error code has its row in `docs/errors.md`, and every row a code.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};

use crate::session::Session;

const SOURCE: &str = "crates/api/src/error.rs";
const TABLE: &str = "docs/errors.md";

/// Compares the two.
pub(super) fn check(session: &Session) -> Result<()> {
    let read = |name: &str| {
        let path = session.root().join(name);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (codes, rows) = (codes(&read(SOURCE)?), rows(&read(TABLE)?));
    if codes.is_empty() {
        bail!("{SOURCE} has no enum ErrorCode with codes");
    }
    let missing: Vec<&str> = codes.difference(&rows).map(String::as_str).collect();
    let stale: Vec<&str> = rows.difference(&codes).map(String::as_str).collect();
    if missing.is_empty() && stale.is_empty() {
        return Ok(());
    }
    bail!(
        "{TABLE} lacks rows for [{}] and has rows for no code [{}]",
        missing.join(", "),
        stale.join(", ")
    )
}

/// The variants of `ErrorCode` as they stand in JSON; the catch-all `Unknown` is none.
fn codes(source: &str) -> BTreeSet<String> {
    source
        .lines()
        .skip_while(|line| !line.contains("enum ErrorCode"))
        .skip(1)
        .take_while(|line| !line.starts_with('}'))
        .filter_map(|line| line.trim().strip_suffix(','))
        .filter(|name| *name != "Unknown" && name.chars().all(char::is_alphanumeric))
        .map(snake_case)
        .collect()
}

/// First cells of the table's rows.
fn rows(document: &str) -> BTreeSet<String> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(code, _)| code.to_owned())
        .filter(|code| code != "error_code")
        .collect()
}

fn snake_case(name: &str) -> String {
    let mut result = String::new();
    for (at, letter) in name.char_indices() {
        if letter.is_uppercase() && at > 0 {
            result.push('_');
        }
        result.extend(letter.to_lowercase());
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_rows_are_read_alike() {
        let source = "pub struct X {\n    a: u8,\n}\npub enum ErrorCode {\n    /// One, two,\n    BadRequest,\n    #[serde(other)]\n    Unknown,\n}\nenum Y {\n    Other,\n}\n";
        let document = "| `error_code` | status |\n|---|---|\n| `bad_request` | 400 |\ntext `other`\n";
        assert_eq!(codes(source), BTreeSet::from(["bad_request".to_owned()]));
        assert_eq!(codes(source), rows(document));
    }
}
