//! The Connect service `process.Process`.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::{
    ConnectError, Encodable, ErrorCode, InboundStream, RequestContext, Response, ServiceRequest,
    ServiceResult, ServiceStream,
};
use futures_util::StreamExt;
use space_proto::process::__buffa::oneof::process_input::Input as InputOneof;
use space_proto::process::__buffa::oneof::process_selector::Selector;
use space_proto::process::__buffa::oneof::stream_input_request::Event as InputEvent;
use space_proto::process::{
    CloseStdinRequest, CloseStdinResponse, ConnectRequest, ConnectResponse, ListRequest, ListResponse,
    Process as ProcessService, ProcessInput, ProcessSelector, SendInputRequest, SendInputResponse,
    SendSignalRequest, SendSignalResponse, StartRequest, StartResponse, StreamInputRequest,
    StreamInputResponse, UpdateRequest, UpdateResponse,
};
use tokio::time::Instant;

use crate::core::named_user;

use super::input::{Input, InputError, Kind};
use super::log::Subscriber;
use super::subscription::{Limit, events};
use super::terminal::Size;
use super::{Process, ProcessError, Processes};

const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";
const KEEPALIVE: Duration = Duration::from_secs(90);
const KEEPALIVE_SECONDS: std::ops::RangeInclusive<u64> = 1..=3600;

impl From<ProcessError> for ConnectError {
    fn from(error: ProcessError) -> Self {
        use crate::account::AccountError;
        let code = match &error {
            ProcessError::NotFound { .. } | ProcessError::Ended { .. } => ErrorCode::NotFound,
            ProcessError::Account(AccountError::Unknown { .. }) => ErrorCode::Unauthenticated,
            ProcessError::Account(AccountError::Read { .. }) | ProcessError::Internal { .. } => {
                ErrorCode::Internal
            }
            ProcessError::Invalid { .. }
            | ProcessError::Path(_)
            | ProcessError::Directory { .. }
            | ProcessError::Program { .. } => ErrorCode::InvalidArgument,
            ProcessError::Resources { .. } => ErrorCode::ResourceExhausted,
            ProcessError::NotRoot => ErrorCode::PermissionDenied,
            ProcessError::Input(_) => ErrorCode::FailedPrecondition,
        };
        let mut message = error.to_string();
        // The cause of an internal error is all that helps whoever reads it.
        if let Some(source) = std::error::Error::source(&error) {
            message = format!("{message}: {source}");
        }
        ConnectError::new(code, message)
    }
}

impl Processes {
    fn select(&self, selector: &ProcessSelector) -> Result<Arc<Process>, ProcessError> {
        let (found, selector) = match &selector.selector {
            Some(Selector::Pid(pid)) => (self.find(|process| process.pid == *pid), format!("pid {pid}")),
            Some(Selector::Tag(tag)) => (
                self.find(|process| process.tag.as_ref() == Some(tag)),
                format!("tag '{tag}'"),
            ),
            None => {
                return Err(ProcessError::Invalid {
                    what: "no process was named; give a pid or a tag",
                });
            }
        };
        found.ok_or(ProcessError::NotFound { selector })
    }

    /// As [`Processes::select`], but what has ended and left nothing behind does not count.
    fn select_living(&self, selector: &ProcessSelector) -> Result<Arc<Process>, ProcessError> {
        let process = self.select(selector)?;
        if process.end().is_some() && process.group().is_none() {
            return Err(ProcessError::Ended { pid: process.pid });
        }
        Ok(process)
    }
}

impl Process {
    /// Writes, and gives up when the process ends first.
    async fn feed(&self, kind: Kind, data: &[u8]) -> Result<(), ProcessError> {
        let mut ended = self.ended.subscribe();
        let write = async {
            let mut input = self.input.lock().await;
            let written = input.write(kind, data).await;
            if matches!(written, Err(InputError::Write { .. })) {
                *input = Input::Closed;
            }
            written
        };
        let written = tokio::select! {
            biased;
            written = write => Some(written),
            _ = ended.wait_for(|ended| *ended) => None,
        };
        match written {
            Some(written) => Ok(written?),
            None => {
                *self.input.lock().await = Input::Closed;
                Err(ProcessError::Ended { pid: self.pid })
            }
        }
    }

    async fn feed_message(&self, input: ProcessInput) -> Result<(), ProcessError> {
        match input.input {
            Some(InputOneof::Stdin(data)) => self.feed(Kind::Stdin, &data).await,
            Some(InputOneof::Pty(data)) => self.feed(Kind::Terminal, &data).await,
            None => Err(ProcessError::Invalid {
                what: "the input is empty; give stdin or pty",
            }),
        }
    }
}

