use std::os::unix::fs::PermissionsExt as _;

use jiff::ToSpan as _;
use space_api::lifecycle::IdleAction;
use space_node_manager::ProcessIdentity;
use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};

use super::*;
use crate::sandbox::now_as_recorded;

fn life(id: &SandboxId, generation: u64) -> Life {
    let name = ObjectName::new("m0123456789ab").expect("valid");
    Life {
        id: id.clone(),
        generation,
        project: ProjectId::random(),
        template: "base:latest".to_owned(),
        template_digest: "sha256:0".to_owned(),
        size: SizeClass::DEFAULT,
        started_at: now_as_recorded(),
        deadline: Timestamp::from_microsecond(now_as_recorded().as_microsecond() + 3_600_000_000)
            .expect("in range"),
        on_idle: Some(IdlePolicy {
            after_seconds: 60,
            action: IdleAction::Pause,
        }),
        guest_token: "token".to_owned(),
        environment: [("A".to_owned(), "b \"c\"\n\u{1f600}".to_owned())].into(),
        machine: MachineRecord {
            name: name.clone(),
            uid: 200_000,
            directory: "/run/x".into(),
            process: ProcessIdentity {
                pid: 1,
                start_ticks: 2,
            },
            executable: "00".to_owned(),
            driver: "pretended".to_owned(),
            version: "1".to_owned(),
            memory_file: "/m".into(),
            memory_bytes: 1,
            private_memory: true,
            disk_layers: vec!["/d".into()],
            disk_bytes: 4,
        },
        network: Some(ObjectName::new("n0123456789ab").expect("valid")),
        ready_ms: None,
        state: Recorded::Creating,
    }
}

fn end(id: &SandboxId, generation: u64, cause: EndCause) -> EndRecord {
    EndRecord {
        id: id.clone(),
        generation,
        cause,
        ended_at: now_as_recorded(),
        cpu_micros: 42,
    }
}

struct Opened {
    journal: Journal,
    tracker: TaskTracker,
    lives: Vec<Life>,
}

async fn open_with(path: &Path, faults: &str) -> Opened {
    let tracker = TaskTracker::new();
    let faults = FaultPoints::parse(faults).expect("parses");
    let (journal, lives) = Journal::open(path, &tracker, faults).await.expect("opens");
    Opened {
        journal,
        tracker,
        lives,
    }
}

async fn open(path: &Path) -> Opened {
    open_with(path, "").await
}

impl Opened {
    async fn close(self) {
        drop(self.journal);
        self.tracker.close();
        self.tracker.wait().await;
    }
}

#[tokio::test]
async fn a_life_is_read_back_whole_in_each_of_its_states() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    let expected = life(&SandboxId::random(), 3);
    let opened = open(&path).await;
    opened.journal.begin(expected.clone()).await.expect("begins");
    opened.close().await;
    for file in ["node.db", "node.db-wal", "node.db-shm"] {
        if let Ok(metadata) = fs_err::metadata(directory.path().join(file)) {
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{file}");
        }
    }
    let opened = open(&path).await;
    assert_eq!(opened.lives, std::slice::from_ref(&expected));

    let at = now_as_recorded();
    let later = Timestamp::from_microsecond(at.as_microsecond() + 7).expect("in range");
    let usable = Life {
        environment: BTreeMap::new(),
        ready_ms: Some(1.5),
        ..expected.clone()
    };
    let changes = [
        (
            Change::Running { ready_ms: Some(1.5) },
            Life {
                state: Recorded::Running,
                ..usable.clone()
            },
        ),
        (
            Change::Pausing,
            Life {
                state: Recorded::Pausing,
                ..usable.clone()
            },
        ),
        (
            Change::Paused(at),
            Life {
                state: Recorded::Paused(at),
                ..usable.clone()
            },
        ),
        (
            Change::Deadline(later),
            Life {
                state: Recorded::Paused(at),
                deadline: later,
                ..usable.clone()
            },
        ),
        (
            Change::Running { ready_ms: None },
            Life {
                state: Recorded::Running,
                deadline: later,
                ..usable.clone()
            },
        ),
        (
            Change::Stopping(EndCause::Deadline),
            Life {
                state: Recorded::Stopping(EndCause::Deadline),
                deadline: later,
                ..usable.clone()
            },
        ),
        // What is to end is not changed any more.
        (
            Change::Running { ready_ms: None },
            Life {
                state: Recorded::Stopping(EndCause::Deadline),
                deadline: later,
                ..usable.clone()
            },
        ),
    ];
    let mut opened = opened;
    for (change, found) in changes {
        let (id, generation) = (expected.id.clone(), expected.generation);
        opened
            .journal
            .change(id, generation, change)
            .await
            .expect("changes");
        opened.close().await;
        opened = open(&path).await;
        assert_eq!(opened.lives, [found]);
    }
    let ended = end(&expected.id, 3, EndCause::Deadline);
    opened.journal.end(ended.clone()).await.expect("ends");
    opened
        .journal
        .end(end(&expected.id, 3, EndCause::Deleted))
        .await
        .expect("changes nothing");
    opened.close().await;
    let opened = open(&path).await;
    assert_eq!(opened.lives, []);
    let found = opened.journal.end_of(expected.id.clone()).await.expect("reads");
    assert_eq!(found, Some(ended), "a life ends once");
    opened.close().await;
}

