//! What a create may ask for. A field that cannot be honoured is refused unless it asks for nothing.

use space_api::e2b::{NetworkConfig, NewSandbox};
use space_store::Project;

use crate::error::{ApiError, template_not_found};

/// Bytes of all labels together, as JSON.
const MAX_METADATA: usize = 64 << 10;
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
    if let Some(metadata) = &body.metadata {
        let bytes: usize = metadata
            .iter()
            .map(|(key, value)| key.len() + value.len() + 6)
            .sum();
        if bytes > MAX_METADATA {
            return Err(ApiError::bad_request(format!(
                "metadata is larger than {MAX_METADATA} bytes"
            )));
        }
    }
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
        return Err(ApiError::not_available("suspend at the deadline (autoPause)")
            .hint("leave autoPause out: the sandbox is then ended at its deadline"));
    }
    if body.auto_resume.as_ref().is_some_and(|resume| resume.enabled) {
        return Err(ApiError::not_available("waking by traffic (autoResume)").hint("leave autoResume out"));
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
