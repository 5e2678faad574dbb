//! The events of one process as a stream for one client.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::ConnectError;
use futures_util::{Stream, stream};
use space_proto::process::__buffa::oneof::process_event::Event;
use space_proto::process::__buffa::oneof::process_event::data_event::Output;
use space_proto::process::ProcessEvent;
use space_proto::process::process_event::end_event::Cause;
use space_proto::process::process_event::{DataEvent, KeepAlive, StartEvent};
use tokio::time::Instant;

use super::Process;
use super::log::{Chunk, Stream as OutputStream, Subscriber};

/// What a subscription does when the time its client gave runs out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The client started the process: its time is the process's deadline, which the supervisor
    /// keeps. The stream tells it after the end.
    OfProcess,
    /// The client only watches: at this instant the stream ends and the process goes on.
    OfStream(Option<Instant>),
}

enum Stage {
    Start,
    Output,
    Overdue,
    Done,
}

struct State {
    process: Arc<Process>,
    subscriber: Subscriber,
    keepalive: Duration,
    limit: Limit,
    stage: Stage,
}

/// `start`, then data and keepalives, then `end`; an error after that if a deadline passed.
pub(crate) fn events(
    process: Arc<Process>,
    subscriber: Subscriber,
    keepalive: Duration,
    limit: Limit,
) -> impl Stream<Item = Result<ProcessEvent, ConnectError>> + Send + 'static {
    let state = State {
        process,
        subscriber,
        keepalive,
        limit,
        stage: Stage::Start,
    };
    stream::unfold(state, |mut state| async move {
        let item = state.next().await?;
        Some((item, state))
    })
}

impl State {
    async fn next(&mut self) -> Option<Result<ProcessEvent, ConnectError>> {
        match self.stage {
            Stage::Start => {
                self.stage = Stage::Output;
                let start = StartEvent {
                    pid: self.process.pid,
                    ..StartEvent::default()
                };
                Some(Ok(event(Event::Start(Box::new(start)))))
            }
            Stage::Output => Some(self.output().await),
            Stage::Overdue => {
                self.stage = Stage::Done;
                Some(Err(overdue()))
            }
            Stage::Done => None,
        }
    }

    async fn output(&mut self) -> Result<ProcessEvent, ConnectError> {
        let limit = self.limit;
        let time_up = async {
            match limit {
                Limit::OfStream(Some(instant)) => tokio::time::sleep_until(instant).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            next = self.subscriber.next() => match next {
                Some((chunk, missing)) => Ok(data(chunk, missing)),
                None => Ok(self.end()),
            },
            () = time_up => {
                self.stage = Stage::Done;
                Err(overdue())
            }
            () = tokio::time::sleep(self.keepalive) => Ok(event(Event::Keepalive(Box::<KeepAlive>::default()))),
        }
    }

    fn end(&mut self) -> ProcessEvent {
        // The log ends only after the end is known.
        let end = self.process.end();
        let past_deadline = end.is_some_and(|end| end.cause == Cause::CAUSE_DEADLINE);
        self.stage = if past_deadline && self.limit == Limit::OfProcess {
            Stage::Overdue
        } else {
            Stage::Done
        };
        let message = end.map(super::end::End::to_message).unwrap_or_default();
        event(Event::End(Box::new(message)))
    }
}

fn event(event: Event) -> ProcessEvent {
    ProcessEvent {
        event: Some(event),
        ..ProcessEvent::default()
    }
}

fn data(chunk: Chunk, dropped: u64) -> ProcessEvent {
    let bytes = chunk.data.into();
    let output = match chunk.stream {
        OutputStream::Stdout => Output::Stdout(bytes),
        OutputStream::Stderr => Output::Stderr(bytes),
        OutputStream::Terminal => Output::Pty(bytes),
    };
    let data = DataEvent {
        output: Some(output),
        offset: chunk.offset,
        dropped,
        ..DataEvent::default()
    };
    event(Event::Data(Box::new(data)))
}

fn overdue() -> ConnectError {
    ConnectError::deadline_exceeded("the time given for this call has passed")
}