#[tokio::test]
async fn ends_are_kept_and_found_by_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    let (first, second) = (SandboxId::random(), SandboxId::random());
    let cause = EndCause::GuestFailed {
        detail: "Kernel panic - \"quoted\"\n\u{1f600}".to_owned(),
    };
    let opened = open(&path).await;
    opened.journal.begin(life(&first, 7)).await.expect("begins");
    assert_eq!(opened.journal.end_of(first.clone()).await.expect("reads"), None);
    let ends = [
        end(&first, 7, cause),
        // It failed before it had a machine, and so was never begun.
        end(
            &second,
            1,
            EndCause::CreateFailed {
                detail: String::new(),
            },
        ),
    ];
    for end in &ends {
        opened.journal.end(end.clone()).await.expect("ends");
    }
    opened.close().await;
    let opened = open(&path).await;
    let all = opened.journal.ends_since(Timestamp::now() - 1.hour()).await;
    assert_eq!(all.expect("reads"), ends);
    let later = opened.journal.ends_since(ends[1].ended_at + 1.second()).await;
    assert_eq!(later.expect("reads"), []);
    opened.close().await;
}

/// An end that could not be recorded at its time is, when it is known which life it was, whatever came after.
#[tokio::test]
async fn a_life_ends_also_when_a_later_one_is_known() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    let id = SandboxId::random();
    let opened = open(&path).await;
    for generation in [1, 2] {
        opened.journal.begin(life(&id, generation)).await.expect("begins");
    }
    let first = end(&id, 1, EndCause::PlatformRestarted);
    opened.journal.end(first.clone()).await.expect("ends");
    // Of one that never began nothing is recorded when a later one is known.
    opened
        .journal
        .end(end(&id, 0, EndCause::PlatformRestarted))
        .await
        .expect("is taken");
    opened.close().await;
    let opened = open(&path).await;
    let lives: Vec<_> = opened.lives.iter().map(|life| life.generation).collect();
    assert_eq!(lives, [2]);
    let ends = opened.journal.ends_since(Timestamp::now() - 1.hour()).await;
    assert_eq!(ends.expect("reads"), [first]);
    opened.close().await;
}

#[tokio::test]
async fn an_old_generation_is_refused_and_disturbs_no_other_of_its_batch() {
    let directory = tempfile::tempdir().expect("a directory");
    let opened = open(&directory.path().join("node.db")).await;
    let journal = &opened.journal;
    let id = SandboxId::random();
    journal.begin(life(&id, 5)).await.expect("begins");
    let others: Vec<_> = (0..50).map(|_| SandboxId::random()).collect();
    let (stale, fine) = tokio::join!(
        futures_util::future::join_all([5, 4].map(|old| journal.begin(life(&id, old)))),
        futures_util::future::join_all(others.iter().map(|other| journal.begin(life(other, 1)))),
    );
    assert!(
        stale
            .iter()
            .all(|answer| matches!(answer, Err(JournalError::Stale { .. }))),
        "{stale:?}"
    );
    assert!(fine.iter().all(Result::is_ok), "{fine:?}");
    journal.begin(life(&id, 6)).await.expect("a newer one begins");
    // An end of an older life comes too late to be anybody's.
    journal
        .end(end(&id, 4, EndCause::Deleted))
        .await
        .expect("harmless");
    assert_eq!(journal.end_of(id).await.expect("reads"), None);
    opened.close().await;
}

