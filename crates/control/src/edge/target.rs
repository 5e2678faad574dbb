//! Which sandbox and port a request is meant for: by host name, by headers, or by path.

use std::net::IpAddr;

use http::{HeaderMap, Request};
use space_api::id::SandboxId;

use crate::config::ControlConfig;

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: SandboxId,
    pub(crate) port: u16,
    pub(crate) routing: Routing,
}

/// How that was said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Routing {
    /// `<port>-<id>.<domain>`: an origin of its own.
    HostName,
    /// `E2b-Sandbox-Id` and `E2b-Sandbox-Port`.
    Headers,
    /// `/sandbox/<id>/<port>/…`: shares an origin with the API and with other sandboxes.
    Path {
        /// `/sandbox/<id>/<port>`, as it was written.
        prefix: String,
        /// What follows, beginning with a slash; `None` if the slash is missing.
        rest: Option<String>,
    },
}

/// A request that names a sandbox in a way that cannot be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BadTarget {
    /// Nothing of that name can exist.
    Id {
        /// As given, bounded and escaped.
        shown: String,
    },
    /// Not a port.
    Port {
        /// As given, bounded and escaped.
        shown: String,
    },
}

/// Longest path prefix of a sandbox.
const PATH_PREFIX: &str = "/sandbox/";

/// Tells where a request goes; `None` is the API.
pub(crate) fn of<B>(config: &ControlConfig, request: &Request<B>) -> Result<Option<Target>, BadTarget> {
    let host = host(request).unwrap_or_default();
    if let Some(target) = by_host(&host, &config.domain)? {
        return Ok(Some(target));
    }
    if is_shared(&host, config)
        && let Some(target) = by_headers(request.headers())?
    {
        return Ok(Some(target));
    }
    by_path(request.uri().path())
}

/// The host that was asked, lower case, without port.
pub(crate) fn host<B>(request: &Request<B>) -> Option<String> {
    authority(request).map(|authority| without_port(&authority).to_ascii_lowercase())
}

/// The host that was asked, as it was written.
pub(crate) fn authority<B>(request: &Request<B>) -> Option<String> {
    request
        .uri()
        .authority()
        .map(|authority| authority.as_str().to_owned())
        .or_else(|| {
            let value = request.headers().get(http::header::HOST)?;
            value.to_str().ok().map(str::to_owned)
        })
}

fn without_port(authority: &str) -> &str {
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if let Some(end) = host.strip_prefix('[').and_then(|rest| rest.find(']')) {
        return host.get(1..=end).unwrap_or(host);
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.contains(':') => name,
        _ => host,
    }
}

fn by_host(host: &str, domain: &str) -> Result<Option<Target>, BadTarget> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let Some(labels) = host.strip_suffix(domain).and_then(|rest| rest.strip_suffix('.')) else {
        return Ok(None);
    };
    let leftmost = labels.split('.').next().unwrap_or_default();
    let Some((port, rest)) = leftmost.split_once('-') else {
        return Ok(None);
    };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(None);
    }
    // What follows a second dash is E2B's client id, of no meaning here.
    let id = rest.split_once('-').map_or(rest, |(id, _)| id);
    Ok(Some(Target {
        id: parse_id(id)?,
        port: parse_port(port)?,
        routing: Routing::HostName,
    }))
}

/// Hosts that stand for all sandboxes; anywhere else the headers mean nothing.
pub(super) fn is_shared(host: &str, config: &ControlConfig) -> bool {
    host == "localhost"
        || host.parse::<IpAddr>().is_ok()
        || host.strip_prefix("sandbox.") == Some(config.domain.as_str())
        || public_host(config).as_deref() == Some(host)
}

fn public_host(config: &ControlConfig) -> Option<String> {
    url::Url::parse(&config.public_url)
        .ok()?
        .host_str()
        .map(|host| host.trim_matches(['[', ']']).to_ascii_lowercase())
}

fn by_headers(headers: &HeaderMap) -> Result<Option<Target>, BadTarget> {
    let Some(id) = headers.get("e2b-sandbox-id") else {
        return Ok(None);
    };
    let id = id.to_str().unwrap_or_default();
    let port = headers
        .get("e2b-sandbox-port")
        .map_or("", |port| port.to_str().unwrap_or_default());
    let id = id.split_once('-').map_or(id, |(id, _)| id);
    Ok(Some(Target {
        id: parse_id(id)?,
        port: parse_port(port)?,
        routing: Routing::Headers,
    }))
}

fn by_path(path: &str) -> Result<Option<Target>, BadTarget> {
    let Some(rest) = path.strip_prefix(PATH_PREFIX) else {
        return Ok(None);
    };
    let (id, rest) = rest.split_once('/').unwrap_or((rest, ""));
    let (port, rest) = match rest.split_once('/') {
        Some((port, rest)) => (port, Some(format!("/{rest}"))),
        None => (rest, None),
    };
    Ok(Some(Target {
        id: parse_id(id)?,
        port: parse_port(port)?,
        routing: Routing::Path {
            prefix: format!("{PATH_PREFIX}{id}/{port}"),
            rest,
        },
    }))
}

fn parse_id(text: &str) -> Result<SandboxId, BadTarget> {
    text.parse().map_err(|_| BadTarget::Id { shown: shown(text) })
}

fn parse_port(text: &str) -> Result<u16, BadTarget> {
    // Only digits: `parse` alone would take a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port > 0 => Ok(port),
        _ => Err(BadTarget::Port { shown: shown(text) }),
    }
}

fn shown(text: &str) -> String {
    text.chars().take(64).flat_map(char::escape_default).collect()
}
