//! The control plane: API gateway, dispatcher, controller and edge router, in one stateless server on one port.
//!
//! ```text
//!  request ──► edge::target ──┬─ names a sandbox ──► edge   (49983 ► Node::data, other ports ► Node::tunnel)
//!                             └─ names none ───────► api    (E2B's REST and our own, over Store and Node)
//!                                                     │
//!  Node::events ──► controller ──► Store ◄────────────┘
//! ```
//!
//! Start reading at [`Control`], then `create.rs` (the one operation with order in it), `queue.rs` (what waits for room),
//! `transitions.rs` (pausing, resuming, waking), then `edge.rs`.

#![forbid(unsafe_code)]

mod api;
mod app;
mod callers;
mod config;
mod controller;
mod create;
mod deadlines;
mod edge;
mod error;
mod openapi;
mod queue;
mod server;
mod transitions;

pub use config::{ControlConfig, Limits};
pub use openapi::document as openapi_document;
pub use server::{Control, ServeError};
