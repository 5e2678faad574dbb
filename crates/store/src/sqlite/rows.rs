//! Between columns and types.

use std::{collections::BTreeMap, str::FromStr};

use jiff::Timestamp;
use space_api::{
    lifecycle::{IdleAction, IdlePolicy, SandboxState},
    size::SizeClass,
};
use sqlx::{Row as _, sqlite::SqliteRow};

use crate::{NewSandbox, SandboxRow, StoreError};

/// Every column of `sandboxes`, in the order of the table.
pub(super) const SANDBOX_COLUMNS: &str = "id, project_id, template, template_digest, vcpus, memory_mib, disk_mib, \
     generation, state, metadata, access_token, traffic_token, mask_request_host, started_at, deadline, ended_at, \
     end_cause, ready_ms, cpu_micros, labels, node_id, wake_on_traffic, idle_pause_seconds";

pub(super) fn micros(at: Timestamp) -> i64 {
    at.as_microsecond()
}

/// What cannot be stored is more than any quota or clock will ever hold.
pub(super) fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn time(row: &SqliteRow, column: &'static str) -> Result<Timestamp, StoreError> {
    Timestamp::from_microsecond(row.get(column)).map_err(|_| StoreError::Corrupt { column })
}

pub(super) fn optional_time(row: &SqliteRow, column: &'static str) -> Result<Option<Timestamp>, StoreError> {
    row.get::<Option<i64>, _>(column)
        .map(|at| Timestamp::from_microsecond(at).map_err(|_| StoreError::Corrupt { column }))
        .transpose()
}

pub(super) fn id<T: FromStr>(row: &SqliteRow, column: &'static str) -> Result<T, StoreError> {
    row.get::<String, _>(column)
        .parse()
        .map_err(|_| StoreError::Corrupt { column })
}

/// The stored name of a state. The store keeps no state that is on its way between two: it is the one that was left.
pub(super) fn state_name(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Pausing => SandboxState::Running.as_str(),
        SandboxState::Resuming => SandboxState::Paused.as_str(),
        state => state.as_str(),
    }
}

fn state(row: &SqliteRow) -> Result<SandboxState, StoreError> {
    SandboxState::from_word(row.get("state")).ok_or(StoreError::Corrupt {
        column: "sandboxes.state",
    })
}

/// A map as it is stored.
pub(super) fn map_text(map: &BTreeMap<String, String>) -> String {
    serde_json::to_string(map).unwrap_or_else(|_| "{}".to_owned())
}

fn map(row: &SqliteRow, column: &'static str) -> Result<BTreeMap<String, String>, StoreError> {
    match row.get::<&str, _>(column) {
        "{}" => Ok(BTreeMap::new()),
        text => serde_json::from_str(text).map_err(|_| StoreError::Corrupt { column }),
    }
}

fn unsigned<T: TryFrom<i64>>(row: &SqliteRow, column: &'static str) -> Result<T, StoreError> {
    T::try_from(row.get::<i64, _>(column)).map_err(|_| StoreError::Corrupt { column })
}

pub(super) fn sandbox(row: &SqliteRow) -> Result<SandboxRow, StoreError> {
    let end_cause = row
        .get::<Option<String>, _>("end_cause")
        .map(|text| {
            serde_json::from_str(&text).map_err(|_| StoreError::Corrupt {
                column: "sandboxes.end_cause",
            })
        })
        .transpose()?;
    Ok(SandboxRow {
        sandbox: NewSandbox {
            id: id(row, "id")?,
            project: id(row, "project_id")?,
            template: row.get("template"),
            size: SizeClass::new(
                unsigned(row, "vcpus")?,
                unsigned(row, "memory_mib")?,
                unsigned(row, "disk_mib")?,
            )
            .map_err(|_| StoreError::Corrupt {
                column: "sandboxes size",
            })?,
            generation: unsigned(row, "generation")?,
            node: row.get("node_id"),
            metadata: map(row, "metadata")?,
            labels: map(row, "labels")?,
            access_token: row.get("access_token"),
            traffic_token: row.get("traffic_token"),
            mask_request_host: row.get("mask_request_host"),
            wake_on_traffic: row.get::<i64, _>("wake_on_traffic") != 0,
            on_idle: row
                .get::<Option<i64>, _>("idle_pause_seconds")
                .and_then(|seconds| u32::try_from(seconds).ok())
                .map(|after_seconds| IdlePolicy {
                    after_seconds,
                    action: IdleAction::Pause,
                }),
            started_at: time(row, "started_at")?,
            deadline: time(row, "deadline")?,
        },
        state: state(row)?,
        template_digest: row.get("template_digest"),
        ended_at: optional_time(row, "ended_at")?,
        end_cause,
        ready_ms: row.get("ready_ms"),
        cpu_micros: row
            .get::<Option<i64>, _>("cpu_micros")
            .and_then(|value| u64::try_from(value).ok()),
    })
}
