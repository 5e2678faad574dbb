//! What was measured, as tables for people and as JSON with fixed keys for programs.
//!
//! A file asked for is written after each section, so that a run that ends early leaves what it has.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use anyhow::{Context as _, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use crate::{
    conditions::Conditions,
    statistics::{Times, round},
};

/// Everything of one run.
#[derive(Debug)]
pub(crate) struct Report {
    conditions: Conditions,
    n: u32,
    smoke: bool,
    file: Option<PathBuf>,
    times: BTreeMap<&'static str, Times>,
    order: Vec<&'static str>,
    ratios: Vec<(&'static str, f64)>,
    curve: Vec<CurvePoint>,
    figures: Vec<Figure>,
    values: Map<String, Value>,
    tables: Vec<Rows>,
    notes: Vec<String>,
    promises: Vec<Promise>,
    failures: Vec<(&'static str, String)>,
    complete: bool,
}

/// Creates at once.
#[derive(Debug)]
pub(crate) struct CurvePoint {
    /// How many.
    pub(crate) at_once: u32,
    /// Sandboxes made per second, from the first request to the last answer.
    pub(crate) per_second: f64,
    /// Each create's own time.
    pub(crate) latency: Times,
}

/// One number that is not a time.
#[derive(Debug)]
pub(crate) struct Figure {
    /// Key in the JSON file.
    pub(crate) key: &'static str,
    /// What it is.
    pub(crate) what: &'static str,
    /// How much.
    pub(crate) value: f64,
    /// Of what.
    pub(crate) unit: &'static str,
}

/// A number that `docs/specification.md` promises, as it was measured.
#[derive(Debug, Clone)]
pub(crate) struct Promise {
    key: String,
    value: f64,
    bound: Bound,
}

/// What is promised of a number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bound {
    /// No more than that.
    AtMost(f64),
    /// No less than that.
    AtLeast(f64),
}

impl Promise {
    /// `key` is at most that.
    pub(crate) fn at_most(key: &str, value: f64, bound: f64) -> Self {
        Self::new(key, value, Bound::AtMost(bound))
    }

    /// `key` is at least that.
    pub(crate) fn at_least(key: &str, value: f64, bound: f64) -> Self {
        Self::new(key, value, Bound::AtLeast(bound))
    }

    fn new(key: &str, value: f64, bound: Bound) -> Self {
        Self {
            key: key.to_owned(),
            value,
            bound,
        }
    }

    fn kept(&self) -> bool {
        match self.bound {
            Bound::AtMost(most) => self.value <= most,
            Bound::AtLeast(least) => self.value >= least,
        }
    }

    fn json(&self) -> Value {
        let (name, bound) = match self.bound {
            Bound::AtMost(most) => ("at_most", most),
            Bound::AtLeast(least) => ("at_least", least),
        };
        json!({"value": round(self.value), name: bound, "kept": self.kept()})
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "at most {most}"),
            Self::AtLeast(least) => write!(f, "at least {least}"),
        }
    }
}

/// A table of its own.
#[derive(Debug)]
struct Rows {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Report {
    /// Begins one, to be written to `file`.
    pub(crate) fn new(conditions: Conditions, n: u32, smoke: bool, file: Option<PathBuf>) -> Self {
        Self {
            conditions,
            n,
            smoke,
            file,
            times: BTreeMap::new(),
            order: Vec::new(),
            ratios: Vec::new(),
            curve: Vec::new(),
            figures: Vec::new(),
            values: Map::new(),
            tables: Vec::new(),
            notes: Vec::new(),
            promises: Vec::new(),
            failures: Vec::new(),
            complete: false,
        }
    }

    /// Adds a distribution under its key.
    pub(crate) fn times(&mut self, key: &'static str, times: Times) {
        self.order.push(key);
        self.times.insert(key, times);
    }

    /// Adds p50 of one over p50 of another, if both were taken, and what is promised of it.
    pub(crate) fn ratio(&mut self, key: &'static str, over: &str, under: &str, bound: Option<Bound>) {
        let p50 = |key: &str| self.times.get(key).map(|times| times.percentile(50));
        if let (Some(over), Some(under)) = (p50(over), p50(under))
            && under > 0.0
        {
            let value = over / under;
            self.ratios.push((key, value));
            if let Some(bound) = bound {
                self.promises.push(Promise::new(key, value, bound));
            }
        }
    }

    /// Adds a point of the curve.
    pub(crate) fn curve(&mut self, point: CurvePoint) {
        self.curve.push(point);
    }

