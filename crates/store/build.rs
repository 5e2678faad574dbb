//! Migrations are embedded at compile time; a new file must be noticed.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
