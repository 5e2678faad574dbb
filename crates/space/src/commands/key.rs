//! `space key`.

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;
use space_api::rest::KeyRole;

use crate::{cli::Global, error::CliError, output};

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key and print it, once
    Create {
        /// Name to tell it apart by
        name: String,
        /// Let it also remove templates and make other such keys
        #[arg(long)]
        admin: bool,
    },
    /// List API keys
    Ls,
    /// Revoke an API key
    Revoke {
        /// Its id, as `space key ls` shows it
        id: String,
    },
}

impl KeyCommand {
    pub(crate) async fn run(&self, global: &Global) -> Result<ExitCode, CliError> {
        let client = global.client()?;
        match self {
            Self::Create { name, admin } => {
                let role = if *admin { KeyRole::Admin } else { KeyRole::Project };
                let created = client.create_key(name, role).await?;
                if global.json {
                    output::json(&created)?;
                } else {
                    output::line(&created.key)?;
                    output::note("This is the only time the key is shown.");
                }
            }
            Self::Ls => {
                let keys = client.keys().await?;
                if global.json {
                    output::json(&keys)?;
                } else {
                    let rows = keys
                        .into_iter()
                        .map(|key| {
                            let state = match key.revoked_at {
                                Some(at) => format!("revoked {}", output::relative(at)),
                                None => "valid".to_owned(),
                            };
                            vec![
                                key.id,
                                key.name,
                                key.role.as_str().to_owned(),
                                format!("{}…", key.shown),
                                output::relative(key.created_at),
                                state,
                            ]
                        })
                        .collect();
                    output::table(&["id", "name", "role", "key", "created", "state"], rows)?;
                }
            }
            Self::Revoke { id } => {
                client
                    .revoke_key(id)
                    .await
                    .map_err(|error| CliError::from(error).with_hint("`space key ls` shows what there is"))?;
                if global.json {
                    output::json(&json!({"revoked": id}))?;
                } else {
                    output::line(id)?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