    /// Adds a number.
    pub(crate) fn figure(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Adds anything for programs; `a.b` goes into the object `a`.
    pub(crate) fn value(&mut self, key: &str, value: Value) {
        match key.split_once('.') {
            Some((outer, inner)) => {
                let object = self
                    .values
                    .entry(outer.to_owned())
                    .or_insert_with(|| Value::Object(Map::new()));
                object[inner] = value;
            }
            None => {
                self.values.insert(key.to_owned(), value);
            }
        }
    }

    /// Adds a table of numbers for people; the first cell of each row is its name.
    pub(crate) fn table(&mut self, title: &str, head: &[&str], rows: Vec<Vec<String>>) {
        self.tables.push(Rows {
            title: title.to_owned(),
            head: head.iter().map(|&each| each.to_owned()).collect(),
            rows,
        });
    }

    /// Adds a row to the table of that title, which is made for the first one.
    pub(crate) fn row(&mut self, title: &str, head: &[&str], row: Vec<String>) {
        match self.tables.iter_mut().find(|table| table.title == title) {
            Some(table) => table.rows.push(row),
            None => self.table(title, head, vec![row]),
        }
    }

    /// Adds a sentence for people.
    pub(crate) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Adds what is promised of a number.
    pub(crate) fn promise(&mut self, promise: Promise) {
        self.promises.push(promise);
    }

    /// Ends a section: a failure is kept, said at once and at the end, and what was measured so far is written.
    pub(crate) fn section(&mut self, name: &'static str, outcome: Result<()>) -> Result<()> {
        if let Err(error) = outcome {
            println!("✗ {name}: {error:#}");
            self.failures.push((name, format!("{error:#}")));
        }
        self.write()
    }

    /// Says that nothing more comes. `true` if no section failed.
    pub(crate) fn finish(&mut self) -> Result<bool> {
        self.complete = true;
        self.write()?;
        Ok(self.failures.is_empty())
    }

    fn write(&self) -> Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let text = serde_json::to_string_pretty(&self.json()).context("the figures are no JSON")?;
        Ok(fs_err::write(file, text + "\n")?)
    }

    /// The file for programs. Keys stay as they are for ever; new ones may come.
    pub(crate) fn json(&self) -> Value {
        let mut all = self.values.clone();
        for (key, times) in &self.times {
            all.insert((*key).to_owned(), times.json());
        }
        for (key, value) in &self.ratios {
            all.insert((*key).to_owned(), json!(round(*value)));
        }
        for figure in &self.figures {
            all.insert(figure.key.to_owned(), json!(round(figure.value)));
        }
        let curve: Value = self
            .curve
            .iter()
            .map(|point| {
                json!({
                    "at_once": point.at_once,
                    "per_second": round(point.per_second),
                    "latency": point.latency.json(),
                })
            })
            .collect();
        let promises: Map<String, Value> = self
            .promises
            .iter()
            .map(|promise| (promise.key.clone(), promise.json()))
            .collect();
        let failures: Map<String, Value> = self
            .failures
            .iter()
            .map(|(name, what)| ((*name).to_owned(), json!(what)))
            .collect();
        for (key, value) in [
            ("curve", curve),
            ("conditions", self.conditions.json()),
            ("n", json!(self.n)),
            ("smoke", json!(self.smoke)),
            ("promises", Value::Object(promises)),
            ("failures", Value::Object(failures)),
            ("complete", json!(self.complete)),
        ] {
            all.insert(key.to_owned(), value);
        }
        Value::Object(all)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut conditions = table(&["conditions", ""], 0);
        for (name, value) in self.conditions.rows() {
            conditions.add_row([name.to_owned(), value]);
        }
        writeln!(f, "{conditions}\n")?;
        self.show_times(f)?;
        if !self.curve.is_empty() {
            let head = [
                "creates at once, no pool",
                "per second",
                "p50 ms",
                "p90 ms",
                "max ms",
            ];
            let mut curve = table(&head, 4);
            for point in &self.curve {
                let mut row = vec![point.at_once.to_string(), format!("{:.1}", point.per_second)];
                row.extend([50, 90, 100].map(|percent| format!("{:.1}", point.latency.percentile(percent))));
                curve.add_row(row);
            }
            writeln!(f, "{curve}\n")?;
        }
        for rows in &self.tables {
            let mut head = vec![rows.title.as_str()];
            head.extend(rows.head.iter().map(String::as_str));
            let mut shown = table(&head, rows.head.len());
            for row in &rows.rows {
                shown.add_row(row);
            }
            writeln!(f, "{shown}\n")?;
        }
        if !self.figures.is_empty() {
            let mut figures = table(&["figure", "value", "unit"], 1);
            for figure in &self.figures {
                let value = format!("{:.1}", figure.value);
                figures.add_row([figure.what, value.as_str(), figure.unit]);
            }
            writeln!(f, "{figures}\n")?;
        }
        if !self.promises.is_empty() {
            let mut promises = table(&["promised", "measured", "bound", ""], 1);
            for promise in &self.promises {
                promises.add_row([
                    promise.key.clone(),
                    format!("{:.2}", promise.value),
                    promise.bound.to_string(),
                    if promise.kept() { "kept" } else { "MISSED" }.to_owned(),
                ]);
            }
            writeln!(f, "{promises}\n")?;
        }
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        for (name, what) in &self.failures {
            writeln!(f, "✗ {name}: {what}")?;
        }
        Ok(())
    }
}

impl Report {
    fn show_times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.order.is_empty() {
            return Ok(());
        }
        let mut times = table(&["milliseconds", "n", "p50", "p90", "p99", "max"], 5);
        for key in &self.order {
            let Some(of) = self.times.get(key) else { continue };
            let mut row = vec![(*key).to_owned(), of.count().to_string()];
            row.extend([50, 90, 99, 100].map(|percent| format!("{:.1}", of.percentile(percent))));
            times.add_row(row);
        }
        writeln!(f, "{times}\n")?;
        if !self.ratios.is_empty() {
            let mut ratios = table(&["ratio of p50", "measured"], 1);
            for (key, value) in &self.ratios {
                ratios.add_row([(*key).to_owned(), format!("{value:.2}")]);
            }
            writeln!(f, "{ratios}\n")?;
        }
        Ok(())
    }
}

