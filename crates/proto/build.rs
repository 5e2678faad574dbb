//! Compiles the service definitions with a pure Rust compiler and generates messages, service
//! traits and clients.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];
    let root = PathBuf::from("../../proto");
    println!("cargo:rerun-if-changed=build.rs");
    for file in FILES {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
    }

    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(FILES)?;
    let descriptor = PathBuf::from(std::env::var("OUT_DIR")?).join("services.descriptor");
    std::fs::write(&descriptor, compiler.encode_file_descriptor_set())?;

    connectrpc_build::Config::new()
        .descriptor_set(&descriptor)
        .files(&FILES)
        .client_feature_name("client")
        .include_file("services.rs")
        .compile()?;
    Ok(())
}
