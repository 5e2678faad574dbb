//! Lists of sandboxes in E2B's shape, and what its list query means.

use std::{collections::BTreeMap, fmt::Write as _};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use http::HeaderValue;
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use space_api::{e2b::ListedSandbox, error::ErrorBody, lifecycle::SandboxState};
use space_store::{Cursor, ListFilter, SortOrder};

use super::{
    extract::{Caller, Query},
    views,
};
use crate::{app::App, error::ApiError};

/// Entries of one page if the client names no number, and the most it may name.
const DEFAULT_LIMIT: u32 = 100;

/// Lists running sandboxes, newest first, at most 1000. Kept for older SDKs.
#[utoipa::path(
    get, path = "/sandboxes", tag = "sandboxes", params(("metadata" = Option<String>, Query)),
    responses((status = 200, body = Vec<ListedSandbox>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn list_v1(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<Vec<ListedSandbox>>, ApiError> {
    let filter = ListFilter {
        states: vec![SandboxState::Running],
        metadata: metadata(query.text("metadata").unwrap_or_default()),
        template: None,
        started_after: None,
        order: SortOrder::Descending,
        cursor: None,
        limit: ListFilter::MAX_LIMIT,
    };
    let page = app.store.list(&caller.0.project.id, &filter).await?;
    Ok(Json(
        page.rows
            .into_iter()
            .map(|row| views::listed(row, &app.config))
            .collect(),
    ))
}

/// Lists sandboxes by page. The header `x-next-token` of an answer is the next page's `nextToken`.
#[utoipa::path(
    get, path = "/v2/sandboxes", tag = "sandboxes",
    params(
        ("metadata" = Option<String>, Query, description = "URL-encoded `key=value` pairs, keys and values encoded once more"),
        ("state" = Option<String>, Query, description = "`running`, `paused`, or both with a comma"),
        ("order" = Option<String>, Query, description = "`asc` or `desc` by start time; `desc` if absent"),
        ("startedAfter" = Option<String>, Query, description = "RFC 3339"),
        ("template" = Option<String>, Query, description = "Name, name:tag or digest"),
        ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent"),
        ("nextToken" = Option<String>, Query),
    ),
    responses((status = 200, body = Vec<ListedSandbox>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)),
    security(("key" = [])),
)]
pub(super) async fn list_v2(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let filter = ListFilter {
        states: states(query.text("state").unwrap_or("running,paused"))?,
        metadata: metadata(query.text("metadata").unwrap_or_default()),
        template: query.text("template").map(str::to_owned),
        started_after: query.parsed::<Timestamp>("startedAfter", "a time as in RFC 3339")?,
        order: match query.text("order") {
            None | Some("desc") => SortOrder::Descending,
            Some("asc") => SortOrder::Ascending,
            Some(_) => return Err(ApiError::bad_request("order must be asc or desc")),
        },
        cursor: cursor(&query)?,
        limit: limit(&query)?,
    };
    let page = app.store.list(&caller.0.project.id, &filter).await?;
    let rows: Vec<_> = page
        .rows
        .into_iter()
        .map(|row| views::listed(row, &app.config))
        .collect();
    Ok(paged(&rows, page.next.as_ref()))
}

pub(super) fn limit(query: &Query) -> Result<u32, ApiError> {
    let limit = query
        .parsed::<u32>("limit", "a number from 1 to 1000")?
        .unwrap_or(DEFAULT_LIMIT);
    if (1..=ListFilter::MAX_LIMIT).contains(&limit) {
        Ok(limit)
    } else {
        Err(ApiError::bad_request("limit must be a number from 1 to 1000"))
    }
}

/// A page with the token of the next one.
pub(super) fn paged<T: Serialize>(rows: &[T], next: Option<&Cursor>) -> Response {
    let mut response = Json(rows).into_response();
    if let Some(next) = next {
        let text = format!("{}:{}", next.started_at.as_microsecond(), next.id);
        if let Ok(value) = HeaderValue::from_str(&URL_SAFE_NO_PAD.encode(text)) {
            response.headers_mut().insert("x-next-token", value);
        }
    }
    response
}

pub(super) fn cursor(query: &Query) -> Result<Option<Cursor>, ApiError> {
    let Some(token) = query.text("nextToken") else {
        return Ok(None);
    };
    decode_cursor(token).map(Some).ok_or_else(|| {
        ApiError::bad_request("nextToken is not one that this API has given").hint("start again without it")
    })
}

fn decode_cursor(token: &str) -> Option<Cursor> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    let (started_at, id) = text.split_once(':')?;
    Some(Cursor {
        started_at: Timestamp::from_microsecond(started_at.parse().ok()?).ok()?,
        id: id.parse().ok()?,
    })
}

/// No sandbox is paused in this version, so that `paused` alone finds none.
fn states(text: &str) -> Result<Vec<SandboxState>, ApiError> {
    let mut states = Vec::new();
    for name in text.split(',') {
        match name.trim() {
            "running" => states.push(SandboxState::Running),
            "paused" => {}
            other => {
                let mut message = "state must be running or paused, not \"".to_owned();
                for c in other.chars().take(32) {
                    let _written = write!(message, "{}", c.escape_debug());
                }
                message.push('"');
                return Err(ApiError::bad_request(message));
            }
        }
    }
    Ok(states)
}

/// SDKs encode keys and values, then the pairs as a form, then the whole as a query value, of which the last is undone already.
fn metadata(text: &str) -> BTreeMap<String, String> {
    let decoded = |part: &str| percent_decode_str(part).decode_utf8_lossy().into_owned();
    url::form_urlencoded::parse(text.as_bytes())
        .map(|(key, value)| (decoded(&key), decoded(&value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_as_sdks_encode_it() {
        // What is left after the query value itself was decoded; "a b" quoted is "a%20b", encoded again "a%2520b".
        let found = metadata("a%2520b=50%2525%2526&k=v");
        assert_eq!(found.get("a b").map(String::as_str), Some("50%&"));
        assert_eq!(found.get("k").map(String::as_str), Some("v"));
        assert!(metadata("").is_empty());
    }

    #[test]
    fn foreign_tokens_are_refused() {
        for bad in ["", "x", "MTI", "////", &URL_SAFE_NO_PAD.encode("1:../../x")] {
            assert_eq!(decode_cursor(bad), None, "{bad}");
        }
    }
}
