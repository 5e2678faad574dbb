//! The vocabulary of SPACE: typed ids, sizes, REST types and error codes. Everything else speaks in these words.
//!
//! [`e2b`] holds the bodies that E2B's SDKs exchange, [`rest`] those of our own `/v1/` API, [`error`] what both answer
//! when something is refused.

pub mod e2b;
pub mod error;
pub mod id;
pub mod key;
pub mod lifecycle;
pub mod rest;
pub mod size;
