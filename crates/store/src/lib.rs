//! Filled by its own steps; see docs/architecture.md.
