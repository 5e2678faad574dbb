//! Lists of sandboxes in E2B's shape, and what its list query means.

use std::collections::BTreeMap;

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
        metadata: metadata(query.text("metadata").unwrap_or_default()),
        ..ListFilter::of_states(vec![SandboxState::Running])
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
        ("startedBefore" = Option<String>, Query, description = "Extension; RFC 3339"),
        ("label" = Option<String>, Query, description = "Extension; `key=value`, several with a comma or by repeating it: all must be there"),
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
    let mut filter = filter(&query, "startedAfter", "startedBefore")?;
    filter.states = states(query.text("state").unwrap_or("running,paused"), &E2B_STATES)?;
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

/// What all lists of sandboxes filter and order by, but for the states. The names of the two times differ.
pub(super) fn filter(
    query: &Query,
    after: &'static str,
    before: &'static str,
) -> Result<ListFilter, ApiError> {
    let time = "a time as in RFC 3339";
    Ok(ListFilter {
        metadata: metadata(query.text("metadata").unwrap_or_default()),
        labels: labels(query.text("label").unwrap_or_default())?,
        template: query.text("template").map(str::to_owned),
        started_after: query.parsed::<Timestamp>(after, time)?,
        started_before: query.parsed::<Timestamp>(before, time)?,
        order: match query.text("order") {
            None | Some("desc") => SortOrder::Descending,
            Some("asc") => SortOrder::Ascending,
            Some(_) => return Err(ApiError::bad_request("order must be asc or desc")),
        },
        cursor: cursor(query)?,
        limit: limit(query)?,
        ..ListFilter::of_states(Vec::new())
    })
}

/// E2B's two states and what they are here.
const E2B_STATES: [SandboxState; 2] = [SandboxState::Running, SandboxState::Paused];

/// The named states, of those that may be asked for.
pub(super) fn states(text: &str, known: &[SandboxState]) -> Result<Vec<SandboxState>, ApiError> {
    text.split(',')
        .map(|word| {
            let found = known.iter().find(|state| state.as_str() == word.trim());
            found.copied().ok_or_else(|| {
                let words: Vec<_> = known.iter().map(|state| state.as_str()).collect();
                let shown: String = word.chars().take(32).flat_map(char::escape_debug).collect();
                ApiError::bad_request(format!(
                    "state must be one of {}, not \"{shown}\"",
                    words.join(", ")
                ))
            })
        })
        .collect()
}

fn labels(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    text.split(',')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            pair.split_once('=')
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .ok_or_else(|| ApiError::bad_request("label must be name=value"))
        })
        .collect()
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
