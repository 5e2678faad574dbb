//! Finding sandboxes.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use space_api::lifecycle::SandboxState;
use space_store::{Edit, Edited, SortOrder};

use crate::{deleted, filter, project_with, run, sandbox, store};

#[tokio::test]
async fn labels_and_metadata_are_changed_and_found_by() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let stranger = project_with(&store, "q").await;
    let mut new = sandbox(&project);
    new.metadata.insert("keep".into(), "1".into());
    new.labels.insert("tier".into(), "free".into());
    new.labels.insert("old".into(), "x".into());
    run(&store, &new).await;
    run(&store, &sandbox(&project)).await;
    let edit = Edit {
        metadata: BTreeMap::from([("added".into(), Some("2".into()))]),
        labels: BTreeMap::from([("tier".into(), Some("paid".into())), ("old".into(), None)]),
    };
    assert_eq!(
        store
            .edit(&stranger.id, &new.id, &edit, &|_| true)
            .await
            .expect("runs"),
        Edited::NotFound
    );
    let mut changes = store.changes();
    let outcome = store
        .edit(&project.id, &new.id, &edit, &|new| new.labels.len() > 1)
        .await;
    let Edited::Unfit(unfit) = outcome.expect("runs") else {
        panic!("one label is too few here");
    };
    assert_eq!(unfit.sandbox.labels.len(), 1, "as it would have become");
    let before = store.sandbox(&new.id).await.expect("reads").expect("is there");
    assert_eq!(before.sandbox.labels, new.labels);
    assert!(!changes.has_changed().expect("open"));
    let outcome = store.edit(&project.id, &new.id, &edit, &|_| true).await;
    let Edited::Done(row) = outcome.expect("runs") else {
        panic!("it is there");
    };
    let row = *row;
    assert!(
        changes.has_changed().expect("open"),
        "it is to be written through"
    );
    changes.mark_unchanged();
    assert_eq!(store.sandbox(&new.id).await.expect("reads"), Some(row.clone()));
    assert_eq!(
        row.sandbox.labels,
        BTreeMap::from([("tier".into(), "paid".into())])
    );
    assert_eq!(row.sandbox.metadata.len(), 2);
    let found = async |labels: &[(&str, &str)]| {
        let mut filter = filter(&[SandboxState::Running]);
        filter.labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        store.list(&project.id, &filter).await.expect("lists").rows.len()
    };
    assert_eq!(found(&[("tier", "paid")]).await, 1);
    assert_eq!(found(&[("tier", "free")]).await, 0);
    assert_eq!(found(&[("old", "x")]).await, 0);
    assert_eq!(found(&[]).await, 2);
}

#[tokio::test]
async fn pages_are_stable_while_sandboxes_come_and_go() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let start = Timestamp::now();
    let make = async |at: i64| {
        let mut new = sandbox(&project);
        new.started_at = start + SignedDuration::from_secs(at);
        run(&store, &new).await;
        new.id
    };
    let mut ids = Vec::new();
    for at in 0..10 {
        ids.push(make(at).await);
    }
    let mut query = filter(&[SandboxState::Running]);
    query.order = SortOrder::Descending;
    query.limit = 4;
    let page = store.list(&project.id, &query).await.expect("lists");
    let mut seen: Vec<_> = page.rows.into_iter().map(|row| row.sandbox.id).collect();
    // A newer one, the one the cursor stands on, and one that is still to come.
    make(11).await;
    for gone in [&ids[6], &ids[3]] {
        store.end(gone, &deleted(), false).await.expect("ends");
    }
    query.cursor = page.next;
    while query.cursor.is_some() {
        let page = store.list(&project.id, &query).await.expect("lists");
        seen.extend(page.rows.into_iter().map(|row| row.sandbox.id));
        query.cursor = page.next;
    }
    let wanted: Vec<_> = [9, 8, 7, 6, 5, 4, 2, 1, 0]
        .map(|at: usize| ids[at].clone())
        .to_vec();
    assert_eq!(seen, wanted, "nothing twice, nothing left out");
}

#[tokio::test]
async fn lists_are_filtered_ordered_and_paged() {
    let (store, _directory) = store().await;
    let project = project_with(&store, "p").await;
    let stranger = project_with(&store, "q").await;
    run(&store, &sandbox(&stranger)).await;
    let start = Timestamp::now();
    let mut ids = Vec::new();
    for at in 0..25_i64 {
        let mut new = sandbox(&project);
        // Pairs share an instant, so that the id must break the tie.
        new.started_at = start + SignedDuration::from_secs(at / 2);
        new.metadata.insert("parity".into(), (at % 2).to_string());
        run(&store, &new).await;
        ids.push((new.started_at, new.id));
    }
    ids.sort();
    for order in [SortOrder::Ascending, SortOrder::Descending] {
        let mut wanted: Vec<_> = ids.iter().map(|(_, id)| id.clone()).collect();
        if order == SortOrder::Descending {
            wanted.reverse();
        }
        let mut found = Vec::new();
        let mut query = filter(&[SandboxState::Running]);
        query.order = order;
        query.limit = 7;
        loop {
            let page = store.list(&project.id, &query).await.expect("lists");
            assert!(page.rows.len() <= 7);
            found.extend(page.rows.into_iter().map(|row| row.sandbox.id));
            query.cursor = page.next;
            if query.cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, wanted);
    }
    let mut query = filter(&[SandboxState::Running]);
    query.metadata.insert("parity".into(), "1".into());
    query.limit = 5;
    let page = store.list(&project.id, &query).await.expect("lists");
    assert_eq!(page.rows.len(), 5);
    query.cursor = page.next;
    query.limit = 100;
    assert_eq!(
        store.list(&project.id, &query).await.expect("lists").rows.len(),
        12 - 5
    );

    let mut query = filter(&[SandboxState::Running]);
    query.started_after = Some(start + SignedDuration::from_secs(10));
    assert_eq!(
        store.list(&project.id, &query).await.expect("lists").rows.len(),
        5
    );
    let mut query = filter(&[SandboxState::Running]);
    query.started_after = Some(start + SignedDuration::from_secs(2));
    query.started_before = Some(start + SignedDuration::from_secs(4));
    assert_eq!(
        store.list(&project.id, &query).await.expect("lists").rows.len(),
        4
    );
    for (template, count) in [
        ("base", 25),
        ("base:latest", 25),
        ("sha256:00", 25),
        ("bas", 0),
        ("base:l", 0),
    ] {
        let mut query = filter(&[SandboxState::Running]);
        query.template = Some(template.into());
        let page = store.list(&project.id, &query).await.expect("lists");
        assert_eq!(page.rows.len(), count, "{template}");
    }
    assert!(
        store
            .list(&project.id, &filter(&[SandboxState::Ended]))
            .await
            .expect("lists")
            .rows
            .is_empty()
    );
    assert!(
        store
            .list(&project.id, &filter(&[]))
            .await
            .expect("lists")
            .rows
            .is_empty()
    );
}
