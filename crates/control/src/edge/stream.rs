//! A body on its way through the edge: passed on frame by frame, never silent for ever, and, where it is a Connect stream, never
//! ended without saying why.
//!
//! A Connect stream is a row of envelopes (one byte of flags, four of length, payload) of which the last, flag 2, tells the
//! outcome. When the machine dies in the middle, or a command outlives its deadline because the guest did not keep it, the
//! edge writes that last envelope itself, provided the guest has not left one half-written.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

/// What ends a stream that cannot be ended in its own words.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why the edge gave up on a stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// Nothing came for too long.
    #[error("nothing was sent for {} seconds", .0.as_secs())]
    Idle(Duration),
    /// The client's own deadline has passed, and the guest did not end the stream.
    #[error("the deadline of the command has passed")]
    Deadline,
}

pin_project_lite::pin_project! {
    /// See the module.
    #[derive(Debug)]
    pub(super) struct Guarded<B> {
        #[pin]
        inner: B,
        #[pin]
        idle: Sleep,
        idle_after: Duration,
        #[pin]
        deadline: Option<Sleep>,
        envelopes: Option<Envelopes>,
        ended: bool,
    }
}

impl<B> Guarded<B> {
    /// Passes `inner` on; an error after `idle_after` of silence.
    pub(super) fn new(inner: B, idle_after: Duration) -> Self {
        Self {
            inner,
            idle: tokio::time::sleep(idle_after),
            idle_after,
            deadline: None,
            envelopes: None,
            ended: false,
        }
    }

    /// Knows that it is a Connect stream.
    pub(super) fn connect_stream(mut self) -> Self {
        self.envelopes = Some(Envelopes::default());
        self
    }

    /// Ends it at `at`.
    pub(super) fn deadline(mut self, at: Option<Instant>) -> Self {
        self.deadline = at.map(tokio::time::sleep_until);
        self
    }
}

impl<B> Body for Guarded<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        if *this.ended {
            return Poll::Ready(None);
        }
        if let Some(deadline) = this.deadline.as_mut().as_pin_mut()
            && deadline.poll(cx).is_ready()
        {
            *this.ended = true;
            let error = Box::new(StreamError::Deadline);
            return Poll::Ready(last_words(this.envelopes.as_ref(), "deadline_exceeded", error));
        }
        match this.inner.poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let next = Instant::now() + *this.idle_after;
                this.idle.as_mut().reset(next);
                if let (Some(envelopes), Some(data)) = (this.envelopes, frame.data_ref()) {
                    envelopes.feed(data);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                *this.ended = true;
                Poll::Ready(last_words(this.envelopes.as_ref(), "unavailable", error.into()))
            }
            Poll::Ready(None) => {
                *this.ended = true;
                match this.envelopes.as_ref() {
                    Some(envelopes) if !envelopes.complete => {
                        let error = "the connection to the sandbox ended before the stream completed".into();
                        Poll::Ready(last_words(Some(envelopes), "unavailable", error))
                    }
                    _ => Poll::Ready(None),
                }
            }
            Poll::Pending => {
                if this.idle.poll(cx).is_ready() {
                    *this.ended = true;
                    let error = Box::new(StreamError::Idle(*this.idle_after));
                    return Poll::Ready(last_words(this.envelopes.as_ref(), "unavailable", error));
                }
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // A Connect stream may need last words even when the guest has none left.
        self.ended || (self.envelopes.is_none() && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.envelopes.is_some() || self.deadline.is_some() {
            SizeHint::default()
        } else {
            self.inner.size_hint()
        }
    }
}

/// The outcome in the stream's own words if it can still be said, the bare error if not.
fn last_words(
    envelopes: Option<&Envelopes>,
    code: &str,
    error: BoxError,
) -> Option<Result<Frame<Bytes>, BoxError>> {
    match envelopes {
        Some(envelopes) if envelopes.complete => None,
        Some(envelopes) if envelopes.between() => {
            let message = format!("the stream was ended by the platform: {error}");
            Some(Ok(Frame::data(end_envelope(code, &message))))
        }
        _ => Some(Err(error)),
    }
}

/// The last envelope of a Connect stream that failed.
pub(super) fn end_envelope(code: &str, message: &str) -> Bytes {
    let payload = serde_json::json!({"error": {"code": code, "message": message}}).to_string();
    let mut envelope = vec![Envelopes::END_OF_STREAM];
    envelope.extend(u32::try_from(payload.len()).unwrap_or(0).to_be_bytes());
    envelope.extend(payload.as_bytes());
    envelope.into()
}

