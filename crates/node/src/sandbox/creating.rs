//! A sandbox that is being created: working and listening at the same time.

use std::{pin::pin, time::Duration};

use space_api::lifecycle::EndCause;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Ending, Input, Parting, Sandbox};
use crate::{
    create::{self, Born, Source},
    failure::Failure,
    provision::wind_up,
    templates::StartingPoint,
};

impl Sandbox {
    pub(super) async fn creating(&self, inputs: &mut mpsc::Receiver<Input>) -> Result<Born, Ending> {
        let (limits, pool) = (&self.shared.config.limits, &self.shared.pool);
        let _busy = pool.busy();
        if let Some(ready) = pool.take(&self.resolved, self.size, &self.request.template) {
            let cancel = CancellationToken::new();
            let steps = Box::pin(create::create(self, Source::Ready(Box::new(ready)), &cancel));
            return self.attend(inputs, limits.create, &cancel, steps).await;
        }
        self.progress.at("preparing the template's machine");
        let cancel = CancellationToken::new();
        let point = async {
            let ensure = self.shared.templates.ensure_machine(&self.resolved, self.size);
            tokio::select! {
                () = cancel.cancelled() => Err(Failure::Ended),
                point = ensure => point.map_err(Failure::from),
            }
        };
        let point: StartingPoint = self.attend(inputs, limits.template, &cancel, point).await?;
        let cancel = CancellationToken::new();
        let steps = Box::pin(create::create(self, Source::Point(Box::new(point)), &cancel));
        self.attend(inputs, limits.create, &cancel, steps).await
    }

    /// Works and listens at the same time. When the sandbox is to end first, `cancel` is cancelled, its machine killed,
    /// and the work is given the time to come to a point where nothing is half-made.
    async fn attend<T>(
        &self,
        inputs: &mut mpsc::Receiver<Input>,
        limit: Duration,
        cancel: &CancellationToken,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Ending> {
        let mut work = pin!(work);
        let mut limit_reached = pin!(tokio::time::sleep(limit));
        let ending = loop {
            tokio::select! {
                biased;
                done = &mut work => return done.map_err(Ending::failed),
                input = inputs.recv() => match self.take(input).await {
                    Some(Parting::End(cause)) => break Ending::told(cause),
                    // It was promised to nobody.
                    Some(Parting::Detach) => break Ending::told(EndCause::PlatformShutdown),
                    None => {}
                },
                () = self.deadline_passes() => break Ending::told(EndCause::Deadline),
                () = &mut limit_reached => break Ending::failed(Failure::Step(format!(
                    "it was not usable within {} s while {}", limit.as_secs(), self.progress.step()
                ))),
            }
        };
        if !wind_up(&self.shared, &self.remains, cancel, work).await {
            tracing::error!(sandbox = %self.request.id, step = self.progress.step(), "a step did not come to an end; what it makes is swept later");
        }
        Err(ending)
    }
}
