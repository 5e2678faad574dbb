//! The sandbox manager: owns each sandbox's life on one machine.
//!
//! [`Node`] is the seam towards the control plane; today it is called in process.

pub mod seam;

pub use seam::{
    CreateSandbox, DataStream, EndRecord, Node, NodeError, NodeInfo, SandboxEvent, SandboxStatus,
    TemplateInfo, TunnelError, TunnelStream, Usage,
};
