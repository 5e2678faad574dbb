//! The generated Rust client, with binary messages over HTTP/2.

use buffa::MessageField;
use connectrpc::client::{CallOptions, ClientConfig, HttpClient};
use space_proto::filesystem::{FilesystemClient, StatRequest};
use space_proto::process::process_event::end_event::Cause;
use space_proto::process::{ProcessClient, ProcessConfig, StartRequest};

use crate::harness::{basic, guest};

#[tokio::test]
async fn starts_a_process_and_reads_a_file() {
    let Some(guest) = guest().await else { return };
    let transport = HttpClient::plaintext_http2_only();
    let config = ClientConfig::new(guest.address.parse().unwrap());
    let client = ProcessClient::new(transport.clone(), config.clone());
    let process = ProcessConfig {
        cmd: "/bin/sh".to_owned(),
        args: vec!["-c".to_owned(), "printf 'a\\377b'; id -un; exit 2".to_owned()],
        ..ProcessConfig::default()
    };
    let request = StartRequest {
        process: MessageField::some(process),
        stdin: Some(false),
        ..StartRequest::default()
    };
    let options = CallOptions::default().with_header("authorization", basic("nobody"));
    let mut stream = client.start_with_options(request, options).await.unwrap();
    let mut output = Vec::new();
    let mut end = None;
    let mut started = 0;
    while let Some(message) = stream.message().await.unwrap() {
        use space_proto::process::__buffa::oneof::process_event::Event;
        use space_proto::process::__buffa::oneof::process_event::data_event::Output;
        match message
            .to_owned_message()
            .event
            .into_option()
            .unwrap()
            .event
            .unwrap()
        {
            Event::Start(start) => started = start.pid,
            Event::Data(data) => match data.output.unwrap() {
                Output::Stdout(bytes) => output.extend(bytes),
                other => panic!("unexpected {other:?}"),
            },
            Event::End(found) => end = Some(found),
            Event::Keepalive(_) => {}
        }
    }
    let end = end.unwrap();
    assert!(started > 1);
    assert_eq!(output, b"a\xffbnobody\n");
    assert_eq!((end.exit_code, end.exited), (2, true));
    assert_eq!(end.cause, Cause::CAUSE_EXIT);

    let files = FilesystemClient::new(transport, config);
    let found = files
        .stat(StatRequest {
            path: "/etc/passwd".to_owned(),
            ..StatRequest::default()
        })
        .await
        .unwrap();
    let found = found.into_owned();
    assert_eq!(found.entry.name, "passwd");
    let missing = files
        .stat(StatRequest {
            path: "/nonexistent".to_owned(),
            ..StatRequest::default()
        })
        .await
        .unwrap_err();
    assert_eq!(missing.code, connectrpc::ErrorCode::NotFound);
}
