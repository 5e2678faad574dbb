//! The private channel between host and guest: control messages and the start of a data session.
