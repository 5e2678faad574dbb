//! Watching directories.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Event, guest, until};

#[tokio::test]
async fn a_stream_tells_what_happens() {
    let Some(guest) = guest().await else { return };
    let root = guest.path("");
    let mut events = guest
        .stream(
            "filesystem.Filesystem/WatchDir",
            &[],
            json!({ "path": root, "recursive": true }),
        )
        .await;
    let Event::Message(start) = events.next().await else {
        panic!("no start")
    };
    assert!(start["start"].is_object());
    std::fs::create_dir_all(guest.path("a/b")).unwrap();
    std::fs::write(guest.path("a/b/file"), "x").unwrap();
    let mut seen = Vec::new();
    while !seen.contains(&("EVENT_TYPE_CREATE".to_owned(), "a/b/file".to_owned())) {
        let Event::Message(message) = events.next().await else {
            panic!("the stream ended")
        };
        let text = |key: &str| message["filesystem"][key].as_str().unwrap_or_default().to_owned();
        seen.push((text("type"), text("name")));
    }
    // A directory is watched from its creation on, however deep, and each entry is told once at least.
    for name in ["a", "a/b"] {
        assert!(
            seen.contains(&("EVENT_TYPE_CREATE".to_owned(), name.to_owned())),
            "{seen:?}"
        );
    }
    let mut limited = guest
        .stream(
            "filesystem.Filesystem/WatchDir",
            &[("connect-timeout-ms", "200")],
            json!({ "path": root }),
        )
        .await;
    let Event::Message(_) = limited.next().await else {
        panic!("no start")
    };
    let Event::End(Some(error)) = limited.next().await else {
        panic!("no end")
    };
    assert_eq!(error.0, "deadline_exceeded");
}

#[tokio::test]
async fn a_watcher_is_polled() {
    let Some(guest) = guest().await else { return };
    std::fs::write(guest.path("old"), "x").unwrap();
    let create = json!({ "path": guest.path(""), "includeEntry": true });
    let made = guest
        .call("filesystem.Filesystem/CreateWatcher", "", create)
        .await
        .unwrap();
    let id = json!({ "watcherId": made["watcherId"] });
    std::fs::rename(guest.path("old"), guest.path("new")).unwrap();
    std::fs::write(guest.path("new"), "more").unwrap();
    std::fs::remove_file(guest.path("new")).unwrap();
    let mut all: Vec<Value> = Vec::new();
    let wanted = ["RENAME old", "CREATE new", "WRITE new", "REMOVE new"];
    for _ in 0..500 {
        let polled = guest
            .call("filesystem.Filesystem/GetWatcherEvents", "", id.clone())
            .await
            .unwrap();
        all.extend(polled["events"].as_array().cloned().unwrap_or_default());
        let has = |kind: &str| {
            all.iter()
                .any(|event| event["type"] == format!("EVENT_TYPE_{kind}"))
        };
        if has("REMOVE") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let seen: Vec<String> = all
        .iter()
        .map(|e| {
            format!(
                "{} {}",
                &e["type"].as_str().unwrap()[11..],
                e["name"].as_str().unwrap()
            )
        })
        .collect();
    for event in wanted {
        assert!(
            seen.iter().any(|found| found == event),
            "{event} is not in {seen:?}"
        );
    }
    guest
        .call("filesystem.Filesystem/RemoveWatcher", "", id.clone())
        .await
        .unwrap();
    assert_eq!(
        guest
            .call("filesystem.Filesystem/GetWatcherEvents", "", id)
            .await
            .unwrap_err()
            .0,
        "not_found"
    );
    let denied = guest
        .call(
            "filesystem.Filesystem/CreateWatcher",
            "nobody",
            json!({ "path": "/root" }),
        )
        .await;
    assert_eq!(denied.unwrap_err().0, "permission_denied");
    let file = guest
        .call(
            "filesystem.Filesystem/CreateWatcher",
            "",
            json!({ "path": "/etc/passwd" }),
        )
        .await;
    assert_eq!(file.unwrap_err().0, "invalid_argument");
    until("nothing", || Some(())).await;
}
