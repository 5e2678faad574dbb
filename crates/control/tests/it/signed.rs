//! Signed URLs for files: good for what they name, for nothing else.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use jiff::Timestamp;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::platform::{Platform, Sandbox, error};

/// Written anew from the contract, so that both sides are not wrong alike.
fn sign(path: &str, operation: &str, user: &str, token: &str, expiration: Option<i64>) -> String {
    let text = match expiration {
        Some(at) => format!("{path}:{operation}:{user}:{token}:{at}"),
        None => format!("{path}:{operation}:{user}:{token}"),
    };
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

async fn ask(platform: &Platform, sandbox: &Sandbox, method: Method, query: &[(&str, &str)]) -> (u16, Value) {
    let mut url = url::Url::parse("http://x/files").expect("url");
    url.query_pairs_mut().extend_pairs(query);
    let path = format!("/files?{}", url.query().unwrap_or_default());
    // No header but the route, and none of the token.
    error(
        platform
            .anonymous(&sandbox.id, 49983, method, &path)
            .send()
            .await
            .expect("answers"),
    )
    .await
}

#[tokio::test]
async fn a_signature_opens_its_file_its_way_until_it_expires() {
    let platform = Platform::start().await;
    let (sandbox, other) = (platform.create().await, platform.create().await);
    let path = "/home/user/a b+ü.txt";
    let token = sandbox.token.as_str();
    let read = sign(path, "read", "", token, None);
    let (status, seen) = ask(
        &platform,
        &sandbox,
        Method::GET,
        &[("path", path), ("signature", &read)],
    )
    .await;
    assert_eq!(status, 200);
    assert!(
        seen["uri"].as_str().expect("uri").contains("path="),
        "the daemon is told which file"
    );

    let soon = Timestamp::now().as_second() + 60;
    let past = Timestamp::now().as_second() - 60;
    let (soon, past) = (soon.to_string(), past.to_string());
    let until = |at: &str, user| sign(path, "read", user, token, at.parse().ok());
    let (valid, expired) = (until(&soon, "root"), until(&past, "root"));
    let with = |signature: &str, at: &str| {
        vec![
            ("path".to_owned(), path.to_owned()),
            ("username".to_owned(), "root".to_owned()),
            ("signature".to_owned(), signature.to_owned()),
            ("signature_expiration".to_owned(), at.to_owned()),
        ]
    };
    let cases = [
        (with(&valid, &soon), 200),
        (with(&expired, &past), 401),
        (with(&expired, &soon), 401),
        (with(&valid, "soon"), 401),
        (with(&valid.replace("v1_", "v2_"), &soon), 401),
        (with("", &soon), 401),
    ];
    for (query, wanted) in cases {
        let query: Vec<_> = query.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let (status, body) = ask(&platform, &sandbox, Method::GET, &query).await;
        assert_eq!(status, wanted, "{query:?}: {body}");
    }
    for (query, method, who) in [
        (
            vec![("path", "/etc/shadow"), ("signature", read.as_str())],
            Method::GET,
            &sandbox,
        ),
        (
            vec![("path", path), ("username", "root"), ("signature", read.as_str())],
            Method::GET,
            &sandbox,
        ),
        (
            vec![("path", path), ("signature", read.as_str())],
            Method::POST,
            &sandbox,
        ),
        (
            vec![("path", path), ("signature", read.as_str())],
            Method::DELETE,
            &sandbox,
        ),
        (
            vec![("path", path), ("signature", read.as_str())],
            Method::GET,
            &other,
        ),
    ] {
        let (status, body) = ask(&platform, who, method.clone(), &query).await;
        assert_eq!(status, 401, "{method} {query:?}: {body}");
    }
    // Twice the same parameter: the daemon might read the other one.
    let twice = [
        ("path", path),
        ("path", "/etc/shadow"),
        ("signature", read.as_str()),
    ];
    assert_eq!(ask(&platform, &sandbox, Method::GET, &twice).await.0, 400);
    // A signature is for files only.
    let request = platform.anonymous(
        &sandbox.id,
        49983,
        Method::GET,
        &format!("/seen?signature={read}"),
    );
    assert_eq!(request.send().await.expect("answers").status(), 401);
}

#[tokio::test]
async fn a_signed_url_without_any_id_finds_its_sandbox() {
    let platform = Platform::start().await;
    let sandboxes = [
        platform.create().await,
        platform.create().await,
        platform.create().await,
    ];
    let ask = async |method: Method, path: &str, signature: &str, more: &str| {
        let signature = signature.replace('+', "%2B");
        let url = format!("{}/files?path={path}&signature={signature}{more}", platform.url);
        let answer = platform
            .client
            .request(method, url)
            .send()
            .await
            .expect("answers");
        answer.status().as_u16()
    };
    for sandbox in &sandboxes {
        let read = sign("x", "read", "", &sandbox.token, None);
        assert_eq!(ask(Method::GET, "x", &read, "").await, 200);
        assert_eq!(
            ask(Method::GET, "y", &read, "").await,
            404,
            "nobody has signed that"
        );
        assert_eq!(ask(Method::POST, "x", &read, "").await, 404);
        let past = Timestamp::now().as_second() - 1;
        let expired = sign("x", "read", "", &sandbox.token, Some(past));
        assert_eq!(
            ask(
                Method::GET,
                "x",
                &expired,
                &format!("&signature_expiration={past}")
            )
            .await,
            401
        );
        platform.delete(&format!("/sandboxes/{}", sandbox.id)).await;
        assert_ne!(ask(Method::GET, "x", &read, "").await, 200, "it is gone");
    }
}

#[tokio::test]
async fn a_signature_for_writing_writes_and_names_its_user_alone() {
    let platform = Platform::start().await;
    let sandbox = platform.create().await;
    let write = sign("/x", "write", "user", &sandbox.token, None);
    let url = format!(
        "/files?path=%2Fx&username=user&signature={}",
        write.replace('+', "%2B")
    );
    let request = platform
        .anonymous(&sandbox.id, 49983, Method::POST, &url)
        .header("authorization", "Basic cm9vdDo=")
        .body("data");
    let (status, seen) = error(request.send().await.expect("answers")).await;
    assert_eq!(status, 200, "{seen}");
    assert_eq!(
        seen["headers"].get("authorization"),
        None,
        "no other user by the side door"
    );
    // A plus sign that was not encoded is a space to every reader of forms.
    let (status, _) = ask(
        &platform,
        &sandbox,
        Method::POST,
        &[("path", "/x"), ("username", "user"), ("signature", &write)],
    )
    .await;
    assert_eq!(status, 200);
    let open = platform.create_with("/sandboxes", json!({"secure": false})).await;
    assert_eq!(
        ask(&platform, &open, Method::GET, &[("path", "/x")]).await.0,
        200,
        "nothing to sign with, nothing asked"
    );
}
