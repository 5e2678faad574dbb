use jiff::ToSpan as _;

use super::*;

fn beginning(id: &SandboxId, generation: u64) -> Beginning {
    Beginning {
        id: id.clone(),
        generation,
        project: ProjectId::random(),
        template: "base:latest".to_owned(),
        size: "1x512x4096".to_owned(),
        at: Timestamp::now(),
    }
}

fn end(id: &SandboxId, generation: u64, cause: EndCause) -> EndRecord {
    let now = Timestamp::now();
    EndRecord {
        id: id.clone(),
        generation,
        cause,
        // The journal keeps microseconds.
        ended_at: Timestamp::from_microsecond(now.as_microsecond()).expect("now is in range"),
        cpu_micros: 42,
    }
}

async fn closed(journal: Journal, tracker: TaskTracker) {
    drop(journal);
    tracker.close();
    tracker.wait().await;
}

#[tokio::test]
async fn a_life_that_was_going_on_is_ended_by_the_restart_and_older_ends_stay() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    let (lost, kept) = (SandboxId::random(), SandboxId::random());
    let cause = EndCause::GuestFailed {
        detail: "Kernel panic - \"quoted\"\n\u{1f600}".to_owned(),
    };

    let tracker = TaskTracker::new();
    let (journal, ended) = Journal::open(&path, &tracker).await.expect("opens");
    assert_eq!(ended, 0);
    journal.begin(beginning(&lost, 1)).await.expect("begins");
    journal.run(lost.clone(), 1, "1:2".to_owned()).await;
    journal.begin(beginning(&kept, 7)).await.expect("begins");
    let kept_end = end(&kept, 7, cause);
    journal.end(kept_end.clone()).await.expect("ends");
    assert_eq!(journal.end_of(lost.clone()).await.expect("reads"), None);
    closed(journal, tracker).await;

    let tracker = TaskTracker::new();
    let (journal, ended) = Journal::open(&path, &tracker).await.expect("opens again");
    assert_eq!(ended, 1);
    assert_eq!(journal.end_of(kept).await.expect("reads"), Some(kept_end.clone()));
    let lost_end = journal.end_of(lost).await.expect("reads").expect("it has ended");
    assert_eq!(lost_end.cause, EndCause::PlatformRestarted);
    let all = journal
        .ends_since(Timestamp::now() - 1.hour())
        .await
        .expect("reads");
    assert_eq!(all, [kept_end, lost_end.clone()]);
    let later = journal
        .ends_since(lost_end.ended_at + 1.second())
        .await
        .expect("reads");
    assert_eq!(later, []);
    closed(journal, tracker).await;
}

#[tokio::test]
async fn an_old_generation_is_refused_and_disturbs_no_other_of_its_batch() {
    let directory = tempfile::tempdir().expect("a directory");
    let tracker = TaskTracker::new();
    let (journal, _) = Journal::open(&directory.path().join("node.db"), &tracker)
        .await
        .expect("opens");
    let id = SandboxId::random();
    journal.begin(beginning(&id, 5)).await.expect("begins");
    let others: Vec<_> = (0..50).map(|_| SandboxId::random()).collect();
    let (stale, fine) = tokio::join!(
        futures_util::future::join_all([5, 4].map(|old| journal.begin(beginning(&id, old)))),
        futures_util::future::join_all(others.iter().map(|other| journal.begin(beginning(other, 1)))),
    );
    assert!(
        stale
            .iter()
            .all(|answer| matches!(answer, Err(JournalError::Stale { .. }))),
        "{stale:?}"
    );
    assert!(fine.iter().all(Result::is_ok), "{fine:?}");
    journal
        .begin(beginning(&id, 6))
        .await
        .expect("a newer one begins");
    closed(journal, tracker).await;
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    let mut connection = SqliteConnectOptions::new()
        .filename(&path)
        .create_if_missing(true)
        .connect()
        .await
        .expect("connects");
    sqlx::raw_sql("PRAGMA user_version = 9")
        .execute(&mut connection)
        .await
        .expect("sets");
    connection.close().await.expect("closes");
    let refused = Journal::open(&path, &TaskTracker::new()).await.map(|_| ());
    assert!(
        matches!(refused, Err(JournalError::TooNew { found: 9, .. })),
        "{refused:?}"
    );
}
