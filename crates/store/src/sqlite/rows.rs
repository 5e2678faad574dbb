//! Between columns and types.

use std::str::FromStr;

use jiff::Timestamp;
use space_api::{lifecycle::SandboxState, size::SizeClass};
use sqlx::{Row as _, sqlite::SqliteRow};

use crate::{NewSandbox, SandboxRow, StoreError};

/// Every column of `sandboxes`, in the order of the table.
pub(super) const SANDBOX_COLUMNS: &str = "id, project_id, template, template_digest, vcpus, memory_mib, disk_mib, \
     generation, state, metadata, access_token, traffic_token, mask_request_host, started_at, deadline, ended_at, \
     end_cause, ready_ms, cpu_micros";

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

pub(super) fn state_name(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Creating => "creating",
        SandboxState::Running => "running",
        SandboxState::Stopping => "stopping",
        SandboxState::Ended => "ended",
    }
}

fn state(row: &SqliteRow) -> Result<SandboxState, StoreError> {
    match row.get::<String, _>("state").as_str() {
        "creating" => Ok(SandboxState::Creating),
        "running" => Ok(SandboxState::Running),
        "stopping" => Ok(SandboxState::Stopping),
        "ended" => Ok(SandboxState::Ended),
        _ => Err(StoreError::Corrupt {
            column: "sandboxes.state",
        }),
    }
}

fn unsigned<T: TryFrom<i64>>(row: &SqliteRow, column: &'static str) -> Result<T, StoreError> {
    T::try_from(row.get::<i64, _>(column)).map_err(|_| StoreError::Corrupt { column })
}

pub(super) fn sandbox(row: &SqliteRow) -> Result<SandboxRow, StoreError> {
    let metadata: String = row.get("metadata");
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
            metadata: serde_json::from_str(&metadata).map_err(|_| StoreError::Corrupt {
                column: "sandboxes.metadata",
            })?,
            access_token: row.get("access_token"),
            traffic_token: row.get("traffic_token"),
            mask_request_host: row.get("mask_request_host"),
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
