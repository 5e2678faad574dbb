//! The only place that writes to standard output and standard error.

use std::{
    io::{self, Write as _},
    sync::{Arc, Mutex},
    time::Duration,
};

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use crate::error::CliError;

/// Prints one line for people or programs.
pub(crate) fn line(text: impl AsRef<str>) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref().as_bytes())?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Prints a value as JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::internal("cannot write the result", error))?;
    line(text)
}

/// Passes bytes of a command through.
pub(crate) fn stdout(bytes: &[u8]) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// Passes bytes of a command through.
pub(crate) fn stderr(bytes: &[u8]) -> Result<(), CliError> {
    Ok(io::stderr().lock().write_all(bytes)?)
}

/// Says something beside the result. Nobody reading it is no failure.
pub(crate) fn note(text: impl AsRef<str>) {
    drop(writeln!(io::stderr().lock(), "{}", text.as_ref()));
}

/// Prints rows under headings; numbers and names only, so that it can be cut by columns too.
pub(crate) fn table(headings: &[&str], rows: Vec<Vec<String>>) -> Result<(), CliError> {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(headings.iter().map(|heading| heading.to_uppercase()));
    for row in rows {
        // What a sandbox or a user named must not command the terminal.
        table.add_row(row.iter().map(|cell| printable(cell)));
    }
    for text in table.to_string().lines() {
        // The style pads every cell by one on both sides.
        line(text.strip_prefix(' ').unwrap_or(text).trim_end())?;
    }
    Ok(())
}

/// Escapes control characters.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escaped: Box<dyn Iterator<Item = char>> = if c.is_control() {
                Box::new(c.escape_default())
            } else {
                Box::new(std::iter::once(c))
            };
            escaped
        })
        .collect()
}

/// Prints a failure with its causes and what to do next.
pub(crate) fn error(error: &CliError, as_json: bool) {
    let chain = error.chain();
    let (message, causes) = chain
        .split_first()
        .map_or(("unknown", &[][..]), |(first, rest)| (first.as_str(), rest));
    if as_json {
        let value = json!({"error": {
            "kind": error.kind(), "message": message, "causes": causes, "hint": error.hint(),
        }});
        note(value.to_string());
        return;
    }
    note(format!("Error: {}", printable(message)));
    for cause in causes {
        note(format!("  because: {}", printable(cause)));
    }
    if let Some(hint) = error.hint() {
        note(format!("Hint: {hint}"));
    }
}

/// A progress bar on standard error; on anything but a terminal, a line per step.
#[derive(Clone)]
pub(crate) struct Bar {
    bar: ProgressBar,
    last: Arc<Mutex<String>>,
}

impl Bar {
    /// Shows nothing moving until the first report.
    pub(crate) fn new(what: &str) -> Self {
        let bar = ProgressBar::new(1000);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {percent:>3} % {elapsed}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        let made = Self {
            bar,
            last: Arc::default(),
        };
        made.restart(what);
        made
    }

    /// Begins the next piece of work.
    pub(crate) fn restart(&self, what: &str) {
        self.bar.set_position(0);
        self.show(what);
    }

    /// A receiver of reports.
    pub(crate) fn progress(&self) -> space_volume::Progress {
        let this = self.clone();
        Arc::new(move |step: space_volume::Step| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a fraction between 0 and 1"
            )]
            let position = (step.fraction.clamp(0.0, 1.0) * 1000.0) as u64;
            this.bar.set_position(position);
            this.show(step.name);
        })
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn show(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        if self.bar.is_hidden()
            && let Ok(mut last) = self.last.lock()
            && *last != what
        {
            what.clone_into(&mut last);
            note(format!("… {what}"));
        }
    }
}

/// A span of time in at most two units: `850 ms`, `4.2 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`.
pub(crate) fn duration(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0 => format!("{} ms", span.as_millis()),
        1..10 => format!("{:.1} s", span.as_secs_f64()),
        10..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// How long ago, or how long still, `when` is.
pub(crate) fn relative(when: jiff::Timestamp) -> String {
    let span = jiff::Timestamp::now().duration_since(when);
    let words = duration(span.unsigned_abs());
    if span.is_negative() {
        format!("in {words}")
    } else {
        format!("{words} ago")
    }
}

/// A size in the largest binary unit that leaves at least one: `4.0 GiB`.
pub(crate) fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    if size < 1024 {
        return format!("{size} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let mut value = size as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_read_well() {
        let shown = |millis| duration(Duration::from_millis(millis));
        assert_eq!(shown(850), "850 ms");
        assert_eq!(shown(4240), "4.2 s");
        assert_eq!(shown(185_000), "3 min 5 s");
        assert_eq!(shown(7_800_000), "2 h 10 min");
        assert_eq!(shown(273_600_000), "3 d 4 h");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(4 << 30), "4.0 GiB");
    }

    #[test]
    fn control_characters_are_shown_not_obeyed() {
        assert_eq!(printable("a\u{1b}[31mü"), "a\\u{1b}[31mü");
    }
}
