//! Messages, service traits and clients of the guest's Connect services.
//!
//! Everything here is generated from `proto/` at build time. [`process`] runs programs and
//! [`filesystem`] handles files; both speak Connect (JSON and binary), gRPC and gRPC-Web. The
//! clients exist only with the feature `client`, so that the guest's binary stays small.

pub use generated::{filesystem, process};

#[expect(
    missing_debug_implementations,
    clippy::allow_attributes,
    clippy::semicolon_if_nothing_returned,
    reason = "generated code"
)]
mod generated {
    connectrpc::include_generated!("services.rs");
}
