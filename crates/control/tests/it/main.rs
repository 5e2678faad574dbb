//! The control plane through its own port, over a real store and a node that is faked in process.

mod daemon;
mod events;
mod fake;
mod idempotency;
mod labels;
mod openapi;
mod pausing;
mod platform;
mod ports;
mod quotas;
mod recovery;
mod refusals;
mod rest;
mod shutdown;
mod signed;
mod speed;
mod waking;
