//! Argument lists with placeholders: matched against a real command line, and filled in to make one.
//!
//! A line is one argument; `{name}` in it stands for text without commas. `restore:` or `boot:` before an argument
//! limits it to that way of starting. Empty lines and lines that begin with `#` are comments.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// How a machine is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a snapshot.
    Restore,
    /// From its kernel.
    Boot,
}

/// Values of placeholders by name.
pub(crate) type Values = BTreeMap<String, String>;

/// The arguments for one way of starting, placeholders and all.
pub(crate) fn patterns(text: &str, way: Way) -> Vec<&str> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter_map(|line| match (line.strip_prefix("restore: "), line.strip_prefix("boot: ")) {
            (Some(only), _) => (way == Way::Restore).then_some(only),
            (_, Some(only)) => (way == Way::Boot).then_some(only),
            _ => Some(line),
        })
        .collect()
}

/// Reads the placeholders' values out of a real command line. Fails, saying where, if the two are not the same.
pub(crate) fn learn(patterns: &[&str], arguments: &[String]) -> Result<Values> {
    let mut values = Values::new();
    for (at, pattern) in patterns.iter().enumerate() {
        let argument = arguments.get(at).with_context(|| format!("{pattern} is missing at the end"))?;
        if !matches(pattern, argument, &mut values) {
            bail!("argument {} is {argument}, not {pattern}", at + 1);
        }
    }
    let more = arguments.get(patterns.len()..).unwrap_or_default();
    ensure!(more.is_empty(), "there is more: {}", more.join(" "));
    Ok(values)
}

/// Puts values in.
pub(crate) fn fill(patterns: &[&str], values: &Values) -> Result<Vec<String>> {
    patterns
        .iter()
        .map(|pattern| {
            let mut argument = String::new();
            for piece in pieces(pattern) {
                match piece {
                    Piece::Text(text) => argument.push_str(text),
                    Piece::Placeholder(name) => {
                        argument.push_str(values.get(name).with_context(|| format!("{{{name}}} has no value"))?);
                    }
                }
            }
            Ok(argument)
        })
        .collect()
}

#[derive(Debug, Clone, Copy)]
enum Piece<'a> {
    Text(&'a str),
    Placeholder(&'a str),
}

fn pieces(pattern: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('{') {
        pieces.push(Piece::Text(before));
        let Some((name, next)) = after.split_once('}') else {
            rest = after;
            break;
        };
        pieces.push(Piece::Placeholder(name));
        rest = next;
    }
    pieces.push(Piece::Text(rest));
    pieces.retain(|piece| !matches!(piece, Piece::Text("")));
    pieces
}

fn matches(pattern: &str, argument: &str, values: &mut Values) -> bool {
    let pieces = pieces(pattern);
    let mut rest = argument;
    for (at, piece) in pieces.iter().enumerate() {
        match piece {
            Piece::Text(text) => match rest.strip_prefix(text) {
                Some(after) => rest = after,
                None => return false,
            },
            Piece::Placeholder(name) => {
                let limit = rest.find(',').unwrap_or(rest.len());
                let end = match pieces.get(at + 1) {
                    Some(Piece::Text(text)) if !text.starts_with(',') => match rest[..limit].find(text) {
                        Some(end) => end,
                        None => return false,
                    },
                    _ => limit,
                };
                let value = &rest[..end];
                if values.entry((*name).to_owned()).or_insert_with(|| value.to_owned()) != value {
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

    const TEXT: &str = "# a comment\n-m\n{memory_mib}\n\nrestore: -incoming\nrestore: file:{state}\nboot: -boot\n-object\n\
                        mem,size={memory_mib}M,path={memory},share=off\n";

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_learned_fills_in_the_same() {
        let patterns = patterns(TEXT, Way::Restore);
        let real = words("-m 512 -incoming file:/x/state -object mem,size=512M,path=/x/memory,share=off");
        let values = learn(&patterns, &real).unwrap();
        assert_eq!(values["memory_mib"], "512");
        assert_eq!(values["memory"], "/x/memory");
        assert_eq!(fill(&patterns, &values).unwrap(), real);
    }

    #[test]
    fn any_difference_is_found() {
        let patterns = patterns(TEXT, Way::Boot);
        assert_eq!(patterns.len(), 5);
        for other in [
            "-m 512 -boot -object mem,size=512M,path=/x,share=on",
            "-m 512 -boot -object mem,size=256M,path=/x,share=off",
            "-m 512 -boot -object mem,size=512M,path=/x,share=off -more",
            "-m 512 -boot -object",
            "-m 512 -incoming -object mem,size=512M,path=/x,share=off",
        ] {
            assert!(learn(&patterns, &words(other)).is_err(), "{other}");
        }
        assert!(fill(&patterns, &Values::new()).is_err());
    }
}
