//! How far a build has come.

use std::sync::Arc;

/// One report.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// What is being done, as a user would say it, for example `installing packages`.
    pub name: &'static str,
    /// How much of the whole is done, 0 to 1; never falls within one build.
    pub fraction: f32,
}

/// Receives the reports of one build, from any task; must not block.
pub type Progress = Arc<dyn Fn(Step) + Send + Sync>;

/// Reports nothing.
pub fn quiet() -> Progress {
    Arc::new(|_| {})
}

/// Maps the fractions of a part of the work into its share of the whole.
#[derive(Clone)]
pub(crate) struct Part {
    progress: Progress,
    from: f32,
    to: f32,
}

impl Part {
    pub(crate) fn new(progress: &Progress, from: f32, to: f32) -> Self {
        Self {
            progress: Arc::clone(progress),
            from,
            to,
        }
    }

    pub(crate) fn report(&self, name: &'static str, fraction: f32) {
        let fraction = self.from + (self.to - self.from) * fraction.clamp(0.0, 1.0);
        (self.progress)(Step { name, fraction });
    }
}
