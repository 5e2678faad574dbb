//! Reads how many tests ran out of what the test runners print.

/// How many tests ended which way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Passed; tests that skipped themselves are not among them.
    pub(crate) passed: u64,
    /// Failed, in whichever way.
    pub(crate) failed: u64,
    /// Left out by their runner.
    pub(crate) left_out: u64,
    /// Why tests skipped themselves, as they said it.
    pub(crate) skips: Vec<String>,
}

impl Counts {
    /// One thing that passed.
    pub(crate) fn success() -> Self {
        Self {
            passed: 1,
            ..Self::default()
        }
    }

    /// One thing that failed.
    pub(crate) fn failure() -> Self {
        Self {
            failed: 1,
            ..Self::default()
        }
    }

    /// Everything that did not run.
    pub(crate) fn skipped(&self) -> u64 {
        self.left_out + u64::try_from(self.skips.len()).unwrap_or(u64::MAX)
    }

    /// Adds others.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.left_out += other.left_out;
        self.skips.extend(other.skips);
    }

    /// What the log of cargo test, nextest, pytest or node's runner says; nothing if it has no closing line.
    pub(crate) fn of_log(log: &str) -> Option<Self> {
        let mut counts = Self::default();
        let mut found = false;
        // nextest shows what each test's own process printed, closing line and all: only its own sums count then.
        let nextest = log.lines().any(|line| line.trim_start().starts_with(NEXTEST));
        // What the test whose output this is has given as reasons: said on both outputs, it is still one skip.
        let mut said: Vec<&str> = Vec::new();
        for line in log.lines() {
            let line = line.trim();
            if begins_a_test(line) {
                said.clear();
            }
            if let Some(why) = line.strip_prefix("SKIPPED: ") {
                if !said.contains(&why) {
                    said.push(why);
                    counts.skips.push(why.trim().to_owned());
                }
                continue;
            }
            if nextest && !line.starts_with(NEXTEST) {
                continue;
            }
            let Some(some) = closing_line(line) else { continue };
            found = true;
            counts.add(some);
        }
        // A test that skipped itself counts as passed with its runner.
        counts.passed = counts
            .passed
            .saturating_sub(u64::try_from(counts.skips.len()).unwrap_or(0));
        found.then_some(counts)
    }
}

/// Whether the line is the heading over one test's output, of nextest (`PASS [ 0.1s] …`) or cargo test.
fn begins_a_test(line: &str) -> bool {
    line.starts_with("---- ")
        || line
            .split_once(" [")
            .is_some_and(|(word, _)| word.chars().all(|c| c.is_ascii_uppercase()))
}

/// The counts in a runner's closing line.
fn closing_line(line: &str) -> Option<Counts> {
    // nextest: `Summary [ 1.2s] 5 tests run: 4 passed (1 slow), 1 failed, 2 skipped`
    if line.starts_with(NEXTEST) {
        return words(line.split_once(" run: ")?.1);
    }
    // cargo test: `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.1s`
    if let Some(rest) = line.strip_prefix("test result: ") {
        return words(rest.split_once(". ")?.1);
    }
    // node: `# pass 3` (tap) or `ℹ pass 3` (spec)
    if let Some(rest) = line.strip_prefix("# ").or_else(|| line.strip_prefix("ℹ ")) {
        let (word, number) = rest.split_once(' ')?;
        return counted(number.parse().ok()?, word);
    }
    // pytest: `==== 3 passed, 1 skipped in 2.34s ====`, with -q without the rules
    let bare = line.trim_matches(|c| c == '=' || c == ' ');
    let (numbers, _) = bare.split_once(" in ")?;
    let begins_with_number = bare.starts_with(|c: char| c.is_ascii_digit());
    let whole = numbers.split(", ").all(|part| {
        part.split_once(' ')
            .is_some_and(|(number, word)| number.parse::<u64>().is_ok() && !word.contains(' '))
    });
    (begins_with_number && whole).then(|| words(numbers)).flatten()
}

/// Sums `4 passed (1 slow), 1 failed; 2 ignored`; nothing if no word is one of a runner's.
fn words(text: &str) -> Option<Counts> {
    let mut counts: Option<Counts> = None;
    for part in text.split([',', ';']) {
        let mut words = part.split_whitespace();
        let number = words.next().and_then(|number| number.parse().ok());
        if let (Some(number), Some(word)) = (number, words.next())
            && let Some(some) = counted(number, word)
        {
            counts.get_or_insert_default().add(some);
        }
    }
    counts
}

fn counted(number: u64, word: &str) -> Option<Counts> {
    let mut counts = Counts::default();
    match word.trim_end_matches(['(', ',']) {
        "passed" | "pass" | "xfailed" => counts.passed = number,
        "failed" | "fail" | "timed" | "error" | "errors" | "exec" | "cancelled" | "xpassed" => {
            counts.failed = number;
        }
        // What nextest calls skipped and cargo test filtered out was not chosen; it runs in another step.
        "ignored" | "todo" => counts.left_out = number,
        _ => return None,
    }
    Some(counts)
}

/// How nextest's closing line begins.
const NEXTEST: &str = "Summary [";

#[cfg(test)]
mod tests {
    use super::*;

    fn three(log: &str) -> (u64, u64, u64) {
        let counts = Counts::of_log(log).unwrap();
        (counts.passed, counts.failed, counts.skipped())
    }

    #[test]
    fn closing_lines_of_all_runners_are_read() {
        assert_eq!(
            three("     Summary [   1.007s] 5 tests run: 4 passed (1 slow), 1 failed, 3 skipped"),
            (4, 1, 0)
        );
        assert_eq!(
            three("     Summary [  61.0s] 2/3 tests run: 1 passed, 1 timed out, 0 skipped"),
            (1, 1, 0)
        );
        let cargo =
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.10s";
        assert_eq!(three(&format!("{cargo}\nother\n{cargo}")), (6, 0, 2));
        assert_eq!(
            three("===== 3 failed, 12 passed, 2 deselected, 1 error in 65.31s (0:01:05) ====="),
            (12, 4, 0)
        );
        assert_eq!(three("12 passed in 0.31s"), (12, 0, 0));
        assert_eq!(
            three("# tests 4\n# pass 3\n# fail 1\n# cancelled 0\n# skipped 0"),
            (3, 1, 0)
        );
        assert_eq!(three("ℹ pass 7\nℹ fail 0"), (7, 0, 0));
    }

    #[test]
    fn a_test_shown_by_nextest_counts_once() {
        let log = "PASS [ 0.1s] a\n  stdout\n    test result: ok. 1 passed; 0 failed; 0 ignored; finished in 0.1s\n\
                   ────\n     Summary [ 1s] 1 test run: 1 passed, 0 skipped";
        assert_eq!(three(log), (1, 0, 0));
    }

    #[test]
    fn a_test_that_skips_itself_is_no_pass() {
        let log =
            "SKIPPED: no /dev/kvm\n    SKIPPED: needs root\nSummary [ 1s] 5 tests run: 5 passed, 0 skipped";
        assert_eq!(three(log), (3, 0, 2));
    }

    #[test]
    fn a_log_without_a_closing_line_counts_nothing() {
        assert_eq!(
            Counts::of_log("5 files in 3 directories\nall passed in the end\nerror: could not compile"),
            None
        );
    }
}
