use std::os::unix::process::ExitStatusExt as _;

use super::*;

fn killed() -> io::Result<ExitStatus> {
    Ok(ExitStatus::from_raw(9))
}

fn exited(code: i32) -> io::Result<ExitStatus> {
    Ok(ExitStatus::from_raw(code << 8))
}

#[tokio::test(start_paused = true)]
async fn a_process_that_was_ready_is_started_again_soon_however_it_ended() {
    let mut watched = Watched::new("a process");
    for status in [killed, || exited(0), || exited(70)] {
        watched.became_ready();
        assert!(matches!(watched.ended(status()), Ok(None)));
        let begin = Instant::now();
        watched.due.wait().await;
        assert_eq!(begin.elapsed(), FIRST_PAUSE);
    }
}

#[tokio::test]
async fn a_process_that_refuses_to_start_is_not_asked_again_and_its_code_is_ours() {
    let mut watched = Watched::new("a process");
    assert!(matches!(watched.ended(exited(1)), Ok(Some(1))));
    assert!(matches!(watched.ended(exited(5)), Ok(Some(5))));
    // Success without ever having served is none.
    assert!(matches!(watched.ended(exited(0)), Ok(Some(1))));
}

#[tokio::test(start_paused = true)]
async fn starts_that_fail_get_rarer_and_then_end() {
    let mut watched = Watched::new("a process");
    let mut before = Duration::ZERO;
    for _ in 1..MOST_FAILED_STARTS {
        assert!(matches!(watched.ended(killed()), Ok(None)));
        let begin = Instant::now();
        watched.due.wait().await;
        assert!(begin.elapsed() > before && begin.elapsed() <= LONGEST_PAUSE);
        before = begin.elapsed();
    }
    let error = watched.ended(killed()).expect_err("given up");
    assert!(error.chain().join(" ").contains("signal: 9"), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("space up")));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_dies_all_the_time_is_given_up_and_one_that_dies_now_and_then_is_not() {
    let mut now_and_then = Watched::new("a process");
    for _ in 0..MOST_DEATHS * 3 {
        now_and_then.became_ready();
        assert!(matches!(now_and_then.ended(killed()), Ok(None)));
        sleep(DEATHS_WITHIN / 30).await;
    }
    let mut all_the_time = Watched::new("a process");
    for _ in 1..MOST_DEATHS {
        all_the_time.became_ready();
        assert!(matches!(all_the_time.ended(killed()), Ok(None)));
    }
    all_the_time.became_ready();
    assert!(all_the_time.ended(killed()).is_err());
}

#[test]
fn a_listening_socket_is_told_from_a_file_that_one_has_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a socket");
    assert!(!is_listened_at(&path));
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    assert!(is_listened_at(&path));
    assert!(!is_listened_at(&directory.path().join("socket")));
    drop(listener);
    assert!(path.exists() && !is_listened_at(&path));
}
