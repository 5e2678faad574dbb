//! Options and values that several commands share.

use std::{str::FromStr, time::Duration};

use clap::Args;
use space_api::{
    id::SandboxId,
    key::random_token,
    lifecycle::{IdleAction, IdlePolicy, SandboxState},
    size::SizeClass,
};
use space_client::SandboxOptions;

/// What a new sandbox is to be like.
#[derive(Debug, Args)]
pub(crate) struct NewSandbox {
    /// Template to start from: NAME, NAME:TAG or a digest
    #[arg(long, short = 't', default_value = "base", value_name = "TEMPLATE")]
    pub(crate) template: String,
    /// Size as VCPUSxMEMORYxDISK with MiB, such as 1x512x4096 [default: the template's]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<SizeClass>,
    /// Set an environment variable of every process in it; NAME alone takes the value from here
    #[arg(long, short = 'e', value_name = "NAME=VALUE")]
    pub(crate) env: Vec<Assignment>,
    /// Attach a label, by which it can be listed
    #[arg(long, short = 'l', value_name = "NAME=VALUE")]
    pub(crate) label: Vec<Assignment>,
    /// Attach metadata, as E2B's SDKs do
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) metadata: Vec<Assignment>,
    /// Pause it, in memory, when it has done no work for this time, such as 5m
    #[arg(long, value_name = "TIME", value_parser = idle)]
    pub(crate) pause_when_idle: Option<IdlePolicy>,
    /// Let traffic to its ports wake it when it is paused
    #[arg(long)]
    pub(crate) wake_on_traffic: bool,
    /// Wait so long for room rather than be refused at once, 5m at most
    #[arg(long, value_name = "TIME", value_parser = span)]
    pub(crate) queue: Option<Duration>,
}

impl NewSandbox {
    pub(crate) fn options(&self, lifetime: Option<Duration>) -> SandboxOptions {
        SandboxOptions {
            template: self.template.clone(),
            size: self.size,
            timeout: lifetime,
            environment: pairs(&self.env),
            metadata: pairs(&self.metadata),
            labels: pairs(&self.label),
            on_idle: self.pause_when_idle,
            wake_on_traffic: self.wake_on_traffic,
            queue: self.queue,
            // A connection that breaks does not make a second one.
            idempotency_key: Some(random_token()),
        }
    }
}

pub(crate) fn pairs(assignments: &[Assignment]) -> std::collections::BTreeMap<String, String> {
    assignments
        .iter()
        .map(|each| (each.name.clone(), each.value.clone()))
        .collect()
}

/// `NAME=VALUE`, or `NAME` for the value it has in our own environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    pub(crate) name: String,
    pub(crate) value: String,
}

impl FromStr for Assignment {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let (name, value) = match given.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => match std::env::var(given) {
                Ok(value) => (given, value),
                Err(_) => {
                    return Err(format!(
                        "expected NAME=VALUE; there is no variable {given} here to pass on"
                    ));
                }
            },
        };
        if name.is_empty() {
            return Err("the name is empty".to_owned());
        }
        Ok(Self {
            name: name.to_owned(),
            value,
        })
    }
}

/// Parses a span of time: a number of seconds, or with a unit: `90s`, `5m`, `2h`, `1d`, `500ms`.
pub(crate) fn span(given: &str) -> Result<Duration, String> {
    let bad =
        || format!("\"{given}\" is no span of time: expected a number with s, m, h, d or ms, such as 90s");
    let at = given
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(given.len());
    let (number, unit) = given.split_at(at);
    let number: f64 = number.parse().map_err(|_| bad())?;
    let factor = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(bad()),
    };
    Duration::try_from_secs_f64(number * factor).map_err(|_| bad())
}

/// Parses how long a sandbox may be idle.
fn idle(given: &str) -> Result<IdlePolicy, String> {
    let seconds = span(given)?.as_secs();
    let range = IdlePolicy::SECONDS;
    u32::try_from(seconds)
        .ok()
        .filter(|seconds| range.contains(seconds))
        .map(|after_seconds| IdlePolicy {
            after_seconds,
            action: IdleAction::Pause,
        })
        .ok_or_else(|| format!("expected {} to {} seconds", range.start(), range.end()))
}

/// Parses a state for clap.
pub(crate) fn state(given: &str) -> Result<SandboxState, String> {
    [
        SandboxState::Creating,
        SandboxState::Running,
        SandboxState::Paused,
        SandboxState::Ended,
    ]
    .into_iter()
    .find(|state| state.as_str() == given)
    .ok_or_else(|| "expected creating, running, paused or ended".to_owned())
}

/// Parses a sandbox id for clap.
pub(crate) fn sandbox_id(given: &str) -> Result<SandboxId, String> {
    given
        .parse()
        .map_err(|error: space_api::id::ParseIdError| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_assignments() {
        assert_eq!(span("90"), Ok(Duration::from_secs(90)));
        assert_eq!(span("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(span("500ms"), Ok(Duration::from_millis(500)));
        for bad in ["", "x", "-1", "5y", "1e400s", "1..2"] {
            assert!(span(bad).is_err(), "{bad}");
        }
        assert!(idle("5m").is_ok_and(|policy| policy.after_seconds == 300));
        assert!(idle("1s").is_err() && idle("2d").is_err());
        assert_eq!(state("paused"), Ok(SandboxState::Paused));
        assert!(state("Paused").is_err());
        let parsed: Assignment = "A=b=c".parse().expect("valid");
        assert_eq!((parsed.name.as_str(), parsed.value.as_str()), ("A", "b=c"));
        assert!("=x".parse::<Assignment>().is_err());
        assert!("SURELY_NOT_SET_ANYWHERE".parse::<Assignment>().is_err());
    }
}
