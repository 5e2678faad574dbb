//! The vocabulary of SPACE: typed ids, sizes, REST types and error codes. Everything else speaks in these words.

pub mod id;
pub mod lifecycle;
pub mod size;
