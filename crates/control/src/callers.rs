//! Who holds which key, remembered for a moment: every call asks, and most are of the same few.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use space_api::key::{ApiKey, KeyHash};
use space_store::{Principal, Store, StoreError};

use crate::app::lock;

/// How long an answer of the store counts. A key revoked here is refused at once; this bounds what another control plane over
/// the same store may have revoked, or a quota that was changed.
const FRESH: Duration = Duration::from_secs(5);
/// Most keys that are remembered; beyond it all are forgotten.
const MAX_KEYS: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Callers {
    known: Mutex<Known>,
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

    /// To be called once a revocation is written.
    pub(crate) fn forget(&self) {
        let mut known = lock(&self.known);
        known.epoch += 1;
        known.by_hash.clear();
    }
}
