//! Projects and API keys.

use jiff::Timestamp;
use space_api::{
    id::{KeyId, ProjectId},
    key::ApiKey,
    rest::{KeyRecord, KeyRole, Quotas},
};
use sqlx::{Row as _, SqliteConnection, SqlitePool, sqlite::SqliteRow};

use super::rows::{id, micros, number, optional_time, time};
use crate::{Bootstrap, Principal, Project, StoreError, error::Context as _};

/// What the project of a fresh installation is called.
const DEFAULT_PROJECT: &str = "default";

pub(super) async fn ensure_default(
    connection: &mut SqliteConnection,
    quotas: Quotas,
    known: Option<ApiKey>,
) -> Result<Bootstrap, StoreError> {
    let project = match project_by_name(connection, DEFAULT_PROJECT).await? {
        Some(found) => update_quotas(connection, found, quotas).await?,
        None => insert_project(connection, DEFAULT_PROJECT, quotas).await?,
    };
    if let Some(key) = known {
        let found = sqlx::query("SELECT revoked_at FROM api_keys WHERE hash = $1")
            .bind(key.hash().as_str())
            .fetch_optional(&mut *connection)
            .await
            .while_asked_to("look up an API key")?;
        let usable = match found {
            Some(row) => optional_time(&row, "revoked_at")?.is_none(),
            None => {
                insert_key(connection, &project.id, "default", KeyRole::Admin, &key).await?;
                true
            }
        };
        if usable {
            return Ok(Bootstrap {
                project,
                key,
                key_is_new: false,
            });
        }
    }
    let key = ApiKey::random();
    insert_key(connection, &project.id, "default", KeyRole::Admin, &key).await?;
    Ok(Bootstrap {
        project,
        key,
        key_is_new: true,
    })
}

/// The first project is made with the store.
pub(super) async fn begun(pool: &SqlitePool) -> Result<Option<Timestamp>, StoreError> {
    let first: Option<i64> = sqlx::query_scalar("SELECT MIN(created_at) FROM projects")
        .fetch_one(pool)
        .await
        .while_asked_to("read when the store was begun")?;
    first
        .map(|at| {
            Timestamp::from_microsecond(at).map_err(|_| StoreError::Corrupt {
                column: "projects.created_at",
            })
        })
        .transpose()
}

pub(super) async fn project_by_name(
    connection: &mut SqliteConnection,
    name: &str,
) -> Result<Option<Project>, StoreError> {
    sqlx::query("SELECT id AS project_id, name AS project_name, max_sandboxes, max_vcpus, max_memory_mib, max_timeout_seconds FROM projects WHERE name = $1")
        .bind(name)
        .fetch_optional(connection)
        .await
        .while_asked_to("look up a project")?
        .map(|row| project(&row))
        .transpose()
}

