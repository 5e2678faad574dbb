//! Whether anyone is waiting for a sandbox: then what is made ahead waits.

use std::{sync::Mutex, time::Duration};

use tokio::{sync::Notify, time::Instant};

use crate::locked;

/// A create is mostly followed by a first command; this long after it the CPU is still kept free.
const AFTER: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Quiet {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Debug)]
struct State {
    busy: usize,
    last: Option<Instant>,
}

/// One create under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy<'a>(&'a Quiet);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.0.state);
        state.busy -= 1;
        state.last = Some(Instant::now());
        drop(state);
        self.0.ended.notify_waiters();
    }
}

impl Quiet {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State { busy: 0, last: None }),
            ended: Notify::new(),
        }
    }

    pub(super) fn busy(&self) -> Busy<'_> {
        locked(&self.state).busy += 1;
        Busy(self)
    }

    /// Waits until nothing is under way nor has just been, at most so long.
    pub(super) async fn wait(&self, most: Duration) {
        let quiet = async {
            loop {
                let ended = self.ended.notified();
                let free_at = {
                    let state = locked(&self.state);
                    match (state.busy, state.last) {
                        (0, None) => return,
                        (0, Some(last)) => Some(last + AFTER),
                        _ => None,
                    }
                };
                match free_at {
                    Some(at) if at <= Instant::now() => return,
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => ended.await,
                }
            }
        };
        // When it is never quiet, what is made ahead must get on all the same.
        drop(tokio::time::timeout(most, quiet).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_for_creates_and_a_moment_longer_but_not_for_ever() {
        let quiet = Quiet::new();
        let waited = |most: u64| {
            let quiet = &quiet;
            async move {
                let began = Instant::now();
                quiet.wait(Duration::from_millis(most)).await;
                began.elapsed()
            }
        };
        assert_eq!(waited(1000).await, Duration::ZERO);
        let busy = quiet.busy();
        assert_eq!(waited(1000).await.as_millis(), 1000);
        let (waited, ()) = tokio::join!(waited(1000), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(busy);
        });
        assert_eq!(waited.as_millis(), 150);
    }
}
