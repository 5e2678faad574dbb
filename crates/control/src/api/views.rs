//! What is stored, as each API shows it.

use space_api::{
    e2b::{ENVD_VERSION, Lifecycle, ListedSandbox, NetworkConfig, RunState, Sandbox, SandboxDetail},
    lifecycle::SandboxState,
    rest::{SandboxEvent, SandboxRecord},
};
use space_node::SandboxStatus;
use space_store::{Event, SandboxRow};

use crate::config::ControlConfig;

pub(super) fn sandbox(row: &SandboxRow, config: &ControlConfig) -> Sandbox {
    let sandbox = &row.sandbox;
    Sandbox {
        template_id: sandbox.template.clone(),
        sandbox_id: sandbox.id.to_string(),
        client_id: config.node_name.clone(),
        envd_version: ENVD_VERSION.to_owned(),
        alias: Some(alias(&sandbox.template)),
        envd_access_token: sandbox.access_token.clone(),
        traffic_access_token: sandbox.traffic_token.clone(),
        domain: config.announced_domain.clone(),
    }
}

pub(super) fn listed(row: SandboxRow, config: &ControlConfig) -> ListedSandbox {
    let sandbox = row.sandbox;
    ListedSandbox {
        alias: Some(alias(&sandbox.template)),
        template_id: sandbox.template,
        sandbox_id: sandbox.id.to_string(),
        client_id: config.node_name.clone(),
        started_at: sandbox.started_at,
        end_at: sandbox.deadline,
        cpu_count: sandbox.size.vcpus,
        memory_mb: sandbox.size.memory_mib,
        disk_size_mb: sandbox.size.disk_mib,
        state: run_state(row.state),
        envd_version: ENVD_VERSION.to_owned(),
        metadata: sandbox.metadata,
        labels: sandbox.labels,
    }
}

/// In E2B's two words. What is on its way is what it was.
fn run_state(state: SandboxState) -> RunState {
    match state {
        SandboxState::Paused | SandboxState::Resuming => RunState::Paused,
        _ => RunState::Running,
    }
}

/// `status` is what the node says of it, if it says anything.
pub(super) fn detail(
    row: SandboxRow,
    status: Option<SandboxStatus>,
    config: &ControlConfig,
) -> SandboxDetail {
    let network = NetworkConfig {
        allow_public_traffic: row.sandbox.traffic_token.is_some().then_some(false),
        mask_request_host: row.sandbox.mask_request_host.clone(),
        ..NetworkConfig::default()
    };
    SandboxDetail {
        envd_access_token: row.sandbox.access_token.clone(),
        network: (network != NetworkConfig::default()).then_some(network),
        lifecycle: Lifecycle {
            auto_resume: row.sandbox.wake_on_traffic,
            on_timeout: "kill".to_owned(),
        },
        listed: listed(row, config),
        allow_internet_access: false,
        last_active_at: status.as_ref().map(|status| status.last_active_at),
        idle_since: status.as_ref().and_then(|status| status.idle_since),
        machine: status
            .map(|status| status.machine)
            .filter(|name| !name.is_empty()),
    }
}

/// `status` is what the node says of it, if it says anything; it knows the states on the way from one to another.
pub(super) fn record(row: SandboxRow, status: Option<SandboxStatus>) -> SandboxRecord {
    let status = status
        .filter(|status| row.state != SandboxState::Ended && status.generation == row.sandbox.generation);
    let sandbox = row.sandbox;
    SandboxRecord {
        id: sandbox.id,
        state: status.as_ref().map_or(row.state, |status| status.state),
        template: sandbox.template,
        template_digest: row.template_digest,
        vcpus: sandbox.size.vcpus,
        memory_mib: sandbox.size.memory_mib,
        disk_mib: sandbox.size.disk_mib,
        generation: sandbox.generation,
        metadata: sandbox.metadata,
        labels: sandbox.labels,
        wake_on_traffic: sandbox.wake_on_traffic,
        on_idle: sandbox.on_idle,
        paused_at: status.as_ref().and_then(|status| status.paused_at),
        last_active_at: status.as_ref().map(|status| status.last_active_at),
        idle_since: status.as_ref().and_then(|status| status.idle_since),
        machine: status
            .map(|status| status.machine)
            .filter(|name| !name.is_empty()),
        secured: sandbox.access_token.is_some(),
        started_at: sandbox.started_at,
        deadline: sandbox.deadline,
        ended_at: row.ended_at,
        end_cause: row.end_cause,
        ready_ms: row.ready_ms,
        cpu_micros: row.cpu_micros,
    }
}

pub(super) fn event(event: Event) -> SandboxEvent {
    SandboxEvent {
        id: event.id,
        sandbox_id: event.sandbox,
        at: event.at,
        kind: event.kind,
        detail: event.detail,
    }
}

/// A template's name without its tag.
pub(super) fn alias(template: &str) -> String {
    template
        .split_once(':')
        .map_or(template, |(bare, _)| bare)
        .to_owned()
}
