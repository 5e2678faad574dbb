//! The control plane through its own port, over a real store and a node that is faked in process.

mod daemon;
mod fake;
mod idempotency;
mod openapi;
mod platform;
mod ports;
mod quotas;
mod recovery;
mod refusals;
mod rest;
mod shutdown;
mod signed;
