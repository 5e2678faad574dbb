//! Following what happens to the project's sandboxes: server-sent events, taken up again where they broke off.

use std::collections::VecDeque;

use reqwest::Method;
use space_api::rest::SandboxEvent;

use crate::{Client, ClientError};

/// Most bytes of one message that are kept until it is complete.
const MAX_MESSAGE: usize = 256 * 1024;

/// A stream of events; see [`Client::follow_events`].
#[derive(Debug)]
pub struct EventStream {
    client: Client,
    answer: Option<reqwest::Response>,
    last: Option<u64>,
    parser: Parser,
    ready: VecDeque<SandboxEvent>,
}

impl Client {
    /// Follows what happens to the project's sandboxes: from now on, or with all after the event `after`.
    pub async fn follow_events(&self, after: Option<u64>) -> Result<EventStream, ClientError> {
        let mut stream = EventStream {
            client: self.clone(),
            answer: None,
            last: after,
            parser: Parser::default(),
            ready: VecDeque::new(),
        };
        stream.connect().await?;
        Ok(stream)
    }
}

impl EventStream {
    /// The next event. When the connection breaks, it connects once more and goes on after the last event; an error means
    /// that this failed too.
    pub async fn next(&mut self) -> Result<SandboxEvent, ClientError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.last = Some(event.id);
                return Ok(event);
            }
            let chunk = match &mut self.answer {
                Some(answer) => answer.chunk().await,
                None => Ok(None),
            };
            match chunk {
                Ok(Some(bytes)) => {
                    for data in self.parser.push(&bytes) {
                        let event = serde_json::from_str(&data).map_err(|error| ClientError::Unexpected {
                            what: "an event".to_owned(),
                            source: Box::new(error),
                        })?;
                        self.ready.push_back(event);
                    }
                }
                Ok(None) | Err(_) => self.connect().await?,
            }
        }
    }

    async fn connect(&mut self) -> Result<(), ClientError> {
        self.parser = Parser::default();
        // Without the limit of other calls: it has no end.
        let mut request = self
            .client
            .raw_request(Method::GET, "/v1/events?follow=true")
            .headers(self.client.endpoint().api_headers());
        if let Some(last) = self.last {
            request = request.header("last-event-id", last.to_string());
        }
        let answer = self.client.checked(request).await?;
        if self.last.is_none() {
            // Where it begins, so that what happens while the connection is broken is not left out, even before the first event.
            self.last = answer
                .headers()
                .get("last-event-id")
                .and_then(|value| value.to_str().ok())
                .and_then(|text| text.parse().ok());
        }
        self.answer = Some(answer);
        Ok(())
    }
}

/// Takes the data out of server-sent events. Names and ids are in the data too.
#[derive(Debug, Default)]
struct Parser {
    line: Vec<u8>,
    data: String,
}

impl Parser {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut messages = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                if self.line.len() < MAX_MESSAGE {
                    self.line.push(*byte);
                }
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
            let line = line.strip_suffix('\r').unwrap_or(&line);
            if line.is_empty() {
                if !self.data.is_empty() {
                    messages.push(std::mem::take(&mut self.data));
                }
            } else if let Some(data) = line.strip_prefix("data:")
                && self.data.len() + data.len() < MAX_MESSAGE
            {
                if !self.data.is_empty() {
                    self.data.push('\n');
                }
                self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
            }
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let text = b": still here\n\nid: 1\nevent: running\ndata: {\"a\":\ndata: 1}\n\nid: 2\r\ndata: x\r\n\r\ndata: unfinished";
        for size in 1..text.len() {
            let mut parser = Parser::default();
            let found: Vec<_> = text.chunks(size).flat_map(|part| parser.push(part)).collect();
            assert_eq!(found, ["{\"a\":\n1}", "x"], "{size}");
        }
    }
}
