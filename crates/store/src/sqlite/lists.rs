//! Pages of sandboxes.

use std::collections::BTreeMap;

use space_api::id::ProjectId;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection};

use super::rows::{SANDBOX_COLUMNS, micros, sandbox, state_name};
use crate::{Cursor, ListFilter, Listed, SortOrder, StoreError, error::Context as _};

/// Rows that are read at a time at least where most of them may be left out.
const READ: u32 = 500;

pub(super) async fn page_of(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    filter: &ListFilter,
) -> Result<Listed, StoreError> {
    let limit = filter.limit.clamp(1, ListFilter::MAX_LIMIT);
    // Few of many may fit, so that a small page would be many reads.
    let all_fit = filter.metadata.is_empty() && filter.labels.is_empty();
    let at_a_time = if all_fit { limit + 1 } else { READ.max(limit + 1) };
    let mut rows = Vec::new();
    let mut cursor = filter.cursor.clone();
    // Metadata and labels are compared here, not in SQL, so that both databases agree; pages are read until one is full.
    loop {
        let page = page(connection, project, filter, cursor.as_ref(), i64::from(at_a_time)).await?;
        let more = page.len() >= usize::try_from(at_a_time).unwrap_or(usize::MAX);
        for row in page {
            let row = sandbox(&row)?;
            cursor = Some(Cursor {
                started_at: row.sandbox.started_at,
                id: row.sandbox.id.clone(),
            });
            let has = |map: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>| {
                wanted.iter().all(|(key, value)| map.get(key) == Some(value))
            };
            if has(&row.sandbox.metadata, &filter.metadata) && has(&row.sandbox.labels, &filter.labels) {
                rows.push(row);
            }
            if rows.len() > usize::try_from(limit).unwrap_or(usize::MAX) {
                break;
            }
        }
        let full = rows.len() > usize::try_from(limit).unwrap_or(usize::MAX);
        if full || !more {
            if full {
                rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
            }
            let next = rows.last().filter(|_| full).map(|last| Cursor {
                started_at: last.sandbox.started_at,
                id: last.sandbox.id.clone(),
            });
            return Ok(Listed { rows, next });
        }
    }
}

async fn page(
    connection: &mut SqliteConnection,
    project: &ProjectId,
    filter: &ListFilter,
    cursor: Option<&Cursor>,
    limit: i64,
) -> Result<Vec<sqlx::sqlite::SqliteRow>, StoreError> {
    let mut query = select();
    query.push("project_id = ").push_bind(project.as_str().to_owned());
    query.push(" AND state IN (");
    let mut states = query.separated(", ");
    for state in &filter.states {
        states.push_bind(state_name(*state));
    }
    query.push(")");
    if let Some(template) = &filter.template {
        query.push(" AND (template = ").push_bind(template.clone());
        query.push(" OR template_digest = ").push_bind(template.clone());
        // `name` stands for all its tags: between "name:" and "name;", the character after the colon.
        query.push(" OR (template >= ").push_bind(format!("{template}:"));
        query
            .push(" AND template < ")
            .push_bind(format!("{template};"))
            .push("))");
    }
    if let Some(after) = filter.started_after {
        query.push(" AND started_at >= ").push_bind(micros(after));
    }
    if let Some(before) = filter.started_before {
        query.push(" AND started_at < ").push_bind(micros(before));
    }
    let (comparison, direction) = match filter.order {
        SortOrder::Ascending => (">", "ASC"),
        SortOrder::Descending => ("<", "DESC"),
    };
    if let Some(cursor) = cursor {
        query
            .push(" AND (started_at ")
            .push(comparison)
            .push(" ")
            .push_bind(micros(cursor.started_at));
        query
            .push(" OR (started_at = ")
            .push_bind(micros(cursor.started_at));
        query
            .push(" AND id ")
            .push(comparison)
            .push(" ")
            .push_bind(cursor.id.as_str().to_owned())
            .push("))");
    }
    query
        .push(" ORDER BY started_at ")
        .push(direction)
        .push(", id ")
        .push(direction);
    query.push(" LIMIT ").push_bind(limit);
    query
        .build()
        .fetch_all(connection)
        .await
        .while_asked_to("list sandboxes")
}

fn select() -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(SANDBOX_COLUMNS).push(" FROM sandboxes WHERE ");
    query
}
