//! Ids, keys, sizes and bodies as clients send them.
#![no_main]

use std::fmt::{Debug, Display};
use std::str::FromStr;

use libfuzzer_sys::fuzz_target;
use space_api::{
    e2b, id,
    key::{ApiKey, KeyHash},
    rest,
    size::SizeClass,
};

/// What is taken is shown as it was, and taken again.
fn comes_back<T: FromStr + Display + PartialEq + Debug>(text: &str)
where
    T::Err: Debug,
{
    if let Ok(value) = text.parse::<T>() {
        assert_eq!(value.to_string().parse::<T>().expect("it was shown by us"), value);
    }
}

fuzz_target!(|input: &[u8]| {
    if let Ok(text) = std::str::from_utf8(input) {
        comes_back::<id::SandboxId>(text);
        comes_back::<id::ProjectId>(text);
        comes_back::<SizeClass>(text);
        if let Ok(key) = text.parse::<ApiKey>() {
            // A key is never shown.
            assert!(!format!("{key:?}").contains(text));
            drop::<KeyHash>(key.hash());
        }
    }
    drop(serde_json::from_slice::<e2b::NewSandbox>(input));
    drop(serde_json::from_slice::<e2b::TimeoutRequest>(input));
    drop(serde_json::from_slice::<e2b::ConnectRequest>(input));
    drop(serde_json::from_slice::<e2b::RefreshRequest>(input));
    drop(serde_json::from_slice::<e2b::ResumeRequest>(input));
    drop(serde_json::from_slice::<rest::NewSandbox>(input));
    drop(serde_json::from_slice::<rest::NewKey>(input));
    drop(serde_json::from_slice::<rest::Quotas>(input));
});
