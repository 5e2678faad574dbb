//! Builds a template (`base` unless a recipe is given) and its machine of the default size, showing progress and what
//! each step took.
//!
//! `build_base STORE_DIRECTORY DAEMON_PROGRAM [RECIPE.toml]`, as root.

#![expect(clippy::print_stdout, reason = "an example for a terminal")]

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use space_node_manager::{LocalPrivileges, Privileges};
use space_vmm::{QemuConfig, QemuDriver, Vmm};
use space_volume::{BuildOptions, MachineRequest, Progress, Recipe, Step, TemplateBuilder, VolumeConfig};

/// Any user id that nobody else on this machine has.
const UID: u32 = 199_998;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: build_base STORE_DIRECTORY DAEMON_PROGRAM [RECIPE.toml]";
    let directory = arguments.next().context(usage)?;
    let daemon_program = arguments.next().context(usage)?;
    let recipe = match arguments.next() {
        Some(path) => Recipe::from_file(&path)?,
        None => Recipe::base()?,
    };

    let run_directory = tempfile::Builder::new()
        .prefix("space-build-")
        .tempdir_in("/tmp")?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(run_directory.path(), mode)?;
    let privileges: Arc<dyn Privileges> = Arc::new(LocalPrivileges::new("build", run_directory.path())?);
    let vmm: Arc<dyn Vmm> =
        Arc::new(QemuDriver::probe(QemuConfig::default(), Arc::clone(&privileges)).await?);
    println!("{:?}", vmm.capabilities());

    let builder = TemplateBuilder::new(VolumeConfig {
        cache_directory: directory.join("cache"),
        directory,
        daemon_program,
    })?;
    let began = Instant::now();
    let template = builder
        .build(&recipe, &BuildOptions::default(), &printing())
        .await?;
    println!(
        "template {} is {} after {:.1?}",
        template.reference(),
        template.digest,
        began.elapsed()
    );

    let began = Instant::now();
    let request = MachineRequest {
        size: template.manifest.default_size,
        vmm: Arc::clone(&vmm),
        privileges,
        uid: UID,
        run_directory: run_directory.path().to_owned(),
    };
    let machine = builder
        .ensure_machine(&template, request, &printing())
        .await
        .map_err(|error| anyhow::anyhow!(error.chain()))?;
    println!("machine ready after {:.1?}", began.elapsed());
    println!("{machine:#?}");
    println!("{} MB on disk", builder.store().disk_bytes(&template) / 1_000_000);
    let removed = builder.store().collect();
    removed.context("cannot remove older builds")
}

/// Prints each step once, when it begins, with what the one before took.
fn printing() -> Progress {
    let last = Mutex::new(None::<(&'static str, Instant)>);
    Arc::new(move |step: Step| {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|(name, _)| name == step.name) {
            return;
        }
        if let Some((name, since)) = last.replace((step.name, Instant::now())) {
            let took: Duration = since.elapsed();
            println!(
                "{:>3.0} %  {name}: {:.2} s",
                step.fraction * 100.0,
                took.as_secs_f64()
            );
        }
    })
}