/// Follows where one envelope ends and the next begins, without keeping any.
#[derive(Debug, Default)]
struct Envelopes {
    header: [u8; 5],
    header_length: usize,
    payload_left: usize,
    complete: bool,
}

impl Envelopes {
    const END_OF_STREAM: u8 = 0b10;

    fn feed(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if self.header_length < self.header.len() {
                let wanted = (self.header.len() - self.header_length).min(data.len());
                let (head, rest) = data.split_at(wanted);
                self.header[self.header_length..self.header_length + wanted].copy_from_slice(head);
                self.header_length += wanted;
                data = rest;
                if self.header_length == self.header.len() {
                    let [flags, length @ ..] = self.header;
                    self.payload_left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                    self.complete |= flags & Self::END_OF_STREAM != 0;
                    self.begin_next_if_done();
                }
            } else {
                let taken = self.payload_left.min(data.len());
                self.payload_left -= taken;
                data = &data[taken..];
                self.begin_next_if_done();
            }
        }
    }

    fn begin_next_if_done(&mut self) {
        if self.payload_left == 0 {
            self.header_length = 0;
        }
    }

    fn between(&self) -> bool {
        self.header_length == 0
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};
    use proptest::prelude::*;

    use super::*;

    fn envelope(flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![flags];
        bytes.extend(u32::try_from(payload.len()).expect("short").to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    proptest! {
        #[test]
        fn envelopes_are_followed_however_they_are_cut(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..6),
            cuts in prop::collection::vec(1_usize..9, 0..200),
            finish in any::<bool>(),
        ) {
            let mut bytes: Vec<u8> = payloads.iter().flat_map(|payload| envelope(0, payload)).collect();
            if finish {
                bytes.extend(envelope(2, b"{}"));
            }
            let mut follower = Envelopes::default();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                follower.feed(head);
                rest = tail;
            }
            follower.feed(rest);
            prop_assert!(follower.between());
            prop_assert_eq!(follower.complete, finish);
            follower.feed(&[0, 0]);
            prop_assert!(!follower.between());
        }
    }

    fn parts(parts: Vec<Result<Vec<u8>, BoxError>>) -> impl Body<Data = Bytes, Error = BoxError> {
        StreamBody::new(futures_util::stream::iter(
            parts
                .into_iter()
                .map(|part| part.map(|bytes| Frame::data(Bytes::from(bytes)))),
        ))
    }

    #[tokio::test]
    async fn a_broken_stream_ends_in_words_between_envelopes_and_in_an_error_within_one() {
        let whole = envelope(0, b"abc");
        let body = Guarded::new(
            parts(vec![Ok(whole.clone()), Err("gone".into())]),
            Duration::from_secs(9),
        )
        .connect_stream();
        let bytes = body.collect().await.expect("ends in words").to_bytes();
        let last = &bytes[whole.len()..];
        assert_eq!(last[0], 2);
        assert!(String::from_utf8_lossy(last).contains("unavailable"));

        let half = whole[..6].to_vec();
        let body =
            Guarded::new(parts(vec![Ok(half), Err("gone".into())]), Duration::from_secs(9)).connect_stream();
        assert!(body.collect().await.is_err());

        let ended = [whole.clone(), envelope(2, b"{}")].concat();
        let body = Guarded::new(parts(vec![Ok(ended.clone())]), Duration::from_secs(9)).connect_stream();
        assert_eq!(body.collect().await.expect("complete").to_bytes(), ended);

        let body = Guarded::new(parts(vec![Ok(whole)]), Duration::from_secs(9)).connect_stream();
        let bytes = body.collect().await.expect("ends in words").to_bytes();
        assert!(String::from_utf8_lossy(&bytes).contains("before the stream completed"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_and_a_late_one_are_ended() {
        let silent = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>());
        let error = Guarded::new(silent, Duration::from_secs(620))
            .collect()
            .await
            .expect_err("idle");
        assert!(error.to_string().contains("620"), "{error}");

        let late = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>());
        let at = Instant::now() + Duration::from_secs(15);
        let body = Guarded::new(late, Duration::from_secs(620))
            .connect_stream()
            .deadline(Some(at));
        let bytes = body.collect().await.expect("ends in words").to_bytes();
        assert!(String::from_utf8_lossy(&bytes).contains("deadline_exceeded"));
        assert_eq!(Instant::now(), at);
    }
}
