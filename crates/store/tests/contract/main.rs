//! What every metadata store must do. Written against the trait: another implementation joins by one more `stores()` entry.

mod file;
mod keys;
mod life;
mod lists;
mod reserving;

use std::{collections::BTreeMap, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
    rest::Quotas,
    size::SizeClass,
};
use space_store::{
    End, EventsOf, ListFilter, NewSandbox, Project, Ready, Reservation, SortOrder, SqliteStore, Store,
};

/// One fresh store with what must outlive it.
pub(crate) async fn store() -> (Arc<dyn Store>, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let store = SqliteStore::open(&directory.path().join("control.db"))
        .await
        .expect("opens");
    (Arc::new(store), directory)
}

pub(crate) async fn project(store: &Arc<dyn Store>, name: &str, quotas: Quotas) -> Project {
    store.create_project(name, quotas).await.expect("project")
}

pub(crate) fn sandbox(project: &Project) -> NewSandbox {
    let now = Timestamp::now();
    NewSandbox {
        id: SandboxId::random(),
        project: project.id.clone(),
        template: "base".into(),
        size: SizeClass::DEFAULT,
        generation: 1,
        node: "local".into(),
        metadata: BTreeMap::new(),
        labels: BTreeMap::new(),
        access_token: Some("secret".into()),
        traffic_token: None,
        mask_request_host: None,
        wake_on_traffic: false,
        on_idle: None,
        started_at: now,
        deadline: now + SignedDuration::from_secs(300),
    }
}

pub(crate) fn ready() -> Ready {
    Ready {
        template: "base:latest".into(),
        template_digest: "sha256:00".into(),
        size: SizeClass::DEFAULT,
        ready_ms: Some(61.5),
    }
}

pub(crate) fn deleted() -> End {
    End {
        generation: 1,
        cause: EndCause::Deleted,
        ended_at: Timestamp::now(),
        cpu_micros: Some(7),
    }
}

pub(crate) fn filter(states: &[SandboxState]) -> ListFilter {
    ListFilter {
        order: SortOrder::Ascending,
        limit: 100,
        ..ListFilter::of_states(states.to_vec())
    }
}

pub(crate) async fn kinds(store: &Arc<dyn Store>, id: &SandboxId) -> Vec<String> {
    let events = store.events(EventsOf::Sandbox(id), 0, 100).await.expect("reads");
    events.into_iter().map(|event| event.kind).collect()
}

pub(crate) async fn run(store: &Arc<dyn Store>, new: &NewSandbox) {
    assert_eq!(
        store.reserve(new, None).await.expect("reserves"),
        Reservation::Reserved
    );
    assert!(store.mark_running(&new.id, 1, &ready()).await.expect("marks"));
}

pub(crate) async fn project_with(store: &Arc<dyn Store>, name: &str) -> Project {
    project(store, name, Quotas::default()).await
}