pub(super) async fn insert_project(
    connection: &mut SqliteConnection,
    name: &str,
    quotas: Quotas,
) -> Result<Project, StoreError> {
    let project = Project {
        id: ProjectId::random(),
        name: name.to_owned(),
        quotas,
    };
    sqlx::query(
        "INSERT INTO projects (id, name, max_sandboxes, max_vcpus, max_memory_mib, max_timeout_seconds, created_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(project.id.as_str())
    .bind(name)
    .bind(i64::from(quotas.max_sandboxes))
    .bind(i64::from(quotas.max_vcpus))
    .bind(number(quotas.max_memory_mib))
    .bind(number(quotas.max_timeout_seconds))
    .bind(micros(Timestamp::now()))
    .execute(connection)
    .await
    .while_asked_to("make a project")?;
    Ok(project)
}

async fn update_quotas(
    connection: &mut SqliteConnection,
    mut project: Project,
    quotas: Quotas,
) -> Result<Project, StoreError> {
    sqlx::query(
        "UPDATE projects SET max_sandboxes = $2, max_vcpus = $3, max_memory_mib = $4, max_timeout_seconds = $5 \
         WHERE id = $1",
    )
    .bind(project.id.as_str())
    .bind(i64::from(quotas.max_sandboxes))
    .bind(i64::from(quotas.max_vcpus))
    .bind(number(quotas.max_memory_mib))
    .bind(number(quotas.max_timeout_seconds))
    .execute(connection)
    .await
    .while_asked_to("change quotas")?;
    project.quotas = quotas;
    Ok(project)
}

pub(super) async fn insert_key(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    name: &str,
    role: KeyRole,
    key: &ApiKey,
) -> Result<KeyRecord, StoreError> {
    let record = KeyRecord {
        id: KeyId::random().into(),
        name: name.to_owned(),
        role,
        shown: key.shown(),
        created_at: Timestamp::now(),
        revoked_at: None,
    };
    sqlx::query(
        "INSERT INTO api_keys (id, project_id, name, shown, hash, created_at, role) \
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(&record.id)
    .bind(project.as_str())
    .bind(name)
    .bind(&record.shown)
    .bind(key.hash().as_str())
    .bind(micros(record.created_at))
    .bind(role.as_str())
    .execute(connection)
    .await
    .while_asked_to("make an API key")?;
    Ok(record)
}

pub(super) async fn keys(pool: &SqlitePool, project: &ProjectId) -> Result<Vec<KeyRecord>, StoreError> {
    sqlx::query(
        "SELECT id, name, role, shown, created_at, revoked_at FROM api_keys WHERE project_id = $1 ORDER BY created_at, id",
    )
    .bind(project.as_str())
    .fetch_all(pool)
    .await
    .while_asked_to("list API keys")?
    .iter()
    .map(|row| {
        Ok(KeyRecord {
            id: row.get("id"),
            name: row.get("name"),
            role: role(row)?,
            shown: row.get("shown"),
            created_at: time(row, "created_at")?,
            revoked_at: optional_time(row, "revoked_at")?,
        })
    })
    .collect()
}

pub(super) async fn revoke(pool: &SqlitePool, project: &ProjectId, key: &KeyId) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "UPDATE api_keys SET revoked_at = COALESCE(revoked_at, $3) WHERE project_id = $1 AND id = $2",
    )
    .bind(project.as_str())
    .bind(key.as_str())
    .bind(micros(Timestamp::now()))
    .execute(pool)
    .await
    .while_asked_to("revoke an API key")?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn authenticate(pool: &SqlitePool, key: &ApiKey) -> Result<Option<Principal>, StoreError> {
    sqlx::query(
        "SELECT k.id AS key_id, k.role, p.id AS project_id, p.name AS project_name, p.max_sandboxes, p.max_vcpus, \
         p.max_memory_mib, p.max_timeout_seconds \
         FROM api_keys k JOIN projects p ON p.id = k.project_id WHERE k.hash = $1 AND k.revoked_at IS NULL",
    )
    .bind(key.hash().as_str())
    .fetch_optional(pool)
    .await
    .while_asked_to("look up an API key")?
    .map(|row| {
        Ok(Principal {
            project: project(&row)?,
            key: id(&row, "key_id")?,
            role: role(&row)?,
        })
    })
    .transpose()
}

fn role(row: &SqliteRow) -> Result<KeyRole, StoreError> {
    KeyRole::from_word(row.get("role")).ok_or(StoreError::Corrupt {
        column: "api_keys.role",
    })
}

fn project(row: &SqliteRow) -> Result<Project, StoreError> {
    let unsigned = |column: &'static str| {
        u64::try_from(row.get::<i64, _>(column)).map_err(|_| StoreError::Corrupt { column })
    };
    let small = |column: &'static str| {
        u32::try_from(row.get::<i64, _>(column)).map_err(|_| StoreError::Corrupt { column })
    };
    Ok(Project {
        id: id(row, "project_id")?,
        name: row.get("project_name"),
        quotas: Quotas {
            max_sandboxes: small("max_sandboxes")?,
            max_vcpus: small("max_vcpus")?,
            max_memory_mib: unsigned("max_memory_mib")?,
            max_timeout_seconds: unsigned("max_timeout_seconds")?,
        },
    })
}
