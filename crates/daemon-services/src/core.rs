//! What all services share: settings, and the defaults that the host may change.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use base64::Engine;
use http::HeaderMap;

use crate::ServiceConfig;
use crate::account::{Account, AccountError, Accounts};

/// What `POST /init` and its kin may change.
#[derive(Debug, Clone, Default)]
pub(crate) struct Defaults {
    pub(crate) user: String,
    pub(crate) workdir: Option<String>,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) guest_token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: ServiceConfig,
    accounts: Accounts,
    defaults: RwLock<Defaults>,
}

impl Core {
    pub(crate) fn new(config: ServiceConfig) -> Self {
        let defaults = Defaults {
            user: config.default_user.clone(),
            workdir: config.default_workdir.clone(),
            ..Defaults::default()
        };
        Self {
            accounts: Accounts::new(config.etc.clone()),
            config,
            defaults: RwLock::new(defaults),
        }
    }

    /// A copy of the current defaults.
    pub(crate) fn defaults(&self) -> Defaults {
        self.defaults
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Defaults)) {
        change(&mut self.defaults.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// The account a request means: the one it names, else the default.
    pub(crate) fn account(&self, named: Option<&str>) -> Result<Account, AccountError> {
        match named {
            Some(name) if !name.is_empty() => self.accounts.find(name),
            _ => self.accounts.find(&self.defaults().user),
        }
    }
}

/// The user name of a `Basic` authorization, whose password is not looked at: whoever may call at
/// all may act as any account.
pub(crate) fn named_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(http::header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = base64::engine::general_purpose::STANDARD
        .decode(encoded.trim())
        .ok()?;
    let text = String::from_utf8(decoded).ok()?;
    Some(
        text.split_once(':')
            .map_or(text.as_str(), |(name, _)| name)
            .to_owned(),
    )
}
