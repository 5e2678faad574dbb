//! What of a request's and an answer's head goes through.
//!
//! Into the guest: nothing that is only for us (keys, tokens, `E2b-*`), nothing that is between two hops, no cookies of a shared
//! origin. Out of it: nothing between two hops; and under a shared origin nothing by which a page of the guest could
//! act as that origin.

use axum::{body::Body, response::Response};
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{self, Entry},
};

use super::target::{Routing, Target};
use crate::api::api_key_shaped;

/// Meant for the next hop only.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// By these a page could act on the whole origin under which it is shown, or on other sandboxes under it.
const ORIGIN_WIDE: [HeaderName; 9] = [
    header::SET_COOKIE,
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("service-worker-allowed"),
    header::STRICT_TRANSPORT_SECURITY,
    header::ALT_SVC,
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
    HeaderName::from_static("origin-agent-cluster"),
];

/// Gives every page an origin of its own: it can run, but reads no cookie and no storage and is same-origin with nothing.
const PAGE_POLICY: &str = "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads";

/// Seconds for which a browser may remember a preflight.
const PREFLIGHT_AGE: &str = "7200";

/// What of a request's head the sandbox sees.
pub(super) fn for_guest(target: &Target, from: &HeaderMap) -> HeaderMap {
    let mut headers = from.clone();
    remove_hop_by_hop(&mut headers);
    // gRPC will not speak without it, and of all its values only this one may go on.
    let trailers = from
        .get(header::TE)
        .is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
    headers.remove(header::TE);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    headers.remove(header::HOST);
    // Answered here already.
    headers.remove(header::EXPECT);
    headers.remove("x-access-token");
    headers.remove("x-api-key");
    if headers.get(header::AUTHORIZATION).is_some_and(api_key_shaped) {
        headers.remove(header::AUTHORIZATION);
    }
    let ours: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("e2b-") || name.as_str().starts_with("x-space-"))
        .cloned()
        .collect();
    for name in ours {
        headers.remove(name);
    }
    if matches!(target.routing, Routing::Path { .. }) {
        headers.remove(header::COOKIE);
    } else {
        join_cookies(&mut headers);
    }
    headers
}

/// HTTP/2 clients may send one cookie per header, which HTTP/1.1 does not know.
fn join_cookies(headers: &mut HeaderMap) {
    let Entry::Occupied(cookies) = headers.entry(header::COOKIE) else {
        return;
    };
    if cookies.iter().count() < 2 {
        return;
    }
    let joined = cookies
        .iter()
        .map(HeaderValue::as_bytes)
        .collect::<Vec<_>>()
        .join(&b"; "[..]);
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(header::COOKIE, joined);
    }
}

/// Removes what is meant for this hop only, named by the standard or by `Connection`.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Lets browsers of any origin read what the daemon answers: it is the token that protects it, and no page has that by itself.
pub(super) fn permit_all_origins(headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.remove(header::ACCESS_CONTROL_ALLOW_CREDENTIALS);
    if !headers.contains_key(header::ACCESS_CONTROL_EXPOSE_HEADERS) {
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("*"),
        );
    }
}

/// Answers a browser's preflight question for the daemon.
pub(super) fn preflight(asked: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
    );
    let allowed = asked
        .get(header::ACCESS_CONTROL_REQUEST_HEADERS)
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static(PREFLIGHT_AGE),
    );
    response
}

/// Makes an answer harmless that is shown under a path of a shared origin.
pub(super) fn contain_page(target: &Target, headers: &mut HeaderMap) {
    for name in ORIGIN_WIDE {
        headers.remove(name);
    }
    // Beside the guest's own policy, if it has one: browsers keep to both. On every answer, whatever it claims to be.
    headers.append(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(PAGE_POLICY),
    );
    if let Routing::Path { prefix, .. } = &target.routing
        && let Some(location) = headers
            .get(header::LOCATION)
            .and_then(|value| value.to_str().ok())
        && let Some(moved) = relocated(location, prefix, target.port)
        && let Ok(moved) = HeaderValue::from_str(&moved)
    {
        headers.insert(header::LOCATION, moved);
    }
}

/// A redirect of a program that does not know under which path it is shown.
fn relocated(location: &str, prefix: &str, port: u16) -> Option<String> {
    if location.starts_with(&format!("{prefix}/")) {
        return None;
    }
    if location.starts_with('/') && !location.starts_with("//") {
        return Some(format!("{prefix}{location}"));
    }
    let rest = ["localhost", "127.0.0.1"]
        .iter()
        .find_map(|host| location.strip_prefix(&format!("http://{host}:{port}")))?;
    if rest.is_empty() || rest.starts_with(['/', '?', '#']) {
        let slash = if rest.starts_with('/') { "" } else { "/" };
        Some(format!("{prefix}{slash}{rest}"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_under_their_path() {
        let moved = |location| relocated(location, "/sandbox/x/8000", 8000);
        assert_eq!(moved("/login").as_deref(), Some("/sandbox/x/8000/login"));
        assert_eq!(
            moved("http://localhost:8000/a?b").as_deref(),
            Some("/sandbox/x/8000/a?b")
        );
        assert_eq!(
            moved("http://127.0.0.1:8000").as_deref(),
            Some("/sandbox/x/8000/")
        );
        for unchanged in [
            "login",
            "//evil.example/",
            "https://example.com/",
            "http://localhost:80001/",
            "/sandbox/x/8000/a",
        ] {
            assert_eq!(moved(unchanged), None, "{unchanged}");
        }
    }

    #[test]
    fn what_connection_names_is_not_passed_on() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("close, X-Private"));
        headers.insert("x-private", HeaderValue::from_static("1"));
        headers.insert("x-public", HeaderValue::from_static("1"));
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.len(), 1);
        assert!(headers.contains_key("x-public"));
    }
}
