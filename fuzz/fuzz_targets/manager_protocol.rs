//! What a node that somebody has taken over may ask of the node manager, the one process that is root.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_node_manager::protocol::{Call, MOST_MACHINES, Request, parse_request};

fuzz_target!(|input: &[u8]| {
    let Ok(request) = parse_request(input) else {
        return;
    };
    let Request::Request { call, .. } = &request else {
        return;
    };
    match call {
        Call::CreateNetwork { name }
        | Call::DeleteNetwork { name }
        | Call::GroupUsage { name }
        | Call::KillGroup { name }
        | Call::DeleteGroup { name } => {
            // Names become paths.
            let name = name.to_string();
            assert!((1..=32).contains(&name.len()) && !name.contains(['/', '.', '\0']));
        }
        Call::CreateGroup { limits, .. } => assert!(limits.memory_bytes > 0 && limits.pids > 0),
        Call::Sweep { keep } => assert!(keep.len() <= MOST_MACHINES),
        Call::Spawn(call) => {
            assert!(call.arguments.len() <= 512 && call.numbers.len() + call.views.len() <= 256)
        }
        _ => {}
    }
    // What is let through is understood the same way when it is passed on.
    let again = serde_json::to_vec(&request).expect("can be written");
    assert!(parse_request(&again).is_ok());
});
