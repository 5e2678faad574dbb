//! What the node manager reads from its socket is taken for hostile.

use proptest::prelude::*;
use space_node_manager::protocol::{Call, ProtocolError, Request, parse_request};

fn request(call: &str) -> String {
    format!(r#"{{"Request":{{"id":7,"call":{call}}}}}"#)
}

fn spawn(change: impl Fn(&mut serde_json::Value)) -> String {
    let mut call = serde_json::json!({"Spawn": {
        "name": "m0", "program": "/usr/bin/qemu", "arguments": ["-S"], "uid": 200_000, "file_size_limit": 1,
        "network": true, "log": true, "numbers": [3, 4], "views": [["/a", false]],
    }});
    change(&mut call["Spawn"]);
    request(&call.to_string())
}

fn group(change: impl Fn(&mut serde_json::Value)) -> String {
    let mut limits = serde_json::json!({
        "memory_bytes": 1 << 30, "pids": 50, "cpu_quota_micros": 100_000, "cpu_weight": 100, "io": null,
    });
    change(&mut limits);
    request(&serde_json::json!({"CreateGroup": {"name": "m0", "limits": limits}}).to_string())
}

#[test]
fn what_a_node_says_is_read() {
    for good in [
        r#"{"Hello":{"version":1}}"#.to_owned(),
        request(r#""OpenKvm""#),
        request(r#"{"Sweep":{"keep":["a","b"]}}"#),
        request(r#"{"Kill":{"process":{"pid":1,"start_ticks":2}}}"#),
        spawn(|_| ()),
        group(|_| ()),
    ] {
        parse_request(good.as_bytes()).unwrap_or_else(|error| panic!("{good}: {error}"));
    }
}

#[test]
fn what_is_out_of_bounds_is_refused() {
    let long = "x".repeat(33 * 1024);
    let many = vec!["/a"; 40];
    for bad in [
        spawn(|call| call["arguments"] = vec!["x"; 600].into()),
        spawn(|call| call["arguments"] = vec![long.as_str()].into()),
        spawn(|call| call["file_size_limit"] = u64::MAX.into()),
        spawn(|call| call["views"] = many.iter().map(|v| serde_json::json!([v, false])).collect()),
        group(|limits| limits["pids"] = 0.into()),
        group(|limits| limits["memory_bytes"] = 1.into()),
        group(|limits| limits["cpu_quota_micros"] = u64::MAX.into()),
        group(|limits| limits["cpu_weight"] = 10_001.into()),
        request(r#"{"SetGroupWeight":{"name":"m0","weight":0}}"#),
    ] {
        let outcome = parse_request(bad.as_bytes());
        assert!(
            matches!(outcome, Err(ProtocolError::OutOfBounds { .. })),
            "{bad:.200}: {outcome:?}"
        );
    }
    for bad in [
        spawn(|call| call["name"] = "../up".into()),
        spawn(|call| call["uid"] = (-1).into()),
        spawn(|call| call["environment"] = "LD_PRELOAD=x".into()),
        request(r#"{"Reboot":{}}"#),
        request(r#"{"Kill":{"process":{"pid":-1,"start_ticks":2}}}"#),
        "[".repeat(60_000),
        String::new(),
    ] {
        let outcome = parse_request(bad.as_bytes());
        assert!(
            matches!(outcome, Err(ProtocolError::Malformed { .. })),
            "{bad:.200}: {outcome:?}"
        );
    }
    assert!(matches!(
        parse_request(&vec![b' '; (128 << 10) + 1]),
        Err(ProtocolError::OutOfBounds { .. })
    ));
}

proptest! {
    #[test]
    fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        drop(parse_request(&bytes));
    }

    /// One byte of a good message changed: it is refused, or is a message within the bounds.
    #[test]
    fn a_damaged_message_stays_within_its_bounds(at in 0..10_000_usize, byte in any::<u8>()) {
        let mut bytes = spawn(|_| ()).into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(Request::Request { call: Call::Spawn(call), .. }) = parse_request(&bytes) {
            prop_assert!(call.arguments.len() + call.numbers.len() + call.views.len() < 10);
            prop_assert!(call.name.as_str().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
        }
    }
}
