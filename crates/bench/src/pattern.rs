//! Argument lists with placeholders: matched against a real command line, and filled in to make one.
//!
//! A line is one argument; `<name>` in it stands for text without commas and quotes. Empty lines and lines that begin
//! with `#` are comments.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// Values of placeholders by name.
pub(crate) type Values = BTreeMap<&'static str, String>;

/// The arguments, placeholders and all.
pub(crate) fn patterns(text: &'static str) -> Vec<&'static str> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

/// Reads the placeholders' values out of a real command line. Fails, saying where, if the two are not the same.
pub(crate) fn learn(patterns: &[&'static str], arguments: &[String]) -> Result<Values> {
    let mut values = Values::new();
    for (at, pattern) in patterns.iter().enumerate() {
        let argument = arguments
            .get(at)
            .with_context(|| format!("{pattern} is missing at the end"))?;
        if !matches(pattern, argument, &mut values) {
            bail!("argument {} is {argument}, not {pattern}", at + 1);
        }
    }
    let more = arguments.get(patterns.len()..).unwrap_or_default();
    ensure!(more.is_empty(), "there is more: {}", more.join(" "));
    Ok(values)
}

/// Puts values in.
pub(crate) fn fill(patterns: &[&'static str], values: &Values) -> Result<Vec<String>> {
    patterns
        .iter()
        .map(|pattern| {
            let mut argument = String::new();
            for piece in pieces(pattern) {
                match piece {
                    Piece::Text(text) => argument.push_str(text),
                    Piece::Placeholder(name) => {
                        argument.push_str(
                            values
                                .get(name)
                                .with_context(|| format!("<{name}> has no value"))?,
                        );
                    }
                }
            }
            Ok(argument)
        })
        .collect()
}

#[derive(Debug, Clone, Copy)]
enum Piece {
    Text(&'static str),
    Placeholder(&'static str),
}

fn pieces(pattern: &'static str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('<') {
        let Some((name, next)) = after.split_once('>') else {
            break;
        };
        pieces.extend([Piece::Text(before), Piece::Placeholder(name)]);
        rest = next;
    }
    pieces.push(Piece::Text(rest));
    pieces
}

fn matches(pattern: &'static str, argument: &str, values: &mut Values) -> bool {
    let mut rest = argument;
    for piece in pieces(pattern) {
        match piece {
            Piece::Text(text) => match rest.strip_prefix(text) {
                Some(after) => rest = after,
                None => return false,
            },
            Piece::Placeholder(name) => {
                let end = rest.find([',', '"', '}']).unwrap_or(rest.len());
                let value = &rest[..end];
                if values.entry(name).or_insert_with(|| value.to_owned()) != value {
                    return false;
                }
                rest = &rest[end..];
            }
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\n-m\n<memory_mib>\n\n-incoming\nfile:<state>\n-object\n\
                        {\"path\":\"<memory>\",\"size\":<memory_mib>}\nmem,path=<memory>,share=off\n";

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_learned_fills_in_the_same() {
        let patterns = patterns(TEXT);
        let real = words(
            "-m 512 -incoming file:/x/state -object {\"path\":\"/x/m\",\"size\":512} mem,path=/x/m,share=off",
        );
        let values = learn(&patterns, &real).unwrap();
        assert_eq!(values["memory_mib"], "512");
        assert_eq!(values["memory"], "/x/m");
        assert_eq!(fill(&patterns, &values).unwrap(), real);
    }

    #[test]
    fn any_difference_is_found() {
        let patterns = patterns(TEXT);
        let good = "-m 512 -incoming file:/s -object {\"path\":\"/m\",\"size\":512} mem,path=/m,share=off";
        assert!(learn(&patterns, &words(good)).is_ok());
        for (from, to) in [
            ("share=off", "share=on"),
            ("\"size\":512", "\"size\":256"),
            ("-incoming ", ""),
            ("=off", "=off -more"),
        ] {
            assert!(learn(&patterns, &words(&good.replace(from, to))).is_err(), "{to}");
        }
        assert!(fill(&patterns, &Values::new()).is_err());
    }

    #[test]
    fn the_checked_in_command_line_has_no_placeholder_twice_by_mistake() {
        let text = include_str!("../floor.args");
        let found: Vec<&str> = patterns(text)
            .into_iter()
            .flat_map(pieces)
            .filter_map(|piece| match piece {
                Piece::Placeholder(name) => Some(name),
                Piece::Text(_) => None,
            })
            .collect();
        let unique: std::collections::BTreeSet<_> = found.iter().collect();
        assert_eq!(unique.len(), found.len(), "{found:?}");
    }
}
