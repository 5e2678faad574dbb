//! Which sandbox and port a request from the network is meant for.
#![no_main]

use http::Request;
use libfuzzer_sys::fuzz_target;

// The parser alone: its crate brings a database and a server.
#[path = "../../crates/control/src/edge/target.rs"]
mod target;

/// What the module above takes from its crate.
mod config {
    pub struct ControlConfig {
        pub domain: String,
        pub public_url: String,
    }
}

// Four lines: path, host, and the two headers that name a sandbox.
fuzz_target!(|input: &[u8]| {
    let config = config::ControlConfig {
        domain: "space.test".to_owned(),
        public_url: "http://api.space.test:3000".to_owned(),
    };
    let mut lines = input.split(|&byte| byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let mut builder = Request::get(line());
    for name in ["host", "e2b-sandbox-id", "e2b-sandbox-port"] {
        let value = line();
        if !value.is_empty() {
            builder = builder.header(name, value);
        }
    }
    // What the HTTP library does not let through never gets here.
    let Ok(request) = builder.body(()) else { return };
    match target::of(&config, &request) {
        Ok(Some(target)) => {
            assert!(target.port > 0);
            let id = target.id.to_string();
            assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
            if let target::Routing::Path { prefix, rest } = target.routing {
                assert!(request.uri().path().starts_with(&prefix));
                assert!(rest.is_none_or(|rest| rest.starts_with('/')));
            }
        }
        Ok(None) => {}
        Err(target::BadTarget::Id { shown } | target::BadTarget::Port { shown }) => {
            assert!(
                shown.len() <= 64 * 10
                    && shown
                        .chars()
                        .all(|shown| shown.is_ascii_graphic() || shown == ' ')
            );
        }
    }
});
