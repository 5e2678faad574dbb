//! How many sandboxes a platform can be told to hold.

use space_node_manager::protocol::MOST_MACHINES;

use super::Serving;
use crate::error::CliError;

/// Machines besides sandboxes and those that are ready: being made, being removed, of a template being built.
const BESIDES: usize = 32;

impl Serving {
    /// Refuses more machines than the node manager makes.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let most = MOST_MACHINES - BESIDES;
        if self.capacity.saturating_add(self.pool) <= most {
            return Ok(());
        }
        Err(CliError::usage(format!(
            "--capacity {} and --pool {} are more machines than can be managed: together at most {most}",
            self.capacity, self.pool
        ))
        .with_hint("choose a lower --capacity or --pool"))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        serving: Serving,
    }

    fn check(words: &[&str]) -> Result<(), CliError> {
        let line = Line::try_parse_from(std::iter::once(&"space").chain(words)).expect("a command line");
        line.serving.check()
    }

    #[test]
    fn more_than_can_be_managed_is_refused() {
        check(&[]).expect("the defaults");
        check(&["--capacity", "980", "--pool", "12"]).expect("as many as can be");
        for words in [["--capacity", "981"], ["--capacity", "18446744073709551615"]] {
            let words = [&words[..], &["--pool", "12"]].concat();
            assert!(check(&words).is_err(), "{words:?}");
        }
    }
}
