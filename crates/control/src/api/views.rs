//! What is stored, as each API shows it.

use space_api::{
    e2b::{ENVD_VERSION, Lifecycle, ListedSandbox, NetworkConfig, RunState, Sandbox, SandboxDetail},
    rest::SandboxRecord,
};
use space_store::SandboxRow;

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
        state: RunState::Running,
        envd_version: ENVD_VERSION.to_owned(),
        metadata: sandbox.metadata,
    }
}

pub(super) fn detail(row: SandboxRow, config: &ControlConfig) -> SandboxDetail {
    let network = NetworkConfig {
        allow_public_traffic: row.sandbox.traffic_token.is_some().then_some(false),
        mask_request_host: row.sandbox.mask_request_host.clone(),
        ..NetworkConfig::default()
    };
    SandboxDetail {
        envd_access_token: row.sandbox.access_token.clone(),
        network: (network != NetworkConfig::default()).then_some(network),
        listed: listed(row, config),
        lifecycle: Lifecycle {
            auto_resume: false,
            on_timeout: "kill".to_owned(),
        },
        allow_internet_access: false,
    }
}

pub(super) fn record(row: SandboxRow) -> SandboxRecord {
    let sandbox = row.sandbox;
    SandboxRecord {
        id: sandbox.id,
        state: row.state,
        template: sandbox.template,
        template_digest: row.template_digest,
        vcpus: sandbox.size.vcpus,
        memory_mib: sandbox.size.memory_mib,
        disk_mib: sandbox.size.disk_mib,
        generation: sandbox.generation,
        metadata: sandbox.metadata,
        secured: sandbox.access_token.is_some(),
        started_at: sandbox.started_at,
        deadline: sandbox.deadline,
        ended_at: row.ended_at,
        end_cause: row.end_cause,
        ready_ms: row.ready_ms,
        cpu_micros: row.cpu_micros,
    }
}

/// A template's name without its tag.
pub(super) fn alias(template: &str) -> String {
    template
        .split_once(':')
        .map_or(template, |(bare, _)| bare)
        .to_owned()
}
