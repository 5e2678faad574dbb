//! What goes on beside a sandbox that runs: asking the daemon for its health, sampling its use, noticing that it is idle,
//! passing on what the guest says by itself.
//!
//! Nothing is asked while the machine stands still. The health question goes over the control port, is the only one that
//! an idle sandbox is asked often, and its answer also says what the agent does.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use space_api::{
    id::SandboxId,
    lifecycle::{IdlePolicy, SandboxState},
};
use space_channel::{Event, HealthReport};
use space_node_manager::ObjectName;
use tokio::{
    sync::{Mutex, mpsc, watch},
    time::Instant,
};

use super::{Input, MOST_DETAIL, Sandbox, View, now_as_recorded};
use crate::{
    failure::{chain, tail},
    idle::{Figures, LastUse, Meter},
    link::{Link, LinkError},
    manager::Shared,
    seam::{GuestNotice, SandboxEvent, Usage},
    usage::{GuestFigures, History},
};

/// Most notices of one guest that are passed on within [`NOTICE_SPAN`]: each becomes a row of the store.
const NOTICES: u32 = 16;
/// See [`NOTICES`].
const NOTICE_SPAN: Duration = Duration::from_secs(60);

/// What the watching works with.
struct Watch {
    shared: Arc<Shared>,
    id: SandboxId,
    worker: ObjectName,
    link: Arc<Link>,
    view: watch::Sender<View>,
    inputs: mpsc::Sender<Input>,
    history: Arc<History>,
    on_idle: Option<IdlePolicy>,
    last_use: Arc<LastUse>,
    /// Held while the guest is asked, so that the one question is not taken for work by the other.
    turn: Mutex<()>,
}

impl Sandbox {
    /// Starts the task that watches over the machine until the sandbox stops.
    pub(super) fn watch_over(&self, worker: &ObjectName, link: &Arc<Link>) {
        let watch = Watch {
            shared: self.shared.clone(),
            id: self.request.id.clone(),
            worker: worker.clone(),
            link: link.clone(),
            view: self.view.clone(),
            inputs: self.own_inputs.clone(),
            history: self.history.clone(),
            on_idle: self.request.on_idle,
            last_use: self.last_use.clone(),
            turn: Mutex::default(),
        };
        let stop = self.owner.stop.clone();
        self.owner.tracker.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                _ = async { tokio::join!(watch.health(), watch.usage(), watch.notices()) } => {}
            }
        });
    }
}

impl Watch {
    async fn health(&self) {
        let limits = &self.shared.config.limits;
        let mut misses = 0;
        let mut meter = Meter::default();
        let mut idle = Idle::default();
        let mut used = None;
        let mut runs = self.view.subscribe();
        loop {
            tokio::time::sleep(limits.health_interval).await;
            if !is_running(&runs) {
                meter.reset();
                idle = Idle::default();
                misses = 0;
                if runs
                    .wait_for(|view| view.status.state == SandboxState::Running)
                    .await
                    .is_err()
                {
                    return;
                }
            }
            let answer = {
                let _turn = self.turn.lock().await;
                tokio::select! {
                    answer = self.link.report(limits.health_answer) => answer,
                    // A machine that stands still owes no answer.
                    _ = runs.wait_for(|view| view.status.state != SandboxState::Running) => continue,
                }
            };
            match answer {
                Ok(report) => {
                    misses = 0;
                    let used = self.last_use.is_newer_than(&mut used);
                    self.judge(&report, used, &mut meter, &mut idle).await;
                }
                Err(error) => {
                    misses += 1;
                    if self.missed(misses, &error).await {
                        return;
                    }
                }
            }
        }
    }

    /// Answers whether that was one too many.
    async fn missed(&self, misses: u32, error: &LinkError) -> bool {
        let error = chain(error);
        tracing::warn!(
            sandbox = %self.id,
            misses,
            error,
            "the daemon did not say that it is well"
        );
        if misses < self.shared.config.limits.health_misses {
            return false;
        }
        let detail = format!("the space daemon has not answered {misses} times in a row: {error}");
        drop(
            self.inputs
                .send(Input::Unresponsive(tail(&detail, MOST_DETAIL)))
                .await,
        );
        true
    }

    async fn judge(&self, report: &HealthReport, used: bool, meter: &mut Meter, idle: &mut Idle) {
        let host = self.shared.privileges.group_usage(&self.worker).await;
        let figures = Figures::new(report, host.ok().map(|usage| usage.cpu_micros));
        let now = now_as_recorded();
        // The guest tells of what is open; what came and went in between only we have seen.
        let work = meter.work(figures).or(used.then_some("it was used"));
        let since = idle.observe(work.is_some(), now);
        let changed = self.view.send_if_modified(|view| {
            let status = &mut view.status;
            if status.state != SandboxState::Running {
                return false;
            }
            if work.is_some() {
                status.last_active_at = now;
            }
            let changed = status.idle_since != since;
            status.idle_since = since;
            changed
        });
        if changed {
            tracing::debug!(sandbox = %self.id, work, "its idleness has changed");
            let status = self.view.borrow().status.clone();
            self.shared.announce(SandboxEvent::Changed(status));
        }
        if let Some(policy) = &self.on_idle
            && idle.lasts(Duration::from_secs(policy.after_seconds.into()))
        {
            // Should there be work after all, the next answer says so again or no more.
            drop(self.inputs.send(Input::Idle).await);
        }
    }

