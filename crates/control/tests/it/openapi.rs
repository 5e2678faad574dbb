//! The checked-in description is the one that is served.

use std::path::Path;

use crate::platform::Platform;

#[test]
fn the_checked_in_description_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let mut current = space_control::openapi_document()
        .to_pretty_json()
        .expect("serialises");
    current.push('\n');
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        fs_err::write(&path, &current).expect("writable");
    }
    let checked_in = fs_err::read_to_string(&path).unwrap_or_default();
    assert!(
        checked_in == current,
        "docs/openapi.json has drifted from the code; run: UPDATE_OPENAPI=1 cargo nextest run -p space-control openapi"
    );
}

#[tokio::test]
async fn it_is_served() {
    let platform = Platform::start().await;
    let response = platform
        .client
        .get(format!("{}/openapi.json", platform.url))
        .send()
        .await
        .expect("answers");
    let served: serde_json::Value = response.json().await.expect("json");
    assert_eq!(served["openapi"].as_str().map(|v| &v[..3]), Some("3.1"));
    for path in ["/v2/sandboxes", "/sandboxes/{sandboxID}", "/v1/keys"] {
        assert!(served["paths"][path].is_object(), "{path}");
    }
}