pub(crate) fn keepalive(context: &RequestContext) -> Duration {
    let asked = context
        .header(KEEPALIVE_HEADER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok());
    asked.map_or(KEEPALIVE, |seconds: u64| {
        Duration::from_secs(seconds.clamp(*KEEPALIVE_SECONDS.start(), *KEEPALIVE_SECONDS.end()))
    })
}

pub(crate) fn deadline(context: &RequestContext) -> Option<Instant> {
    context.deadline().map(Instant::from_std)
}

/// The generated trait is implemented for this, so that handlers can hold the state they share.
#[derive(Debug)]
pub(crate) struct Service(pub(crate) Arc<Processes>);

impl Service {
    async fn start_subscribed(
        &self,
        context: &RequestContext,
        request: StartRequest,
    ) -> Result<(Arc<Process>, Subscriber), ProcessError> {
        let account = self.0.core.account(named_user(context.headers()).as_deref())?;
        let processes = Arc::clone(&self.0);
        let deadline = deadline(context);
        // In a task of its own: a client that goes away half-way must not leave a process that
        // nobody supervises.
        let task = tokio::spawn(async move {
            let started = processes.start(request, account).await?;
            let process = Arc::clone(&started.process);
            let subscriber = process.log.subscribe(None);
            processes.watch(started, deadline);
            Ok((process, subscriber))
        });
        task.await.unwrap_or_else(|error| {
            let source = std::io::Error::other(error);
            Err(ProcessError::Internal {
                what: "starting the process",
                source,
            })
        })
    }
}

impl ProcessService for Service {
    async fn list<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<impl Encodable<ListResponse> + Send + use<'a>> {
        let processes = self.0.list(request.include_ended);
        Response::ok(ListResponse {
            processes,
            ..ListResponse::default()
        })
    }

    async fn connect(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<ConnectResponse> + Send + use<>>> {
        let request = request.to_owned_message();
        let process = self.0.select(&request.process)?;
        let from = request.replay.as_option().map(|replay| {
            let first = if replay.pty_offset > 0 {
                replay.pty_offset
            } else {
                replay.stdout_offset
            };
            [first, replay.stderr_offset]
        });
        let subscriber = process.log.subscribe(from);
        let events = events(
            process,
            subscriber,
            keepalive(&context),
            Limit::OfStream(deadline(&context)),
        );
        Ok(Response::stream(events.map(|event| {
            Ok(ConnectResponse {
                event: event?.into(),
                ..ConnectResponse::default()
            })
        })))
    }

    async fn start(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<StartResponse> + Send + use<>>> {
        let (process, subscriber) = self
            .start_subscribed(&context, request.to_owned_message())
            .await?;
        let events = events(process, subscriber, keepalive(&context), Limit::OfProcess);
        Ok(Response::stream(events.map(|event| {
            Ok(StartResponse {
                event: event?.into(),
                ..StartResponse::default()
            })
        })))
    }

    async fn update<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<impl Encodable<UpdateResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.select_living(&request.process)?;
        if let Some(pty) = request.pty.into_option() {
            let Some(terminal) = process.terminal() else {
                return Err(ProcessError::from(InputError::NoTerminal).into());
            };
            let size = Size::new(pty.size.cols, pty.size.rows);
            terminal.resize(size).map_err(|source| ProcessError::Internal {
                what: "resizing the terminal",
                source,
            })?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input<'a>(
        &'a self,
        _context: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<StreamInputResponse> + Send + use<'a>> {
        let mut process: Option<Arc<Process>> = None;
        while let Some(request) = requests.next().await {
            match (request?.to_owned_message().event, &process) {
                (Some(InputEvent::Start(start)), None) => {
                    process = Some(self.0.select_living(&start.process)?);
                }
                (Some(InputEvent::Data(data)), Some(process)) => {
                    process
                        .feed_message(data.input.into_option().unwrap_or_default())
                        .await?;
                }
                (Some(InputEvent::Start(_)), Some(_)) => {
                    return Err(ProcessError::Invalid {
                        what: "the process was already named",
                    }
                    .into());
                }
                (Some(InputEvent::Data(_)), None) => {
                    return Err(ProcessError::Invalid {
                        what: "the first message must name the process",
                    }
                    .into());
                }
                (Some(InputEvent::Keepalive(_)) | None, _) => {}
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<impl Encodable<SendInputResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.select_living(&request.process)?;
        process
            .feed_message(request.input.into_option().unwrap_or_default())
            .await?;
        Response::ok(SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<SendSignalResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.select_living(&request.process)?;
        let number = match request.number {
            0 => request.signal.to_i32(),
            number => i32::try_from(number).unwrap_or(i32::MAX),
        };
        process.signal(number)?;
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<CloseStdinResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.0.select_living(&request.process)?;
        process.input.lock().await.close().map_err(ProcessError::from)?;
        Response::ok(CloseStdinResponse::default())
    }
}
