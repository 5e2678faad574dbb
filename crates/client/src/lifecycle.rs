//! What can be done with a sandbox while it lives, and finding it among others.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use reqwest::Method;
use space_api::{
    id::SandboxId,
    lifecycle::SandboxState,
    rest::{ExtendRequest, SandboxEdit, SandboxEvent, SandboxRecord},
};

use crate::{Client, ClientError};

/// Which sandboxes to list; all of the project if nothing is named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordFilter {
    /// Any of these; all if empty.
    pub states: Vec<SandboxState>,
    /// All of these.
    pub labels: BTreeMap<String, String>,
    /// Name, `name:tag` or digest.
    pub template: Option<String>,
    /// Created at or after.
    pub created_after: Option<Timestamp>,
    /// Created before.
    pub created_before: Option<Timestamp>,
    /// At most so many; all if `None`.
    pub limit: Option<usize>,
}

impl RecordFilter {
    fn query(&self) -> Vec<(&'static str, String)> {
        let page = self.limit.unwrap_or(1000).clamp(1, 1000);
        let mut query = vec![("limit", page.to_string())];
        if !self.states.is_empty() {
            let words: Vec<_> = self.states.iter().map(|state| state.as_str()).collect();
            query.push(("state", words.join(",")));
        }
        for (name, value) in &self.labels {
            query.push(("label", format!("{name}={value}")));
        }
        if let Some(template) = &self.template {
            query.push(("template", template.clone()));
        }
        if let Some(at) = self.created_after {
            query.push(("createdAfter", at.to_string()));
        }
        if let Some(at) = self.created_before {
            query.push(("createdBefore", at.to_string()));
        }
        query
    }
}

impl Client {
    /// Records of sandboxes, newest first, ended ones among them unless the states say otherwise.
    pub async fn list(&self, filter: &RecordFilter) -> Result<Vec<SandboxRecord>, ClientError> {
        let most = filter.limit.unwrap_or(usize::MAX);
        self.pages("/v1/sandboxes", &filter.query(), most).await
    }

    /// Stops its machine, which stays in memory. Its deadline goes on counting.
    pub async fn pause(&self, id: &SandboxId) -> Result<SandboxRecord, ClientError> {
        self.send(
            Method::POST,
            &format!("/v1/sandboxes/{id}/pause"),
            &serde_json::json!({}),
        )
        .await
    }

    /// Lets it run on.
    pub async fn resume(&self, id: &SandboxId) -> Result<SandboxRecord, ClientError> {
        self.send(
            Method::POST,
            &format!("/v1/sandboxes/{id}/resume"),
            &serde_json::json!({}),
        )
        .await
    }

    /// Keeps it alive for at least `timeout` from now; never shortens.
    pub async fn extend(&self, id: &SandboxId, timeout: Duration) -> Result<SandboxRecord, ClientError> {
        let body = ExtendRequest {
            timeout_seconds: timeout.as_secs(),
        };
        self.send(Method::POST, &format!("/v1/sandboxes/{id}/extend"), &body)
            .await
    }

    /// Changes metadata and labels: `None` takes a name away, what is not named stays.
    pub async fn edit(&self, id: &SandboxId, edit: &SandboxEdit) -> Result<SandboxRecord, ClientError> {
        self.send(Method::PATCH, &format!("/v1/sandboxes/{id}"), edit)
            .await
    }

    /// What happened to it, oldest first, also after its end.
    pub async fn events(&self, id: &SandboxId) -> Result<Vec<SandboxEvent>, ClientError> {
        let query = [("limit", "1000".to_owned())];
        self.pages(&format!("/v1/sandboxes/{id}/events"), &query, usize::MAX)
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_asks_for_nothing_that_was_not_named() {
        assert_eq!(RecordFilter::default().query(), [("limit", "1000".to_owned())]);
        let filter = RecordFilter {
            states: vec![SandboxState::Running, SandboxState::Paused],
            labels: BTreeMap::from([("a".into(), "1".into()), ("b".into(), "2".into())]),
            limit: Some(5),
            ..RecordFilter::default()
        };
        let query = filter.query();
        let wanted = [
            ("limit", "5"),
            ("state", "running,paused"),
            ("label", "a=1"),
            ("label", "b=2"),
        ];
        assert_eq!(query, wanted.map(|(name, value)| (name, value.to_owned())));
    }
}