/// A table whose first `numbers` columns after the first are right-aligned.
pub(crate) fn table(head: &[&str], numbers: usize) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(head.to_vec());
    for at in 1..=numbers {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn report(file: Option<PathBuf>) -> Report {
        Report::new(Conditions::gather("qemu").unwrap(), 2, false, file)
    }

    #[test]
    fn the_fixed_keys_are_there() {
        let mut report = report(None);
        report.times("floor", [Duration::from_millis(50)].into_iter().collect());
        report.times("ready", [Duration::from_millis(60)].into_iter().collect());
        report.times("pool", [Duration::from_millis(7)].into_iter().collect());
        report.times("cold_boot", [Duration::from_millis(3000)].into_iter().collect());
        report.ratio("ready_over_floor", "ready", "floor", Some(Bound::AtMost(1.25)));
        report.ratio(
            "cold_boot_over_ready",
            "cold_boot",
            "ready",
            Some(Bound::AtLeast(40.0)),
        );
        report.ratio("never_taken", "x", "floor", None);
        report.value("sdk.h1", json!({"ratio": 1.1}));
        report.value("sdk.h2", json!({"ratio": 1.2}));
        let json = report.json();
        assert_eq!(json["floor"]["p50_ms"], 50.0);
        assert_eq!(json["pool"]["p99_ms"], 7.0);
        assert_eq!(json["ready_over_floor"], 1.2);
        assert_eq!(json["cold_boot_over_ready"], 50.0);
        assert_eq!(json["sdk"]["h1"]["ratio"], 1.1);
        assert_eq!(json["sdk"]["h2"]["ratio"], 1.2);
        assert_eq!(json["promises"]["ready_over_floor"]["kept"], true);
        assert!(json.get("never_taken").is_none());
        let shown = report.to_string();
        assert!(
            shown.contains("| ready_over_floor") && shown.contains("at most 1.25"),
            "{shown}"
        );
    }

    #[test]
    fn a_promise_that_is_not_kept_says_so() {
        let mut report = report(None);
        report.promise(Promise::at_most("slow", 12.0, 10.0));
        report.promise(Promise::at_least("rare", 99.0, 99.0));
        let json = report.json();
        assert_eq!(json["promises"]["slow"]["kept"], false);
        assert_eq!(json["promises"]["rare"]["kept"], true);
        assert!(report.to_string().contains("MISSED"));
    }

    #[test]
    fn what_was_measured_is_on_disk_before_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("figures.json");
        let mut report = report(Some(file.clone()));
        let read = || serde_json::from_slice::<Value>(&std::fs::read(&file).unwrap()).unwrap();
        report.times("floor", [Duration::from_millis(50)].into_iter().collect());
        report.section("floor", Ok(())).unwrap();
        assert_eq!(read()["floor"]["p50_ms"], 50.0);
        report
            .section("pool", Err(anyhow::anyhow!("no machine")))
            .unwrap();
        assert!(!report.finish().unwrap(), "a section failed");
        assert_eq!(
            (&read()["failures"]["pool"], &read()["complete"]),
            (&json!("no machine"), &json!(true))
        );
    }
}
