//! From create to delete.

use http::StatusCode;
use http_body_util::{BodyExt as _, Empty};
use space_api::lifecycle::{EndCause, SandboxState};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::{DataStream, NodeError, SandboxEvent, TunnelError, fakes::guest::ECHO_PORT, locked};

async fn healthy(mut data: DataStream) -> StatusCode {
    data.ready().await.expect("ready");
    let body = Empty::new().map_err(|never| match never {}).boxed();
    let request = http::Request::get("http://space/health")
        .body(body)
        .expect("valid");
    data.send_request(request).await.expect("answers").status()
}

#[tokio::test]
async fn a_sandbox_lives_from_create_to_delete() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    let mut events = node.events();
    let mut request = request();
    request
        .environment
        .insert("KEY".to_owned(), "a \"value\"\n\u{1f600}".to_owned());
    let id = request.id.clone();

    let status = within(node.create(request)).await.expect("is created");
    assert_eq!(status.state, SandboxState::Running);
    assert!(status.ready_ms.is_some_and(|ready| ready > 0.0));
    assert_eq!(within(node.status(&id)).await.expect("lives"), status);
    assert_eq!(node.list().await, std::slice::from_ref(&status));
    assert_eq!(node.info().await.sandboxes, 1);
    assert_eq!(within(events.recv()).await, Ok(SandboxEvent::Ready(status)));

    let token = node.guest_token(&id).await.expect("lives");
    let guest = fixture.life(&id).expect("lives");
    {
        let known = locked(&guest.guest.known);
        let [identity] = &known.identities[..] else {
            panic!("{:?}", known.identities)
        };
        assert_eq!(
            (identity.hostname.as_str(), identity.generation),
            (id.as_str(), 1)
        );
        assert_eq!(identity.guest_token, token);
        assert!(identity.entropy.iter().any(|byte| *byte != 0));
        let expected = serde_json::json!({ "envVars": { "KEY": "a \"value\"\n\u{1f600}" } });
        assert_eq!(known.environment, Some(expected));
    }

    assert_eq!(
        within(healthy(node.data(&id).await.expect("opens"))).await,
        StatusCode::NO_CONTENT
    );
    let tunnel = within(node.tunnel(&id, ECHO_PORT)).await.expect("is open");
    let message = vec![7; 100_000];
    let (mut reader, mut writer) = tokio::io::split(tunnel);
    let mut echoed = vec![0; message.len()];
    let (written, read) =
        within(async { tokio::join!(writer.write_all(&message), reader.read_exact(&mut echoed)) }).await;
    written.expect("writes");
    read.expect("reads");
    assert_eq!(echoed, message);
    let closed = within(node.tunnel(&id, 9))
        .await
        .expect_err("nothing listens there");
    assert!(
        matches!(closed, TunnelError::PortClosed { port: 9 }),
        "{closed:?}"
    );

    let usage = within(node.usage(&id)).await.expect("lives");
    assert_eq!(
        usage
            .last()
            .map(|sample| (sample.mem_used, sample.host_cpu_micros)),
        Some((3, 1000))
    );

    let end = within(node.delete(&id)).await.expect("is deleted");
    assert_eq!((&end.cause, end.cpu_micros), (&EndCause::Deleted, 1000));
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
    assert_eq!(within(events.recv()).await, Ok(SandboxEvent::Ended(end.clone())));
    for gone in [
        node.delete(&id).await.err(),
        node.status(&id).await.err(),
        node.data(&id).await.err(),
    ] {
        assert!(
            matches!(&gone, Some(NodeError::NotFound { end: Some(known), .. }) if **known == end),
            "{gone:?}"
        );
    }
    assert_eq!(node.ends_since(end.ended_at).await.expect("reads"), [end]);
    fixture.close().await;
}

#[tokio::test]
async fn creating_is_idempotent_and_an_old_generation_is_refused() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    let request = request();
    let both = futures_util::future::join_all([node.create(request.clone()), node.create(request.clone())]);
    let statuses = within(both).await;
    assert_eq!(statuses[0].as_ref().ok(), statuses[1].as_ref().ok());
    assert_eq!(node.list().await.len(), 1);
    let end = within(node.delete(&request.id)).await.expect("lives");

    let refused = within(node.create(request.clone()))
        .await
        .expect_err("that life is over");
    assert!(
        matches!(&refused, NodeError::NotFound { end: Some(known), .. } if **known == end),
        "{refused:?}"
    );
    assert_eq!(fixture.leftovers(), Vec::<String>::new());
    let again = CreateSandbox {
        generation: 2,
        ..request
    };
    within(node.create(again)).await.expect("a new life");
    fixture.close().await;
}

#[tokio::test]
async fn a_broken_data_session_is_reopened_once_for_everyone() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    let request = request();
    let id = request.id.clone();
    within(node.create(request)).await.expect("is created");
    for round in 1..=3 {
        let opened = futures_util::future::join_all((0..20).map(|_| node.data(&id)));
        let opened = within(opened).await;
        let sessions = fixture.world.sessions.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(sessions, round, "one session for all callers");
        for data in opened {
            assert_eq!(
                within(healthy(data.expect("opens"))).await,
                StatusCode::NO_CONTENT
            );
        }
        let data = node.data(&id).await.expect("is open");
        fixture.life(&id).expect("lives").guest.break_session();
        until("the session is seen to be broken", || data.is_closed()).await;
    }
    let tunnel = within(node.tunnel(&id, ECHO_PORT)).await;
    assert!(tunnel.is_ok(), "a tunnel reopens it too: {tunnel:?}");
    fixture.close().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_a_whole_sandbox() {
    let fixture = Fixture::new().await;
    *locked(&fixture.world.slowness) = Duration::from_millis(4);
    let requests: Vec<_> = (0..8).map(|_| request()).collect();
    for (at, request) in (0_u64..).zip(&requests) {
        let limit = Duration::from_millis(at);
        drop(tokio::time::timeout(limit, fixture.node.create(request.clone())).await);
    }
    for request in &requests {
        // Whether or not the first caller waited: asking again answers for the same life.
        within(fixture.node.create(request.clone()))
            .await
            .expect("is usable");
        drop(tokio::time::timeout(Duration::from_millis(1), fixture.node.delete(&request.id)).await);
    }
    until("all are gone", || fixture.leftovers().is_empty()).await;
    fixture.close().await;
}

#[tokio::test]
async fn templates_are_listed_and_held_by_their_sandboxes() {
    let fixture = Fixture::new().await;
    let node = &fixture.node;
    let unknown = within(node.create(CreateSandbox {
        template: "nope".to_owned(),
        ..request()
    }))
    .await;
    assert!(
        matches!(&unknown, Err(NodeError::TemplateNotFound { name }) if name == "nope"),
        "{unknown:?}"
    );
    let held = || std::sync::Arc::strong_count(&fixture.world.template) - 1;
    assert_eq!(held(), 0);
    let status = within(node.create(request())).await.expect("is created");
    assert_eq!((node.templates().await.expect("lists").len(), held()), (1, 1));
    node.delete_template("base").await.expect("its name goes");
    assert_eq!(*locked(&fixture.world.deleted_templates), ["base"]);
    within(node.delete(&status.id)).await.expect("is deleted");
    until("its files are let go", || held() == 0).await;
    assert!(matches!(
        node.delete_template("nope").await,
        Err(NodeError::TemplateNotFound { .. })
    ));
    fixture.close().await;
}
