//! `space template`.

mod build;

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;

use crate::{
    cli::Global,
    error::{CliError, Kind},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// List templates
    Ls,
    /// Build a template on this machine
    Build(build::Build),
    /// Remove templates
    Rm {
        /// NAME, NAME:TAG or a digest
        #[arg(required = true)]
        templates: Vec<String>,
    },
}

impl TemplateCommand {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        match self {
            Self::Ls => {
                let templates = global.client()?.templates().await?;
                if global.json {
                    output::json(&templates)?;
                    return Ok(ExitCode::SUCCESS);
                }
                let rows = templates
                    .into_iter()
                    .map(|template| {
                        vec![
                            template.template_id,
                            template.digest.chars().take(19).collect(),
                            format!(
                                "{}x{}x{}",
                                template.cpu_count, template.memory_mb, template.disk_size_mb
                            ),
                            template.ready_sizes.join(" "),
                            output::relative(template.created_at),
                        ]
                    })
                    .collect();
                output::table(
                    &["template", "digest", "default size", "ready sizes", "built"],
                    rows,
                )?;
            }
            Self::Build(build) => return Box::pin(build.run(global)).await,
            Self::Rm { templates } => {
                let client = global.client()?;
                for name in templates {
                    client.delete_template(name).await.map_err(|error| {
                        let error = CliError::from(error);
                        if error.kind() == Kind::NotFound {
                            error.with_hint("`space template ls` shows what there is")
                        } else {
                            error
                        }
                    })?;
                    if !global.json {
                        output::line(name)?;
                    }
                }
                if global.json {
                    output::json(&json!({"removed": templates}))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
