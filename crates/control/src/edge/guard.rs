//! Who may speak to the daemon, and about what.

use std::collections::HashMap;

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, Method, Request, header};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use sha2::{Digest as _, Sha256};

use super::{answers::Answer, target::Target};
use crate::app::{Route, Token};

/// Calls that only the platform itself may make.
const HOST_ONLY: [&str; 8] = [
    "/init",
    "/batch",
    "/freeze",
    "/unfreeze",
    "/fsfreeze",
    "/fsthaw",
    "/collapse",
    "/upgrade",
];

/// On whose word a request to the daemon is let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// It needs none, or it showed the access token.
    Token,
    /// A signed URL: good for exactly the file, the user and the direction it names.
    Signature,
}

/// Whether this is a browser's question, which never carries a token.
pub(super) fn is_preflight<B>(request: &Request<B>) -> bool {
    request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Admits a request to the daemon or says why not. `path` and `query` are those the daemon will see.
pub(super) fn admit(
    route: &Route,
    target: &Target,
    method: &Method,
    path: &str,
    query: &str,
    headers: &HeaderMap,
) -> Result<Admission, Answer> {
    if is_host_only(path) {
        return Err(Answer::NoSuchPath {
            id: target.id.clone(),
        });
    }
    let Some(token) = &route.access_token else {
        return Ok(Admission::Token);
    };
    if method == Method::GET && path == "/health" {
        return Ok(Admission::Token);
    }
    let refused = |why| {
        Err(Answer::Unauthorized {
            id: target.id.clone(),
            why,
        })
    };
    if let Some(shown) = headers.get("x-access-token") {
        return if equal(shown.as_bytes(), token.0.as_bytes()) {
            Ok(Admission::Token)
        } else {
            refused("unauthorized access: the access token is not this sandbox's")
        };
    }
    if path == "/files"
        && let Some(operation) = operation(method)
    {
        let Some(signed) = signed_query(query) else {
            return Err(Answer::Ambiguous {
                id: target.id.clone(),
                what: "a query parameter is given twice",
            });
        };
        if signed.contains_key("signature") {
            return match verify(&signed, operation, token, Timestamp::now()) {
                Ok(()) => Ok(Admission::Signature),
                Err(why) => refused(why),
            };
        }
    }
    refused(
        "unauthorized access: send the sandbox's access token as X-Access-Token, or a signed URL for files",
    )
}

/// What a signature must allow for a method.
fn operation(method: &Method) -> Option<&'static str> {
    match *method {
        Method::GET | Method::HEAD => Some("read"),
        Method::POST => Some("write"),
        _ => None,
    }
}

/// Whether a request comes with nothing but a signature.
pub(super) fn is_signed_file<B>(request: &Request<B>) -> bool {
    request.uri().path() == "/files"
        && request
            .uri()
            .query()
            .is_some_and(|query| query.contains("signature=v1_"))
        && !request.headers().contains_key("x-access-token")
}

/// Whether this sandbox's token made the signature, expired or not.
pub(super) fn is_signer(route: &Route, method: &Method, query: &str) -> bool {
    let (Some(token), Some(operation), Some(signed)) =
        (&route.access_token, operation(method), signed_query(query))
    else {
        return false;
    };
    signed.contains_key("signature") && verify(&signed, operation, token, Timestamp::MIN).is_ok()
}

/// Whether a path means one of the host-only calls, however it is spelt.
fn is_host_only(path: &str) -> bool {
    // Decoded until nothing changes, because a daemon may decode once more than we think.
    let mut decoded = path.to_owned();
    for _ in 0..3 {
        let next = percent_decode_str(&decoded).decode_utf8_lossy().into_owned();
        if next == decoded {
            break;
        }
        decoded = next;
    }
    let mut normal = String::new();
    for segment in decoded.split(['/', '\\']) {
        match segment {
            "" | "." => {}
            ".." => normal.truncate(normal.rfind('/').unwrap_or(0)),
            other => {
                normal.push('/');
                normal.push_str(&other.to_ascii_lowercase());
            }
        }
    }
    HOST_ONLY.contains(&normal.as_str())
}

/// The parameters that a signature covers; `None` if one of them is there twice, so that the daemon might read the other.
fn signed_query(query: &str) -> Option<HashMap<String, String>> {
    let mut found = HashMap::new();
    for (key, value) in url::form_urlencoded::parse(query.as_bytes()) {
        let covered = ["path", "username", "signature", "signature_expiration"].contains(&key.as_ref());
        if covered && found.insert(key.into_owned(), value.into_owned()).is_some() {
            return None;
        }
    }
    Some(found)
}

fn verify(
    signed: &HashMap<String, String>,
    operation: &str,
    token: &Token,
    now: Timestamp,
) -> Result<(), &'static str> {
    let value = |key: &str| signed.get(key).map_or("", String::as_str);
    let expiration = match signed.get("signature_expiration") {
        None => None,
        Some(text) => Some(
            text.parse::<i64>()
                .map_err(|_| "unauthorized access: signature_expiration is not a number of seconds")?,
        ),
    };
    let wanted = signature(value("path"), operation, value("username"), &token.0, expiration);
    if !equal(value("signature").as_bytes(), wanted.as_bytes()) {
        return Err("unauthorized access: invalid signature");
    }
    if expiration.is_some_and(|expiration| expiration < now.as_second()) {
        return Err("unauthorized access: the signature is already expired");
    }
    Ok(())
}

/// E2B's signature, version 1.
pub(super) fn signature(
    path: &str,
    operation: &str,
    user: &str,
    token: &str,
    expiration: Option<i64>,
) -> String {
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiration) = expiration {
        text.push(':');
        text.push_str(&expiration.to_string());
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
}

/// Admits a request to a port of which the traffic token is asked.
pub(super) fn admit_traffic(route: &Route, target: &Target, headers: &HeaderMap) -> Result<(), Answer> {
    let Some(token) = &route.traffic_token else {
        return Ok(());
    };
    let shown = headers.get("e2b-traffic-access-token");
    if shown.is_some_and(|shown| equal(shown.as_bytes(), token.0.as_bytes())) {
        return Ok(());
    }
    Err(Answer::TrafficToken {
        id: target.id.clone(),
        present: shown.is_some(),
    })
}

/// Compares secrets without telling by the time taken where they differ: what is compared are their digests.
pub(super) fn equal(shown: &[u8], secret: &[u8]) -> bool {
    Sha256::digest(shown) == Sha256::digest(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_only_calls_are_known_however_they_are_spelt() {
        for path in [
            "/init",
            "//init",
            "/init/",
            "/INIT",
            "/%69nit",
            "/%2569nit",
            "/x/../init",
            "/./init",
            "/fsfreeze",
            "\\init",
        ] {
            assert!(is_host_only(path), "{path}");
        }
        for path in [
            "/",
            "/health",
            "/files",
            "/initial",
            "/init/x",
            "/process.Process/Start",
        ] {
            assert!(!is_host_only(path), "{path}");
        }
    }

    #[test]
    fn the_signature_is_that_of_the_sdks() {
        // Computed with the Python SDK's get_signature.
        assert_eq!(
            signature("/home/user/x", "read", "root", "token", Some(1_700_000_000)),
            "v1_88CEcrrOXNzBEPyuthHK8TboIuK49th6CEdEN2HILeQ"
        );
    }
}
