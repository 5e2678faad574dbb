//! Templates in E2B's shape. In this version they belong to the installation; all projects see the same.

use axum::{
    Json,
    extract::{Path, State},
};
use http::StatusCode;
use space_api::{
    e2b::{ENVD_VERSION, Template, TemplateAlias, TemplateBuild, TemplateWithBuilds},
    error::ErrorBody,
};
use space_node::TemplateInfo;

use super::{extract::Caller, views};
use crate::{
    app::App,
    create::names,
    error::{ApiError, template_not_found},
};

/// Lists templates.
#[utoipa::path(get, path = "/templates", tag = "templates",
    responses((status = 200, body = Vec<Template>), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn list(State(app): State<App>, _: Caller) -> Result<Json<Vec<Template>>, ApiError> {
    all(&app).await
}

/// Lists templates.
#[utoipa::path(get, path = "/v2/templates", tag = "templates",
    responses((status = 200, body = Vec<Template>), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn list_v2(State(app): State<App>, _: Caller) -> Result<Json<Vec<Template>>, ApiError> {
    all(&app).await
}

/// Lists templates that come with the installation: in this version all of them.
#[utoipa::path(get, path = "/default-templates", tag = "templates",
    responses((status = 200, body = Vec<Template>), (status = 401, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn list_default(State(app): State<App>, _: Caller) -> Result<Json<Vec<Template>>, ApiError> {
    all(&app).await
}

async fn all(app: &App) -> Result<Json<Vec<Template>>, ApiError> {
    let templates = app.node.templates().await?;
    Ok(Json(templates.iter().map(template).collect()))
}

/// Shows one template by name, `name:tag` or digest.
#[utoipa::path(get, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 200, body = TemplateWithBuilds), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn one(
    State(app): State<App>,
    _: Caller,
    Path(name): Path<String>,
) -> Result<Json<TemplateWithBuilds>, ApiError> {
    let template = template(&find(&app, &name).await?);
    let build = TemplateBuild {
        build_id: template.build_id.clone(),
        status: template.build_status.clone(),
        created_at: template.created_at,
        updated_at: template.updated_at,
        cpu_count: template.cpu_count,
        memory_mb: template.memory_mb,
    };
    Ok(Json(TemplateWithBuilds {
        template,
        builds: vec![build],
    }))
}

/// Resolves a name to a template.
#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = TemplateAlias), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn alias(
    State(app): State<App>,
    _: Caller,
    Path(name): Path<String>,
) -> Result<Json<TemplateAlias>, ApiError> {
    Ok(Json(TemplateAlias {
        template_id: find(&app, &name).await?.name,
        public: true,
    }))
}

/// Removes a template's name and, when nothing uses it any more, its files. Takes an admin key.
#[utoipa::path(delete, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 204), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)), security(("key" = [])))]
pub(super) async fn delete(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    caller.admin("remove templates, which all projects share")?;
    // As it was asked for: a digest stands for all its names, and has none at all where only files are left.
    app.node.delete_template(&name).await?;
    app.forget_templates();
    Ok(StatusCode::NO_CONTENT)
}

async fn find(app: &App, name: &str) -> Result<TemplateInfo, ApiError> {
    app.node
        .templates()
        .await?
        .into_iter()
        .find(|template| names(template, name))
        .ok_or_else(|| template_not_found(name))
}

fn template(info: &TemplateInfo) -> Template {
    Template {
        template_id: info.name.clone(),
        build_id: uuid_of(&info.digest),
        cpu_count: info.default_size.vcpus,
        memory_mb: info.default_size.memory_mib,
        disk_size_mb: info.default_size.disk_mib,
        public: true,
        aliases: vec![views::alias(&info.name)],
        names: vec![info.name.clone()],
        created_at: info.created_at,
        updated_at: info.created_at,
        created_by: None,
        last_spawned_at: None,
        spawn_count: 0,
        build_count: 1,
        envd_version: ENVD_VERSION.to_owned(),
        build_status: "ready".to_owned(),
        digest: info.digest.clone(),
        ready_sizes: info.ready_sizes.iter().map(ToString::to_string).collect(),
    }
}

/// SDKs read build ids as UUIDs; the digest's first 128 bits serve as one.
fn uuid_of(digest: &str) -> String {
    let mut digits: String = digest
        .trim_start_matches("sha256:")
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(32)
        .collect();
    while digits.len() < 32 {
        digits.push('0');
    }
    format!(
        "{}-{}-{}-{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_become_uuids_whatever_they_hold() {
        assert_eq!(
            uuid_of("sha256:00112233445566778899aabbccddeeff0011"),
            "00112233-4455-6677-8899-aabbccddeeff"
        );
        assert_eq!(uuid_of("sha256:é1"), "10000000-0000-0000-0000-000000000000");
    }
}