    /// Passes on what the guest says by itself. A guest that says too much is not heard for a while.
    async fn notices(&self) {
        let mut budget = Budget::default();
        loop {
            if let Some(mut events) = self.link.take_events().await {
                while let Some(event) = events.recv().await {
                    if !budget.allows() {
                        continue;
                    }
                    let (kind, detail) = words(event);
                    tracing::info!(sandbox = %self.id, kind, detail, "the guest told");
                    self.shared.announce(SandboxEvent::Told(GuestNotice {
                        id: self.id.clone(),
                        at: now_as_recorded(),
                        kind,
                        detail,
                    }));
                }
            }
            // The next health question opens the connection again.
            tokio::time::sleep(self.shared.config.limits.health_interval).await;
        }
    }

    async fn usage(&self) {
        let mut runs = self.view.subscribe();
        loop {
            tokio::time::sleep(self.shared.config.limits.usage_interval).await;
            if runs
                .wait_for(|view| view.status.state == SandboxState::Running)
                .await
                .is_err()
            {
                return;
            }
            let _turn = self.turn.lock().await;
            tokio::select! {
                sampled = sample(&self.shared, &self.worker, &self.link) => match sampled {
                    Ok(sample) => self.history.add(sample),
                    Err(error) => tracing::debug!(sandbox = %self.id, error, "no sample of its use"),
                },
                _ = runs.wait_for(|view| view.status.state != SandboxState::Running) => {}
            }
        }
    }
}

/// Counts notices within a span of time.
#[derive(Debug, Default)]
struct Budget {
    since: Option<Instant>,
    used: u32,
}

impl Budget {
    fn allows(&mut self) -> bool {
        let now = Instant::now();
        if self.since.is_none_or(|since| now - since >= NOTICE_SPAN) {
            *self = Self {
                since: Some(now),
                used: 0,
            };
        }
        self.used = self.used.saturating_add(1);
        self.used <= NOTICES
    }
}

fn words(event: Event) -> (&'static str, String) {
    match event {
        Event::AgentOutOfMemory { detail } => ("agent_out_of_memory", detail),
        Event::AgentProcessLimit { detail } => ("agent_process_limit", detail),
        Event::AgentThawed => ("agent_thawed", String::new()),
        Event::ThawedByWatchdog => ("thawed_by_watchdog", String::new()),
        Event::Other { code, detail } => ("other", format!("{code}: {detail}")),
    }
}

fn is_running(view: &watch::Receiver<View>) -> bool {
    view.borrow().status.state == SandboxState::Running
}

/// How long there has been no work.
#[derive(Debug, Default)]
struct Idle {
    /// When work was last seen.
    worked: Option<(Instant, Timestamp)>,
    idle: bool,
}

impl Idle {
    /// Answers since when it is idle.
    fn observe(&mut self, work: bool, now: Timestamp) -> Option<Timestamp> {
        if work || self.worked.is_none() {
            *self = Self {
                worked: Some((Instant::now(), now)),
                idle: false,
            };
            return None;
        }
        self.idle = true;
        self.worked.map(|(_, at)| at)
    }

    fn lasts(&self, time: Duration) -> bool {
        self.idle && self.worked.is_some_and(|(since, _)| since.elapsed() >= time)
    }
}

/// One sample of use, guest and host.
pub(crate) async fn sample(shared: &Shared, name: &ObjectName, link: &Arc<Link>) -> Result<Usage, String> {
    let body = link.metrics().await.map_err(|error| chain(&error))?;
    let figures = GuestFigures::parse(&body)
        .map_err(|error| format!("the guest's metrics are not understood: {error}"))?;
    let host = shared
        .privileges
        .group_usage(name)
        .await
        .map_err(|error| chain(&error))?;
    Ok(figures.sample(Timestamp::now(), &host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_says_too_much_is_heard_again_later() {
        let mut budget = Budget::default();
        let heard = (0..1000).filter(|_| budget.allows()).count();
        assert_eq!(heard, NOTICES as usize);
        tokio::time::advance(NOTICE_SPAN).await;
        assert!(budget.allows());
    }

    #[tokio::test(start_paused = true)]
    async fn idleness_lasts_from_the_last_work_and_work_ends_it() {
        let mut idle = Idle::default();
        let hour = Duration::from_secs(3600);
        let at = |second| Timestamp::from_second(second).expect("in range");
        assert_eq!(idle.observe(false, at(1)), None, "the first look tells nothing");
        tokio::time::advance(hour).await;
        assert!(!idle.lasts(hour), "it has not been seen idle yet");
        assert_eq!(idle.observe(false, at(2)), Some(at(1)));
        assert!(idle.lasts(hour) && !idle.lasts(hour * 2));
        tokio::time::advance(hour).await;
        assert!(idle.lasts(hour * 2));
        assert_eq!(idle.observe(true, at(3)), None);
        assert!(!idle.lasts(Duration::ZERO));
        assert_eq!(idle.observe(false, at(4)), Some(at(3)));
    }
}
