//! What a create may ask for. A field that cannot be honoured is refused unless it asks for nothing.

use std::collections::BTreeMap;

use space_api::{
    e2b::{NetworkConfig, NewSandbox},
    lifecycle::IdlePolicy,
    rest::QueueRequest,
};
use space_store::Project;

use crate::error::{ApiError, template_not_found};

/// Bytes of all metadata together, as JSON.
const MAX_METADATA: usize = 64 << 10;
/// Labels of one sandbox.
const MAX_LABELS: usize = 64;
/// Characters of a label's name.
const MAX_LABEL_NAME: usize = 63;
/// Characters of a label's value.
const MAX_LABEL_VALUE: usize = 128;
/// Characters of a template's name with tag.
const MAX_TEMPLATE: usize = 160;
/// Characters of a masked host.
const MAX_HOST: usize = 253;

pub(super) fn fields(body: &NewSandbox, project: &Project) -> Result<(), ApiError> {
    template(&body.template_id)?;
    if let Some(timeout) = body.timeout {
        if timeout == 0 {
            return Err(
                ApiError::bad_request("a timeout of 0 would end the sandbox at once")
                    .hint("ask for at least 1 second"),
            );
        }
        timeout_within(timeout, project)?;
    }
    if let Some(map) = &body.metadata {
        metadata(map)?;
    }
    if let Some(map) = &body.labels {
        labels(map)?;
    }
    within(
        "on_idle.after_seconds",
        body.on_idle.map(|policy| policy.after_seconds),
        &IdlePolicy::SECONDS,
    )?;
    within(
        "queue.timeout_seconds",
        body.queue.map(|queue| queue.timeout_seconds),
        &QueueRequest::SECONDS,
    )?;
    for (name, value) in body.env_vars.iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let shown: String = name.chars().take(64).flat_map(char::escape_debug).collect();
            return Err(
                ApiError::bad_request(format!("\"{shown}\" is not a usable environment variable"))
                    .hint("names are not empty and hold neither = nor NUL; values hold no NUL"),
            );
        }
    }
    features(body)
}

fn within<T: PartialOrd + std::fmt::Display>(
    field: &str,
    value: Option<T>,
    range: &std::ops::RangeInclusive<T>,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !range.contains(&value) => Err(ApiError::bad_request(format!(
            "{field} must be {} to {} seconds",
            range.start(),
            range.end()
        ))),
        _ => Ok(()),
    }
}

/// Metadata that may be written on a sandbox.
pub(crate) fn metadata(map: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len() + 6).sum();
    if bytes > MAX_METADATA {
        return Err(ApiError::bad_request(format!(
            "metadata is larger than {MAX_METADATA} bytes"
        )));
    }
    Ok(())
}

/// Labels that may be written on a sandbox. They hold no comma or equals sign, so that they can be listed in a query.
pub(crate) fn labels(map: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if map.len() > MAX_LABELS {
        return Err(ApiError::bad_request(format!("more than {MAX_LABELS} labels")));
    }
    for (name, value) in map {
        let name_fits = (1..=MAX_LABEL_NAME).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte));
        let value_fits = value.chars().count() <= MAX_LABEL_VALUE
            && !value.contains([',', '='])
            && !value.chars().any(char::is_control);
        if !name_fits || !value_fits {
            let shown: String = name.chars().take(64).flat_map(char::escape_debug).collect();
            return Err(ApiError::bad_request(format!("\"{shown}\" is not a usable label")).hint(
                "names are 1 to 63 of a-z, A-Z, 0-9, -, _, . and /; values up to 128 characters without comma or =; what does not fit goes into metadata",
            ));
        }
    }
    Ok(())
}

/// A timeout that the project may ask for.
pub(crate) fn timeout_within(seconds: u64, project: &Project) -> Result<(), ApiError> {
    let most = project.quotas.max_timeout_seconds;
    if seconds > most {
        return Err(
            ApiError::bad_request(format!("a timeout cannot be greater than {most} seconds"))
                .hint("connect or set the timeout again before it runs out"),
        );
    }
    Ok(())
}

fn template(name: &str) -> Result<(), ApiError> {
    if name.is_empty() {
        return Err(ApiError::bad_request("templateID is empty"));
    }
    let usable = name.len() <= MAX_TEMPLATE
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.:/@".contains(&byte));
    if usable {
        Ok(())
    } else {
        Err(template_not_found(name))
    }
}

fn features(body: &NewSandbox) -> Result<(), ApiError> {
    if body.auto_pause == Some(true) {
        return Err(auto_pause());
    }
    let present = |value: &Option<serde_json::Value>| value.as_ref().is_some_and(asks_for_something);
    if present(&body.mcp) {
        return Err(ApiError::not_available("the MCP gateway (mcp)").hint("leave mcp out"));
    }
    if present(&body.iam) {
        return Err(ApiError::not_available("workload identity (iam)").hint("leave iam out"));
    }
    if body
        .volume_mounts
        .as_ref()
        .is_some_and(|mounts| !mounts.is_empty())
    {
        return Err(ApiError::not_available("mounting volumes (volumeMounts)").hint("leave volumeMounts out"));
    }
    body.network.as_ref().map_or(Ok(()), network)
}

/// E2B's `autoPause` frees the machine and keeps its state for weeks, which a pause in memory does not.
pub(crate) fn auto_pause() -> ApiError {
    ApiError::not_available("suspend at the deadline (autoPause)").hint(
        "leave autoPause out: the sandbox is then ended at its deadline; onIdle pauses one that does no work, in memory, and POST /v1/sandboxes/{id}/pause does so now",
    )
}

fn network(network: &NetworkConfig) -> Result<(), ApiError> {
    let refuse = |field: &str| {
        Err(
            ApiError::not_available(&format!("a way out of the sandbox (network.{field})")).hint(format!(
                "leave {field} out; in this version no sandbox reaches any network"
            )),
        )
    };
    let some = |list: &Option<Vec<String>>| list.as_ref().is_some_and(|list| !list.is_empty());
    if some(&network.allow_out) {
        return refuse("allowOut");
    }
    if some(&network.dns_servers) {
        return refuse("dnsServers");
    }
    if network.egress_proxy.as_ref().is_some_and(asks_for_something) {
        return refuse("egressProxy");
    }
    if network.rules.as_ref().is_some_and(asks_for_something) {
        return refuse("rules");
    }
    if network
        .https_ports
        .as_ref()
        .is_some_and(|ports| !ports.is_empty())
    {
        return Err(
            ApiError::not_available("TLS to a port inside (network.httpsPorts)").hint("leave httpsPorts out"),
        );
    }
    if let Some(host) = &network.mask_request_host {
        let usable = !host.is_empty()
            && host.len() <= MAX_HOST
            && host
                .replace("${PORT}", "1")
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && !b"/\\@?#".contains(&byte));
        if !usable {
            return Err(
                ApiError::bad_request("network.maskRequestHost is not a host name")
                    .hint("for example localhost:${PORT}"),
            );
        }
    }
    Ok(())
}

fn asks_for_something(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => false,
        serde_json::Value::Object(fields) => !fields.is_empty(),
        serde_json::Value::Array(items) => !items.is_empty(),
        _ => true,
    }
}
