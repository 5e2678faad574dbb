//! What is asked over the control port beside the greeting: that the guest runs on, and how it is.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use space_channel::{Event, HealthReport, HelloAck, HostControl};
use tokio::sync::mpsc;

use super::{Link, LinkError, Session};

impl Link {
    /// What the daemon says of itself, once it has.
    pub(crate) async fn greeted(&self) -> Result<HelloAck, LinkError> {
        Ok(self.control().await?.greeted(self.limit).await?)
    }

    /// Lets the agent's processes run, should they stand still, and sets the clock. Written at once, also while the
    /// machine stands still: then it is the first that the daemon reads.
    pub(crate) async fn thaw(&self) -> Result<(), LinkError> {
        let control = self.control().await?;
        let now = u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default();
        Ok(control.thaw(now, self.limit).await?)
    }

    /// How the daemon says it is.
    pub(crate) async fn report(&self, limit: Duration) -> Result<HealthReport, LinkError> {
        let asked = async { Ok(self.control().await?.health(limit).await?) };
        tokio::time::timeout(limit, asked)
            .await
            .map_err(|_| LinkError::TimedOut {
                step: "health",
                limit,
            })?
    }

    /// What the guest says by itself on the connection that there is, until that ends; `None` if it was taken before.
    pub(crate) async fn take_events(&self) -> Option<mpsc::Receiver<Event>> {
        self.session.lock().await.control.take_events()
    }

    /// The control connection, opened again if it was closed.
    async fn control(&self) -> Result<Arc<HostControl>, LinkError> {
        let mut session = self.session.lock().await;
        if session.control.is_closed() {
            *session = Session {
                control: Arc::new(self.open_control().await?),
                nonce_used: false,
                data: None,
            };
        }
        Ok(session.control.clone())
    }
}