async fn raw(path: &Path, statements: &'static str) {
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .connect()
        .await
        .expect("connects");
    sqlx::raw_sql(statements)
        .execute(&mut connection)
        .await
        .expect("executes");
    connection.close().await.expect("closes");
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    raw(&path, "PRAGMA user_version = 9").await;
    let refused = Journal::open(&path, &TaskTracker::new(), FaultPoints::default())
        .await
        .map(|_| ());
    assert!(
        matches!(refused, Err(JournalError::TooNew { found: 9, .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn format_1_keeps_its_ends_and_its_lives_end_with_the_platform_they_lived_on() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("node.db");
    // As the version before wrote it.
    raw(
        &path,
        "CREATE TABLE lives (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, generation INTEGER NOT NULL,
            project TEXT NOT NULL, template TEXT NOT NULL, size TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('creating', 'running', 'ended')), process TEXT,
            started_us INTEGER NOT NULL, ended_us INTEGER, cause TEXT, cpu_us INTEGER NOT NULL DEFAULT 0,
            UNIQUE (id, generation)
        ) STRICT;
        CREATE INDEX lives_ended ON lives (ended_us, seq) WHERE ended_us IS NOT NULL;
        CREATE INDEX lives_live ON lives (state) WHERE state != 'ended';
        INSERT INTO lives (id, generation, project, template, size, state, started_us, ended_us, cause, cpu_us) VALUES
            ('sbxaaaaaaaaaaaaaaaa', 2, 'p', 'base:latest', '1x512x4096', 'ended', 1, 4102444800000000, '{\"kind\":\"deleted\"}', 5),
            ('sbxbbbbbbbbbbbbbbbb', 1, 'p', 'base:latest', '1x512x4096', 'running', 1, NULL, NULL, 0);
        PRAGMA user_version = 1;",
    )
    .await;
    let opened = open(&path).await;
    assert_eq!(opened.lives, []);
    let ends = rows_of(&path).await;
    assert_eq!(
        ends,
        [
            (
                "sbxaaaaaaaaaaaaaaaa".to_owned(),
                "{\"kind\":\"deleted\"}".to_owned()
            ),
            (
                "sbxbbbbbbbbbbbbbbbb".to_owned(),
                "{\"kind\":\"platform_restarted\"}".to_owned()
            ),
        ]
    );
    opened.close().await;
    // Opened once more it is of the present format, and stays as it is.
    let opened = open(&path).await;
    assert_eq!(rows_of(&path).await.len(), 2);
    opened.close().await;
}

async fn rows_of(path: &Path) -> Vec<(String, String)> {
    let mut connection = SqliteConnectOptions::new()
        .filename(path)
        .connect()
        .await
        .expect("connects");
    sqlx::query_as("SELECT id, cause FROM lives WHERE state = 'ended' ORDER BY seq")
        .fetch_all(&mut connection)
        .await
        .expect("reads")
}

#[tokio::test]
async fn a_failed_or_panicked_transaction_loses_itself_and_nothing_else() {
    for act in ["fail", "panic"] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("node.db");
        let opened = open_with(&path, &format!("journal.begin.before={act}@2")).await;
        let ids: Vec<_> = (0..3).map(|_| SandboxId::random()).collect();
        let mut begun = Vec::new();
        for id in &ids {
            begun.push(opened.journal.begin(life(id, 1)).await.is_ok());
        }
        assert_eq!(begun, [true, false, true], "{act}");
        opened.close().await;
        let opened = open(&path).await;
        let lives: Vec<_> = opened.lives.iter().map(|life| life.id.clone()).collect();
        assert_eq!(lives, [ids[0].clone(), ids[2].clone()], "{act}");
        opened.close().await;
    }
}

/// The other half of the test below: run alone, in a process of its own, it kills itself.
#[tokio::test]
async fn a_process_that_kills_itself_at_a_durable_write() {
    let (Some(path), Some(faults)) = (
        std::env::var_os("SPACE_TEST_JOURNAL"),
        std::env::var("SPACE_TEST_FAULT").ok(),
    ) else {
        return;
    };
    let opened = open_with(Path::new(&path), &faults).await;
    for number in 1..=3_u64 {
        let id = SandboxId::random();
        opened.journal.begin(life(&id, number)).await.expect("begins");
        let running = Change::Running { ready_ms: Some(1.0) };
        opened
            .journal
            .change(id.clone(), number, running)
            .await
            .expect("changes");
        opened
            .journal
            .change(id.clone(), number, Change::Stopping(EndCause::Deleted))
            .await
            .expect("changes");
        opened
            .journal
            .end(end(&id, number, EndCause::Deleted))
            .await
            .expect("ends");
    }
}

#[tokio::test]
async fn a_kill_at_each_durable_write_leaves_what_was_durable_before_it() {
    let found = |lives: &[Life], ends: usize| {
        let states = lives.iter().map(|life| match life.state {
            Recorded::Creating => "creating",
            Recorded::Running => "running",
            Recorded::Stopping(_) => "stopping",
            _ => "other",
        });
        (states.collect::<Vec<_>>(), ends)
    };
    for (point, lives, ends) in [
        ("begin.before", &[][..], 1),
        ("begin.after", &["creating"], 1),
        ("running.before", &["creating"], 1),
        ("running.after", &["running"], 1),
        ("stopping.before", &["running"], 1),
        ("stopping.after", &["stopping"], 1),
        ("end.before", &["stopping"], 1),
        ("end.after", &[], 2),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("node.db");
        let program = std::env::current_exe().expect("known");
        let status = tokio::process::Command::new(program)
            .args([
                "--exact",
                "journal::tests::a_process_that_kills_itself_at_a_durable_write",
            ])
            .env("SPACE_TEST_JOURNAL", &path)
            .env("SPACE_TEST_FAULT", format!("journal.{point}=kill@2"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .await
            .expect("runs");
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(9), "{point}");
        let opened = open(&path).await;
        let known = rows_of(&path).await.len();
        assert_eq!(found(&opened.lives, known), (lives.to_vec(), ends), "{point}");
        opened.close().await;
    }
}
