//! `space template build`: on this machine, in the store that `space up` uses, whether it runs or not.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use serde_json::json;
use space_api::size::SizeClass;
use space_node_manager::{LocalOptions, LocalPrivileges};
use space_volume::{BuildOptions, Recipe};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cli::{DATA_DIRECTORY, Global},
    commands::up::{
        assemble, ensure_root,
        installation::{Installation, RUN_DIRECTORY},
        prepare, volume_error,
    },
    error::CliError,
    output,
};

/// Longest wait for another build.
const TURN_LIMIT: Duration = Duration::from_secs(3600);
/// How often its end is looked for.
const TURN_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// File with the recipe, or `base` for the built-in one
    recipe: String,
    /// Make the machine of these sizes too [default: the recipe's own]
    #[arg(long, value_name = "SIZE")]
    size: Vec<SizeClass>,
    /// Keep the template of that name, unless it can be brought up to date without fetching anything
    #[arg(long, conflicts_with = "refresh")]
    if_missing: bool,
    /// Take the newest packages and kernel instead of those that were fetched before
    #[arg(long)]
    refresh: bool,
    /// Directory that `space up` keeps its state in
    #[arg(long, default_value = DATA_DIRECTORY, value_name = "DIRECTORY", env = "SPACE_DATA_DIR")]
    data_dir: PathBuf,
    /// Template store [default: DATA_DIR/templates]
    #[arg(long, value_name = "DIRECTORY", env = "SPACE_TEMPLATES")]
    templates: Option<PathBuf>,
    /// Directory for sockets
    #[arg(long, default_value = RUN_DIRECTORY, value_name = "DIRECTORY")]
    run_dir: PathBuf,
    /// Program that becomes the guest's first process [default: space-daemon beside this program]
    #[arg(long, value_name = "PATH")]
    daemon: Option<PathBuf>,
}

impl Build {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        ensure_root("building a template")?;
        let recipe = self.recipe()?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        // Dropped in the middle, it ends what it has started; the rest goes with the next build.
        tokio::select! {
            built = Box::pin(self.build(global, recipe)) => built,
            _ = interrupt.recv() => Ok(ExitCode::from(130)),
            _ = terminate.recv() => Ok(ExitCode::from(143)),
        }
    }

    async fn build(&self, global: &Global, recipe: Recipe) -> Result<ExitCode, CliError> {
        let data = std::path::absolute(&self.data_dir)?;
        let templates = self.templates.clone().unwrap_or_else(|| data.join("templates"));
        let installation = Installation::builder(&data, &self.run_dir);
        let parts = self.parts(&installation, &templates).await?;
        parts
            .privileges
            .sweep(&std::collections::BTreeSet::new())
            .await
            .map_err(|error| CliError::internal("cannot remove what an interrupted build left", error))?;
        let bar = output::Bar::new("building the template");
        let there = match parts
            .builder
            .store()
            .resolve(&format!("{}:{}", recipe.name, recipe.tag))
        {
            // With its root image cached, a build takes a moment, and makes one only if the daemon has changed.
            Ok(template) if self.if_missing && !parts.has_cached_roots() => Some(template),
            _ => None,
        };
        let template = match there {
            Some(template) => template,
            None => parts
                .builder
                .build(
                    &recipe,
                    &BuildOptions {
                        refresh: self.refresh,
                    },
                    &bar.progress(),
                )
                .await
                .map_err(|error| volume_error("cannot build the template", error))?,
        };
        let sizes = match self.size.as_slice() {
            [] => vec![template.manifest.default_size],
            sizes => sizes.to_vec(),
        };
        let mut machines = Vec::new();
        for size in sizes {
            bar.restart(&format!("making the machine of {size}"));
            let request = parts.request(size);
            parts
                .builder
                .ensure_machine(&template, request, &bar.progress())
                .await
                .map_err(|error| volume_error("cannot make the template's machine", error))?;
            machines.push(size);
        }
        bar.finish();
        prepare::settle_store(&templates)?;
        let bytes = parts.builder.store().disk_bytes(&template);
        if global.json {
            output::json(&json!({
                "template": template.reference(), "digest": template.digest, "sizes": machines,
                "bytes": bytes, "packages": template.manifest.packages.len(),
            }))?;
        } else {
            output::line(template.reference())?;
            output::note(format!("{} ({})", template.digest, output::bytes(bytes)));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Waits for its turn if another build runs.
    async fn parts(
        &self,
        installation: &Installation,
        templates: &Path,
    ) -> Result<assemble::Parts, CliError> {
        let begin = std::time::Instant::now();
        let mut told = false;
        loop {
            match self.parts_now(installation, templates).await {
                Err(error) if error.is_busy() && begin.elapsed() < TURN_LIMIT => {
                    if !told {
                        output::note("another template build is running: waiting for it");
                        told = true;
                    }
                    tokio::time::sleep(TURN_INTERVAL).await;
                }
                parts => return parts,
            }
        }
    }

    async fn parts_now(
        &self,
        installation: &Installation,
        templates: &Path,
    ) -> Result<assemble::Parts, CliError> {
        let options = LocalOptions {
            // The one that machines are built as; all else is root's.
            users: installation.build_uid()..=installation.build_uid(),
            ..LocalOptions::default()
        };
        let privileges = LocalPrivileges::with(&installation.name, &installation.run_directory, options)
            .map_err(|error| assemble::privilege_error(error, installation))?;
        assemble::Parts::new(
            installation,
            Arc::new(privileges),
            templates,
            self.daemon.as_deref(),
        )
        .await
    }

    fn recipe(&self) -> Result<Recipe, CliError> {
        if self.recipe == "base" {
            return Recipe::base().map_err(|error| volume_error("cannot read the built-in recipe", error));
        }
        let text = fs_err::read_to_string(&self.recipe).map_err(|error| {
            CliError::from(error).with_hint("name a recipe file, or `base` for the built-in one")
        })?;
        Recipe::from_toml(&text).map_err(|error| volume_error(&format!("cannot use {}", self.recipe), error))
    }
}
