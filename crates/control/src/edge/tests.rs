//! Properties of what the edge reads from strangers.

use http::Request;
use proptest::prelude::*;
use space_api::id::SandboxId;

use super::{
    guard::signature,
    target::{self, Routing},
};
use crate::config::ControlConfig;

fn request(host: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().uri(path).header("host", host);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("valid request")
}

fn config() -> ControlConfig {
    ControlConfig {
        domain: "space.example".into(),
        public_url: "http://box.internal:3000".into(),
        ..ControlConfig::default()
    }
}

#[test]
fn headers_count_only_under_a_shared_host() {
    let id = SandboxId::random();
    let headers = [("e2b-sandbox-id", id.as_str()), ("e2b-sandbox-port", "49983")];
    for host in [
        "localhost",
        "localhost:3000",
        "127.0.0.1:3000",
        "[::1]:3000",
        "sandbox.space.example",
        "BOX.internal:3000",
    ] {
        let found = target::of(&config(), &request(host, "/health", &headers)).expect("parses");
        assert_eq!(
            found.map(|t| (t.id, t.port, t.routing)),
            Some((id.clone(), 49983, Routing::Headers)),
            "{host}"
        );
    }
    for host in [
        "space.example",
        "api.space.example",
        "evil.example",
        "sandbox.evil.example",
        "xsandbox.space.example",
    ] {
        let found = target::of(&config(), &request(host, "/health", &headers)).expect("parses");
        assert_eq!(found, None, "{host}");
    }
}

#[test]
fn bad_names_of_sandboxes_are_no_requests_to_the_api() {
    for (host, path) in [
        ("8000-nope.space.example", "/"),
        ("99999-aaaaaaaaaaaaaaaaaaaa.space.example", "/"),
        ("0-aaaaaaaaaaaaaaaaaaaa.space.example", "/"),
        ("localhost", "/sandbox/x/80/"),
        ("localhost", "/sandbox/aaaaaaaaaaaaaaaaaaaa/+80/"),
        ("localhost", "/sandbox/aaaaaaaaaaaaaaaaaaaa"),
    ] {
        assert!(
            target::of(&config(), &request(host, path, &[])).is_err(),
            "{host} {path}"
        );
    }
}

proptest! {
    #[test]
    fn host_names_round_trip(port in 1_u16.., upper in any::<bool>(), outer in 0_u16..3, client in "(-[a-z0-9]{1,8})?") {
        let id = SandboxId::random();
        let mut host = format!("{port}-{id}{client}.space.example");
        if upper {
            host = host.to_uppercase();
        }
        match outer {
            1 => host.push_str(":3000"),
            2 => host.push('.'),
            _ => {}
        }
        let found = target::of(&config(), &request(&host, "/a?b", &[])).expect("parses").expect("names a sandbox");
        prop_assert_eq!((found.id, found.port, found.routing), (id, port, Routing::HostName));
    }

    #[test]
    fn paths_round_trip(port in 1_u16.., rest in "(/[a-z0-9%2F.]{0,20}){0,3}") {
        let id = SandboxId::random();
        let path = format!("/sandbox/{id}/{port}{rest}");
        let found = target::of(&config(), &request("localhost", &path, &[])).expect("parses").expect("names a sandbox");
        prop_assert_eq!(&found.id, &id);
        prop_assert_eq!(found.port, port);
        let Routing::Path { prefix, rest: found } = found.routing else { panic!("by path") };
        prop_assert_eq!(prefix, format!("/sandbox/{id}/{port}"));
        prop_assert_eq!(found.unwrap_or_default(), rest);
    }

    #[test]
    fn no_host_makes_it_panic_or_reach_a_sandbox_by_accident(host in "[!-~]{0,60}") {
        if let Ok(Some(found)) = target::of(&config(), &request(&host, "/", &[])) {
            let lower = host.to_lowercase();
            prop_assert!(lower.contains(&format!("{}-{}", found.port, found.id)), "{}", host);
        }
    }

    #[test]
    fn a_signature_is_good_for_exactly_what_it_names(
        path in "[ -~]{0,40}", user in "[a-z]{0,8}", token in "[0-9a-f]{64}", other in "[ -~]{1,40}", expiration in prop::option::of(0_i64..4_000_000_000),
    ) {
        let made = signature(&path, "read", &user, &token, expiration);
        prop_assert_eq!(&made, &signature(&path, "read", &user, &token, expiration));
        prop_assert_ne!(&made, &signature(&path, "write", &user, &token, expiration));
        let later = Some(expiration.map_or(1, |at| at + 1));
        prop_assert_ne!(&made, &signature(&path, "read", &user, &token, later));
        prop_assert_ne!(&made, &signature(&format!("{path}{other}"), "read", &user, &token, expiration));
    }
}
