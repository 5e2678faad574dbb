//! Who holds which key, remembered for a moment: every call asks, and most are of the same few.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use space_api::key::{ApiKey, KeyHash};
use space_store::{Principal, Store, StoreError};
use tokio::sync::watch;

use crate::{app::lock, error::chain};

/// How long an answer of the store counts. A key revoked here is refused at once; this bounds what another control plane over
/// the same store may have revoked, or a quota that was changed.
const FRESH: Duration = Duration::from_secs(5);
/// Most keys that are remembered; beyond it all are forgotten.
const MAX_KEYS: usize = 4096;
/// When a store that did not answer is asked again whether a key is good still.
const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Callers {
    known: Mutex<Known>,
    /// Counts revocations, for those whose requests outlast them.
    revocations: watch::Sender<u64>,
}

/// Whether a key is good still, for a request that takes long: one that waits for room, or a stream.
#[derive(Debug)]
pub(crate) struct Standing {
    principal: Principal,
    revocations: watch::Receiver<u64>,
    /// It was good after the last revocation that was seen.
    checked: bool,
}

impl Standing {
    /// Waits until the key is revoked. May be dropped and called again.
    pub(crate) async fn lost(&mut self, store: &dyn Store) {
        loop {
            // Also at first: it may have been revoked between its request and this.
            if !self.checked {
                match store.keys(&self.principal.project.id).await {
                    Ok(keys) => {
                        let own = keys.iter().find(|key| key.id == self.principal.key.as_str());
                        if own.is_none_or(|key| key.revoked_at.is_some()) {
                            return;
                        }
                        self.checked = true;
                    }
                    Err(error) => {
                        tracing::warn!(error = %chain(&error), "a key could not be looked up; it is tried again");
                        tokio::time::sleep(ASK_AGAIN).await;
                        continue;
                    }
                }
            }
            if self.revocations.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            self.checked = false;
        }
    }
}

#[derive(Debug, Default)]
struct Known {
    /// Raised by every revocation: what was read before one is not remembered after it.
    epoch: u64,
    by_hash: HashMap<KeyHash, (Instant, Principal)>,
}

impl Callers {
    /// Who holds this key; `None` if nobody does. Only holders are remembered, so that strangers cannot fill the memory.
    pub(crate) async fn find(
        &self,
        store: &dyn Store,
        key: &ApiKey,
    ) -> Result<Option<Principal>, StoreError> {
        let hash = key.hash();
        let epoch = {
            let known = lock(&self.known);
            if let Some((at, principal)) = known.by_hash.get(&hash)
                && at.elapsed() < FRESH
            {
                return Ok(Some(principal.clone()));
            }
            known.epoch
        };
        let found = store.authenticate(key).await?;
        if let Some(principal) = &found {
            let mut known = lock(&self.known);
            if known.epoch == epoch {
                if known.by_hash.len() >= MAX_KEYS {
                    known.by_hash.clear();
                }
                known.by_hash.insert(hash, (Instant::now(), principal.clone()));
            }
        }
        Ok(found)
    }

    /// What tells when the key that was shown is revoked.
    pub(crate) fn standing(&self, principal: &Principal) -> Standing {
        Standing {
            principal: principal.clone(),
            revocations: self.revocations.subscribe(),
            checked: false,
        }
    }

    /// To be called once a revocation is written.
    pub(crate) fn forget(&self) {
        let mut known = lock(&self.known);
        known.epoch += 1;
        known.by_hash.clear();
        drop(known);
        self.revocations.send_modify(|count| *count += 1);
    }
}
