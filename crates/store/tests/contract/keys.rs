//! Projects and API keys.

use jiff::Timestamp;
use space_api::{
    id::KeyId,
    key::ApiKey,
    rest::{KeyRole, Quotas},
};

use crate::{project, store};

#[tokio::test]
async fn a_key_opens_its_project_until_it_is_revoked() {
    let (store, _directory) = store().await;
    let first = store
        .ensure_default_project_and_key(Quotas::default(), None)
        .await
        .expect("bootstrap");
    assert!(first.key_is_new);
    let again = store
        .ensure_default_project_and_key(Quotas::default(), Some(first.key.clone()))
        .await
        .expect("bootstrap");
    assert!(!again.key_is_new);
    assert_eq!(again.project.id, first.project.id);

    let who = store
        .authenticate(&first.key)
        .await
        .expect("reads")
        .expect("known");
    assert_eq!((who.project, who.role), (first.project.clone(), KeyRole::Admin));
    assert_eq!(store.authenticate(&ApiKey::random()).await.expect("reads"), None);

    let (record, key) = store
        .create_key(&first.project.id, "ci", KeyRole::Project)
        .await
        .expect("key");
    let id: KeyId = record.id.parse().expect("id");
    let other = project(&store, "other", Quotas::default()).await;
    assert!(
        !store.revoke_key(&other.id, &id).await.expect("runs"),
        "another project's key"
    );
    let who = store.authenticate(&key).await.expect("reads").expect("known");
    assert_eq!(who.role, KeyRole::Project);
    assert!(store.revoke_key(&first.project.id, &id).await.expect("runs"));
    assert!(store.revoke_key(&first.project.id, &id).await.expect("twice"));
    assert_eq!(store.authenticate(&key).await.expect("reads"), None);
    let listed = store.keys(&first.project.id).await.expect("lists");
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().any(|k| k.id == record.id && k.revoked_at.is_some()));
    assert!(listed.iter().all(|k| k.shown.len() == 8));

    let replaced = store
        .ensure_default_project_and_key(Quotas::default(), Some(key))
        .await
        .expect("bootstrap");
    assert!(replaced.key_is_new, "a revoked key is not kept");
}

#[tokio::test]
async fn a_key_of_an_earlier_installation_is_taken_into_a_new_store() {
    let (store, _directory) = store().await;
    let key = ApiKey::random();
    let outcome = store
        .ensure_default_project_and_key(Quotas::default(), Some(key.clone()))
        .await
        .expect("bootstrap");
    assert!(!outcome.key_is_new);
    assert!(store.authenticate(&key).await.expect("reads").is_some());
}

#[tokio::test]
async fn a_store_knows_when_it_was_begun() {
    let (store, _directory) = store().await;
    assert_eq!(store.begun().await.expect("reads"), None);
    let before = Timestamp::now();
    let first = || store.ensure_default_project_and_key(Quotas::default(), None);
    first().await.expect("bootstrap");
    let begun = store.begun().await.expect("reads").expect("it has a project");
    assert!(begun.as_microsecond() >= before.as_microsecond() && begun <= Timestamp::now());
    first().await.expect("again");
    project(&store, "another", Quotas::default()).await;
    assert_eq!(store.begun().await.expect("reads"), Some(begun));
}
