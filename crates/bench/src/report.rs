//! What was measured, as tables for people and as JSON with fixed keys for programs.

use std::{collections::BTreeMap, fmt};

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
    times: BTreeMap<&'static str, Times>,
    order: Vec<&'static str>,
    ratios: Vec<Ratio>,
    curve: Vec<CurvePoint>,
    figures: Vec<Figure>,
}

#[derive(Debug)]
struct Ratio {
    key: &'static str,
    value: f64,
    promise: &'static str,
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

impl Report {
    /// Begins one.
    pub(crate) fn new(conditions: Conditions, n: u32, smoke: bool) -> Self {
        Self {
            conditions,
            n,
            smoke,
            times: BTreeMap::new(),
            order: Vec::new(),
            ratios: Vec::new(),
            curve: Vec::new(),
            figures: Vec::new(),
        }
    }

    /// Adds a distribution under its key.
    pub(crate) fn times(&mut self, key: &'static str, times: Times) {
        self.order.push(key);
        self.times.insert(key, times);
    }

    /// Adds p50 of one over p50 of another, if both were taken.
    pub(crate) fn ratio(&mut self, key: &'static str, over: &str, under: &str, promise: &'static str) {
        let p50 = |key: &str| self.times.get(key).map(|times| times.percentile(50));
        if let (Some(over), Some(under)) = (p50(over), p50(under))
            && under > 0.0
        {
            self.ratios.push(Ratio {
                key,
                value: over / under,
                promise,
            });
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

    /// The file for programs. Keys stay as they are for ever; new ones may come.
    pub(crate) fn json(&self) -> Value {
        let mut all = Map::new();
        for (key, times) in &self.times {
            all.insert((*key).to_owned(), times.json());
        }
        for ratio in &self.ratios {
            all.insert(ratio.key.to_owned(), json!(round(ratio.value)));
        }
        for figure in &self.figures {
            all.insert(figure.key.to_owned(), json!(round(figure.value)));
        }
        let curve = self.curve.iter().map(|point| {
            json!({
                "at_once": point.at_once,
                "per_second": round(point.per_second),
                "latency": point.latency.json(),
            })
        });
        all.insert("curve".to_owned(), curve.collect());
        all.insert("conditions".to_owned(), self.conditions.json());
        all.insert("n".to_owned(), json!(self.n));
        all.insert("smoke".to_owned(), json!(self.smoke));
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

        let mut times = table(&["milliseconds", "n", "p50", "p90", "p99", "max"], 5);
        for key in &self.order {
            let Some(of) = self.times.get(key) else { continue };
            let mut row = vec![(*key).to_owned(), of.count().to_string()];
            row.extend([50, 90, 99, 100].map(|percent| format!("{:.1}", of.percentile(percent))));
            times.add_row(row);
        }
        writeln!(f, "{times}\n")?;

        let mut ratios = table(&["ratio of p50", "measured", "promised"], 1);
        for ratio in &self.ratios {
            ratios.add_row([
                ratio.key.to_owned(),
                format!("{:.2}", ratio.value),
                ratio.promise.to_owned(),
            ]);
        }
        writeln!(f, "{ratios}\n")?;

        let mut curve = table(
            &["creates at once", "per second", "p50 ms", "p90 ms", "max ms"],
            4,
        );
        for point in &self.curve {
            let mut row = vec![point.at_once.to_string(), format!("{:.1}", point.per_second)];
            row.extend([50, 90, 100].map(|percent| format!("{:.1}", point.latency.percentile(percent))));
            curve.add_row(row);
        }
        writeln!(f, "{curve}\n")?;

        let mut figures = table(&["figure", "value", "unit"], 1);
        for figure in &self.figures {
            figures.add_row([
                figure.what.to_owned(),
                format!("{:.1}", figure.value),
                figure.unit.to_owned(),
            ]);
        }
        write!(f, "{figures}")
    }
}

/// A table whose first `numbers` columns after the first are right-aligned.
fn table(head: &[&str], numbers: usize) -> Table {
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

    #[test]
    fn the_fixed_keys_are_there() {
        let conditions = Conditions::gather("qemu").unwrap();
        let mut report = Report::new(conditions, 2, false);
        report.times("floor", [Duration::from_millis(50)].into_iter().collect());
        report.times("ready", [Duration::from_millis(60)].into_iter().collect());
        report.times("cold_boot", [Duration::from_millis(3000)].into_iter().collect());
        report.ratio("ready_over_floor", "ready", "floor", "at most 1.25");
        report.ratio("cold_boot_over_ready", "cold_boot", "ready", "at least 40");
        let json = report.json();
        assert_eq!(json["floor"]["p50_ms"], 50.0);
        assert_eq!(json["ready"]["p50_ms"], 60.0);
        assert_eq!(json["ready_over_floor"], 1.2);
        assert_eq!(json["cold_boot_over_ready"], 50.0);
        assert!(report.to_string().contains("| ready_over_floor"));
    }
}
